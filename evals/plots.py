"""Charts of the benchmarks, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY, BLUE, ORANGE = "#8a8a8a", "#1f6fb4", "#d9822b"
COLOURS = {"full": GREY, "sink_h2o": BLUE, "streaming_llm": ORANGE}
NAMES = {"full": "DynamicCache (full)", "sink_h2o": "SinkH2OCache", "streaming_llm": "StreamingLLMCache"}
MEBIBYTE = 1 << 20


def bench_chart(what: str, results: dict[str, Sequence[Any]], file: Path) -> None:
    """Draw what `kvcache bench` measured: `what` is its subcommand, `results` its tables of dataclass rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    draw = {"decode": _decode, "margin": _margin, "prefill": _prefill, "chunks": _chunks}[what]
    rows = next(iter(results.values()))
    panels = 2 if what in ("decode", "prefill") else 1
    figure, axes = pyplot.subplots(1, panels, figsize=(5.5 * panels, 4.2), dpi=150, layout="constrained", squeeze=False)
    draw(list(axes[0]), rows)
    for panel in axes[0]:
        panel.set_ylim(0, panel.get_ylim()[1] * 1.05)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    pyplot.close(figure)


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
