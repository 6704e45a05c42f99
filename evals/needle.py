"""Needles in a haystack: does the answer survive the evictions, at every depth of every length, and what was kept?

The question is known while the text is read (policies that watch attention may see it), or asked afterwards: the text
is read and evicted first, and the question comes as further tokens. The last token of the prompt is always read by
itself, so no part of an answer comes out of a forward that still saw what it was about to evict.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.evals.cli import add_command, common_options, console, load_model, positive
from kvcache.evals.haystack import FORMS, KINDS, Builder, Haystack, Place, draw_needles, form, grade, sentences

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table
    from torch import Tensor
    from transformers import Cache, PreTrainedModel

EXAMPLES = """\
examples:
  kvcache eval needle --cache sink_h2o:slots=25%                         one needle, known and afterwards
  kvcache eval needle --lengths 1024 2048 --cache streaming_llm:slots=12.5% --cache sink_h2o:slots=12.5% \\
      --needles several --repeats 8 --json needle.json --png needle.png  as many needles as depths, each asked for
  kvcache eval needle --ask afterwards --chunk 256 --cache sink_h2o:slots=512   eviction while the text is read
  kvcache eval needle --form chat --kind words --model owner/name        an instruction model, words to find
"""
DEFAULT_CACHES = ("streaming_llm:slots=25%", "sink_h2o:slots=25%")
FULL = "full"
ASKS = ("known", "afterwards")
NEEDLES = ("single", "several")


@dataclass(frozen=True)
class Case:
    """One cell of the grid. It measures every depth once: single: a haystack for each depth; several: one haystack with
    a needle of another city at each depth, and all of them are asked for, one at a time."""

    cache: str
    length: int
    ask: str
    needles: str
    kind: str
    seed: int

    @property
    def key(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


def cases(
    caches: Sequence[str],
    lengths: Sequence[int],
    *,
    asks: Sequence[str] = ASKS,
    needles: Sequence[str] = ("single",),
    kinds: Sequence[str] = ("digits",),
    seeds: Sequence[int] = (0,),
) -> list[Case]:
    """The grid. Caches as `caches.parse_cache` reads them; the full cache comes first in any case, as the ceiling.

    Seeds go outermost: an interrupted run has measured all caches alike.

    Raises ValueError for a cache that does not exist, or an ask, needles or kind that is none.
    """
    from kvcache.evals.caches import parse_cache

    for given, known in ((asks, ASKS), (needles, NEEDLES), (kinds, KINDS)):
        if unknown := [value for value in given if value not in known]:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(known)}")
    written = list(dict.fromkeys(str(parse_cache(cache)) for cache in (FULL, *caches)))
    return [
        Case(cache, length, ask, number, kind, seed)
        for seed in seeds
        for length in lengths
        for kind in kinds
        for number in needles
        for ask in asks
        for cache in written
    ]


@dataclass(frozen=True)
class Trial:
    """One question. depth: share of the text before the needle; parts: share of the answer's digits or words that are
    right; kept, kept_answer: share of the tokens of the needle, and of the answer in it, that the cache held when the
    answer began (mean over layers and KV heads); tokens: of the prompt."""

    depth: float
    city: str
    expected: str
    answer: str
    exact: bool
    parts: float
    kept: float
    kept_answer: float
    tokens: int


@dataclass(frozen=True)
class Needles:
    """What all cells of one measurement share. chunk: tokens per forward while reading; None: all in one."""

    model: PreTrainedModel
    builder: Builder
    depths: tuple[float, ...]
    chunk: int | None = None

    def check(self, grid: Sequence[Case]) -> None:
        """Raise the ValueError that a cell of the grid would, before the first one is measured."""
        from kvcache.evals.caches import build_cache, parse_cache

        for cache, length in dict.fromkeys((case.cache, case.length) for case in grid):
            build_cache(parse_cache(cache), self.model.config, length=length)
        for case in dict.fromkeys(replace(case, cache=FULL, ask=ASKS[0]) for case in grid):
            self.haystacks(case)

    def run(self, grid: Sequence[Case], file: Path | None, header: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """All cells of the grid, ready for JSON: the case's fields, its trials and the seconds they took. See
        `cells.run_cells` for what the file and the header do."""
        from kvcache.evals.cells import run_cells

        self.check(grid)
        return run_cells({case.key: partial(self._cell, case) for case in grid}, file, header, "needle", "needle")

    def _cell(self, case: Case) -> dict[str, Any]:
        start = time.perf_counter()
        trials = self.measure(case)
        seconds = round(time.perf_counter() - start, 1)
        return {**asdict(case), "seconds": seconds, "trials": [asdict(trial) for trial in trials]}

    def measure(self, case: Case) -> list[Trial]:
        """One trial for each depth.

        Raises ValueError for a length that leaves no room, or a text that is too short.
        """
        import torch

        haystacks = self.haystacks(case)
        with torch.inference_mode():
            return [trial for haystack in haystacks for trial in self._ask(case, haystack)]

    def haystacks(self, case: Case) -> list[Haystack]:
        """What a case reads: one haystack with all needles, or one for each depth."""
        needles = draw_needles(case.kind, len(self.depths), case.seed)
        build = partial(self.builder.build, length=case.length, seed=case.seed)
        if case.needles == "several":
            return [build(needles, self.depths)]
        return [build([needle], [depth]) for needle, depth in zip(needles, self.depths, strict=True)]

    def _ask(self, case: Case, haystack: Haystack) -> list[Trial]:
        """All questions of a haystack."""
        from kvcache.evals.caches import build_cache, parse_cache

        make = partial(build_cache, parse_cache(case.cache), self.model.config, length=case.length)
        pairs = list(zip(haystack.places, haystack.questions, strict=True))
        if case.ask == "known":
            return [self._trial(place, haystack.ids + question, make()) for place, question in pairs]
        read = make()
        self._read(haystack.ids, read)
        caches = itertools.chain((copy.deepcopy(read) for _ in pairs[1:]), [read])  # one copy at a time
        return [self._trial(place, question, cache) for (place, question), cache in zip(pairs, caches, strict=True)]

    def _trial(self, place: Place, ids: list[int], cache: Cache) -> Trial:
        """Read the rest of the prompt, then continue greedily."""
        needle = place.needle
        self._read(ids[:-1], cache)
        tokens = cache.get_seq_length() + 1
        kept, kept_answer = (kept_share(cache, *span) for span in (place.span, place.answer))
        answer = self._continue(ids[-1], cache, self.builder.room(needle))
        exact, parts = grade(needle, answer)
        return Trial(place.depth, needle.city, needle.answer, answer, exact, parts, kept, kept_answer, tokens)

    def _read(self, ids: list[int], cache: Cache) -> None:
        step = self.chunk or max(1, len(ids))
        for start in range(0, len(ids), step):
            self._forward(ids[start : start + step], cache)

    def _continue(self, token: int, cache: Cache, count: int) -> str:
        """Text of up to `count` tokens behind `token`."""
        tokenizer = self.builder.tokenizer
        answer: list[int] = []
        for _ in range(count):
            token = int(self._forward([token], cache).argmax())
            if token == tokenizer.eos_token_id:
                break
            answer.append(token)
        return str(tokenizer.decode(answer))

    def _forward(self, ids: list[int], cache: Cache) -> Tensor:
        """Logits `[1, 1, vocabulary]` behind the last of `ids`."""
        import torch

        from kvcache.evals.generation import CACHE_ARGUMENT

        arguments: dict[str, Any] = {CACHE_ARGUMENT: cache, "use_cache": True, "logits_to_keep": 1}
        return self.model(input_ids=torch.tensor([ids], device=self.model.device), **arguments).logits


def kept_share(cache: Cache, start: int, stop: int, row: int = 0) -> float:
    """Share of the tokens at positions start to stop - 1 that a row holds, mean over its managed layers and KV
    heads; 1 for a cache that evicts nothing."""
    from kvcache import EvictingCache

    if not isinstance(cache, EvictingCache):
        return 1.0
    shares = []
    for layer in cache.managed:
        positions = cache.kept_positions(layer.index)[row]  # [kv_heads, slots]
        shares.append(((positions >= start) & (positions < stop)).float().sum(-1).mean().item() / (stop - start))
    return statistics.mean(shares)


# ---- figures out of the trials


@dataclass(frozen=True)
class Score:
    """All trials of one kind together. depth: None: of all depths. exact, parts: means, each with its 95 % Wilson
    interval (of parts it is one too wide, for they are shares and not only 0 or 1); kept, kept_answer: means."""

    cache: str
    length: int
    ask: str
    needles: str
    kind: str
    depth: float | None
    n: int
    exact: float
    exact_interval: tuple[float, float]
    parts: float
    parts_interval: tuple[float, float]
    kept: float
    kept_answer: float


def scores(cells: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """One score for each cache, length, ask, needles, kind and depth of the measured cells, and one of all depths."""
    groups: dict[tuple[Case, float | None], list[Mapping[str, Any]]] = {}
    for cell in cells.values():
        fields: dict[str, Any] = {name: cell[name] for name in ("cache", "length", "ask", "needles", "kind")}
        case = Case(**fields, seed=0)  # all seeds together
        for trial in cell["trials"]:
            for depth in (None, trial["depth"]):
                groups.setdefault((case, depth), []).append(trial)
    return [_score(case, depth, trials) for (case, depth), trials in groups.items()]


def _score(case: Case, depth: float | None, trials: Sequence[Mapping[str, Any]]) -> Score:
    from kvcache.evals.cells import wilson

    n = len(trials)
    means = {name: statistics.fmean(t[name] for t in trials) for name in ("exact", "parts", "kept", "kept_answer")}
    return Score(
        cache=case.cache,
        length=case.length,
        ask=case.ask,
        needles=case.needles,
        kind=case.kind,
        depth=depth,
        n=n,
        exact_interval=wilson(means["exact"] * n, n),
        parts_interval=wilson(means["parts"] * n, n),
        **means,
    )


# ---- what is shown


def tables(content: Mapping[str, Any]) -> Iterable[Table]:
    """One table for each kind of question in a result: a row for each cache and length, with all depths together."""
    from rich import box
    from rich.table import Table

    everything = scores(content["cells"])
    depths = sorted({score.depth for score in everything if score.depth is not None})
    for row, group in _rows(everything):
        caption = _caption(content, group)
        table = Table(title=f"needle: {row}", caption=caption, caption_justify="left", box=box.SIMPLE)
        table.add_column("cache", overflow="fold", min_width=12)
        at = "/".join(f"{100 * depth:g}" for depth in depths)
        for name in ("length", "n", "exact", group[0].kind, "kept", "its answer", f"exact % at\n{at}"):
            table.add_column(name, justify="right")
        for score in group:
            if score.depth is None:
                table.add_row(*_cells(score, [other for other in group if _same(score, other)], depths))
        yield table


def _cells(score: Score, others: Sequence[Score], depths: Sequence[float]) -> list[str]:
    at = {other.depth: f"{100 * other.exact:.0f}" for other in others}
    return [
        _label(score.cache),
        f"{score.length:,}",
        str(score.n),
        _with_interval(score.exact, score.exact_interval),
        _with_interval(score.parts, score.parts_interval),
        f"{score.kept:.0%}",
        f"{score.kept_answer:.0%}",
        "/".join(at.get(depth, "-") for depth in depths),
    ]


def _with_interval(mean: float, interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{mean:.0%} ({100 * low:.0f}-{100 * high:.0f})"


def _label(cache: str) -> str:
    return cache.replace(":", " ", 1).replace("slots=", "")


def _same(score: Score, other: Score) -> bool:
    return (score.cache, score.length) == (other.cache, other.length)


def _rows(everything: Sequence[Score]) -> list[tuple[str, list[Score]]]:
    """Scores by what was asked and how: those that one table, or one row of the chart, shows."""
    groups: dict[str, list[Score]] = {}
    for score in everything:
        parts = "words" if score.kind == "words" else "digits"
        number = "one needle" if score.needles == "single" else "several needles, one asked"
        when = "question known" if score.ask == "known" else "question afterwards"
        groups.setdefault(f"{when}, {number}, {parts}", []).append(score)
    return list(groups.items())


def _caption(content: Mapping[str, Any], group: Sequence[Score]) -> str:
    lines = [
        "n questions over all depths, with the 95 % interval of the mean; kept: share of the needle's tokens that the "
        "cache held when the answer began, and of the answer in it; last: exact answers at each depth (% of the text)"
    ]
    trained = content["settings"].get("trained_length")
    if trained is not None and any(score.length > trained for score in group):
        lines.append(
            f"lengths above the {trained:,} tokens that the model was trained for: absolute positions fail there"
        )
    return "\n".join(lines)


def chart(content: Mapping[str, Any], file: Path) -> None:
    """Heat maps, one for each cache and kind of question: exact answers by depth and length, and what was kept."""
    from kvcache.evals.plots import figure, save

    rows = _rows(scores(content["cells"]))
    caches = list(dict.fromkeys(score.cache for _, group in rows for score in group))
    lengths = sorted({score.length for _, group in rows for score in group})
    depths = sorted({score.depth for _, group in rows for score in group if score.depth is not None})
    drawing, panels = figure(
        len(rows) * len(caches), len(caches), width=max(1.6, 0.5 + 0.75 * len(lengths)), height=0.9 + 0.42 * len(depths)
    )
    drawing.set_size_inches(drawing.get_figwidth() + 1.8, drawing.get_figheight() + 0.9)  # for labels and titles
    axes = [panels[start : start + len(caches)] for start in range(0, len(panels), len(caches))]
    for line, (name, group) in zip(axes, rows, strict=True):
        line[0].set_ylabel(name.replace(", ", "\n") + "\n\ndepth")
        for panel, cache in zip(line, caches, strict=True):
            mine = {(score.depth, score.length): score for score in group if score.cache == cache}
            _heat_map(panel, mine, depths, lengths)
            panel.tick_params(labelleft=panel is line[0], labelbottom=line is axes[-1])
    for panel, cache in zip(axes[0], caches, strict=True):
        panel.set_title(_label(cache).replace(" ", "\n", 1).replace(",", ",\n"), fontsize=9)
    for panel in axes[-1]:
        panel.set_xlabel("length (tokens)")
    bar = drawing.colorbar(panels[0].images[0], ax=panels, format="{x:.0%}", fraction=0.03, pad=0.02)
    bar.set_label("exact answers")
    drawing.suptitle(_title(content), fontsize=10)
    save(drawing, file)


def _heat_map(
    panel: Axes, mine: Mapping[tuple[float | None, int], Score], depths: Sequence[float], lengths: Sequence[int]
) -> None:
    """One panel: depth downwards, length to the right; cells that were not measured stay empty."""
    nothing = float("nan")
    values = [[mine[d, n].exact if (d, n) in mine else nothing for n in lengths] for d in depths]
    panel.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for (depth, length), score in mine.items():
        if depth is not None:
            colour = "white" if score.exact < 0.55 else "black"
            place: dict[str, Any] = {"ha": "center", "color": colour}
            x, y = lengths.index(length), depths.index(depth)
            panel.text(x, y - 0.02, f"{score.exact:.0%}", va="bottom", fontsize=8, **place)
            panel.text(x, y + 0.05, f"kept {score.kept:.0%}", va="top", fontsize=5.5, **place)
    panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    panel.tick_params(labelsize=8)
    panel.grid(False)


def _title(content: Mapping[str, Any]) -> str:
    counts = sorted({score.n for score in scores(content["cells"]) if score.depth is not None})
    n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    questions = "question" if n == "1" else "questions"
    return f"Needle in a haystack, {n} {questions} per cell\nkept: share of the needle's tokens in the cache"


# ---- the command


def add_parser(commands: Any) -> None:
    """Register `kvcache eval needle`."""
    parser = add_command(commands, "needle", "Find needles in a haystack: what survives eviction, and where.", EXAMPLES)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--cache",
        metavar="CACHE",
        dest="caches",
        action="append",
        help=f"a cache beside the full one, several times (default: {' and '.join(DEFAULT_CACHES).replace('%', '%%')})",
    )
    parser.add_argument(
        "--lengths", metavar="N", type=positive, nargs="+", default=[1024], help="tokens of the prompt (default: 1024)"
    )
    parser.add_argument(
        "--depths",
        metavar="D",
        type=_depth,
        nargs="+",
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        help="of the needle, in %% of the text (default: 0 25 50 75 100)",
    )
    parser.add_argument(
        "--ask",
        choices=ASKS,
        nargs="+",
        default=list(ASKS),
        help="known: the question is part of the prompt; afterwards: it comes when the text is evicted (default: both)",
    )
    parser.add_argument(
        "--needles",
        choices=NEEDLES,
        nargs="+",
        default=["single"],
        help="in a text: single (default), or several, one at each depth, each asked for in turn",
    )
    parser.add_argument("--kind", choices=tuple(KINDS), nargs="+", default=["digits"], help="(default: digits)")
    parser.add_argument(
        "--form", choices=FORMS, default="raw", help="raw (default): a text to continue; chat: a user's"
    )
    parser.add_argument("--repeats", metavar="N", type=positive, default=5, help="texts for each depth (default: 5)")
    parser.add_argument(
        "--chunk",
        metavar="N",
        type=positive,
        help="read N tokens at a time, evicting in between (default: all at once)",
    )
    parser.add_argument("--text", default="austen:northanger", help="the haystack (default: austen:northanger)")
    common_options(parser)


def _depth(text: str) -> float:
    try:
        share = float(text) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a depth from 0 to 100 (%)")
    return share


def run(options: argparse.Namespace) -> int:
    """The command; returns the exit code."""
    from kvcache.evals.record import provenance, text_record
    from kvcache.evals.texts import load_text
    from kvcache.models.spec import decoder_config

    grid = cases(
        options.caches or DEFAULT_CACHES,
        sorted(set(options.lengths)),
        asks=options.ask,
        needles=options.needles,
        kinds=options.kind,
        seeds=range(options.seed, options.seed + options.repeats),
    )
    text = load_text(options.text)
    model, tokenizer = load_model(options)
    source = sentences(text.text, tokenizer)
    depths = tuple(sorted(set(options.depths)))
    measurement = Needles(model, Builder(source, tokenizer, form(options.form, tokenizer)), depths, options.chunk)
    record = provenance(
        options.model,
        dtype=model.dtype,
        device=model.device,
        seed=options.seed,
        texts=[text_record(text, len(source.ids))],
    )
    settings = {
        "depths": list(depths),
        "form": options.form,
        "chunk": options.chunk,
        "trained_length": getattr(decoder_config(model.config), "max_position_embeddings", None),
    }
    header = {"provenance": record.to_dict(), "settings": settings}
    content = {**header, "cells": measurement.run(grid, options.json, header)}
    for table in tables(content):
        console().print(table)
    if options.png is not None:
        chart(content, options.png)
    return 0
