"""What a result was measured on, and result files that say so."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcache.evals.texts import Text

SCHEMA = 1
_PACKAGES = {"torch": "torch", "transformers": "transformers", "kvcache": "kvcache-evict"}
_PLAIN_LIST = re.compile(r"\[\n((?:[\s\d.,eE+-]|null)*)\n\s*\]")  # of numbers: they stay on one line
_RESULTS = ("evals/results", "docs/images")  # commands that run one after the other change them


@dataclass(frozen=True)
class TextRecord:
    """A text, or the part of it that was used: its name, the hash of all of it, the tokens that were used."""

    name: str
    sha256: str
    tokens: int


def text_record(text: Text, tokens: int | Tensor) -> TextRecord:
    """tokens: their number, or the ids themselves."""
    return TextRecord(text.name, text.sha256, tokens.numel() if isinstance(tokens, Tensor) else tokens)


@dataclass(frozen=True)
class Provenance:
    """What a result was measured on and how to get it again.

    revision: of git, followed by +dirty where tracked files differ from it; "unknown" outside of the repository.
    date: ISO 8601, UTC.
    """

    command: str
    model: str
    dtype: str
    device: str
    device_name: str
    threads: int
    versions: dict[str, str]
    revision: str
    texts: tuple[TextRecord, ...]
    seed: int
    date: str

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, and equal to what is read from it."""
        return {**asdict(self), "texts": [asdict(text) for text in self.texts]}


def provenance(
    model: str,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    seed: int = 0,
    texts: Sequence[TextRecord] = (),
    command: str | None = None,
) -> Provenance:
    """Of a measurement that is made now, by this process. command: None is this process's command line."""
    device = torch.device(device)
    return Provenance(
        command=shlex.join(["kvcache", *sys.argv[1:]]) if command is None else command,
        model=model,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        device_name=device_name(device),
        threads=torch.get_num_threads(),
        versions={"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        revision=revision(),
        texts=tuple(texts),
        seed=seed,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def revision() -> str:
    """Of the repository that this file belongs to; result files may differ from it."""
    file = Path(__file__).resolve()
    if _git("ls-files", "--error-unmatch", str(file)) is None:
        return "unknown"
    results = (f":(top,exclude){folder}" for folder in _RESULTS)
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *results)
    return (_git("rev-parse", "--short", "HEAD") or "unknown") + ("+dirty" if changes else "")


def _git(*arguments: str) -> str | None:
    """What git says, None where it refuses or is missing."""
    folder = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(_PACKAGES[name])
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# ---- files


def write_json(file: Path, kind: str, payload: dict[str, Any]) -> None:
    """Write a result of that kind. The file is replaced as a whole: at any time it holds valid JSON.

    Raises:
        ValueError: NaN or infinity among the numbers, which JSON does not know (write None).
    """
    text = json.dumps({"schema": SCHEMA, "kind": kind, **payload}, indent=1, allow_nan=False) + "\n"
    text = _PLAIN_LIST.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False, encoding="utf-8") as stream:
        stream.write(text)
    os.chmod(stream.name, 0o644)  # temporary files are private
    os.replace(stream.name, file)


def read_json(file: Path, kind: str | None = None) -> dict[str, Any]:
    """A result that `write_json` wrote. kind: which is expected, None for any.

    Raises:
        ValueError: not JSON, no result, one of another schema or kind.
        OSError: a missing file.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(document, dict) or "schema" not in document:
        raise ValueError(f"{file} is no result of kvcache eval: it names no schema")
    if document["schema"] != SCHEMA:
        raise ValueError(
            f"{file} has the schema {document['schema']!r}, this version knows {SCHEMA}: choose another file"
        )
    if kind is not None and document.get("kind") != kind:
        raise ValueError(f"{file} is a result of kvcache eval {document.get('kind')}, not of {kind}")
    return document
