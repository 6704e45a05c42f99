"""A grid of independent measurements: resumable, and shared by the processes of `accelerate launch`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcache.evals import scale
from kvcache.evals.record import read_json, write_json

Cell = dict[str, Any]
_CHANGES = ("date", "command", "revision")  # in the provenance: they do not make figures another measurement


_tell: ContextVar[Callable[[str], None]] = ContextVar("tell", default=lambda text: None)


class OtherProcess(Exception):
    """Raised in every process but the first when all is measured: the results are with the first one."""


def run_cells(
    cells: Mapping[str, Callable[[], Cell]], file: Path | None, header: Mapping[str, Any], kind: str, progress: str
) -> dict[str, Cell]:
    """Measure every cell, in order; a bar on stderr says how far it is.

    `file` holds all finished cells after each of them, so an interrupted run loses one. Cells that it holds already are
    not measured again; those that are not asked for now stay in it.

    Args:
        cells: from keys to functions that give plain numbers, texts, lists and dicts of them.
        file: the result file; None keeps nothing.
        header: what is the same for all cells, ready for JSON: "settings" and "provenance".
        kind: of the result, see `record.write_json`.
        progress: what the bar says.

    Returns:
        The cells that were asked for, in their order.

    Raises:
        ValueError: the file holds cells of another header, schema or kind; or `record.write_json` refuses a cell.
        OtherProcess: in every process but the first.
    """
    book = _Book(file, dict(header), kind)
    known = book.load()
    mine = scale.share(list(cells))  # by all cells: processes may start at different times, and find different files
    with _bar() as bar:
        task = bar.add_task(progress, total=len(mine), completed=sum(key in known for key in mine), cell="")
        for key in mine:
            if key not in known:
                bar.update(task, cell=key)
                _tell.set(lambda text, key=key: bar.update(task, cell=f"{key}: {text}"))
                known[key] = cells[key]()
                book.save(known)
                bar.advance(task)
    everyone = scale.gather({key: known[key] for key in mine})
    if everyone is None:
        raise OtherProcess("the results are with the first process")
    book.finish({**known, **everyone})
    return {key: everyone[key] for key in cells}


def tell(text: str) -> None:
    """Said by a long measurement: how far it is, shown beside the bar of `run_cells`."""
    _tell.get()(text)


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share, `successes` of `n`; z = 1.96 gives 95 %. (0, 1) where n is 0."""
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = ((centre + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[cell]}", markup=False),
    )
    return Progress(*columns, console=Console(stderr=True))


class _Book:
    """The result file, and those that other processes keep beside it until all is measured."""

    def __init__(self, file: Path | None, header: dict[str, Any], kind: str) -> None:
        self.file, self.kind = file, kind
        self.header = json.loads(json.dumps(header))  # as it comes back from a file: tuples are lists
        self.earlier: list[str] = []  # commands that cells of the file come from

    def load(self) -> dict[str, Cell]:
        """All cells that are finished."""
        if self.file is None:
            return {}
        cells: dict[str, Cell] = {}
        for file in (self.file, *scale.parts(self.file)):
            if file.exists():
                cells |= self._read(file)
        return cells

    def _read(self, file: Path) -> dict[str, Cell]:
        document = read_json(file, self.kind)
        differing = _differences(document, self.header)
        if differing:
            raise ValueError(
                f"{file} holds another measurement ({'; '.join(differing)}): choose another file, or delete it"
            )
        command = document.get("provenance", {}).get("command")
        for each in (*document.get("earlier_commands", ()), command):
            if each and each not in (*self.earlier, self.header.get("provenance", {}).get("command")):
                self.earlier.append(each)
        return document["cells"]

    def save(self, cells: dict[str, Cell], complete: bool = False) -> None:
        if self.file is not None:
            self._write(self.file if complete else scale.part(self.file), cells, complete)

    def finish(self, cells: dict[str, Cell]) -> None:
        self.save(cells, complete=True)
        for file in scale.parts(self.file) if self.file is not None else ():
            file.unlink()

    def _write(self, file: Path, cells: dict[str, Cell], complete: bool) -> None:
        earlier = {"earlier_commands": self.earlier} if self.earlier else {}
        write_json(file, self.kind, {**self.header, **earlier, "complete": complete, "cells": cells})


def _differences(document: Mapping[str, Any], header: Mapping[str, Any]) -> list[str]:
    """What the headers differ in, in words."""
    then, now = _settled(document), _settled(header)
    names = sorted({*then, *now})
    return [
        f"{name}: {then.get(name)} there, {now.get(name)} here" for name in names if then.get(name) != now.get(name)
    ]


def _settled(header: Mapping[str, Any]) -> dict[str, Any]:
    provenance = {name: value for name, value in header.get("provenance", {}).items() if name not in _CHANGES}
    return {**provenance, **header.get("settings", {})}
