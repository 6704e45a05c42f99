"""kvpress, another library of KV cache compression, on the same token ids: in an environment of its own.

kvpress wants an older transformers than this project does, so it gets a virtual environment, made once in the user's
cache folder, where `peer_runner.py` takes jobs line by line. Nothing here is needed unless peers are asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import torch
from filelock import FileLock

from kvcache.models.load import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PYTHON = "KVCACHE_PEERS_PYTHON"
"""The environment variable that names the Python of an environment which has kvpress already."""
RUNNER = Path(__file__).with_name("peer_runner.py")
# What was tried together; the rest is what pip makes of it. torch comes in the version of this process.
REQUIREMENTS = ("kvpress==0.5.5", "transformers==5.2.0", "tokenizers==0.22.2", "accelerate==1.15.0", "numpy<3")

# How each method is called in the tables, and what it is.
PREFILL_PRESSES = {
    "streaming_llm": "StreamingLLMPress",
    "snapkv": "SnapKVPress",
    "tova": "TOVAPress",
    "observed_attention": "ObservedAttentionPress",
    "expected_attention": "ExpectedAttentionPress",
    "knorm": "KnormPress",
}
# SnapKV's and ExpectedAttention's scores take positions from the forward at hand, which has them in a prefill only.
DECODING_PRESSES = ("streaming_llm", "tova", "knorm")


class PeerError(ValueError):
    """The environment could not be made, the peer could not be started, or a job failed in it."""


@dataclass(frozen=True)
class Peer:
    """A press of kvpress. decoding: under its DecodingPress, which compresses while decoding, not after the prefill."""

    press: str
    decoding: bool = False

    def __str__(self) -> str:
        return f"kvpress:{'decoding:' if self.decoding else ''}{self.press}"

    @property
    def label(self) -> str:
        """As kvpress calls it."""
        name = PREFILL_PRESSES[self.press]
        return f"kvpress DecodingPress({name})" if self.decoding else f"kvpress {name}"


PEERS = (
    *(Peer(press) for press in PREFILL_PRESSES),
    *(Peer(press, decoding=True) for press in DECODING_PRESSES),
)


def parse_peers(names: Sequence[str]) -> tuple[Peer, ...]:
    """Peers by the names that `str` gives them, with or without "kvpress:"; "all" is every one.

    Raises ValueError for an unknown name; it lists those that exist.
    """
    known = {str(peer).removeprefix("kvpress:"): peer for peer in PEERS}
    wanted = list(known) if "all" in names else [name.strip().removeprefix("kvpress:") for name in names]
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no peer {name!r}: all, {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(wanted))


def label(name: str) -> str:
    """Of a peer's name, as `str` gives it."""
    return next((peer.label for peer in PEERS if str(peer) == name), name)


# ---- the environment


def environment() -> Path:
    """The Python that has kvpress: the one that KVCACHE_PEERS_PYTHON names, or that of the environment in the user's
    cache folder, which is made on the first call (some minutes, 1.5 GB).

    Raises PeerError when it cannot be made.
    """
    if named := os.environ.get(PYTHON):
        if not Path(named).is_file():
            raise PeerError(f"{PYTHON} names {named!r}, which is no file: it wants the path of a Python with kvpress")
        return Path(named)
    folder = _folder()
    python = _python(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not _stamp(folder).is_file():
                _make(folder, python)
    except OSError as error:
        raise PeerError(f"cannot make an environment in {folder}: {error}. Another place: set KVCACHE_HOME") from error
    return python


def ready() -> bool:
    """Whether `environment` would have nothing to install."""
    return bool(os.environ.get(PYTHON)) or _stamp(_folder()).is_file()


def requirements() -> tuple[str, ...]:
    """What is installed, as pip takes it."""
    return (*REQUIREMENTS, f"torch=={torch.__version__.partition('+')[0]}")


def _folder() -> Path:
    """Another Python or other versions make another environment."""
    what = repr((requirements(), platform.python_version(), sys.platform))
    return cache_folder() / "peers" / f"kvpress-{hashlib.sha256(what.encode()).hexdigest()[:12]}"


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _stamp(folder: Path) -> Path:
    return folder / "complete"


def _make(folder: Path, python: Path) -> None:
    print(f"making an environment for kvpress once, some minutes, in {folder}", file=sys.stderr)
    _check([sys.executable, "-m", "venv", "--clear", str(folder)])
    _check([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements()])
    _stamp(folder).write_text("\n".join(requirements()) + "\n")


def _check(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = " ".join((done.stderr or done.stdout).split())[-600:]
        raise PeerError(
            f"{' '.join(command[1:4])} failed while making kvpress' environment: {last}. "
            f"Make one yourself (pip install {' '.join(requirements())}) and name its Python in {PYTHON}"
        )


# ---- the process


class PeerProcess:
    """The runner with one model loaded. It starts at the first job; as a context manager it ends on leaving.

    Args:
        model: a folder with a config and safetensors weights, or a hub id: see `weights_of`.
        dtype: of weights and cache, as torch calls it ("float32").
        python: of the environment; None: `environment()`.
    """

    def __init__(
        self, model: str, dtype: str = "float32", device: str = "cpu", threads: int = 1, python: Path | None = None
    ) -> None:
        self.settings = {"model": model, "dtype": dtype, "device": device, "threads": threads}
        self.python = python
        self.versions: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None
        self._messages: IO[str] | None = None

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer to a job: see the methods of `peer_runner.Runner` for what there is to ask.

        Raises PeerError when the environment or the process cannot be had, the job failed, or the process has ended.
        """
        if self._process is None:
            self._start()
        return self._exchange(job)

    def close(self) -> None:
        """End the process; the next job starts it again."""
        process, self._process = self._process, None
        if process is not None:
            for stream in (process.stdin, process.stdout):  # without input its loop ends
                if stream is not None:
                    with suppress(OSError):
                        stream.close()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._messages is not None:
            self._messages.close()
            self._messages = None

    def _start(self) -> None:
        python = self.python or environment()
        self._messages = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        # Packages of this process must not be found before those of that environment.
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        self._process = subprocess.Popen(
            [str(python), "-s", str(RUNNER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            encoding="utf-8",
            env=clean,
        )
        try:
            self.versions = self._exchange(self.settings)["versions"]
        except BaseException:
            self.close()
            raise

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise PeerError(f"kvpress' process ended: {self._last_words(process)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"kvpress: {answer['error']}")
        return answer

    def _last_words(self, process: subprocess.Popen[str]) -> str:
        assert self._messages is not None
        code = process.wait(timeout=60)
        self._messages.seek(0)
        text = " ".join(self._messages.read().split())
        return text[-600:] or f"exit code {code}, no message"


def weights_of(model: PreTrainedModel) -> str:
    """Where another process finds the weights that `kvcache.models.load` has read: a folder, or a hub id.

    Raises PeerError for a model out of a GGUF file other than the embedded one, which is converted.
    """
    place = model.name_or_path
    if not place or (Path(place).is_dir() and not (Path(place) / "config.json").is_file()):
        raise PeerError(f"peers read a folder with a config.json, or a hub id; this model came from {place!r}")
    return place
