"""Result files, their provenance, and grids of cells: resumed, interrupted, shared by processes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.evals import record, scale
from kvcache.evals.cells import OtherProcess, run_cells, tell, wilson
from kvcache.evals.record import SCHEMA, TextRecord, provenance, read_json, text_record, write_json
from kvcache.evals.texts import Text

pytestmark = pytest.mark.fast
HEADER = {"provenance": {"model": "m", "seed": 0, "command": "one", "date": "d", "revision": "r"}, "settings": {"n": 1}}


# ---- provenance and files


def test_provenance_says_what_and_where() -> None:
    text = text_record(Text("t", "abc", "hash"), torch.zeros(1, 7))
    made = provenance("smollm2", dtype=torch.bfloat16, device="cpu", seed=3, texts=[text], command="kvcache eval x")
    assert made.dtype == "bfloat16" and made.device == "cpu" and made.device_name
    assert made.threads == torch.get_num_threads() and made.seed == 3
    assert made.versions["torch"] == torch.__version__ and set(made.versions) >= {"python", "transformers", "kvcache"}
    assert made.texts == (TextRecord("t", "hash", 7),)
    json.dumps(made.to_dict())


def test_the_command_line_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/kvcache", "eval", "ppl", "--text", "my book.txt"])
    assert provenance("m", dtype="float32", device="cpu").command == "kvcache eval ppl --text 'my book.txt'"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"ls-files": None}, "unknown"),
        ({"ls-files": "x", "status": "", "rev-parse": "abc1234"}, "abc1234"),
        ({"ls-files": "x", "status": " M a.py", "rev-parse": "abc1234"}, "abc1234+dirty"),
    ],
)
def test_revision(answers: dict[str, str | None], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_git", lambda *arguments: answers[arguments[0]])
    assert record.revision() == expected


def test_files_round_trip_with_lists_of_numbers_on_one_line(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.json"
    payload = {"cells": {"a": [1, 2.5, None, -1e-9], "b": ["x [1, 2]", "y"], "c": [], "d": [[1], {"e": [True]}]}}
    write_json(file, "ppl", payload)
    assert read_json(file, "ppl") == {"schema": SCHEMA, "kind": "ppl", **payload}
    assert "[1, 2.5, null, -1e-09]" in file.read_text()
    assert [each.name for each in file.parent.iterdir()] == ["a.json"]


def test_a_refused_payload_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, "ppl", {"x": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(file, "ppl", {"x": math.nan})
    assert read_json(file)["x"] == 1 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[1]", "names no schema"),
        ('{"kind": "ppl"}', "names no schema"),
        ('{"schema": 99, "kind": "ppl"}', f"the schema 99, this version knows {SCHEMA}"),
        ('{"schema": 1, "kind": "needle"}', "a result of kvcache eval needle, not of ppl"),
    ],
)
def test_refuses_other_files(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_json(file, "ppl")


# ---- cells


class Grid:
    """Cells that count how often they are measured; those in `broken` are interrupted."""

    def __init__(self, *keys: str, broken: str = "") -> None:
        self.measured: list[str] = []
        self.broken = broken
        self.cells = {key: self._cell(key) for key in keys}

    def _cell(self, key: str) -> Callable[[], dict[str, Any]]:
        def measure() -> dict[str, Any]:
            tell("half way")
            if key == self.broken:
                raise KeyboardInterrupt
            self.measured.append(key)
            return {"value": key * 2}

        return measure

    def run(self, file: Path | None, header: dict[str, Any] = HEADER) -> dict[str, Any]:
        return run_cells(self.cells, file, header, "ppl", "testing")


def test_cells_come_back_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    assert Grid("b", "a").run(file) == {"b": {"value": "bb"}, "a": {"value": "aa"}}
    document = read_json(file, "ppl")
    assert document["complete"] is True and document["settings"] == {"n": 1}
    assert list(document["cells"]) == ["b", "a"]
    assert Grid("a").run(None) == {"a": {"value": "aa"}}


def test_an_interrupted_run_leaves_what_is_finished_and_resumes(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with pytest.raises(KeyboardInterrupt):
        Grid("a", "b", "c", broken="b").run(file)
    document = read_json(file, "ppl")
    assert document["complete"] is False and document["cells"] == {"a": {"value": "aa"}}
    again = Grid("a", "b", "c")
    assert list(again.run(file)) == ["a", "b", "c"] and again.measured == ["b", "c"]
    assert read_json(file)["complete"] is True


def test_further_cells_are_added_and_earlier_commands_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    Grid("a").run(file)
    for command in ("two", "two", "three"):
        changed = {"command": command, "date": "later", "revision": "s"}
        more = Grid("b")
        more.run(file, {**HEADER, "provenance": {**HEADER["provenance"], **changed}})
    document = read_json(file)
    assert set(document["cells"]) == {"a", "b"} and not more.measured
    assert document["provenance"]["command"] == "three" and document["earlier_commands"] == ["one", "two"]


@pytest.mark.parametrize(
    ("part", "change", "said"), [("settings", {"n": 2}, "n: 1 there, 2 here"), ("provenance", {"seed": 1}, "seed")]
)
def test_another_header_is_refused(part: str, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    Grid("a").run(file)
    before = file.read_text()
    with pytest.raises(ValueError, match=f"{said}.*choose another file, or delete it"):
        Grid("a").run(file, {**HEADER, part: {**HEADER[part], **change}})
    assert file.read_text() == before


def test_a_header_survives_json(tmp_path: Path) -> None:
    """Tuples become lists in a file; that is no other measurement."""
    made = provenance("m", dtype="float32", device="cpu", texts=[TextRecord("t", "h", 1)])
    header = {"provenance": made.to_dict(), "settings": {"lengths": (1, 2)}}
    Grid("a").run(tmp_path / "a.json", header)
    again = Grid("a")
    again.run(tmp_path / "a.json", header)
    assert not again.measured


def test_processes_share_the_cells_and_the_first_has_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    monkeypatch.setattr(scale, "world", lambda: 2)
    monkeypatch.setattr(scale, "rank", lambda: 1)
    theirs: dict[str, Any] = {}
    monkeypatch.setattr(scale, "gather", lambda results: theirs.update(results))
    second = Grid("a", "b", "c")
    with pytest.raises(OtherProcess):
        second.run(file)
    assert second.measured == ["b"] and theirs == {"b": {"value": "bb"}} and not file.exists()
    monkeypatch.setattr(scale, "rank", lambda: 0)
    monkeypatch.setattr(scale, "gather", lambda results: {**results, **theirs})
    first = Grid("a", "b", "c")
    assert list(first.run(file)) == ["a", "b", "c"] and first.measured == ["a", "c"]
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_cells_of_processes_that_were_interrupted_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.json"
    monkeypatch.setattr(scale, "world", lambda: 2)
    monkeypatch.setattr(scale, "rank", lambda: 0)
    with pytest.raises(KeyboardInterrupt):
        Grid("a", "b", "c", broken="c").run(file)
    monkeypatch.setattr(scale, "world", lambda: 1)
    alone = Grid("a", "b", "c")
    alone.run(file)
    assert alone.measured == ["b", "c"] and len(list(tmp_path.iterdir())) == 1


# ---- statistics


@pytest.mark.parametrize(
    ("successes", "n", "interval"),
    [(0, 0, (0.0, 1.0)), (10, 10, (0.7225, 1.0)), (0, 10, (0.0, 0.2775)), (5, 10, (0.2366, 0.7634))],
)
def test_wilson(successes: int, n: int, interval: tuple[float, float]) -> None:
    assert wilson(successes, n) == pytest.approx(interval, abs=1e-4)
