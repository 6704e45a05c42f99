"""KV bytes, peak memory and time per token against length, for any list of caches: flat lines or growing ones.

One row of random tokens (what they say changes neither bytes nor times) is read in one forward, in chunks with
evictions between them, and token by token behind such a prefill. A cache reads on from one length to the next, so
64k tokens are prefilled once. Peak: growth of memory since before the cache was there, see process_memory.py.
Caches take their turns one after the other; for ratios of times on a machine with neighbours there is `kvcache bench`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.evals.cli import add_command, common_options, console, natural, positive
from kvcache.evals.plots import MEBIBYTE
from kvcache.evals.units import show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table
    from torch import Tensor
    from transformers import Cache, PreTrainedModel

    from kvcache.evals.caches import CacheSpec

KIND = "memory"
EXAMPLES = """\
examples:
  kvcache eval memory                                            full and bounded caches, 2k to 64k tokens
  kvcache eval memory --cache full --cache sink_h2o:slots=512 --lengths 1024 4096 --png memory.png
  kvcache eval memory --modes chunks decode --full-limit 32768   longer for the full cache
  kvcache eval memory --model path/to/model --device cuda --one-shot-limit 65536
"""
CACHES = ("full", "streaming_llm:slots=1024", "sink_h2o:slots=1024")
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
MODES = {
    "one-shot": "prefill in one forward",
    "chunks": "prefill in chunks",
    "decode": "decode",
}
LEAST_SHOWN = 2**-10  # MiB: a peak may be 0, which has no place on a logarithmic axis
TIMED_CHUNKS = 4  # the last ones before a length say what a token costs there


@dataclass(frozen=True)
class Point:
    """A cache at one length in one mode.

    kv_bytes: what the cache holds then. peak_bytes: largest growth of memory since before the cache was there, in this
    mode (chunks: on the whole way to this length). milliseconds: per token at this length, the median of the last
    chunks or of all decode steps; mean_milliseconds: their mean, rare evictions included.
    """

    cache: str
    mode: str
    length: int
    kv_bytes: int
    peak_bytes: int
    milliseconds: float
    mean_milliseconds: float


@dataclass(frozen=True)
class Limits:
    """Lengths, in tokens, beyond which nothing is measured: `full` for caches that keep all, `one_shot` for prefills in
    one forward."""

    full: int
    one_shot: int

    def allow(self, mode: str, length: int, bounded: bool) -> bool:
        """Whether a length is measured; bounded: the cache evicts."""
        return (bounded or length <= self.full) and (mode != "one-shot" or length <= self.one_shot)


class Stream:
    """One cache that reads on along a row of tokens, and is measured where it stops.

    Args:
        ids: `[1, tokens]` int64, at least as many as will be read.
        chunk: tokens per forward of a prefill.
    """

    def __init__(self, model: PreTrainedModel, cache: Callable[[], Cache], ids: Tensor, chunk: int) -> None:
        from kvcache.evals.process_memory import Meter

        self.model, self.ids, self.chunk = model, ids, chunk
        self.meter = Meter({parameter.device for parameter in model.parameters()})
        self.cache = cache()
        self.seen = self.most = 0

    def prefill(self, length: int) -> tuple[int, list[float]]:
        """Read up to `length` tokens: peak bytes since the beginning, and seconds per token of each chunk."""
        from kvcache.evals.process_memory import freed_at_once

        times = []
        with freed_at_once(), self.meter.peak() as peak:
            while self.seen < length:
                size = min(self.chunk, length - self.seen)
                times.append(self._read(size) / size)
        self.most = max(self.most, *peak)
        return self.most, times

    def decode(self, steps: int) -> tuple[int, list[float]]:
        """Read `steps` tokens one by one: peak bytes meanwhile, and the seconds of each."""
        self._read(1)  # the first forward of this shape
        with self.meter.peak() as peak:
            times = [self._read(1) for _ in range(steps)]
        return peak[0], times

    def _read(self, size: int) -> float:
        """Seconds of one forward over the next `size` tokens."""
        import torch

        from kvcache.evals.generation import CACHE_ARGUMENT

        part = self.ids[:, self.seen : self.seen + size].to(self.model.device)
        self.meter.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            self.model(input_ids=part, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: self.cache})
        self.meter.synchronize()
        self.seen += size
        return time.perf_counter() - start


class Measurement:
    """The points of some caches on one model, each on demand.

    Args:
        lengths: in tokens, ascending and apart by more than `steps` tokens.
        chunk: tokens per forward of a prefill in chunks. steps: tokens decoded at each length.
        seed: of the tokens.

    Raises:
        ValueError: lengths that are none, or too close.
    """

    def __init__(
        self, model: PreTrainedModel, lengths: Sequence[int], *, chunk: int = 512, steps: int = 48, seed: int = 0
    ) -> None:
        _check_lengths(lengths, steps)
        self.model, self.chunk, self.steps = model, chunk, steps
        self.ids = _random_ids(model, max(lengths) + steps + 1, seed)
        self._stream: tuple[object, Stream] | None = None  # the one cache that is alive

    def point(self, spec: CacheSpec, mode: str, length: int) -> Point:
        """Measure one point. Points of one cache are cheapest in ascending order, without another cache between.

        Raises:
            ValueError: a cache that cannot be built for this model, an unknown mode.
        """
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} must be one of {', '.join(MODES)}")
        stream = self._at(spec, mode, length)
        if mode == "decode":
            if stream.seen < length:
                stream.prefill(length)
            peak, times = stream.decode(self.steps)
        else:
            peak, times = stream.prefill(length)
            times = times[-TIMED_CHUNKS:]
        return self._point(spec, mode, length, stream, peak, times)

    def _point(
        self, spec: CacheSpec, mode: str, length: int, stream: Stream, peak: int, times: Sequence[float]
    ) -> Point:
        from kvcache.evals.generation import kv_bytes

        median, mean = statistics.median(times) * 1e3, statistics.mean(times) * 1e3
        return Point(str(spec), mode, length, kv_bytes(stream.cache), peak, median, mean)

    def _at(self, spec: CacheSpec, mode: str, length: int) -> Stream:
        """A stream that has not read past what the point wants; the last one where it serves."""
        from kvcache.evals.caches import build_cache

        one_shot = mode == "one-shot"
        relative = isinstance(spec.get("slots", 0), str)  # a share of the length
        key = (spec, one_shot, length if one_shot or relative else None)
        reads_on = (
            self._stream is not None and self._stream[0] == key and self._stream[1].seen <= length - (mode == "chunks")
        )
        if self._stream is None or not reads_on:
            self._stream = None  # before the next one measures what is free
            build = partial(build_cache, spec, self.model.config, length)
            self._stream = key, Stream(self.model, build, self.ids, length if one_shot else self.chunk)
        return self._stream[1]


def _check_lengths(lengths: Sequence[int], steps: int) -> None:
    if not lengths:
        raise ValueError("no lengths were given: at least one is needed")
    for shorter, longer in pairwise(lengths):
        if longer - shorter <= steps + 1:
            raise ValueError(
                f"lengths {shorter} and {longer} must ascend and be further apart than the {steps} tokens that are "
                "decoded between them: leave one out, or give fewer --steps"
            )


def _random_ids(model: PreTrainedModel, count: int, seed: int) -> Tensor:
    """`[1, count]` int64 in the model's vocabulary."""
    import torch

    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(0, vocabulary, (1, count), generator=torch.Generator().manual_seed(seed))


def warm_up(model: PreTrainedModel, tokens: int = 256) -> None:
    """One forward without a measured cache: it brings the weights, which are mapped from a file, into memory."""
    import torch

    with torch.inference_mode():
        model(input_ids=_random_ids(model, tokens, 0).to(model.device), use_cache=False)


# ---- what people see


def tables(content: Mapping[str, Any]) -> Iterator[Table]:
    """One table for each mode of a result: a row for each cache and length."""
    cells = list(content["cells"].values())
    lengths = sorted({cell["length"] for cell in cells})
    settings = content["settings"]
    for mode, rows in _by_mode(cells).items():
        table = _table(f"{MODES[mode]}{_how(mode, settings)}")
        table.caption = _caption(cells, settings)
        for cache, mine in rows.items():
            for cell in mine:
                table.add_row(*_row(cell))
            missing = [f"{length:,}" for length in lengths if length not in {cell["length"] for cell in mine}]
            if missing:
                table.add_row(cache, ", ".join(missing), *["not measured"] * 3)
            table.add_section()
        yield table


def _by_mode(cells: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    """Cells by mode and cache, ascending by length."""
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for mode in MODES:
        for cell in sorted(cells, key=lambda cell: cell["length"]):
            if cell["mode"] == mode:
                found.setdefault(mode, {}).setdefault(cell["cache"], []).append(cell)
    order = list(dict.fromkeys(cell["cache"] for cell in cells))
    return {mode: {cache: rows[cache] for cache in order if cache in rows} for mode, rows in found.items()}


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE, title_justify="left", caption_justify="left")
    table.add_column("cache", overflow="fold")
    for head in ("length", "KV cache", "peak memory", "ms per token"):
        table.add_column(head, justify="right")
    return table


def _how(mode: str, settings: Mapping[str, Any]) -> str:
    return {"chunks": f" of {settings['chunk']:,}", "decode": f", {settings['steps']} steps"}.get(mode, "")


def _row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = show_bytes(cell["kv_bytes"]), show_bytes(cell["peak_bytes"])
    return cell["cache"], f"{cell['length']:,}", *sizes, f"{cell['milliseconds']:.2f}"


def _caption(cells: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    lines = [
        "KV cache: with the copy of the keys at their ranks, where positions are in the cache. "
        f"Peak memory: {settings['peak']}, above what it was before the cache. ms: median at that length",
        "not measured: beyond --full-limit or --one-shot-limit, or not asked for",
    ]
    trained = settings["trained_length"]
    if trained is not None and any(cell["length"] > trained and _absolute(cell["cache"]) for cell in cells):
        lines.append(
            f"beyond the trained length of {trained:,} tokens the text of a cache with absolute positions is worth "
            "nothing; its bytes and times are right"
        )
    return "\n".join(lines)


def _absolute(cache: str) -> bool:
    """Whether a cache keeps absolute positions at any length."""
    return cache.split(":")[0] in ("full", "quantized") or "positions=absolute" in cache


def chart(content: Mapping[str, Any], file: Path) -> None:
    """A row of panels for each mode: KV bytes, peak memory and time per token against length."""
    from kvcache.evals.plots import figure, save

    cells = list(content["cells"].values())
    modes = _by_mode(cells)
    drawing, panels = figure(len(modes) * len(_PANELS), columns=len(_PANELS), width=4.6, height=3.3)
    lengths = sorted({cell["length"] for cell in cells})
    rows = iter(panels)
    for mode, caches in modes.items():
        for value, title, unit, scale in _PANELS:
            panel = next(rows)
            _lines(panel, caches, value, scale)
            _axes(panel, lengths, f"{MODES[mode]}{_how(mode, content['settings'])}", title, unit)
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save(drawing, file)


# A figure of a cell, what it is, its unit, and by what it is divided. Bytes on a logarithmic axis: a full cache's line
# would press all others onto the ground.
_PANELS = (
    ("kv_bytes", "KV cache", "MiB", MEBIBYTE),
    ("peak_bytes", "peak memory", "MiB", MEBIBYTE),
    ("milliseconds", "time per token", "ms", 1),
)


def _lines(panel: Axes, caches: Mapping[str, Sequence[Mapping[str, Any]]], value: str, scale: int) -> None:
    from kvcache.evals.caches import parse_cache
    from kvcache.evals.plots import colours, dashes

    labels = {cache: parse_cache(cache).label for cache in caches}
    colour, dash = colours(list(labels.values())), dashes(list(labels.values()))
    for cache, cells in caches.items():
        label = labels[cache]
        style: dict[str, Any] = {"color": colour[label], "linestyle": dash[label], "linewidth": 2.2, "marker": "o"}
        lengths, values = [cell["length"] for cell in cells], [cell[value] / scale for cell in cells]
        panel.plot(lengths, values, label=label, markersize=4, **style)


def _axes(panel: Axes, lengths: Sequence[int], mode: str, title: str, unit: str) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xlim(lengths[0] / 1.2, lengths[-1] * 1.2)
    panel.set_xticks(lengths, [f"{length / 1024:g}k" if length >= 1024 else str(length) for length in lengths])
    panel.minorticks_off()
    if unit == "MiB":
        low, high = (max(bound, LEAST_SHOWN) for bound in panel.dataLim.intervaly)
        panel.set_yscale("log", base=2)
        panel.set_ylim(2.0 ** math.floor(math.log2(low) - 0.2), 2.0 ** math.ceil(math.log2(high) + 0.2))
        panel.yaxis.set_major_formatter("{x:,g}")
    else:
        panel.set_ylim(0, panel.get_ylim()[1] * 1.05)
    panel.set_title(f"{title}\n{mode}", fontsize=10)
    panel.set(xlabel="tokens seen", ylabel=unit)


# ---- the command


def add_parser(commands: Any) -> None:
    """`kvcache eval memory`."""
    parser = add_command(commands, "memory", "KV bytes, peak memory and time per token against length.", EXAMPLES)
    common_options(parser)
    parser.add_argument(
        "--cache", metavar="SPEC", action="append", help=f"again for more (default: {', '.join(CACHES)})"
    )
    parser.add_argument("--lengths", metavar="N", type=positive, nargs="+", default=list(LENGTHS), help="in tokens")
    parser.add_argument("--modes", choices=list(MODES), nargs="+", default=list(MODES), help="(default: all)")
    parser.add_argument("--chunk", metavar="N", type=positive, default=512, help="tokens per forward (default: 512)")
    parser.add_argument(
        "--steps", metavar="N", type=positive, default=48, help="tokens decoded at a length (default: 48)"
    )
    parser.add_argument(
        "--full-limit",
        metavar="N",
        type=natural,
        default=16384,
        help="longest length for caches that keep everything: their time grows with its square (default: 16384)",
    )
    parser.add_argument(
        "--one-shot-limit",
        metavar="N",
        type=natural,
        default=8192,
        help="longest prefill in one forward, which costs the square of the length with any cache (default: 8192)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the result file does not hold yet; print the tables, draw the chart where asked."""
    from kvcache.evals.caches import parse_cache
    from kvcache.evals.cells import run_cells
    from kvcache.evals.cli import load_model

    specs = [parse_cache(text) for text in options.cache or CACHES]
    lengths = sorted(set(options.lengths))
    _check_lengths(lengths, options.steps)
    model, _ = load_model(options)
    measurement = Measurement(model, lengths, chunk=options.chunk, steps=options.steps, seed=options.seed)
    points = _points(model, specs, [mode for mode in MODES if mode in options.modes], lengths, _limits(options))
    header = _header(options, model)
    warm_up(model)
    cells = {
        f"{spec} {mode} {length}": partial(_cell, measurement, spec, mode, length) for spec, mode, length in points
    }
    content = {**header, "cells": run_cells(cells, options.json, header, KIND, "memory")}
    for table in tables(content):
        console().print(table)
    if options.png is not None:
        chart(content, options.png)
    return 0


def _limits(options: argparse.Namespace) -> Limits:
    return Limits(options.full_limit, options.one_shot_limit)


def _cell(measurement: Measurement, spec: CacheSpec, mode: str, length: int) -> dict[str, Any]:
    return asdict(measurement.point(spec, mode, length))


def _points(
    model: PreTrainedModel, specs: Sequence[CacheSpec], modes: Sequence[str], lengths: Sequence[int], limits: Limits
) -> list[tuple[CacheSpec, str, int]]:
    """What is measured, in an order in which each cache reads on.

    Raises:
        ValueError: the limits leave nothing, or a cache cannot be built for the model.
    """
    from kvcache.cache import EvictingCache
    from kvcache.evals.caches import build_cache

    points = []
    for spec in specs:
        bounded = isinstance(build_cache(spec, model.config, lengths[0]), EvictingCache)
        for apart in (False, True):  # one-shot prefills stand apart
            part = [mode for mode in modes if (mode == "one-shot") is apart]
            points += [(spec, m, n) for n in lengths for m in part if limits.allow(m, n, bounded)]
    if not points:
        raise ValueError(f"nothing is left to measure: all lengths ({lengths}) are beyond the limits ({limits})")
    return points


def _header(options: argparse.Namespace, model: PreTrainedModel) -> dict[str, Any]:
    from kvcache.evals.process_memory import Meter
    from kvcache.evals.record import provenance
    from kvcache.models.spec import decoder_config

    origin = provenance(options.model, dtype=model.dtype, device=model.device, seed=options.seed)
    settings = {
        "chunk": options.chunk,
        "steps": options.steps,
        "peak": Meter({parameter.device for parameter in model.parameters()}).what,
        "trained_length": getattr(decoder_config(model.config), "max_position_embeddings", None),
    }
    return {"provenance": origin.to_dict(), "settings": settings}
