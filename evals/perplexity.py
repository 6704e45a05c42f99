"""Perplexity of a long text, read as a stream: token by token or in chunks, with the cache's evictions on the way."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from rich.table import Table
    from torch import Tensor
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

    from kvcache.evals.caches import CacheSpec
    from kvcache.evals.record import TextRecord

KIND = "ppl"
SUMMARY = "Perplexity against position, caches side by side: teacher-forced, the text streams through the cache."
EXAMPLES = """\
examples:
  kvcache eval ppl --text austen:northanger --skip 2000 --from 1024 --json ppl.json --png ppl.png
  kvcache eval ppl --cache full --cache streaming_llm:sinks=4,window=508 --cache sink_h2o:slots=512,margin=1
  kvcache eval ppl --cache full --cache window:slots=25% --cache recompute:slots=25% --chunk 32
  kvcache eval ppl --tokens 65536 --chunk 64 --cache full@12288 --cache sink_h2o:slots=1024,positions=cache
  cat book.txt | kvcache eval ppl --text - --tokens 2000

caches: full, window, streaming_llm, sink_h2o, heavy_hitters (sink_h2o with options), snapkv, tova, key_norm, key_diff,
tri_attention, expected_attention, joined, scissorhands, lag_kv, r_kv, value_aware, random, quantized, recompute (a
window computed anew for every token, of every stride-th block of 16 tokens). NAME@N reads only the first N tokens.
With a json file, caches can be added later.
"""
CACHES = ("full", "window:slots=512", "streaming_llm:slots=512", "sink_h2o:slots=512")
BLOCK = 16  # tokens whose mean is kept in the result file, so that caches can be compared in pairs
LOG_RANGE = 5.0  # a chart that spans more than this factor has a logarithmic axis
_BATCH = 8  # windows that recomputation reads at once
_TELL_EVERY = 1.0  # seconds


@dataclass(frozen=True)
class Bucket:
    """The tokens at positions `start` to `stop`, `stop` not included: how many were scored, and their perplexity.

    None where none was scored, or where its standard error is unknown (a single token). The error takes the tokens for
    independent; on 3,072 tokens of a novel, errors from the means of 64 and 256 of them are 1.3 and 1.5 times as large.
    """

    start: int
    stop: int
    tokens: int
    perplexity: float | None
    standard_error: float | None


@dataclass(frozen=True)
class Perplexity:
    """How well the tokens of a text were predicted.

    Args:
        nll: `[n - 1]` fp32: negative log-likelihoods, in nats, of the tokens at positions 1 to n - 1; NaN: not scored.
        first: the position from which tokens count for `overall`.
        overall, buckets: of the tokens from `first` on, and of all by position. The standard error is that of the mean
            nll, times the perplexity.
        seconds: for all tokens that were scored.
        kv_bytes: that the cache keeps alive after the last token; 0 for recomputation, which keeps none.
        positions: of keys, "absolute" or "cache" (their rank in it), at the end.
    """

    nll: Tensor
    first: int
    overall: Bucket
    buckets: tuple[Bucket, ...]
    seconds: float
    kv_bytes: int
    positions: str

    @property
    def tokens_per_second(self) -> float:
        scored = sum(bucket.tokens for bucket in self.buckets)
        return scored / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON. blocks: the mean nll of every `BLOCK` positions, None: none was scored."""
        return {
            "perplexity": self.overall.perplexity,
            "standard_error": self.overall.standard_error,
            "scored": self.overall.tokens,
            "first": self.first,
            "buckets": [asdict(bucket) for bucket in self.buckets],
            "block": BLOCK,
            "blocks": _block_means(self.nll),
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "kv_bytes": self.kv_bytes,
            "positions": self.positions,
        }


# ---- scoring


def score(model: PreTrainedModel, ids: Tensor, cache: Cache, chunk: int = 1) -> Tensor:
    """Negative log-likelihoods, in nats, of all tokens but the first: `[n - 1]` fp32 on the CPU.

    The tokens go through the empty cache `chunk` at a time; it evicts between chunks as in generation. In a chunk of
    more than one, later tokens see the earlier ones of their chunk besides what the cache kept.

    Args:
        ids: `[1, n]` int64.

    Raises:
        ValueError: not one row of two tokens or more, or a chunk below 1.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from kvcache.evals.cells import tell
    from kvcache.evals.generation import CACHE_ARGUMENT

    _check_ids(ids)
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be 1 or more")
    ids = ids.to(model.device)
    targets = ids[0, 1:]
    losses, told = [], time.perf_counter()
    with torch.no_grad():
        for start in range(0, len(targets), chunk):
            stop = min(start + chunk, len(targets))
            output = model(input_ids=ids[:, start:stop], use_cache=True, **{CACHE_ARGUMENT: cache})
            logits = output.logits[0].float()
            losses.append(cross_entropy(logits, targets[start:stop].to(logits.device), reduction="none"))
            if time.perf_counter() - told > _TELL_EVERY:
                told = time.perf_counter()
                tell(f"{stop:,} of {len(targets):,} tokens")
    return torch.cat(losses).cpu()


def score_recompute(model: PreTrainedModel, ids: Tensor, window: int, stride: int = 1) -> Tensor:
    """The same, but each token is predicted by a forward of its own over the `window` tokens before it.

    A sliding window with recomputation: what StreamingLLM (arXiv 2309.17453, figure 1) is compared with. It costs a
    window per token, so only every `stride`-th block of `BLOCK` positions is scored; the other tokens are NaN.

    Raises:
        ValueError: as `score`; a window or stride below 1.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from kvcache.evals.cells import tell

    _check_ids(ids)
    if window < 1 or stride < 1:
        raise ValueError(f"window={window} and stride={stride} must be 1 or more")
    ids = ids.to(model.device)
    nll = torch.full((ids.shape[1] - 1,), math.nan)
    positions = torch.arange(1, ids.shape[1])
    scored = (positions[positions // BLOCK % stride == 0]) - 1  # of the tokens that predict them
    short = scored[scored < window]  # they see all tokens before them: one forward has them all
    with torch.no_grad():
        logits = model(input_ids=ids[:, : int(short[-1]) + 1], use_cache=False).logits[0, short.to(ids.device)]
        nll[short] = cross_entropy(logits.float(), ids[0, short + 1], reduction="none").cpu()
        rest = scored[len(short) :]
        for ends in rest.split(_BATCH) if len(rest) else ():
            rows = torch.stack([ids[0, end + 1 - window : end + 1] for end in ends.tolist()])
            logits = model(input_ids=rows, use_cache=False, logits_to_keep=1).logits[:, 0]
            nll[ends] = cross_entropy(logits.float(), ids[0, ends + 1], reduction="none").cpu()
            tell(f"{int(ends[-1]) + 1:,} of {len(nll):,} tokens")
    return nll


def _check_ids(ids: Tensor) -> None:
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < 2:
        raise ValueError(f"ids of shape {tuple(ids.shape)} must be one row of two tokens or more, [1, n]")


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    spec: CacheSpec,
    *,
    chunk: int = 1,
    first: int = 1,
    bucket: int | None = None,
) -> Perplexity:
    """Perplexity of `ids` `[1, n]` with an empty cache of that kind; shares of slots are shares of n.

    Args:
        first: the position from which tokens count for the overall figure.
        bucket: positions per bucket; None: a power of two, so that there are at most 16.

    Raises:
        ValueError: as `score`, what the cache refuses, or no token from `first` on.
    """
    from kvcache.evals.caches import build_cache, resolve_options
    from kvcache.evals.generation import kv_bytes

    length = ids.shape[1]
    if not 0 <= first < length:
        raise ValueError(f"first={first} leaves none of {length} tokens to score: it must be 0 to {length - 1}")
    held, positions = 0, "absolute"
    start = time.perf_counter()
    if spec.name == "recompute":
        options = {"window": 1024, "stride": 16, **resolve_options(spec, length)}
        nll = score_recompute(model, ids, **options)
        seconds, positions = time.perf_counter() - start, "cache"
    else:
        cache = build_cache(spec, model.config, length)
        nll = score(model, ids, cache, chunk)
        seconds = time.perf_counter() - start
        held = kv_bytes(cache)
        positions = cache.stats().positions if hasattr(cache, "stats") else "absolute"  # pyright: ignore
    size = bucket or _bucket_size(length)
    buckets = tuple(_bucket(nll, at, min(at + size, length)) for at in range(0, length, size))
    return Perplexity(nll, first, _bucket(nll, first, length), buckets, seconds, held, positions)


def _bucket_size(length: int) -> int:
    return max(64, 1 << math.ceil(math.log2(length / 16)))


def _bucket(nll: Tensor, start: int, stop: int) -> Bucket:
    """nll[i] is of the token at position i + 1; the token at position 0 has none."""
    values = nll[max(0, start - 1) : stop - 1].double()
    values = values[~values.isnan()]
    if len(values) == 0:
        return Bucket(start, stop, 0, None, None)
    perplexity = _exp(float(values.mean()))
    spread = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
    error = perplexity * spread if perplexity is not None else math.nan
    return Bucket(start, stop, len(values), perplexity, error if math.isfinite(error) else None)


def _exp(mean: float) -> float | None:
    """None stands for infinity, which JSON does not know."""
    return math.exp(mean) if mean < 700 else None


def _block_means(nll: Tensor) -> list[float | None]:
    """Blocks by position of the predicted token, as buckets are."""
    means = [
        float(nll[max(0, start - 1) : start + BLOCK - 1].double().nanmean()) for start in range(0, len(nll) + 1, BLOCK)
    ]
    return [round(mean, 5) if math.isfinite(mean) else None for mean in means]


def ratio(cell: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[float, float] | None:
    """Perplexity of one cell of a result over another's of the same text, and its standard error.

    From the differences in the blocks of tokens that both scored, from `first` on: how hard a passage is cancels out,
    so that the error is far smaller than that of either perplexity. None where fewer than two such blocks exist.
    """
    size, first = cell["block"], max(cell["first"], base["first"])
    pairs = list(zip(cell["blocks"], base["blocks"], strict=False))[-(-first // size) :]
    differences = [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]
    if len(differences) < 2:
        return None
    mean = sum(differences) / len(differences)
    variance = sum((each - mean) ** 2 for each in differences) / (len(differences) - 1)
    value = math.exp(min(mean, 700))
    return value, value * math.sqrt(variance / len(differences))


# ---- the command


@dataclass(frozen=True)
class Asked:
    """One `--cache`: as it was written, and how many tokens it reads (None: all)."""

    text: str
    spec: CacheSpec
    limit: int | None

    @property
    def label(self) -> str:
        return self.spec.label if self.limit is None else f"{self.spec.label} @{self.limit}"


def parse_asked(text: str) -> Asked:
    """`CACHE` or `CACHE@N`: only the first N tokens.

    Raises:
        ValueError: as `parse_cache`, or an N that is no number from 2 on.
    """
    from kvcache.evals.caches import parse_cache

    written, at, limit = text.partition("@")
    if at and not (limit.isdecimal() and int(limit) >= 2):
        raise ValueError(f"{limit!r} in {text!r} is not a number of tokens, 2 or more")
    return Asked(text, parse_cache(written), int(limit) if at else None)


def add_parser(commands: Any) -> None:
    """Register `kvcache eval ppl`."""
    from kvcache.evals.cli import add_command, common_options, natural, positive

    parser = add_command(commands, "ppl", SUMMARY, EXAMPLES)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--cache",
        dest="caches",
        action="append",
        metavar="CACHE",
        help=f"NAME[:OPTION=VALUE,...][@TOKENS], may be repeated (default: {' '.join(CACHES)}); "
        "ratios are to the first of them",
    )
    parser.add_argument(
        "--text",
        dest="texts",
        action="append",
        metavar="TEXT",
        help="austen[:NOVEL], kjv, stdlib, datasets:OWNER/NAME[:SPLIT[:COLUMN]], a file, or - (default: "
        "austen:northanger), may be repeated",
    )
    parser.add_argument("--tokens", metavar="N", type=positive, default=4096, help="of each text (default: 4096)")
    parser.add_argument("--skip", metavar="N", type=natural, default=0, help="leave out the text's first N tokens")
    parser.add_argument(
        "--from",
        dest="first",
        metavar="N",
        type=natural,
        default=1,
        help="tokens from position N on count for the overall figure (default: 1); the buckets show all",
    )
    parser.add_argument(
        "--chunk", metavar="C", type=positive, default=1, help="tokens per forward, evictions between (default: 1)"
    )
    parser.add_argument(
        "--bucket", metavar="N", type=positive, help="positions per bucket (default: at most 16 buckets)"
    )
    common_options(parser)


def run(options: argparse.Namespace) -> int:
    """`kvcache eval ppl`."""
    from kvcache.evals.cells import run_cells
    from kvcache.evals.cli import console, load_model
    from kvcache.evals.texts import load_text

    asked = [parse_asked(text) for text in options.caches or CACHES]
    if options.first >= options.tokens:
        raise ValueError(f"--from {options.first} leaves none of --tokens {options.tokens} to score")
    texts = [load_text(name) for name in options.texts or ["austen:northanger"]]
    model, tokenizer = load_model(options)
    rows = {text.name: _ids(text, tokenizer, options) for text in texts}
    _check_buildable(model, asked, options.tokens)
    header = _header(options, model, [_record(text, rows[text.name]) for text in texts])
    cells = {
        f"{each.text} on {name}": partial(_cell, model, ids, each, name, options)
        for name, ids in rows.items()
        for each in asked
    }
    results = run_cells(cells, options.json, header, KIND, "perplexity")
    document = {**header, "cells": results}
    for table in tables(document):
        console().print(table)
    if options.png is not None:
        chart(document, options.png)
    return 0


def _ids(text: Any, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> Tensor:
    from kvcache.evals.texts import tokens

    return tokens(text, tokenizer, options.tokens, options.skip)


def _record(text: Any, ids: Tensor) -> TextRecord:
    from kvcache.evals.record import text_record

    return text_record(text, ids)


def _check_buildable(model: PreTrainedModel, asked: Sequence[Asked], length: int) -> None:
    """Before the first hour of measuring, not after it."""
    from kvcache.evals.caches import build_cache, resolve_options

    for each in asked:
        if each.spec.name == "recompute":
            resolve_options(each.spec, each.limit or length)
        else:
            build_cache(each.spec, model.config, each.limit or length)


def _header(options: argparse.Namespace, model: PreTrainedModel, texts: Sequence[TextRecord]) -> dict[str, Any]:
    from kvcache.evals.record import provenance
    from kvcache.models.spec import describe

    settings = {name: getattr(options, name) for name in ("tokens", "skip", "first", "chunk", "bucket")}
    settings["trained_length"] = describe(model.config).trained_length
    where = {"dtype": model.dtype, "device": model.device}
    made = provenance(options.model, **where, seed=options.seed, texts=texts)
    return {"provenance": made.to_dict(), "settings": settings}


def _cell(model: PreTrainedModel, ids: Tensor, asked: Asked, text: str, options: argparse.Namespace) -> dict[str, Any]:
    from kvcache.models.spec import describe

    part = ids[:, : asked.limit]
    first = min(options.first, part.shape[1] - 1)
    result = measure(model, part, asked.spec, chunk=options.chunk, first=first, bucket=options.bucket)
    trained = describe(model.config).trained_length
    beyond = result.positions == "absolute" and trained is not None and part.shape[1] > trained
    names = {"cache": str(asked.spec), "label": asked.label, "text": text, "tokens": part.shape[1]}
    return {**names, **result.to_dict(), "beyond_trained_length": beyond}


# ---- tables


def tables(document: Mapping[str, Any]) -> list[Table]:
    """Two for each text of a result: the caches side by side, and perplexity by position."""
    return [
        table
        for cells in by_text(document).values()
        for table in (_overall(document, cells), *([_by_position(cells)] if len(cells[0]["buckets"]) > 1 else []))
    ]


def by_text(document: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The cells of a result, those of one text together."""
    texts: dict[str, list[dict[str, Any]]] = {}
    for cell in document["cells"].values():
        texts.setdefault(cell["text"], []).append(cell)
    return texts


def _overall(document: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    from kvcache.evals.units import show_bytes

    settings, base = document["settings"], cells[0]
    title = f"{base['text']}: tokens {settings['first']:,} to {settings['tokens']:,}, {_reading(settings['chunk'])}"
    beyond = any(cell["beyond_trained_length"] for cell in cells)
    trained = settings["trained_length"]
    caption = f"! longer than the trained length of {trained:,} tokens, at absolute positions" if beyond else None
    table = Table(title=title, caption=caption, box=box.SIMPLE, title_justify="left", caption_justify="left")
    table.add_column("cache")
    for name in ("tokens", "perplexity", f"to {base['label']}", "tokens/s", "KV bytes", "positions"):
        table.add_column(name, justify="right")
    for cell in cells:
        mark = "! " if cell["beyond_trained_length"] else ""
        table.add_row(
            mark + cell["label"],
            f"{cell['scored']:,}",
            _with_error(cell["perplexity"], cell["standard_error"]),
            _ratio(cell, base),
            f"{cell['tokens_per_second']:,.1f}",
            show_bytes(cell["kv_bytes"]) if cell["kv_bytes"] else "-",
            cell["positions"],
        )
    return table


def _reading(chunk: int) -> str:
    return "token by token" if chunk == 1 else f"in chunks of {chunk:,}"


def _by_position(cells: Sequence[Mapping[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title="perplexity by position", box=box.SIMPLE, title_justify="left")
    table.add_column("tokens", justify="right")
    for cell in cells:
        table.add_column(cell["label"], justify="right")
    longest = max((cell["buckets"] for cell in cells), key=len)
    for index, bucket in enumerate(longest):
        row = (cell["buckets"][index] if index < len(cell["buckets"]) else None for cell in cells)
        shown = (_with_error(each["perplexity"], each["standard_error"]) if each else "" for each in row)
        table.add_row(f"{bucket['start']:,} to {bucket['stop']:,}", *shown)
    return table


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{_three(value)} ± {_three(error)}" if error is not None else _three(value)


def _three(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"


def _ratio(cell: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    if cell is base:
        return "1"
    found = ratio(cell, base)
    return "-" if found is None else f"{found[0]:.3f} ± {found[1]:.3f}"


# ---- chart


def chart(result: Mapping[str, Any], file: Path) -> None:
    """Perplexity against position, one panel for each text and one line for each cache, as PNG."""
    from kvcache.evals.plots import figure, save

    texts = by_text(result)
    drawing, panels = figure(len(texts), columns=2, width=7.5, height=5.2)
    for panel, (name, cells) in zip(panels, texts.items(), strict=True):
        _draw(panel, cells, result["settings"])
        model, reading = result["provenance"]["model"], _reading(result["settings"]["chunk"])
        panel.set_title(f"{model} on {name}, {reading}")
    save(drawing, file)


def _draw(panel: Axes, cells: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    from kvcache.evals.plots import colours, dashes, thousands

    labels = [cell["label"] for cell in cells]
    colour, dash = colours(labels), dashes(labels)
    heights: list[float] = []
    for cell in cells:
        known = [bucket for bucket in cell["buckets"] if bucket["perplexity"] is not None]
        middle = [(bucket["start"] + bucket["stop"]) / 2 for bucket in known]
        value = [bucket["perplexity"] for bucket in known]
        heights += value
        style: dict[str, Any] = {"color": colour[cell["label"]], "label": cell["label"], "markersize": 4}
        if _is_sampled(cell):  # too few tokens for a line: what shows is how hard they are
            style["label"] += " (of few tokens, standard error)"
            style |= {"yerr": _whiskers(known), "fmt": "s", "capsize": 2, "elinewidth": 1}
            panel.errorbar(middle, value, **style)
        else:
            panel.plot(middle, value, linestyle=dash[cell["label"]], linewidth=2, marker="o", **style)
    panel.set(xlabel="position in the text (tokens)", ylabel="perplexity")
    _scale(panel, heights)
    thousands(panel)
    longest, trained = max(cell["tokens"] for cell in cells), settings["trained_length"]
    if trained is not None and trained <= longest:
        panel.axvline(trained, color="black", linestyle=":", linewidth=1.2, label=f"trained length, {trained:,} tokens")
    panel.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.13), ncols=2)


def _is_sampled(cell: Mapping[str, Any]) -> bool:
    return sum(bucket["tokens"] for bucket in cell["buckets"]) < 0.9 * (cell["tokens"] - 1)


def _whiskers(buckets: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Down and up: the standard error is that of a logarithm, so it is a factor."""
    factors = [math.exp((bucket["standard_error"] or 0.0) / bucket["perplexity"]) for bucket in buckets]
    values = [bucket["perplexity"] for bucket in buckets]
    down = [value - value / factor for value, factor in zip(values, factors, strict=True)]
    return [down, [value * factor - value for value, factor in zip(values, factors, strict=True)]]


def _scale(panel: Axes, heights: Sequence[float]) -> None:
    if not heights or max(heights) / min(heights) <= LOG_RANGE:
        panel.set_ylim(bottom=0)
        return
    from matplotlib.ticker import LogLocator, NullFormatter

    panel.set_yscale("log")
    panel.set_ylim(min(heights) / 1.3, max(heights) * 1.3)
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.set_minor_formatter(NullFormatter())
