"""Charts as PNG files: what all of them share, and those of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, BLUE, ORANGE = "#8a8a8a", "#1f6fb4", "#d9822b"
COLOURS = {"full": GREY, "sink_h2o": BLUE, "streaming_llm": ORANGE}
NAMES = {"full": "DynamicCache (full)", "sink_h2o": "SinkH2OCache", "streaming_llm": "StreamingLLMCache"}
MEBIBYTE = 1 << 20
# Of caches in the evals; further ones of a name, and other names, take the colours left over in their order.
_CACHE_COLOURS = {"full": GREY, "window": "#c0392b", "streaming_llm": ORANGE, "sink_h2o": BLUE, "recompute": "#2e8b57"}
_MORE_COLOURS = ("#7b4fa3", "#17a2a8", "#b0578d", "#8c6d31", "#4f6d2f", "#e377c2", "#5b5fc7", "#222222")
_DASHES = ("-", "--", "-.", ":")


def colours(labels: Sequence[str]) -> dict[str, str]:
    """A colour for each label (`CacheSpec.label`, its first word is the cache): the usual one where it is free."""
    free = list(_MORE_COLOURS)
    chosen: dict[str, str] = {}
    for label in labels:
        usual = _CACHE_COLOURS.get((label.split() or [""])[0])
        if usual is None or usual in chosen.values():
            usual = free[0]
            free.append(free.pop(0))
        chosen[label] = usual
    return chosen


def dashes(labels: Sequence[str]) -> dict[str, str]:
    """A line style for each label, so that lines on top of each other can be told apart."""
    return {label: _DASHES[index % len(_DASHES)] for index, label in enumerate(labels)}


def figure(
    panels: int, columns: int | None = None, width: float = 5.5, height: float = 4.2
) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, row by row, `columns` in each (None: all in one). width, height: of one, in inches.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("charts take the package matplotlib: pip install 'kvcache-evict[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(panels, columns or panels)
    rows = -(-panels // columns)
    size = (width * columns, height * rows)
    drawing, axes = pyplot.subplots(rows, columns, figsize=size, dpi=150, layout="constrained", squeeze=False)
    flat = list(axes.flat)
    for panel in flat[panels:]:
        panel.remove()
    for panel in flat[:panels]:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return drawing, flat[:panels]


def save(drawing: Figure, file: Path) -> None:
    """Write the figure as PNG and let go of it."""
    from matplotlib import pyplot

    file.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(file, format="png")
    pyplot.close(drawing)


def thousands(panel: Axes, axis: str = "x") -> None:
    """Tick labels such as 16,384."""
    (panel.xaxis if axis == "x" else panel.yaxis).set_major_formatter("{x:,.0f}")


def bench_chart(what: str, results: dict[str, Sequence[Any]], file: Path) -> None:
    """Draw what `kvcache bench` measured: `what` is its subcommand, `results` its tables of dataclass rows."""
    draw = {"decode": _decode, "margin": _margin, "prefill": _prefill, "chunks": _chunks}[what]
    rows = next(iter(results.values()))
    panels = 2 if what in ("decode", "prefill") else 1
    drawing, axes = figure(panels)
    draw(axes, rows)
    for panel in axes:
        panel.set_ylim(0, panel.get_ylim()[1] * 1.05)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(frameon=False)
    save(drawing, file)


def _decode(panels: list[Axes], rows: Sequence[Any]) -> None:
    for cache, colour in COLOURS.items():
        mine = sorted((row for row in rows if row.cache == cache), key=lambda row: row.seen)
        seen = [row.seen for row in mine]
        style: dict[str, Any] = {"color": colour, "linewidth": 2.5, "marker": "o", "label": NAMES[cache]}
        style["linestyle"] = "--" if cache == "streaming_llm" else "-"  # it may lie on another line
        panels[0].plot(seen, [row.milliseconds for row in mine], **style)
        panels[1].plot(seen, [row.kv_bytes / MEBIBYTE for row in mine], **style)
    panels[0].set(title="Time per new token", ylabel="milliseconds")
    panels[1].set(title="Memory of the KV cache", ylabel="MiB")
    for panel in panels:
        panel.set_xlabel("tokens seen")
        panel.xaxis.set_major_formatter("{x:,.0f}")


def _margin(panels: list[Axes], rows: Sequence[Any]) -> None:
    (panel,) = panels
    panel.plot([row.margin for row in rows], [row.milliseconds for row in rows], color=BLUE, linewidth=2.5, marker="o")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:.0f}")
    panel.set(title="Time per new token against the margin", xlabel="margin (tokens)", ylabel="milliseconds, mean")


def _prefill(panels: list[Axes], rows: Sequence[Any]) -> None:
    lengths = [row.length for row in rows]
    for prefix, cache in (("full_", "full"), ("", "sink_h2o")):
        style: dict[str, Any] = {"color": COLOURS[cache], "linewidth": 2.5, "marker": "o", "label": NAMES[cache]}
        panels[0].plot(lengths, [getattr(row, prefix + "seconds") for row in rows], **style)
        panels[1].plot(lengths, [getattr(row, prefix + "peak_bytes") / MEBIBYTE for row in rows], **style)
    panels[0].set(title="Prefill in one forward", ylabel="seconds")
    panels[1].set(title="Peak memory above the model's", ylabel="MiB")
    for panel in panels:
        panel.set_xlabel("prompt length (tokens)")
        panel.xaxis.set_major_formatter("{x:,.0f}")


def _chunks(panels: list[Axes], rows: Sequence[Any]) -> None:
    (panel,) = panels
    seen = [row.seen for row in rows]
    panel.plot(seen, [row.most_bytes / MEBIBYTE for row in rows], color=ORANGE, linewidth=2.5, label="most, in a chunk")
    panel.plot(seen, [row.bytes / MEBIBYTE for row in rows], color=BLUE, linewidth=2.5, label="after a chunk")
    panel.set(title="Bytes that the cache holds during a prefill", xlabel="tokens seen", ylabel="MiB")
    panel.xaxis.set_major_formatter("{x:,.0f}")
