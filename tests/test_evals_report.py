"""The report: one page with everything in it, and files that it refuses."""

from __future__ import annotations

import base64
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvcache.evals import report
from kvcache.evals.cli import main
from kvcache.evals.record import write_json

pytestmark = pytest.mark.fast
BENCH = {
    "machine": {"cpu": "a <fast> one", "threads": 2, "command": "kvcache bench margin"},
    "margin: time per token": [
        {"margin": 1, "milliseconds": 2.5, "ratio": 1.0},
        {"margin": 32, "milliseconds": 2.0, "ratio": 0.8},
    ],
}
PROVENANCE = {
    "command": "kvcache eval memory --model '<script>alert(1)</script>'",
    "model": "<b>smollm2</b>",
    "dtype": "float32",
    "versions": {"torch": "2.13", "transformers": "5.24"},
    "revision": "0123abc",
    "texts": [{"name": "austen", "sha256": "f" * 64, "tokens": 1234}, {"name": "kjv", "sha256": "0", "tokens": 5}],
}


def _cell(cache: str, mode: str, length: int) -> dict[str, Any]:
    times = {"milliseconds": 1.5, "mean_milliseconds": 2.0}
    return {"cache": cache, "mode": mode, "length": length, "kv_bytes": 1 << 20, "peak_bytes": 1 << 21, **times}


def _memory(folder: Path, name: str = "memory", **more: Any) -> Path:
    settings = {"chunk": 512, "steps": 8, "peak": "resident size", "trained_length": 8192}
    cells = [_cell(cache, mode, n) for cache in ("full", "window") for mode in ("chunks", "decode") for n in (64, 128)]
    content = {
        "provenance": PROVENANCE,
        "settings": settings,
        "complete": True,
        "cells": {f"{cell['cache']} {cell['mode']} {cell['length']}": cell for cell in cells},
        **more,
    }
    file = folder / f"{name}.json"
    write_json(file, "memory", content)
    return file


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    _memory(folder)
    (folder / "margin.json").write_text(json.dumps(BENCH))
    return folder


class _Reader(HTMLParser):
    """Checks that tags close in order, and collects what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: set[str] = set()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self.ids |= {value or "" for name, value in attrs if name == "id"}
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _page(folder: Path) -> str:
    return report.page(report.read_results(folder))


def test_page_needs_nothing_else(results: Path) -> None:
    page = _page(results)
    reader = _Reader()
    reader.feed(page)
    assert reader.open == []
    assert not reader.tags & {"script", "link", "iframe", "object"}
    for reference in reader.references:
        assert reference.startswith("data:image/png;base64,") or reference.removeprefix("#") in reader.ids
    assert "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page


def test_charts_are_drawn_from_the_figures(results: Path) -> None:
    images = re.findall(r"data:image/png;base64,([^\"]+)", _page(results))
    assert len(images) == 2
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)


def test_tables_and_provenance(results: Path) -> None:
    page = _page(results)
    for part in ("prefill in chunks of 512", "2.00 MiB", "decode, 8 steps", "margin: time per token", "0.8"):
        assert part in page
    for part in ("0123abc", "torch 2.13, transformers 5.24", "name austen", "f" * 64, "tokens 1,234", "kvcache bench"):
        assert part in page


def test_everything_is_escaped(results: Path) -> None:
    page = _page(results)
    assert "<script>" not in page and "<b>smollm2" not in page and "<fast>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "a &lt;fast&gt; one" in page
    assert "&lt;i&gt;" in report.page(report.read_results(results), title="<i>")


def test_a_strange_file_name(results: Path) -> None:
    _memory(results, 'a "quoted" <name>')
    reader = _Reader()
    reader.feed(_page(results))
    assert "memory-a--quoted---name-" in reader.ids


def test_order_is_by_kind_then_name(results: Path) -> None:
    _memory(results, "a")
    assert [result.file.stem for result in report.read_results(results)] == ["a", "memory", "margin"]


def test_an_interrupted_run(results: Path) -> None:
    _memory(results, complete=False, cells={})
    page = _page(results)
    assert "Incomplete" in page
    assert "No chart" in page


def test_earlier_commands_are_named(results: Path) -> None:
    _memory(results, earlier_commands=["kvcache eval memory --first"])
    assert "kvcache eval memory --first" in _page(results)


def test_without_matplotlib_the_picture_beside_is_taken(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (results / "memory.png").write_bytes(b"a picture")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = _page(results)
    assert base64.b64encode(b"a picture").decode() in page
    assert page.count("No chart") == 1  # of the benchmark, which has none beside it


def test_values_of_a_kind_without_tables_of_its_own() -> None:
    records = [{"cell": "a", "n": 1000, "share": 0.123456, "list": [1]}, {"cell": "b", "n": None, "yes": True}]
    grid = report._grid_of_records("title", records)
    assert grid.header == ("cell", "n", "share", "yes")
    assert grid.rows == (("a", "1,000", "0.1235", ""), ("b", "", "", "True"))
    assert grid.numeric == (False, True, True, True)


# ---- what is refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema": 99, "kind": "memory"}', "schema 99"),
        ('{"schema": 1, "kind": "songs"}', "unknown kind 'songs'"),
        ('{"schema": 1}', "unknown kind None"),
        ('{"figures": []}', "no schema"),
        ("[]", "no schema"),
        ("{", "not JSON"),
        ('{"schema": 1, "kind": "memory", "complete": true}', "does not hold what"),
        ('{"schema": 1, "kind": "memory", "complete": true, "cells": {"a": {}}}', "does not hold what"),
        ('{"machine": {"command": "kvcache bench sleep"}, "x": [{"a": 1}]}', "does not hold what"),
    ],
)
def test_a_file_that_cannot_be_shown_is_named(content: str, message: str, results: Path) -> None:
    (results / "strange.json").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        _page(results)
    assert "strange.json" in str(caught.value)


def test_folders_without_results(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no result files"):
        report.read_results(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        report.read_results(tmp_path / "missing")


# ---- the command


def test_command(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(results)]) == 0
    assert "2 results" in capsys.readouterr().out
    assert (results / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["report", str(results), "--out", str(tmp_path / "new" / "page.html"), "--title", "All of it"]) == 0
    assert "<title>All of it</title>" in (tmp_path / "new" / "page.html").read_text()
