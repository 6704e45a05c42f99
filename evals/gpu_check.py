"""What only a GPU can tell: the kernels' tests compiled, their times against floors, and whole decode steps.

Floors come from the same machine in the same run: a copy gives the bandwidth, a matrix product the arithmetic. Times of
kernels are those of replayed CUDA graphs, so that launching from Python does not count.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EXAMPLES = """\
examples:
  scripts/gpu_check --out gpu_check            everything, about 6 minutes on one large GPU
  scripts/gpu_check --out gpu_check --skip tests,end_to_end
  scripts/gpu_check --smoke --out /tmp/smoke   tiny sizes on the CPU, kernels interpreted: does the script run?
"""
PARTS = ("tests", "decode", "sums", "evict", "end_to_end")
SCORE_BYTES = 44  # per slot and KV head: logits written and read, score and position, at 4 query heads a group
TEST_SECONDS = 150


@dataclass(frozen=True)
class Sizes:
    """What is measured. heads: query heads, KV heads, head_dim."""

    heads: tuple[int, int, int]
    batches: tuple[int, ...]
    slots: tuple[int, ...]
    prefill: tuple[int, ...]
    seen: tuple[int, ...]
    budget: int
    model: dict[str, Any]
    most_batch: int
    steps: int
    copy_bytes: int
    matrix: int
    dtype: str


FULL = Sizes(
    heads=(32, 8, 128),
    batches=(1, 8, 64),
    slots=(2048, 8192, 32768),
    prefill=(4096, 16384, 32768),
    seen=(2048, 8192, 32768, 131072),
    budget=2048,
    model={
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 1 << 20,
    },
    most_batch=256,
    steps=40,
    copy_bytes=1 << 30,
    matrix=8192,
    dtype="bfloat16",
)
SMOKE = Sizes(
    heads=(4, 2, 16),
    batches=(1, 2),
    slots=(65,),
    prefill=(70,),
    seen=(64, 128),
    budget=32,
    model={
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 4096,
    },
    most_batch=2,
    steps=2,
    copy_bytes=1 << 16,
    matrix=64,
    dtype="float32",
)


@dataclass(frozen=True)
class Row:
    """One figure. seconds: of the thing itself. floor: the least seconds that its bytes or operations take here.
    base: seconds of what it is compared with. target: what `ratio` (to the base, or to the floor) should be."""

    part: str
    what: str
    seconds: float
    floor: float | None = None
    base: float | None = None
    target: str = ""
    ratio: float | None = None
    held: bool | None = None


def _ratio_row(part: str, what: str, seconds: float, base: float, most: float, floor: float | None = None) -> Row:
    ratio = seconds / base
    return Row(part, what, seconds, floor, base, f"<= {most:g} of the other", ratio, ratio <= most)


class Machine:
    """A device, its timer and its floors."""

    def __init__(self, smoke: bool) -> None:
        import torch

        self.sizes = SMOKE if smoke else FULL
        self.device = torch.device("cpu" if smoke else "cuda")
        self.dtype: torch.dtype = getattr(torch, self.sizes.dtype)
        self.name = platform.machine() if smoke else torch.cuda.get_device_name()
        count = self.sizes.copy_bytes
        source = torch.ones(count, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        self.bandwidth = 2 * count / self.seconds(lambda: target.copy_(source))
        side = self.sizes.matrix
        a = torch.ones(side, side, dtype=self.dtype, device=self.device)
        self.flops = 2 * side**3 / self.seconds(lambda: a @ a)

    def seconds(self, action: Callable[[], object]) -> float:
        """Of one call: the median, by a replayed CUDA graph on a GPU."""
        import torch

        if self.device.type == "cpu":
            return _median(action, 3)
        from triton.testing import do_bench_cudagraph

        action()  # compiles before the capture
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            timed: Any = do_bench_cudagraph(action, rep=20)
            return float(timed) / 1e3

    def normal(self, *shape: int) -> Tensor:
        import torch

        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def synchronize(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _median(action: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[times // 2]


# ---- kernels


def decode_rows(machine: Machine) -> Iterator[Row]:
    """Decode attention with mass against torch's own without, and against the bytes."""
    import torch

    from kvcache.kernels.decode_attention import decode_attention_triton

    query_heads, kv_heads, dim = machine.sizes.heads
    for batch in machine.sizes.batches:
        for slots in machine.sizes.slots:
            query = machine.normal(batch, query_heads, 1, dim)
            keys, values = (machine.normal(batch, kv_heads, slots, dim) for _ in range(2))
            score = torch.zeros(batch, kv_heads, slots, device=machine.device)

            def ours(q: Tensor = query, k: Tensor = keys, v: Tensor = values, s: Tensor | None = score) -> object:
                return decode_attention_triton(q, k, v, k.shape[2], 0.1, score=s)

            def plain(q: Tensor = query, k: Tensor = keys, v: Tensor = values) -> object:
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.1, enable_gqa=True)

            with_mass, without = machine.seconds(ours), machine.seconds(lambda: ours(s=None))
            torch_plain = machine.seconds(plain)
            entries = batch * kv_heads * slots
            floor = entries * (2 * dim * keys.element_size() + SCORE_BYTES) / machine.bandwidth
            what = f"decode attention with mass, batch {batch}, {slots} slots"
            yield _ratio_row("decode", f"{what}: against itself without", with_mass, without, 1.08, floor)
            yield Row("decode", f"{what}: torch's attention", torch_plain, floor, with_mass)
            share = floor / with_mass
            most = (batch, slots) == (64, 8192)
            yield Row("decode", f"{what}: of bandwidth", with_mass, floor, None, ">= 0.8" if most else "", share,
                      share >= 0.8 if most else None)  # fmt: skip


def sums_rows(machine: Machine) -> Iterator[Row]:
    """Column sums against the flash forward that they follow."""
    from kvcache.kernels.column_sums import column_sums_triton
    from kvcache.kernels.flash import flash_triton

    query_heads, kv_heads, dim = machine.sizes.heads
    for length in machine.sizes.prefill:
        query, keys = machine.normal(1, query_heads, length, dim), machine.normal(1, kv_heads, length, dim)
        _, lse = flash_triton(query, keys, keys, 0.1, 0)
        lse = lse.contiguous()

        def sums(q: Tensor = query, k: Tensor = keys, lse: Tensor = lse) -> object:
            return column_sums_triton(q, k, lse, 0.1, 0)

        def forward(q: Tensor = query, k: Tensor = keys) -> object:
            return flash_triton(q, k, k, 0.1, 0)

        floor = query_heads * length**2 * dim / machine.flops  # half of 2 n^2 d: causal
        yield _ratio_row(
            "sums", f"column sums over {length} tokens", machine.seconds(sums), machine.seconds(forward), 0.6, floor
        )


def evict_rows(machine: Machine) -> Iterator[Row]:
    """Moving entries after an eviction, and overwriting victims, against the bytes that they must move."""
    import torch

    from kvcache.budget import LayerBudget
    from kvcache.eviction import plan_eviction
    from kvcache.kernels.compact import apply_moves_triton
    from kvcache.kernels.write import evict_and_write_triton

    _, kv_heads, dim = machine.sizes.heads
    margin, slots, batch = 32, machine.sizes.slots[0], machine.sizes.batches[-1]
    capacity = slots + margin
    keys, values = (machine.normal(batch, kv_heads, capacity, dim) for _ in range(2))
    score = torch.rand(batch, kv_heads, capacity, device=machine.device)
    positions = (
        torch.arange(capacity, dtype=torch.int32, device=machine.device).expand(batch, kv_heads, -1).contiguous()
    )
    following = torch.full((batch,), capacity, dtype=torch.int32, device=machine.device)
    budget = LayerBudget(sinks=4, window=slots // 2, heavy_hitters=slots - slots // 2 - 4, margin=margin)

    def plan() -> Any:
        return plan_eviction(score, score, positions, budget, following, [slots] * batch, capacity)

    made = plan()

    def move() -> None:
        apply_moves_triton(
            keys, values, score, positions, made.score, made.positions,
            made.source, made.source_rows, made.target_rows, capacity,
        )  # fmt: skip

    bookkeeping = 2 * (4 + 4) * batch * kv_heads * capacity
    moved = 2 * 2 * made.source.numel() * dim * keys.element_size() + bookkeeping
    seconds, floor = machine.seconds(move), moved / machine.bandwidth
    yield Row("evict", f"moves after evicting {margin} of {capacity}, batch {batch}", seconds, floor, None, "",
              floor / seconds)  # fmt: skip
    yield Row("evict", f"choosing them (torch), batch {batch}", machine.seconds(plan))
    new = machine.normal(batch, kv_heads, 1, dim)

    def overwrite() -> None:
        evict_and_write_triton(keys, values, score, positions, new, new, score, 4, slots // 2, following)

    seconds, floor = machine.seconds(overwrite), batch * kv_heads * capacity * 8 / machine.bandwidth
    yield Row("evict", f"evict and write over {capacity} slots, batch {batch}", seconds, floor, None, "",
              floor / seconds)  # fmt: skip


# ---- end to end


def end_to_end_rows(machine: Machine) -> Iterator[Row]:
    """Decode steps of a random model of Llama-3-8B's shape, with made-up keys and values of the tokens seen."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from kvcache import SinkH2OCache

    sizes = machine.sizes
    torch.set_default_dtype(machine.dtype)
    with torch.device(machine.device):
        model = LlamaForCausalLM(LlamaConfig(**sizes.model)).eval()
    torch.set_default_dtype(torch.float32)

    def bounded() -> Any:
        window = sizes.budget // 2
        return SinkH2OCache(model.config, 4, window, sizes.budget - window - 4, positions="absolute")

    for seen in sizes.seen:
        times: dict[str, float] = {}
        for name, make in (("DynamicCache", DynamicCache), ("SinkH2OCache", bounded)):
            for batch in sorted({1, _largest_batch(machine, model, seen if name == "DynamicCache" else sizes.budget)}):
                seconds, peak = _step_seconds(machine, model, make(), seen, batch)
                rate = f"{batch / seconds:,.0f} tokens/s, peak {peak / 2**30:.1f} GiB"
                if batch == 1 and name == "DynamicCache":
                    times[name] = seconds
                if batch == 1 and name == "SinkH2OCache":
                    faster = times["DynamicCache"] / seconds
                    last = seen == 131072
                    yield Row("end_to_end", f"{name} at {seen} seen, batch 1: {rate}", seconds, None,
                              times["DynamicCache"], ">= 3 x DynamicCache" if last else "", faster,
                              faster >= 3 if last else None)  # fmt: skip
                else:
                    yield Row("end_to_end", f"{name} at {seen} seen, batch {batch}: {rate}", seconds)
    yield _eviction_share(machine, model, bounded())


def _largest_batch(machine: Machine, model: Any, tokens: int) -> int:
    """Rows whose keys and values of `tokens` tokens fit twice (DynamicCache makes a new one at every step)."""
    import torch

    if machine.device.type == "cpu":
        return machine.sizes.most_batch
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * machine.dtype.itemsize
    layer = per_token // config.num_hidden_layers
    free = torch.cuda.mem_get_info()[0] - (4 << 30)
    return max(1, min(machine.sizes.most_batch, free // (tokens * (per_token + 2 * layer))))


def _step_seconds(machine: Machine, model: Any, cache: Any, seen: int, batch: int) -> tuple[float, int]:
    """Seconds of one decode step (mean over whole margins), and the most bytes of device memory within."""
    import torch

    from kvcache.evals.generation import CACHE_ARGUMENT

    _make_seen(machine, model, cache, seen, batch)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=machine.device)

    def step() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache})

    step()
    step()
    machine.synchronize()
    if machine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(machine.sizes.steps):
        step()
    machine.synchronize()
    seconds = (time.perf_counter() - start) / machine.sizes.steps
    return seconds, torch.cuda.max_memory_allocated() if machine.device.type == "cuda" else 0


def _make_seen(machine: Machine, model: Any, cache: Any, seen: int, batch: int) -> None:
    """Random keys and values in every layer; an evicting cache is told that it saw `seen` tokens."""
    from kvcache import EvictingCache
    from kvcache.routing import AttentionCall

    query_heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    dim = model.config.head_dim
    bounded = isinstance(cache, EvictingCache)
    tokens = min(seen, machine.sizes.budget) if bounded else seen
    for index in range(model.config.num_hidden_layers):
        keys, values = (machine.normal(batch, kv_heads, tokens, dim) for _ in range(2))
        cache.update(keys, values, index)
        if bounded:
            layer = cache.managed[index]
            cache.attend(layer, machine.normal(batch, query_heads, tokens, dim), AttentionCall(dim**-0.5))
    if bounded:
        for layer in cache.managed:
            layer.seen = seen


def _eviction_share(machine: Machine, model: Any, cache: Any) -> Row:
    """What evictions add to a step: steps with one in each margin against steps without."""
    import torch

    from kvcache.evals.generation import CACHE_ARGUMENT

    margin = cache.managed[0].budget.margin
    _make_seen(machine, model, cache, machine.sizes.budget, 1)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=machine.device)
    times = []
    for _ in range(3 * margin + 3):
        machine.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache})
        machine.synchronize()
        times.append(time.perf_counter() - start)
    usual = sorted(times[3:])[len(times) // 2]
    extra = sum(times[3:]) / len(times[3:]) - usual
    return Row("end_to_end", f"evictions, margin {margin}, batch 1: share of a step", extra, None, usual, "<= 0.05",
               extra / usual, extra / usual <= 0.05)  # fmt: skip


# ---- tests


def test_rows(smoke: bool) -> Iterator[Row]:
    """The kernels' and the engine's tests, compiled for this device (in the smoke test: a few, interpreted)."""
    chosen = ["-k", "append"] if smoke else []
    parallel = ["-n", "8"] if importlib.util.find_spec("xdist") and not smoke else []
    files = sorted(str(file) for file in Path("tests").glob("test_kernels*.py"))
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", *parallel, *chosen, *files]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TEST_SECONDS, check=False)
        passed, summary = result.returncode == 0, (result.stdout.strip().splitlines() or [result.stderr])[-1]
        if not passed:
            print(result.stdout[-6000:], file=sys.stderr)
    except subprocess.TimeoutExpired:
        passed, summary = False, f"not finished within {TEST_SECONDS} s"
    yield Row("tests", summary, time.perf_counter() - start, target="all pass", held=passed)


# ---- output


def measure(smoke: bool, skip: Sequence[str]) -> tuple[dict[str, Any], list[Row]]:
    """`(what was measured on, figures)`; progress goes to stderr."""
    import torch
    import transformers

    from kvcache.kernels.jit import INSTALLED

    if not smoke and not torch.cuda.is_available():
        raise ValueError("no CUDA GPU here: --smoke runs tiny sizes on the CPU")
    if not INSTALLED:
        raise ValueError("Triton is not installed: pip install triton")
    import triton

    rows: list[Row] = []
    if "tests" not in skip:  # before this process holds the device's memory
        rows += _told(test_rows(smoke))
    machine = Machine(smoke)
    parts = {"decode": decode_rows, "sums": sums_rows, "evict": evict_rows, "end_to_end": end_to_end_rows}
    for name, part in parts.items():
        if name not in skip:
            rows += _told(replace(row, held=None) if smoke else row for row in part(machine))
    about = {
        "machine": machine.name,
        "smoke": smoke,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "copy_bytes_per_second": machine.bandwidth,
        "matmul_flops": machine.flops,
        "sizes": asdict(machine.sizes),
    }
    return about, rows


def _told(rows: Iterator[Row]) -> list[Row]:
    done = []
    for row in rows:
        print(_line(row), file=sys.stderr, flush=True)
        done.append(row)
    return done


def _line(row: Row) -> str:
    verdict = {None: "", True: "held", False: "MISSED"}[row.held]
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    return (
        f"{row.part:<10} {row.what:<78} {row.seconds * 1e6:>12,.1f} us {ratio:>8} {row.target:<22} {verdict}".rstrip()
    )


def chart(about: dict[str, Any], rows: Sequence[Row], file: Path) -> None:
    """Every figure that has a floor: its time above the floor's, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.floor is not None and row.seconds > 0]
    figure, axis = pyplot.subplots(figsize=(11, 0.28 * max(4, len(shown)) + 1.4), dpi=130, layout="constrained")
    places = range(len(shown))
    axis.barh(places, [row.seconds * 1e6 for row in shown], color="#1f6fb4", label="measured")
    axis.barh(places, [(row.floor or 0) * 1e6 for row in shown], color="#d9822b", height=0.4, label="floor")
    axis.set_yticks(list(places), [row.what for row in shown], fontsize=7)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set(xlabel="microseconds", title=f"{about['machine']}: kernels against their floors")
    axis.legend(frameon=False)
    figure.savefig(file)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check. Returns 0 if every target held, 1 if one was missed, 2 for wrong input."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="gpu_check.json and gpu_check.png go there"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU; its times mean nothing")
    parser.add_argument("--skip", default="", metavar="PARTS", help=f"parts to leave out, of: {','.join(PARTS)}")
    options = parser.parse_args(argv)
    skip = [part for part in options.skip.split(",") if part]
    unknown = sorted(set(skip) - set(PARTS))
    if unknown:
        parser.error(f"--skip {','.join(unknown)}: the parts are {', '.join(PARTS)}")
    if options.smoke:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
        os.environ.setdefault("KVCACHE_KERNELS", "triton")
    try:
        about, rows = measure(options.smoke, skip)
    except ValueError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"about": about, "rows": [asdict(row) for row in rows]}
    (options.out / "gpu_check.json").write_text(json.dumps(content, indent=1) + "\n")
    chart(about, rows, options.out / "gpu_check.png")
    judged = [row for row in rows if row.held is not None]
    print(f"\n{about['machine']}: {sum(bool(row.held) for row in judged)} of {len(judged)} targets held")
    for row in judged:
        print(_line(row))
    return 0 if options.smoke or all(row.held for row in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
