"""All results of a folder on one HTML page that needs nothing else: charts, tables, where each figure comes from."""

from __future__ import annotations

import argparse
import base64
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvcache.evals.cli import add_command

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """\
examples:
  kvcache eval report evals/results                       writes evals/results/report.html
  kvcache eval report results --out page.html --title "Llama 3 at 8k"
"""
BENCH = "bench"
# Kinds in the order of the page: module, heading.
KINDS = {
    "compare": ("compare", "Comparison"),
    "ppl": ("perplexity", "Perplexity"),
    "needle": ("needle", "Needle in a haystack"),
    "memory": ("memory", "Memory against length"),
    "plan": ("plan", "What fits"),
    BENCH: ("plots", "Benchmark"),
}
FOLDED_ROWS = 40  # longer tables are folded away


@dataclass(frozen=True)
class Grid:
    """A table as plain text. numeric: which columns are set to the right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]
    caption: str = ""


@dataclass(frozen=True)
class Result:
    """A result file: its kind, all that it holds, and where the figures come from."""

    file: Path
    kind: str
    content: Mapping[str, Any]

    @property
    def anchor(self) -> str:
        return re.sub(r"[^\w.-]", "-", f"{self.kind}-{self.file.stem}")

    @property
    def complete(self) -> bool:
        return bool(self.content.get("complete", True))

    @property
    def provenance(self) -> Mapping[str, Any]:
        return self.content.get("machine" if self.kind == BENCH else "provenance") or {}


# ---- reading


def read_results(folder: Path) -> list[Result]:
    """The result files (`*.json`) of a folder, by kind and name.

    Raises:
        ValueError: no such folder, no result files, or a file that is none, is of another schema or of an unknown kind;
            the message says which.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give the one that holds the results' JSON files")
    results = [_read(file) for file in sorted(folder.glob("*.json"))]
    if not results:
        raise ValueError(f"{folder} holds no result files: write some with --json {folder / 'NAME.json'}")
    order = list(KINDS)
    return sorted(results, key=lambda result: (order.index(result.kind), result.file.name))


def _read(file: Path) -> Result:
    from kvcache.evals.record import read_json

    content = _parse(file)
    if isinstance(content, dict) and "schema" not in content and isinstance(content.get("machine"), dict):
        return Result(file, BENCH, content)
    content = read_json(file)
    kind = content.get("kind")
    if kind not in KINDS:
        raise ValueError(f"{file} holds a result of the unknown kind {kind!r}; known: {', '.join(KINDS)}")
    return Result(file, kind, content)


def _parse(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error


# ---- charts and tables of one result


def chart(result: Result) -> bytes | None:
    """The chart as PNG: drawn from the figures, else the file of the same name beside them, else None.

    Raises:
        ValueError: a complete result whose contents its chart does not understand.
    """
    try:
        return _draw(result)
    except ImportError:  # matplotlib is an extra
        beside = result.file.with_suffix(".png")
        return beside.read_bytes() if beside.is_file() else None
    except _MISUNDERSTOOD as error:
        if not result.complete:  # too little for a chart so far
            return None
        raise _strange(result, error) from error


_MISUNDERSTOOD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StopIteration)


def _strange(result: Result, error: Exception) -> ValueError:
    return ValueError(
        f"{result.file} does not hold what a result of the kind {result.kind!r} holds ({error!r}): measure it again, "
        "or move it out of the folder"
    )


def _draw(result: Result) -> bytes:
    import_module("matplotlib")  # said here, not in the midst of a chart
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "chart.png")
        if result.kind == BENCH:
            _draw_bench(result, file)
        else:
            _module(result.kind).chart(result.content, file)
        return file.read_bytes()


def _draw_bench(result: Result, file: Path) -> None:
    from kvcache.evals.plots import bench_chart

    shown: dict[str, Sequence[Any]] = {
        title: [SimpleNamespace(**row) for row in rows] for title, rows in _bench_tables(result)
    }
    bench_chart(_bench_name(result), shown, file)


def tables(result: Result) -> list[Grid]:
    """The result's tables: those of its own command where it has them, else its cells' plain values.

    Raises:
        ValueError: contents that do not make a table.
    """
    try:
        return list(_tables(result))
    except _MISUNDERSTOOD as error:
        raise _strange(result, error) from error


def _tables(result: Result) -> Iterator[Grid]:
    if result.kind == BENCH:
        yield from (_grid_of_records(title, rows) for title, rows in _bench_tables(result))
        return
    own: Callable[[Mapping[str, Any]], Iterable[Table]] | None = getattr(_module(result.kind), "tables", None)
    cells = result.content["cells"]
    if own is None:
        yield _grid_of_records("", [{"cell": key, **cell} for key, cell in cells.items()])
    elif cells:
        yield from (_grid(table) for table in own(result.content))


def _module(kind: str) -> Any:
    return import_module(f"kvcache.evals.{KINDS[kind][0]}")


def _bench_tables(result: Result) -> list[tuple[str, list[dict[str, Any]]]]:
    return [(title, rows) for title, rows in result.content.items() if isinstance(rows, list) and rows]


def _bench_name(result: Result) -> str:
    """The subcommand of `kvcache bench`: its command line says it."""
    words = str(result.provenance.get("command", "")).split()
    return words[2] if words[:2] == ["kvcache", "bench"] and len(words) > 2 else ""


def _grid(table: Table) -> Grid:
    columns = table.columns
    cells = [[_plain(cell) for cell in column.cells] for column in columns]
    return Grid(
        title=_plain(table.title or ""),
        header=tuple(_plain(column.header) for column in columns),
        rows=tuple(zip(*cells, strict=True)),
        numeric=tuple(column.justify == "right" for column in columns),
        caption=_plain(table.caption or ""),
    )


def _plain(cell: Any) -> str:
    from rich.text import Text

    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def _grid_of_records(title: str, records: Sequence[Mapping[str, Any]]) -> Grid:
    """One row per record; lists and mappings in it are left out."""
    plain = [{k: v for k, v in record.items() if not isinstance(v, list | dict)} for record in records]
    names = list(dict.fromkeys(name for record in plain for name in record))
    rows = tuple(tuple(_show(record.get(name)) for name in names) for record in plain)
    numeric = tuple(all(isinstance(record.get(name), int | float | None) for record in plain) for name in names)
    return Grid(title, tuple(name.replace("_", " ") for name in names), rows, numeric)


def _show(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


# ---- the page


def page(results: Sequence[Result], title: str = "kvcache: evaluations") -> str:
    """The HTML of all results; everything that it shows is in it.

    Raises:
        ValueError: see `chart`.
    """
    contents = "".join(
        f'<li><a href="#{escape(result.anchor)}">{escape(_heading(result))}</a></li>' for result in results
    )
    sections = "\n".join(_section(result) for result in results)
    return _PAGE.format(title=escape(title), style=_STYLE, contents=contents, sections=sections)


def _heading(result: Result) -> str:
    return f"{KINDS[result.kind][1]}: {result.file.stem}"


def _section(result: Result) -> str:
    parts = [f'<section id="{escape(result.anchor)}">', f"<h2>{escape(_heading(result))}</h2>"]
    if not result.complete:
        parts.append(
            '<p class="warning">Incomplete: the run was interrupted, or goes on. The same command resumes it.</p>'
        )
    parts += [_figure(result), *(_table(grid) for grid in tables(result)), _origin(result), "</section>"]
    return "\n".join(parts)


def _figure(result: Result) -> str:
    png = chart(result)
    if png is None:
        return "<p>No chart: there is too little to draw, or matplotlib is not installed.</p>"
    data = base64.b64encode(png).decode("ascii")
    return f'<figure><img alt="{escape(_heading(result))}" src="data:image/png;base64,{data}"></figure>'


def _table(grid: Grid) -> str:
    classes = ["number" if numeric else "text" for numeric in grid.numeric]
    head = "".join(f'<th class="{c}">{escape(name)}</th>' for c, name in zip(classes, grid.header, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f'<td class="{c}">{_lines(v)}</td>' for c, v in zip(classes, row, strict=True)) + "</tr>"
        for row in grid.rows
    )
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    note = f'<p class="note">{_lines(grid.caption)}</p>' if grid.caption else ""
    title = escape(grid.title or "Table")
    if len(grid.rows) > FOLDED_ROWS:
        return f"<details><summary>{title} ({len(grid.rows)} rows)</summary>{table}{note}</details>"
    return f"<h3>{title}</h3>{table}{note}"


def _lines(text: str) -> str:
    return "<br>".join(escape(line) for line in text.split("\n"))


def _origin(result: Result) -> str:
    """Command lines, provenance and settings."""
    provenance = dict(result.provenance)
    commands = [*result.content.get("earlier_commands", ()), provenance.pop("command", "")]
    settings = result.content.get("settings") or {}
    lines = [
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{_value(value)}</dd>"
        for name, value in (*provenance.items(), *settings.items())
    ]
    return (
        "".join(f'<p class="command"><code>{escape(str(command))}</code></p>' for command in commands)
        + f"<details open><summary>Where it comes from</summary><dl>{''.join(lines)}</dl></details>"
    )


def _value(value: Any) -> str:
    """A value out of JSON in one line; each member of a list of mappings in its own."""
    if isinstance(value, Mapping):
        return escape(", ".join(f"{name} {_show(each)}" for name, each in value.items()))
    if isinstance(value, list):
        separator = "<br>" if any(isinstance(each, Mapping) for each in value) else ", "
        return separator.join(_value(each) for each in value) or "none"
    return escape(_show(value)) or "not given"


# ---- the command


def add_parser(commands: Any) -> None:
    """`kvcache eval report`."""
    parser = add_command(commands, "report", "One HTML page of all results in a folder, for any browser.", EXAMPLES)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the folder with the results' JSON files")
    parser.add_argument("--out", metavar="F", type=Path, help="the page (default: FOLDER/report.html)")
    parser.add_argument("--title", default="kvcache: evaluations", help="of the page")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    results = read_results(options.folder)
    out = options.out or options.folder / "report.html"
    text = page(results, options.title)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(f"{out}: {len(results)} results, {len(text.encode()) / 1e6:.1f} MB")
    return 0


_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<h1>{title}</h1>
<nav><ul>{contents}</ul></nav>
{sections}
</body>
</html>
"""

_STYLE = """\
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1d2329; --faint: #5b6570; --line: #d8dde2; --band: #f4f6f8; --link: #1a5fa0;
  --alarm: #9a3b00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181c; --ink: #e2e6ea; --faint: #9aa5b1; --line: #39424b; --band: #1d232a; --link: #7fb8ec;
    --alarm: #f0a267;
  }
}
body {
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.7rem; }
h2 { font-size: 1.3rem; margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1.2rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.4rem; }
a { color: var(--link); }
figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; padding: 6px; box-sizing: border-box; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.8rem; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
th { color: var(--faint); font-weight: 600; }
.text { text-align: left; }
.number { text-align: right; }
tbody tr:nth-child(even) { background: var(--band); }
.note, summary, dt { color: var(--faint); }
.note { font-size: 0.9rem; margin: 0.4rem 0; }
.warning { color: var(--alarm); font-weight: 600; }
.command code { background: var(--band); padding: 0.2rem 0.4rem; border-radius: 4px; overflow-wrap: anywhere; }
summary { cursor: pointer; margin: 0.8rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1.2rem; font-size: 0.9rem; margin: 0.5rem 0; }
dd { margin: 0; overflow-wrap: anywhere; }
"""
