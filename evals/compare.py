"""The one table: what every cache loses, and what it costs, at the same budgets of the same text.

Five measurements of each cache and budget, every one also of the full cache:

- stream: perplexity of a long text that streams through the cache, evictions on the way, over the full cache's.
- continuation: perplexity behind a prompt that was read at once and brought down to the budget, over the full cache's.
- needle: a number hidden in a prompt of the same length, asked for in the prompt, or afterwards.
- speed: single tokens per second behind such a prompt, and the bytes that the cache holds then.

Peers (`--peers`) are methods of kvpress on the same token ids, in an environment of its own, see `peers.py`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.evals.units import show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvcache.evals.caches import CacheSpec
    from kvcache.evals.haystack import Builder
    from kvcache.evals.peers import Peer, PeerProcess

KIND = "compare"
SUMMARY = "One table of caches and budgets: perplexity and needles against the full cache, speed, memory; peers too."
EXAMPLES = """\
examples:
  kvcache eval compare --json compare.json --md compare.md --png compare.png
  kvcache eval compare --slots 512 256 128 --cache sink_h2o --cache sink_h2o:positions=cache
  kvcache eval compare --cache quantized:backend=hqq,nbits=4 --peers --json compare.json
  kvcache eval compare --peers snapkv decoding:tova --seeds 1 --tokens 2048

caches are given without their sizes, which --slots sets; the full cache always comes first. With a json file caches,
budgets and peers can be added later: what it holds is not measured again. peers: kvpress' presses streaming_llm,
snapkv, tova, observed_attention, expected_attention, knorm and decoding:PRESS (streaming_llm, tova, knorm).
"""
CACHES = ("full", "window", "streaming_llm", "sink_h2o")
SLOTS = (512, 256)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
BLOCK = 16  # tokens whose mean stays in the result, so that perplexities can be compared in pairs
EVERY = 32  # tokens between two compressions of a peer that compresses while decoding: our default margin

# What cannot be measured of whom, and why. Tables show a dash and say it below.
PREFILL_ONLY = "compresses once, after the prefill: while decoding, its cache grows like the full one"
DECODING_ONLY = "compresses while decoding only: a prompt stays whole until the answer has begun"


@dataclass(frozen=True)
class Protocol:
    """What is the same for all caches.

    tokens, first, chunk: of the stream, how many tokens it has, from which position on they count, and how many go
    through the cache at once. length: of the prompts, in tokens. continuations, continued: how many prompts there are,
    and how many tokens are scored behind each. steps: tokens decoded for the speed. form, kind, depths: of the needles.
    """

    tokens: int = 4096
    first: int = 1024
    chunk: int = 8
    length: int = 2048
    continuations: int = 4
    continued: int = 256
    steps: int = 64
    form: str = "raw"
    kind: str = "digits"
    depths: tuple[float, ...] = DEPTHS

    def check(self, slots: Sequence[int]) -> None:
        """Raises ValueError where one of the measurements would have nothing to measure."""
        if not self.first < self.tokens:
            raise ValueError(f"--from {self.first} leaves none of --tokens {self.tokens} to score")
        room = self.length - self.continued
        if slots and max(slots) >= room:
            raise ValueError(
                f"a budget of {max(slots)} slots is no budget for prompts of {self.length} tokens and {self.continued} "
                f"behind them: take fewer than {room} slots, or a larger --length"
            )


@dataclass(frozen=True)
class Material:
    """Token ids that all caches get. stream: `[1, tokens]`; prompts: `[continuations, length + continued]` int64;
    builder: of the needles' prompts."""

    protocol: Protocol
    stream: Tensor
    prompts: Tensor
    builder: Builder

    def haystacks(self, ask: str, seed: int) -> Iterable[tuple[Any, list[int], list[int]]]:
        """For each depth: the needle, the ids that are read before anything is dropped, and those that follow. They are
        those of `needle.Needles.measure`."""
        from kvcache.evals.haystack import draw_needles

        depths = self.protocol.depths
        for needle, depth in zip(draw_needles(self.protocol.kind, len(depths), seed), depths, strict=True):
            haystack = self.builder.build([needle], [depth], self.protocol.length, seed)
            ids, question = haystack.ids, haystack.questions[0]
            whole = ids + question
            yield (needle, whole[:-1], whole[-1:]) if ask == "known" else (needle, ids, question)


# ---- who is measured


@dataclass(frozen=True)
class Ours:
    """A cache of transformers' interface, in this process. slots: None for one that has no budget."""

    model: PreTrainedModel
    spec: CacheSpec
    slots: int | None

    @property
    def name(self) -> str:
        return str(self.spec)

    @property
    def sized(self) -> CacheSpec:
        from dataclasses import replace

        extra = () if self.slots is None else (("slots", self.slots),)
        return replace(self.spec, options=(*extra, *self.spec.options))

    def __str__(self) -> str:
        return str(self.sized)

    def cells(self, material: Material, seeds: Sequence[int]) -> dict[str, Callable[[], dict[str, Any]]]:
        """What is measured, by the names of the measurements."""
        return {
            "stream": partial(self.stream, material),
            "continuation": partial(self.continuation, material),
            "speed": partial(self.speed, material),
            **{
                f"needle {ask} seed={seed}": partial(self.needle, material, ask, seed)
                for seed in seeds
                for ask in ("known", "afterwards")
            },
        }

    def stream(self, material: Material) -> dict[str, Any]:
        from kvcache.evals.perplexity import measure

        protocol = material.protocol
        result = measure(self.model, material.stream, self.sized, chunk=protocol.chunk, first=protocol.first)
        return stream_cell(result.nll.tolist(), protocol.first, result.seconds, result.kv_bytes)

    def continuation(self, material: Material) -> dict[str, Any]:
        from kvcache.evals.caches import build_cache
        from kvcache.evals.continuation import continuation, once

        protocol = material.protocol
        spec = once(self.sized, protocol.continued)
        results = [
            continuation(self.model, build_cache(spec, self.model.config), ids[None], protocol.length)
            for ids in material.prompts
        ]
        return continuation_cell([result.nll.tolist() for result in results], max(result.kept for result in results))

    def speed(self, material: Material) -> dict[str, Any]:
        from kvcache.evals.caches import build_cache
        from kvcache.evals.continuation import decode_speed

        ids, length = _speed_ids(material)
        result = decode_speed(self.model, build_cache(self.sized, self.model.config), ids, length)
        return {"tokens_per_second": result.tokens_per_second, "kv_bytes": result.kv_bytes}

    def needle(self, material: Material, ask: str, seed: int) -> dict[str, Any]:
        from kvcache.evals.needle import Case, Needles

        protocol = material.protocol
        case = Case(str(self.sized), protocol.length, ask, "single", protocol.kind, seed)
        trials = Needles(self.model, material.builder, protocol.depths).measure(case)
        return {"exact": [trial.exact for trial in trials], "parts": [trial.parts for trial in trials]}


@dataclass(frozen=True)
class Theirs:
    """A method of kvpress, in its own process."""

    peer: Peer
    slots: int
    process: PeerProcess
    stop: Sequence[int]

    @property
    def name(self) -> str:
        return str(self.peer)

    def __str__(self) -> str:
        return f"{self.peer}@{self.slots}"

    def cells(self, material: Material, seeds: Sequence[int]) -> dict[str, Callable[[], dict[str, Any]]]:
        """What is measured, by the names of the measurements."""
        if self.peer.decoding:
            return {"stream": partial(self.stream, material)}
        return {
            "continuation": partial(self.continuation, material),
            "speed": partial(self.speed, material),
            **{
                f"needle {ask} seed={seed}": partial(self.needle, material, ask, seed)
                for seed in seeds
                for ask in ("known", "afterwards")
            },
        }

    def stream(self, material: Material) -> dict[str, Any]:
        protocol = material.protocol
        ids = material.stream[0].tolist()
        answer = self._ask("stream", ids=ids, chunk=protocol.chunk, every=EVERY)
        cell = stream_cell(answer["nll"], protocol.first, answer["seconds"], answer["peak_kv_bytes"])
        return {**cell, "versions": self.process.versions}

    def continuation(self, material: Material) -> dict[str, Any]:
        length = material.protocol.length
        answers = [self._ask("score", prefill=ids[:length], then=ids[length:]) for ids in material.prompts.tolist()]
        cell = continuation_cell([answer["nll"] for answer in answers], max(answer["kept"] for answer in answers))
        return {**cell, "versions": self.process.versions}

    def speed(self, material: Material) -> dict[str, Any]:
        from kvcache.evals.continuation import Speed

        ids, length = _speed_ids(material)
        answer = self._ask("speed", prefill=ids[0, :length].tolist(), then=ids[0, length:].tolist())
        result = Speed(tuple(answer["seconds"]), answer["kv_bytes"])
        return {
            "tokens_per_second": result.tokens_per_second,
            "kv_bytes": result.kv_bytes,
            "versions": self.process.versions,
        }

    def needle(self, material: Material, ask: str, seed: int) -> dict[str, Any]:
        from kvcache.evals.haystack import grade

        exact, parts = [], []
        for needle, prefill, then in material.haystacks(ask, seed):
            room = material.builder.room(needle)
            answer = self._ask("generate", prefill=prefill, then=then, new_tokens=room, stop=list(self.stop))
            tokens = [token for token in answer["tokens"] if token not in self.stop]
            right, share = grade(needle, str(material.builder.tokenizer.decode(tokens)))
            exact.append(right)
            parts.append(share)
        return {"exact": exact, "parts": parts, "versions": self.process.versions}

    def _ask(self, measure: str, **arguments: Any) -> dict[str, Any]:
        return self.process.ask({"measure": measure, "press": self.peer.press, "budget": self.slots, **arguments})


def _speed_ids(material: Material) -> tuple[Tensor, int]:
    """Ids `[1, n]` and how many of them are the prompt."""
    protocol = material.protocol
    return material.prompts[:1, : protocol.length + protocol.steps], protocol.length


def stream_cell(nll: Sequence[float], first: int, seconds: float, kv_bytes: int) -> dict[str, Any]:
    """nll[i]: of the token at position i + 1, in nats; first: the position from which tokens count."""
    counted = nll[first - 1 :] if first > 0 else nll
    return {
        **_perplexity(counted),
        "first": first,
        "blocks": _means([[math.nan, *nll]]),
        "seconds": round(seconds, 3),
        "kv_bytes": kv_bytes,
    }


def continuation_cell(nll: Sequence[Sequence[float]], kept: int) -> dict[str, Any]:
    """nll: in nats, of the tokens behind each prompt; kept: tokens of a prompt that the cache held."""
    return {**_perplexity([each for one in nll for each in one]), "first": 0, "blocks": _means(nll), "kept": kept}


def _perplexity(nll: Sequence[float]) -> dict[str, Any]:
    mean = math.fsum(nll) / len(nll)
    return {"perplexity": math.exp(mean) if mean < 700 else None, "tokens": len(nll), "block": BLOCK}


def _means(rows: Iterable[Sequence[float]]) -> list[float]:
    """Of every `BLOCK` numbers of each row, those that are none left out."""
    means = []
    for row in rows:
        for start in range(0, len(row), BLOCK):
            part = [value for value in row[start : start + BLOCK] if not math.isnan(value)]
            if part:
                means.append(round(math.fsum(part) / len(part), 5))
    return means


# ---- figures out of the cells


@dataclass(frozen=True)
class Figure:
    """A number and its 95 % interval, if there is one."""

    value: float
    low: float | None = None
    high: float | None = None


MEASURES = ("stream", "continuation", "needle known", "needle afterwards", "speed", "bytes")


@dataclass(frozen=True)
class Row:
    """One cache at one budget: figures by `MEASURES`, None where nothing was measured. slots: None: no budget."""

    cache: str
    slots: int | None
    figures: Mapping[str, Figure | None]

    @property
    def label(self) -> str:
        return label(self.cache)


def label(cache: str) -> str:
    """For tables and charts; unknown caches keep their name."""
    from kvcache.evals.peers import label as peer_label

    if cache.startswith("kvpress:"):
        return peer_label(cache)
    return cache.replace(":", " ", 1).replace(",", " ")


def rows(content: Mapping[str, Any]) -> list[Row]:
    """The full cache and others without a budget, then budget by budget, the largest first."""
    groups: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {}
    for cell in content["cells"].values():
        groups.setdefault((cell["cache"], cell["slots"]), []).append(cell)
    full = {cell["measure"]: cell for cell in groups.get(("full", None), [])}
    caches = list(dict.fromkeys(cache for cache, _ in groups))
    order = sorted(groups, key=lambda key: (-(key[1] or math.inf), caches.index(key[0])))
    return [Row(*key, _figures(groups[key], full)) for key in order]


def _figures(cells: Sequence[Mapping[str, Any]], full: Mapping[str, Mapping[str, Any]]) -> dict[str, Figure | None]:
    by_measure = {cell["measure"]: cell for cell in cells}
    speed = by_measure.get("speed")
    held = by_measure.get("speed") or by_measure.get("stream")  # of a peer that compresses while decoding, its most
    return {
        **{name: _ratio(by_measure.get(name), full.get(name)) for name in ("stream", "continuation")},
        **{
            f"needle {ask}": _share([cell for cell in cells if cell["measure"] == f"needle {ask}"])
            for ask in ("known", "afterwards")
        },
        "speed": Figure(speed["tokens_per_second"]) if speed else None,
        "bytes": Figure(held["kv_bytes"]) if held else None,
    }


def _ratio(cell: Mapping[str, Any] | None, base: Mapping[str, Any] | None) -> Figure | None:
    from kvcache.evals.perplexity import ratio

    found = ratio(cell, base) if cell is not None and base is not None else None
    if found is None:
        return None
    value, error = found
    return Figure(value, value - 1.96 * error, value + 1.96 * error)


def _share(cells: Sequence[Mapping[str, Any]]) -> Figure | None:
    from kvcache.evals.cells import wilson

    exact = [bool(each) for cell in cells for each in cell["exact"]]
    return Figure(sum(exact) / len(exact), *wilson(sum(exact), len(exact))) if exact else None


def why_not(cache: str, measure: str) -> str | None:
    """Why that cannot be measured; None where it can."""
    if cache.startswith("kvpress:decoding:"):
        return DECODING_ONLY if measure not in ("stream", "bytes") else None
    return PREFILL_ONLY if cache.startswith("kvpress:") and measure == "stream" else None


# ---- tables


HEADERS = {
    "stream": "perplexity, streaming (x full)",
    "continuation": "perplexity, after a prompt (x full)",
    "needle known": "needle, question known",
    "needle afterwards": "needle, asked afterwards",
    "speed": "tokens/s",
    "bytes": "KV bytes",
}


def _texts(row: Row, reasons: list[str]) -> list[str]:
    """A row's cells; reasons that are new go to the end of `reasons`."""
    texts = [row.label, "all" if row.slots is None else f"{row.slots:,}"]
    for measure in MEASURES:
        figure, reason = row.figures[measure], why_not(row.cache, measure)
        if figure is not None:
            texts.append(_text(measure, figure))
        elif reason is None:
            texts.append("")
        else:
            if reason not in reasons:
                reasons.append(reason)
            texts.append(f"- ({_letter(reasons.index(reason))})")
    return texts


def _text(measure: str, figure: Figure) -> str:
    if measure == "bytes":
        return show_bytes(figure.value)
    if measure == "speed":
        return f"{figure.value:.1f}"
    low, high = figure.low or 0.0, figure.high or 0.0
    if measure.startswith("needle"):
        return f"{figure.value:.0%} ({100 * low:.0f}-{100 * high:.0f})"
    return f"{figure.value:.3f} ± {(high - low) / 2:.3f}"


def _letter(index: int) -> str:
    return "abcdefgh"[index]


def notes(content: Mapping[str, Any], reasons: Sequence[str]) -> list[str]:
    """What stands below the table: how it was measured, and why some of it was not."""
    told, made = content["settings"], content["provenance"]
    text = made["texts"][0]["name"]
    counts = {len(cell["exact"]) for cell in content["cells"].values() if cell["measure"] == "needle known"}
    seeds = {cell.get("seed") for cell in content["cells"].values() if cell["measure"] == "needle known"}
    lines = [
        f"{made['model']}, {made['dtype']}, {text}. Streaming: {told['tokens']:,} tokens, {told['chunk']} at a time, "
        f"counted from {told['first']:,}. After a prompt: {told['continuations']} prompts of {told['length']:,} tokens "
        f"read at once and cut down to the slots, {told['continued']} tokens behind each scored without further "
        "evictions. ±, (low-high): 95 % intervals."
    ]
    if counts:
        lines.append(
            f"Needle: exact answers to {max(counts) * len(seeds)} questions, {told['length']:,} tokens, at "
            f"{len(told['depths'])} depths."
        )
    lines.append(
        f"tokens/s: {told['steps'] - 1} single tokens behind a prompt of {told['length']:,}; KV bytes: after that "
        f"prompt. {made['threads']} threads of {made['device_name']}."
    )
    if peers := _peer_versions(content):
        lines.append(f"{peers}, in a process of its own; behind the prompt its caches grow by every further token.")
    return lines + [f"({_letter(index)}) {reason}." for index, reason in enumerate(reasons)]


def _peer_versions(content: Mapping[str, Any]) -> str:
    versions = next((cell["versions"] for cell in content["cells"].values() if cell.get("versions")), None)
    return f"kvpress {versions['kvpress']} with transformers {versions['transformers']}" if versions else ""


def tables(content: Mapping[str, Any]) -> list[Table]:
    """The table, for a terminal."""
    from rich import box
    from rich.table import Table

    reasons: list[str] = []
    lines = [(row, _texts(row, reasons)) for row in rows(content)]
    caption = "\n".join(notes(content, reasons))
    table = Table(title="caches side by side", caption=caption, caption_justify="left", box=box.SIMPLE)
    table.add_column("cache", overflow="fold", min_width=14)
    for header in ("slots", *HEADERS.values()):
        table.add_column(header, justify="right")
    for index, (row, texts) in enumerate(lines):
        ends = index + 1 < len(lines) and lines[index + 1][0].slots != row.slots
        table.add_row(*texts, end_section=ends)
    return [table]


def markdown(content: Mapping[str, Any]) -> str:
    """The same for a README."""
    reasons: list[str] = []
    body = [_texts(row, reasons) for row in rows(content)]
    header = ["cache", "slots", *HEADERS.values()]
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    below = [*notes(content, reasons), f"`{content['provenance']['command']}`"]
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n" + "\n".join(f"- {x}" for x in below) + "\n"
    )


# ---- the chart


PANELS = {
    "stream": "Perplexity, streaming\n(full cache = 1)",
    "continuation": "Perplexity after a prompt\n(full cache = 1)",
    "needle known": "Needle found\nquestion known",
    "needle afterwards": "Needle found\nasked afterwards",
}


def chart(content: Mapping[str, Any], file: Path) -> None:
    """A line for each cache, a mark for each budget, with its interval; perplexity ratios and needles."""
    from kvcache.evals.plots import figure, save

    everything = rows(content)
    labels = list(dict.fromkeys(row.label for row in everything))
    budgets = list(dict.fromkeys(row.slots for row in everything))
    drawing, panels = figure(len(PANELS), width=2.9, height=1.7 + 0.36 * len(labels))
    for panel, (measure, title) in zip(panels, PANELS.items(), strict=True):
        _marks(panel, measure, everything, labels, budgets)
        panel.set_title(title, fontsize=10)
        panel.set_ylim(len(labels) - 0.5, -0.5)
        panel.set_yticks(range(len(labels)), labels if panel is panels[0] else [""] * len(labels))
        panel.tick_params(labelsize=9, length=0, axis="y")
    handles, names = panels[1].get_legend_handles_labels()
    drawing.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    save(drawing, file)


def _marks(
    panel: Axes, measure: str, everything: Sequence[Row], labels: Sequence[str], budgets: Sequence[int | None]
) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    from kvcache.evals.plots import BLUE, GREY, ORANGE

    palette = dict(zip(budgets, (GREY, BLUE, ORANGE, "#c0392b", "#7b4fa3", "#2e8b57"), strict=False))
    ratios = measure in ("stream", "continuation")
    sizes = [budget for budget in budgets if budget is not None]
    for budget in budgets:
        mine = [(row, row.figures[measure]) for row in everything if row.slots == budget]
        shown = [(row, found) for row, found in mine if found is not None]
        step = 0.16 * (sizes.index(budget) - (len(sizes) - 1) / 2) if budget in sizes else 0.0
        panel.errorbar(
            [found.value for _, found in shown],
            [labels.index(row.label) + step for row, _ in shown],
            xerr=[
                [found.value - (found.low or 0.0) for _, found in shown],
                [(found.high or 0.0) - found.value for _, found in shown],
            ],
            fmt="o",
            markersize=5,
            linewidth=1.4,
            color=palette.get(budget, "#222222"),
            label="no budget" if budget is None else f"{budget:,} slots",
        )
    for row in everything:
        if why_not(row.cache, measure):
            place: dict[str, Any] = {"transform": panel.get_yaxis_transform(), "va": "center", "ha": "center"}
            panel.text(0.5, labels.index(row.label), "not measurable", fontsize=7, color=GREY, **place)
    if ratios:
        panel.set_xscale("log")
        panel.axvline(1, color=GREY, linewidth=0.8)
        panel.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 1.2, 1.5, 2, 3, 5)))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter("{x:g}")
    else:
        panel.set_xlim(-0.03, 1.03)
        panel.xaxis.set_major_formatter("{x:.0%}")
    panel.tick_params(labelsize=8, axis="x")


# ---- the command


def add_parser(commands: Any) -> None:
    """Register `kvcache eval compare`."""
    from kvcache.evals.cli import add_command, common_options, natural, positive
    from kvcache.evals.haystack import FORMS, KINDS

    usual = Protocol()
    parser = add_command(commands, "compare", SUMMARY, EXAMPLES)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--cache",
        dest="caches",
        action="append",
        metavar="CACHE",
        help=f"NAME[:OPTION=VALUE,...] without sizes, may be repeated (default: {' '.join(CACHES)})",
    )
    parser.add_argument(
        "--slots", metavar="N", type=positive, nargs="+", default=list(SLOTS), help="budgets (default: 512 256)"
    )
    parser.add_argument("--peers", metavar="PRESS", nargs="*", help="kvpress' presses too; without names all of them")
    parser.add_argument("--md", metavar="F", type=Path, help="write the table there, as Markdown")
    parser.add_argument("--text", default="austen:northanger", help="see kvcache eval ppl (default: austen:northanger)")
    group = parser.add_argument_group("protocol")
    for name, kind, help in (
        ("tokens", positive, "of the stream"),
        ("first", natural, "position in it from which tokens count"),
        ("chunk", positive, "tokens of it per forward"),
        ("length", positive, "of prompts and haystacks, in tokens"),
        ("continuations", positive, "prompts"),
        ("continued", positive, "tokens scored behind each prompt"),
        ("steps", positive, "tokens decoded behind a prompt, for the speed"),
    ):
        flag = "--from" if name == "first" else f"--{name}"
        default = getattr(usual, name)
        group.add_argument(
            flag, dest=name, metavar="N", type=kind, default=default, help=f"{help} (default: {default})"
        )
    group.add_argument("--seeds", metavar="N", type=positive, default=4, help="haystacks at each depth (default: 4)")
    group.add_argument("--depths", metavar="D", type=float, nargs="+", default=DEPTHS, help="shares before the needle")
    group.add_argument("--form", choices=FORMS, default=usual.form, help="how it is asked (default: raw)")
    group.add_argument("--kind", choices=tuple(KINDS), default=usual.kind, help="of needle (default: digits)")
    common_options(parser)


def run(options: argparse.Namespace) -> int:
    """`kvcache eval compare`."""
    from kvcache.evals.cells import run_cells
    from kvcache.evals.cli import console, load_model
    from kvcache.evals.haystack import Builder, form, sentences
    from kvcache.evals.peers import PeerProcess, parse_peers, weights_of
    from kvcache.evals.texts import load_text, tokens

    protocol = _protocol(options)
    specs = parse_caches(options.caches or CACHES)
    peers = () if options.peers is None else parse_peers(options.peers or ["all"])
    protocol.check(options.slots)
    text = load_text(options.text)
    model, tokenizer = load_model(options)
    each = protocol.length + protocol.continued
    prompts = tokens(text, tokenizer, max(protocol.continuations * each, each + protocol.steps))
    material = Material(
        protocol,
        tokens(text, tokenizer, protocol.tokens),
        prompts[0, : protocol.continuations * each].view(-1, each),
        Builder(sentences(text.text, tokenizer), tokenizer, form(protocol.form, tokenizer)),
    )
    dtype, device = str(model.dtype).removeprefix("torch."), str(model.device)
    with PeerProcess(weights_of(model) if peers else "", dtype, device, _threads()) as process:
        stop = [token for token in [tokenizer.eos_token_id] if isinstance(token, int)]
        who = subjects(model, specs, options.slots, peers, process, stop)
        cells = all_cells(who, material, [options.seed + index for index in range(options.seeds)])
        header = _header(options, protocol, model, text)
        results = run_cells(cells, options.json, header, KIND, "comparing")
    content = {**header, "cells": results}
    for table in tables(content):
        console().print(table)
    if options.md is not None:
        options.md.parent.mkdir(parents=True, exist_ok=True)
        options.md.write_text(markdown(content), encoding="utf-8")
    if options.png is not None:
        chart(content, options.png)
    return 0


def parse_caches(texts: Sequence[str]) -> list[CacheSpec]:
    """Caches without sizes, the full one first.

    Raises:
        ValueError: as `parse_cache`, a cache with sizes of its own, or one that keeps no cache.
    """
    from kvcache.evals.caches import CacheSpec, parse_cache

    specs = [CacheSpec("full"), *(parse_cache(text) for text in texts)]
    for spec in specs:
        sizes = [name for name, _ in spec.options if name in ("slots", "window", "heavy_hitters")]
        if sizes:
            raise ValueError(f"{str(spec)!r} has a size of its own ({', '.join(sizes)}): sizes are what --slots sets")
        if spec.name == "recompute":
            raise ValueError("recompute keeps no cache, so there is nothing to compare: it is for kvcache eval ppl")
    return list(dict.fromkeys(specs))


def subjects(
    model: PreTrainedModel,
    specs: Sequence[CacheSpec],
    slots: Sequence[int],
    peers: Sequence[Peer],
    process: PeerProcess,
    stop: Sequence[int],
) -> list[Ours | Theirs]:
    """Every cache at every budget; those without one once. Ours are built here once, so that what cannot be built says
    so before anything is measured.

    Raises:
        ValueError: what `build_cache` refuses.
    """
    from kvcache.evals.caches import build_cache
    from kvcache.evals.continuation import takes

    budgets = list(dict.fromkeys(slots))
    ours = [Ours(model, spec, None) for spec in specs if not takes(spec, "window")]
    ours += [Ours(model, spec, budget) for budget in budgets for spec in specs if takes(spec, "window")]
    for each in ours:
        build_cache(each.sized, model.config)
    return [*ours, *(Theirs(peer, budget, process, stop) for budget in budgets for peer in peers)]


def all_cells(
    who: Sequence[Ours | Theirs], material: Material, seeds: Sequence[int]
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every measurement of everyone, ready for `run_cells`."""
    return {
        f"{name} of {each}": partial(_cell, each, name, measure)
        for each in who
        for name, measure in each.cells(material, seeds).items()
    }


def _cell(subject: Ours | Theirs, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    what, _, seed = name.partition(" seed=")
    about = {"measure": what, "cache": subject.name, "slots": subject.slots, **({"seed": int(seed)} if seed else {})}
    return {**about, **measure()}


def _protocol(options: argparse.Namespace) -> Protocol:
    values = {name: getattr(options, name) for name in Protocol.__dataclass_fields__}
    return Protocol(**{**values, "depths": tuple(options.depths)})


def _header(options: argparse.Namespace, protocol: Protocol, model: PreTrainedModel, text: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from kvcache.evals.record import provenance, text_record

    each = protocol.length + protocol.continued
    used = text_record(text, max(protocol.tokens, protocol.continuations * each))
    made = provenance(options.model, dtype=model.dtype, device=model.device, seed=options.seed, texts=[used])
    return {"provenance": made.to_dict(), "settings": {**asdict(protocol), "depths": list(protocol.depths)}}


def _threads() -> int:
    import torch

    return torch.get_num_threads()
