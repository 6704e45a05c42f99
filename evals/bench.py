"""Speed and memory of the evicting caches beside transformers' DynamicCache, interleaved in one run.

Times on shared machines drift, so every ratio is the median over steps of two times taken one after the other.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache import Budget, EvictingCache, SinkH2OCache
from kvcache.evals.generation import CACHE_ARGUMENT
from kvcache.evals.process_memory import Meter
from kvcache.models.load import load
from kvcache.policies import HeavyHitters, Policy, Recency
from kvcache.routing import AttentionCall

EXAMPLES = """\
examples:
  kvcache bench decode                              time per token at 1k, 8k and 32k tokens seen
  kvcache bench decode --seen 2048 --slots 256      a smaller budget
  kvcache bench margin --json margin.json           what the margin costs and saves
  kvcache bench prefill --lengths 2048 4096         one-shot prefill, and its peak memory
  kvcache bench chunks --length 32768 --chunk 512   cache bytes during a long prefill in chunks
"""


# ---- measuring


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _interleaved(actions: dict[str, Callable[[], object]], rounds: int, what: str) -> dict[str, list[float]]:
    """Seconds of each action in each round; a round runs them one after the other.

    Each round in another order: what ran before leaves its mark on the processor's caches.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    shuffle = random.Random(0)
    for _ in track(range(rounds), description=what, console=Console(stderr=True)):
        for name in shuffle.sample(list(actions), len(actions)):
            times[name].append(_seconds(actions[name]))
    return times


def _ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Median of the ratios of times taken one after the other."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


# ---- caches filled without a model: what they hold does not change what a step costs


def _synthetic(model: PreTrainedModel, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values of `n` tokens as one layer of the model gives them."""
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    q, k, v = (torch.randn(1, n, count, head_dim, dtype=model.dtype).transpose(1, 2) for count in heads)
    return q, k, v


def _fill(cache: Cache, model: PreTrainedModel, tokens: int, chunk: int = 1024) -> None:
    """Let a cache see `tokens` random tokens in every layer."""
    for start in range(0, tokens, chunk):
        query, keys, values = _synthetic(model, min(chunk, tokens - start))
        for index in range(model.config.num_hidden_layers):
            cache.update(keys, values, index)
            if isinstance(cache, EvictingCache):
                cache.attend(cache.managed[index], query, AttentionCall(query.shape[3] ** -0.5))


def _evicting(model: PreTrainedModel, policy: Policy, slots: int, margin: int) -> EvictingCache:
    """Half of the slots a window and, where the policy can use them, half heavy hitters."""
    heavy = slots // 2 if policy.observes_mass else 0
    budget = Budget(sinks=4, window=slots - heavy - 4, heavy_hitters=heavy, margin=margin)
    return EvictingCache(model.config, policy, budget, positions="absolute")


def _step(model: PreTrainedModel, cache: Cache) -> Callable[[], object]:
    ids = torch.tensor([[100]])
    return lambda: model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache})


# ---- decode


@dataclass(frozen=True)
class DecodeRow:
    """Median time per token of one cache; ratio: to DynamicCache holding all tokens seen, in the same run."""

    cache: str
    seen: int
    slots: int
    kv_bytes: int
    milliseconds: float
    ratio: float


def decode(model: PreTrainedModel, seen: Sequence[int], slots: int, margin: int, steps: int) -> list[DecodeRow]:
    """Time per token after `seen` tokens: DynamicCache, SinkH2O and StreamingLLM at `slots`, SinkH2O with room for all.

    Steps with an eviction (one in `margin`) hardly move the median; `margins` measures their cost.
    """
    caches: dict[tuple[str, int], Cache] = {}
    for tokens in seen:
        caches["full", tokens] = DynamicCache(config=model.config)
        caches["sink_h2o", tokens] = _evicting(model, HeavyHitters(), slots, margin)
        caches["streaming_llm", tokens] = _evicting(model, Recency(), slots, margin)
    caches["sink_h2o, budget >= length", seen[0]] = _evicting(model, HeavyHitters(), 2 * seen[0] + steps, margin)
    for (_, tokens), cache in track(caches.items(), description="filling", console=Console(stderr=True)):
        _fill(cache, model, tokens)
    actions = {f"{name}@{tokens}": _step(model, cache) for (name, tokens), cache in caches.items()}
    _interleaved(actions, 3, "warming up")
    times = _interleaved(actions, steps, "decoding")
    rows = []
    for (name, tokens), cache in caches.items():
        mine, full = times[f"{name}@{tokens}"], times[f"full@{tokens}"]
        milliseconds = statistics.median(mine) * 1e3
        rows.append(DecodeRow(name, tokens, *_slots_and_bytes(cache), milliseconds, _ratio(mine, full)))
    return rows


def _slots_and_bytes(cache: Cache) -> tuple[int, int]:
    if isinstance(cache, EvictingCache):
        return cache.stats().slots, cache.stats().bytes
    layers: Any = cache.layers
    return cache.get_seq_length(), sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


@dataclass(frozen=True)
class OverheadRow:
    """Milliseconds per step over all layers: all that the engine does, and only the two products and the softmax."""

    policy: str
    total: float
    core: float
    overhead: float


def overhead(model: PreTrainedModel, slots: int, margin: int, steps: int) -> list[OverheadRow]:
    """What a decode step costs beyond its arithmetic: update, checks, writing, mass, evictions."""
    rows = []
    for policy in (HeavyHitters(), Recency()):
        cache = _evicting(model, policy, slots, margin)
        _fill(cache, model, slots)
        query, keys, values = _synthetic(model, 1)
        call = AttentionCall(query.shape[3] ** -0.5)

        def engine(cache: EvictingCache = cache, q: Tensor = query, k: Tensor = keys, v: Tensor = values) -> None:
            for index, layer in enumerate(cache.managed):
                cache.update(k, v, index)
                cache.attend(layer, q, call)  # noqa: B023

        live = [
            (layer.keys.flatten(0, 1)[:, :slots].mT, layer.values.flatten(0, 1)[:, :slots]) for layer in cache.managed
        ]
        grouped = query.view(keys.shape[1], -1, query.shape[3])

        def core(live: list[tuple[Tensor, Tensor]] = live, grouped: Tensor = grouped) -> None:
            for k, v in live:
                torch.bmm(torch.softmax(torch.bmm(grouped, k), dim=-1), v)

        times = _interleaved({"engine": engine, "core": core}, steps, f"overhead, {type(policy).__name__}")
        total, arithmetic = (statistics.median(times[name]) * 1e3 for name in ("engine", "core"))
        rows.append(OverheadRow(type(policy).__name__, total, arithmetic, total - arithmetic))
    return rows


# ---- margin


@dataclass(frozen=True)
class MarginRow:
    """Mean time per token at one margin over whole cycles of eviction; ratio: to margin 1, in the same run."""

    margin: int
    milliseconds: float
    ratio: float


def margins(model: PreTrainedModel, values: Sequence[int], slots: int, steps: int) -> list[MarginRow]:
    """Time per token of SinkH2O against the margin: rare evictions against attention over more slots."""
    caches = {margin: _evicting(model, HeavyHitters(), slots, margin) for margin in values}
    for cache in caches.values():
        _fill(cache, model, 2 * slots)
    times = _interleaved({str(m): _step(model, cache) for m, cache in caches.items()}, steps, "margins")
    means = {margin: statistics.mean(times[str(margin)]) for margin in values}
    return [MarginRow(margin, mean * 1e3, mean / means[values[0]]) for margin, mean in means.items()]


# ---- prefill


@dataclass(frozen=True)
class PrefillRow:
    """One-shot prefill of `length` tokens; ratio: to DynamicCache (sdpa) in the same run; peak: of process memory."""

    length: int
    full_seconds: float
    seconds: float
    ratio: float
    full_peak_bytes: int
    peak_bytes: int


def prefill(model: PreTrainedModel, lengths: Sequence[int], slots: int, rounds: int) -> list[PrefillRow]:
    """Prefill with exact heavy-hitter mass over all queries, against the same prefill without."""
    rows = []
    model(input_ids=torch.full((1, 512), 100), logits_to_keep=1)  # the warm-up
    for length in lengths:
        ids = torch.randint(100, 1000, (1, length), generator=torch.Generator().manual_seed(0))

        def run(cache: Callable[[], Cache], ids: Tensor = ids) -> None:
            model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache()})

        makers = {
            "full": lambda: DynamicCache(config=model.config),
            "sink_h2o": lambda: SinkH2OCache(model.config, window=slots // 2 - 4, heavy_hitters=slots // 2),
        }
        times: dict[str, list[float]] = {name: [] for name in makers}
        peaks: dict[str, list[int]] = {name: [] for name in makers}
        for _ in track(range(rounds), description=f"prefill {length}", console=Console(stderr=True)):
            for name, make in makers.items():
                with Meter().peak() as peak:
                    times[name].append(_seconds(partial(run, make)))
                peaks[name] += peak
        full, mine = times["full"], times["sink_h2o"]
        medians = statistics.median(full), statistics.median(mine)
        rows.append(PrefillRow(length, *medians, _ratio(mine, full), min(peaks["full"]), min(peaks["sink_h2o"])))
    return rows


@dataclass(frozen=True)
class ChunkRow:
    """After a chunk: tokens seen, bytes that the cache then holds, and the most that it held during the chunk."""

    seen: int
    bytes: int
    most_bytes: int


class _Watched(SinkH2OCache):
    """Notes the largest number of bytes held at any attention: all layers' slots and the staged chunk of one."""

    most = 0

    def attend(self, layer: Any, query: Tensor, call: AttentionCall) -> Tensor:
        staged = sum(tensor.nbytes for tensor in layer.staged)
        self.most = max(self.most, staged + _held(self))
        output = super().attend(layer, query, call)
        self.most = max(self.most, _held(self))
        return output


def _held(cache: EvictingCache) -> int:
    """Bytes of every storage that the cache's layers hold on to, whatever their views show."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for layer in cache.managed for t in layer.state()}
    return sum(storage.nbytes() for storage in storages.values())


def chunks(model: PreTrainedModel, length: int, chunk: int, slots: int) -> list[ChunkRow]:
    """Prefill in chunks with eviction between them: the curve of bytes held."""
    cache = _Watched(model.config, window=slots // 2 - 4, heavy_hitters=slots // 2)
    ids = torch.randint(100, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    rows = []
    for start in track(range(0, length, chunk), description="prefilling", console=Console(stderr=True)):
        cache.most = 0
        part = ids[:, start : start + chunk]
        model(input_ids=part, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        rows.append(ChunkRow(cache.get_seq_length(), _held(cache), cache.most))
    return rows


# ---- the command


def machine() -> dict[str, Any]:
    """What a figure was measured on."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).resolve().parent
    )
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "revision": revision.stdout.strip() or None,
        "command": "kvcache bench " + " ".join(sys.argv[2:]),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _table(title: str, rows: Sequence[Any]) -> Table:
    """Dataclass rows as a table; one column for each field."""
    table = Table(title=title)
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        values = (
            f"{v:.3f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v for v in asdict(row).values()
        )
        table.add_row(*values)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcache bench", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="decode|margin|prefill|chunks")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", default="smollm2", help="smollm2, a hub id, a folder or a .gguf file")
    common.add_argument("--slots", type=int, default=1024, help="budget: slots kept per layer and head (1024)")
    common.add_argument("--threads", type=int, default=2, help="threads that torch may use (2)")
    common.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    common.add_argument("--png", type=Path, metavar="FILE", help="draw them there")
    add = commands.add_parser("decode", parents=[common], help="time per token, and the engine's own overhead")
    add.add_argument("--seen", type=int, nargs="+", default=[1024, 8192, 32768], help="tokens seen before")
    add.add_argument("--margin", type=int, default=32)
    add.add_argument("--steps", type=int, default=64)
    add = commands.add_parser("margin", parents=[common], help="time per token against the margin")
    add.add_argument("--margins", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128])
    add.add_argument("--steps", type=int, default=256)
    add = commands.add_parser("prefill", parents=[common], help="one-shot prefill and its peak memory")
    add.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    add.add_argument("--rounds", type=int, default=3)
    add = commands.add_parser("chunks", parents=[common], help="bytes held during a prefill in chunks")
    add.add_argument("--length", type=int, default=32768)
    add.add_argument("--chunk", type=int, default=512)
    return parser


def _run(options: argparse.Namespace, model: PreTrainedModel) -> dict[str, Sequence[Any]]:
    """Titles and rows of what was asked for."""
    if options.what == "decode":
        arguments = (options.slots, options.margin, options.steps)
        return {
            "decode: time per token": decode(model, options.seen, *arguments),
            "decode: engine, ms per step over all layers": overhead(model, *arguments),
        }
    if options.what == "margin":
        return {"margin: time per token": margins(model, options.margins, options.slots, options.steps)}
    if options.what == "prefill":
        return {"prefill in one forward": prefill(model, options.lengths, options.slots, options.rounds)}
    return {"prefill in chunks": chunks(model, options.length, options.chunk, options.slots)}


def main(argv: Sequence[str]) -> int:
    """`kvcache bench`; returns the exit code."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    model, _ = load(options.model)
    with torch.inference_mode():
        results = _run(options, model)
    for title, rows in results.items():
        shown = rows if len(rows) <= 24 else [*rows[:3], *rows[-3:]]
        Console().print(_table(title, shown))
    if options.json:
        report = {"machine": machine(), **{title: [asdict(row) for row in rows] for title, rows in results.items()}}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.png:
        from kvcache.evals.plots import bench_chart

        bench_chart(options.what, results, options.png)
    return 0
