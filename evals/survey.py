"""Policies side by side at many budgets: every haystack is read once per policy, with room for all of it.

A cache that holds the whole text is copied for each budget and brought down to it (`EvictingCache.resize`), which keeps
what reading with that budget in one forward would keep. All questions of a haystack are answered as rows of one batch,
and the texts of a stream are rows of another. So a survey of many policies costs little more than one of them did.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.evals.cli import add_command, common_options, console, load_model, natural, positive

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table
    from torch import Tensor
    from transformers import Cache, PreTrainedModel

    from kvcache import Budget
    from kvcache.evals.caches import CacheSpec
    from kvcache.evals.haystack import Builder, Haystack

KIND = "survey"
SUMMARY = "Survey policies: needles at shares of the length, perplexity of streams at numbers of slots."
EXAMPLES = """\
examples:
  kvcache eval survey --cache snapkv --cache tova --cache random --json survey.json --png survey.png
  kvcache eval survey --cache sink_h2o --lengths 1024 2048 4096 --shares 50 25 12.5 --seeds 4 --streams ''
  kvcache eval survey --cache snapkv:queries=32 --lengths --slots 64 128 256 --streams austen:persuasion stdlib

caches are given without their sizes, which --shares and --slots set; the full cache always comes first. With a json
file caches, lengths, seeds and sizes can be added later: what it holds is not measured again.
"""
FULL = "full"
ASKS = ("known", "afterwards")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
TAIL = 64  # tokens that are read together with a known question, so that windows of last queries are what they would be
ROOM = 160  # slots beyond the length of a haystack, for its question and answer


# ---- caches with a size


def sized(cache: str, slots: int) -> CacheSpec:
    """The cache with a number of slots, as `caches.build_cache` reads it; the full one as it is."""
    from kvcache.evals.caches import parse_cache

    spec = parse_cache(cache)
    return spec if cache == FULL else replace(spec, options=(("slots", slots), *spec.options))


def written(caches: Sequence[str]) -> list[str]:
    """The full cache and these, each once.

    Raises:
        ValueError: as `parse_cache`, or a cache that has a number of slots already or no use for one.
    """
    from kvcache.evals.caches import parse_cache
    from kvcache.evals.continuation import takes

    specs = [parse_cache(cache) for cache in caches]
    for spec in specs:
        if str(spec) != FULL and not takes(spec, "window"):
            raise ValueError(f"{str(spec)!r} has no budget: a survey compares caches of the same number of slots")
        if given := [name for name, _ in spec.options if name in ("slots", "heavy_hitters")]:
            raise ValueError(
                f"{str(spec)!r} has a size of its own ({given[0]}): sizes are what --shares and --slots set"
            )
    return list(dict.fromkeys([FULL, *map(str, specs)]))


class Rows:
    """A cache, and which of the tokens that each of its rows has seen are real."""

    def __init__(self, model: PreTrainedModel, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.mask = self._tensor([[]])  # [batch, seen] int64

    def copied(self) -> Rows:
        """A copy that goes its own way."""
        other = Rows(self.model, copy.deepcopy(self.cache))
        other.mask = self.mask
        return other

    def repeat(self, times: int) -> None:
        """Each row so often."""
        self.cache.batch_repeat_interleave(times)
        self.mask = self.mask.repeat_interleave(times, 0)

    def read(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Ids for each row, shorter ones are padded on the left; the logits `[batch, 1, vocabulary]` behind them."""
        from kvcache.evals.generation import CACHE_ARGUMENT

        longest = max(map(len, rows))
        ids = self._tensor([[0] * (longest - len(row)) + list(row) for row in rows])
        real = self._tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        self.mask = real if self.mask.shape[1] == 0 else self._joined(real)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -longest:]
        arguments: dict[str, Any] = {CACHE_ARGUMENT: self.cache, "attention_mask": self.mask, "logits_to_keep": 1}
        return self.model(input_ids=ids, position_ids=positions, **arguments).logits

    def _joined(self, new: Tensor) -> Tensor:
        import torch

        return torch.cat((self.mask, new), dim=1)

    def _tensor(self, numbers: list[Any]) -> Tensor:
        import torch

        return torch.tensor(numbers, dtype=torch.int64, device=self.model.device)


# ---- needles


@dataclass(frozen=True)
class Needles:
    """What every haystack is measured with: one needle at each depth, all of them asked for. shares: of the length, in
    %, that caches keep."""

    model: PreTrainedModel
    builder: Builder
    depths: Sequence[float]
    shares: Sequence[float]

    def measure(self, cache: str, length: int, seed: int) -> dict[str, Any]:
        """For every share and both ways to ask, lists with an entry for each depth."""
        import torch

        from kvcache.evals.caches import build_cache
        from kvcache.evals.haystack import draw_needles

        haystack = self.builder.build(draw_needles("digits", len(self.depths), seed), self.depths, length, seed)
        with torch.inference_mode():
            whole = Rows(self.model, build_cache(sized(cache, length + ROOM), self.model.config))
            whole.read([haystack.ids[:-TAIL]])
            tail, questions = haystack.ids[-TAIL:], haystack.questions
            known = whole.copied()
            known.repeat(len(questions))
            known.read([tail + question[:-1] for question in questions])
            whole.read([tail])
            answers = [
                {"share": share, "ask": ask, **self._answers(cache, round(length * share / 100), haystack, read)}
                for share in ([100.0] if cache == FULL else self.shares)
                for ask, read in zip(ASKS, (known, whole), strict=True)
            ]
        return {"answers": answers}

    def _answers(self, cache: str, slots: int, haystack: Haystack, read: Rows) -> dict[str, Any]:
        """Bring a copy of what was read down to the slots, ask what was not asked yet, and continue."""
        from kvcache.evals.haystack import grade
        from kvcache.evals.needle import kept_share

        mine = read.copied()
        if cache != FULL:
            mine.cache.resize(self._budget(cache, slots))  # pyright: ignore[reportAttributeAccessIssue]
        if len(mine.mask) == 1:
            mine.repeat(len(haystack.questions))
            mine.read([question[:-1] for question in haystack.questions])
        kept = [kept_share(mine.cache, *place.answer, row) for row, place in enumerate(haystack.places)]
        texts = self._continue([question[-1] for question in haystack.questions], mine, haystack)
        graded = [grade(place.needle, text) for place, text in zip(haystack.places, texts, strict=True)]
        return {
            "exact": [exact for exact, _ in graded],
            "parts": [round(parts, 4) for _, parts in graded],
            "kept": [round(each, 4) for each in kept],
        }

    def _budget(self, cache: str, slots: int) -> Budget:
        from kvcache.evals.caches import build_cache

        return build_cache(sized(cache, slots), self.model.config).budget  # pyright: ignore[reportAttributeAccessIssue]

    def _continue(self, last: Sequence[int], rows: Rows, haystack: Haystack) -> list[str]:
        """Greedy text behind each row's last token."""
        tokenizer = self.builder.tokenizer
        steps = [list(last)]
        for _ in range(max(self.builder.room(place.needle) for place in haystack.places)):
            steps.append(rows.read([[token] for token in steps[-1]])[:, -1].argmax(-1).tolist())
        answers = [list(answer) for answer in zip(*steps[1:], strict=True)]
        end = tokenizer.eos_token_id
        return [str(tokenizer.decode(row[: row.index(end)] if end in row else row)) for row in answers]


# ---- streams


@dataclass(frozen=True)
class Streams:
    """Texts that stream through a cache as rows of one batch, evictions on the way.

    ids: `[texts, tokens]` int64; names: of the texts; first: position from which tokens count; chunk: tokens at once.
    """

    model: PreTrainedModel
    ids: Tensor
    names: Sequence[str]
    first: int
    chunk: int

    def measure(self, cache: str, slots: int) -> dict[str, Any]:
        """For each text, its perplexity and what `perplexity.ratio` compares."""
        import time

        import torch

        from kvcache.evals.caches import build_cache
        from kvcache.evals.compare import stream_cell
        from kvcache.evals.generation import CACHE_ARGUMENT, kv_bytes

        held, nll = build_cache(sized(cache, slots), self.model.config), []
        start = time.perf_counter()
        with torch.inference_mode():
            for at in range(0, self.ids.shape[1] - 1, self.chunk):
                part = self.ids[:, at : min(at + self.chunk, self.ids.shape[1] - 1)]
                arguments: dict[str, Any] = {CACHE_ARGUMENT: held, "use_cache": True}
                logits = self.model(input_ids=part, **arguments).logits.float()
                targets = self.ids[:, at + 1 : at + 1 + part.shape[1]]
                nll.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").cpu())
        seconds = time.perf_counter() - start
        texts = [stream_cell(row, self.first, seconds, kv_bytes(held)) for row in torch.cat(nll, dim=1).tolist()]
        return {"texts": dict(zip(self.names, texts, strict=True))}


# ---- figures out of the cells


@dataclass(frozen=True)
class Answer:
    """Needles of one cache, length, share and way to ask. exact: share of n, with its 95 % Wilson interval; parts,
    kept: means of the digits that are right and of the answer's tokens that were held."""

    cache: str
    length: int
    share: float
    ask: str
    n: int
    exact: float
    interval: tuple[float, float]
    parts: float
    kept: float


def answers(content: Mapping[str, Any]) -> list[Answer]:
    """All seeds and depths together; in the order of the cells."""
    from kvcache.evals.cells import wilson

    groups: dict[tuple[str, int, float, str], list[Mapping[str, Any]]] = {}
    for cell in content["cells"].values():
        for answer in cell.get("answers", ()):
            groups.setdefault((cell["cache"], cell["length"], answer["share"], answer["ask"]), []).append(answer)
    found = []
    for key, parts in groups.items():
        exact = [each for part in parts for each in part["exact"]]
        means = [statistics.fmean(each for part in parts for each in part[name]) for name in ("parts", "kept")]
        n = len(exact)
        found.append(Answer(*key, n, sum(exact) / n, wilson(sum(exact), n), *means))
    return found


@dataclass(frozen=True)
class Ratio:
    """Perplexity over the full cache's on the same text, and its standard error."""

    cache: str
    slots: int
    text: str
    value: float
    error: float


def ratios(content: Mapping[str, Any]) -> list[Ratio]:
    """Of every cache, number of slots and text, where the full cache is measured too."""
    from kvcache.evals.perplexity import ratio

    cells = [cell for cell in content["cells"].values() if "texts" in cell]
    full = next((cell["texts"] for cell in cells if cell["cache"] == FULL), {})
    found = []
    for cell in cells:
        for text, result in cell["texts"].items():
            against = ratio(result, full[text]) if cell["cache"] != FULL and text in full else None
            if against is not None:
                found.append(Ratio(cell["cache"], cell["slots"], text, *against))
    return found


# ---- what is shown


def tables(content: Mapping[str, Any]) -> Iterable[Table]:
    """Needles for each way to ask, then streams."""
    from rich import box
    from rich.table import Table

    for title, header, lines in _tables(content):
        table = Table(title=title, box=box.SIMPLE)
        for name in header:
            table.add_column(name, justify="left" if name == "cache" else "right")
        for line in lines:
            table.add_row(*line)
        yield table


def markdown(content: Mapping[str, Any]) -> str:
    """The same tables for a page."""
    parts = []
    for title, header, lines in _tables(content):
        rule = ["---" if name == "cache" else "---:" for name in header]
        rows = ["| " + " | ".join(row) + " |" for row in (header, rule, *lines)]
        parts.append("\n".join([f"**{title}**", "", *rows]))
    made = content["provenance"]
    return (
        "\n\n".join([*parts, f"`{made['command']}` ({made['model']}, {made['dtype']}, {made['device_name']})"]) + "\n"
    )


def _tables(content: Mapping[str, Any]) -> Iterable[tuple[str, list[str], list[list[str]]]]:
    found = answers(content)
    for ask in ASKS:
        mine = {(a.cache, a.length, a.share): a for a in found if a.ask == ask}
        columns = list(dict.fromkeys((a.length, a.share) for a in found if a.cache != FULL))
        columns.sort(key=lambda column: (column[0], -column[1]))
        if mine and columns:
            n = sorted({a.n for a in mine.values()})
            title = f"needles, question {ask}: exact answers, %, with 95 % interval (n = {'-'.join(map(str, n))})"
            header = ["cache", *(f"{length:,} at {share:g} %" for length, share in columns)]
            caches = list(dict.fromkeys(cache for cache, _, _ in mine))
            yield title, header, [[cache, *(_shown(mine, cache, column) for column in columns)] for cache in caches]
    values = {(r.cache, r.slots, r.text): r for r in ratios(content)}
    if values:
        columns = list(dict.fromkeys((text, slots) for _, slots, text in values))
        columns.sort(key=lambda column: (column[0], column[1]))
        caches = list(dict.fromkeys(cache for cache, _, _ in values))
        header = ["cache", *(f"{text} at {slots}" for text, slots in columns)]
        lines = [[cache, *(_ratio(values.get((cache, slots, text))) for text, slots in columns)] for cache in caches]
        yield "perplexity over the full cache's, streaming, \u00b1 1.96 standard errors", header, lines


def _shown(mine: Mapping[tuple[str, int, float], Answer], cache: str, column: tuple[int, float]) -> str:
    answer = mine.get((cache, column[0], 100.0 if cache == FULL else column[1]))
    if answer is None:
        return ""
    low, high = answer.interval
    return f"{100 * answer.exact:.0f} ({100 * low:.0f}-{100 * high:.0f})"


def _ratio(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.value:.3f} \u00b1 {1.96 * ratio.error:.3f}"


def chart(content: Mapping[str, Any], file: Path) -> None:
    """Needles of the longest length at the middle share, and perplexity ratios against slots: what was measured.

    Raises:
        ValueError: nothing was measured but the full cache.
    """
    from kvcache.evals.plots import figure, save

    found, values = answers(content), ratios(content)
    shares = sorted({a.share for a in found if a.cache != FULL})
    draws: list[Callable[[Axes], None]] = []
    if shares:
        share = shares[len(shares) // 2]
        length = max(a.length for a in found if a.share == share)
        picked = [a for a in found if a.length == length and (a.cache == FULL or a.share == share)]
        draws.append(partial(_needle_bars, picked, f"Needles: {length:,} tokens, {share:g} % kept"))
    if values:
        draws.append(partial(_ratio_lines, values))
    if not draws:
        raise ValueError("nothing to draw: measure another cache beside the full one")
    rows = max(len({each.cache for each in part}) for part in (found, values) if part)
    drawing, panels = figure(len(draws), width=6.8, height=0.3 * rows + 2)
    for draw, panel in zip(draws, panels, strict=True):
        draw(panel)
    save(drawing, file)


def _needle_bars(picked: Sequence[Answer], title: str, panel: Axes) -> None:
    caches = list(dict.fromkeys(a.cache for a in picked))
    style: dict[str, Any] = {"error_kw": {"linewidth": 0.8, "ecolor": "#555555"}}
    for offset, ask, colour in zip((-0.2, 0.2), ASKS, ("#1f6fb4", "#d9822b"), strict=True):
        mine = [a for a in picked if a.ask == ask]
        at = [caches.index(a.cache) + offset for a in mine]
        error = [[100 * (a.exact - a.interval[0]) for a in mine], [100 * (a.interval[1] - a.exact) for a in mine]]
        exact = [100 * a.exact for a in mine]
        panel.barh(at, exact, 0.38, xerr=error, color=colour, label=f"question {ask}", **style)
    panel.set_yticks(range(len(caches)), [cache.replace(":", " ", 1) for cache in caches], fontsize=8)
    panel.invert_yaxis()
    panel.set(xlim=(0, 105), xlabel="exact answers, %", title=title)
    panel.legend(frameon=False, fontsize=8, loc="lower right")


def _ratio_lines(values: Sequence[Ratio], panel: Axes) -> None:
    from kvcache.evals.plots import colours, dashes

    caches = list(dict.fromkeys(r.cache for r in values))
    labels = [cache.replace(":", " ", 1) for cache in caches]
    colour, dash = colours(labels), dashes(labels)
    for cache, label in zip(caches, labels, strict=True):
        slots = sorted({r.slots for r in values if r.cache == cache})
        means = [statistics.fmean(r.value for r in values if r.cache == cache and r.slots == n) for n in slots]
        panel.plot(slots, means, color=colour[label], linestyle=dash[label], marker="o", markersize=4, label=label)
    everywhere = sorted({r.slots for r in values})
    panel.set_xscale("log", base=2)
    panel.set_xticks(everywhere, [f"{n}" for n in everywhere])
    panel.set_ylim(bottom=1)
    panel.legend(frameon=False, fontsize=7)
    panel.set(xlabel="slots", ylabel="times the full cache's, mean of texts", title="Perplexity of streams")


# ---- the command


def add_parser(commands: Any) -> None:
    """Register `kvcache eval survey`."""
    parser = add_command(commands, KIND, SUMMARY, EXAMPLES)
    parser.set_defaults(run=run)
    parser.add_argument("--cache", metavar="CACHE", dest="caches", action="append", help="a cache, several times")
    parser.add_argument("--text", default="austen:northanger", help="the haystack (default: austen:northanger)")
    parser.add_argument("--lengths", metavar="N", type=positive, nargs="*", default=[2048], help="of haystacks, tokens")
    parser.add_argument(
        "--shares", metavar="P", type=float, nargs="+", default=[50.0, 25.0, 12.5], help="kept of them, in %%"
    )
    parser.add_argument("--seeds", metavar="N", type=positive, default=4, help="haystacks of five needles (default: 4)")
    parser.add_argument(
        "--streams", metavar="TEXT", nargs="*", default=["austen:northanger"], help="texts that stream through"
    )
    parser.add_argument(
        "--slots", metavar="N", type=positive, nargs="*", default=[64, 128, 256, 512], help="of streams"
    )
    parser.add_argument("--tokens", metavar="N", type=positive, default=4096, help="of each stream (default: 4096)")
    parser.add_argument("--from", dest="first", metavar="N", type=natural, default=1024, help="counted (default: 1024)")
    parser.add_argument("--chunk", metavar="N", type=positive, default=16, help="tokens at once (default: 16)")
    parser.add_argument("--md", metavar="F", type=Path, help="write the tables there, as Markdown")
    common_options(parser)


def all_cells(
    needles: Needles, streams: Streams | None, caches: Sequence[str], lengths: Sequence[int], seeds: Sequence[int],
    slots: Sequence[int],
) -> dict[str, Callable[[], dict[str, Any]]]:  # fmt: skip
    """Every measurement, ready for `cells.run_cells`; seeds outermost, so that an interrupted run is even."""
    cells: dict[str, Callable[[], dict[str, Any]]] = {}
    for seed in seeds:
        for length in lengths:
            for cache in caches:
                about = {"cache": cache, "length": length, "seed": seed}
                cells[f"needle {cache} length={length} seed={seed}"] = partial(_cell, about, needles.measure)
    if streams is not None:
        for n in slots:
            for cache in caches:
                about = {"cache": cache, "slots": 0 if cache == FULL else n}
                cells[f"stream {cache} slots={about['slots']}"] = partial(_cell, about, streams.measure)
    return cells


def _cell(about: dict[str, Any], measure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return {**about, **measure(**about)}


def run(options: argparse.Namespace) -> int:
    """`kvcache eval survey`.

    Raises:
        ValueError: a cache that `parse_cache` refuses, or one with a size of its own; texts that are too short.
    """
    import torch

    from kvcache.evals.cells import run_cells
    from kvcache.evals.haystack import Builder, form, sentences
    from kvcache.evals.record import provenance, text_record
    from kvcache.evals.texts import load_text, tokens

    caches = written(options.caches or ["sink_h2o", "snapkv"])
    text = load_text(options.text)
    texts = [load_text(name) for name in options.streams if name]
    model, tokenizer = load_model(options)
    source = sentences(text.text, tokenizer)
    needles = Needles(model, Builder(source, tokenizer, form("raw", tokenizer)), DEPTHS, options.shares)
    streams = None
    if texts and options.slots:
        ids = torch.cat([tokens(each, tokenizer, options.tokens) for each in texts]).to(model.device)
        streams = Streams(model, ids, [each.name for each in texts], options.first, options.chunk)
    seeds = range(options.seed, options.seed + options.seeds)
    cells = all_cells(needles, streams, caches, options.lengths, seeds, options.slots)
    records = [text_record(text, len(source.ids)), *(text_record(each, options.tokens) for each in texts)]
    made = provenance(options.model, dtype=model.dtype, device=model.device, seed=options.seed, texts=records)
    settings = {"depths": list(DEPTHS), "first": options.first, "chunk": options.chunk, "shares": options.shares}
    header = {"provenance": made.to_dict(), "settings": settings}
    content = {**header, "cells": run_cells(cells, options.json, header, KIND, "surveying")}
    for table in tables(content):
        console().print(table)
    if options.md is not None:
        options.md.parent.mkdir(parents=True, exist_ok=True)
        options.md.write_text(markdown(content), encoding="utf-8")
    if options.png is not None:
        chart(content, options.png)
    return 0
