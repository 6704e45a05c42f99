"""The seven invariants of the design, after every one of a random sequence of operations on a tiny Llama.

The oracle runs alongside, so each operation also compares logits, kept positions and scores with it. What the model
wrote is noted at the cache's door and looked up again in its slots.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache import Budget, EvictingCache, estimate_bytes
from kvcache.policies import HeavyHitters, Recency
from tests import helpers
from tests.contract import model_named
from tests.helpers import left_padded, tokens
from tests.oracle import Oracle

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SIZES: list[dict[str, Any]] = [
    {"sinks": 2, "window": 3, "heavy_hitters": 4, "margin": 1},
    {"sinks": 0, "window": 1, "heavy_hitters": 5, "margin": 4},
    {"sinks": 3, "window": 6, "heavy_hitters": 0, "margin": 7},
    {"sinks": [1, 0, 4], "window": [2, 8, 1], "heavy_hitters": [0, 3, 6], "margin": [5, 1, 3]},
]
Written = list[dict[int, tuple[Tensor, Tensor]]]
"""Per row, per layer: the keys and values [kv_heads, tokens, dim] of its real tokens, as the model wrote them."""


@functools.cache
def short_model() -> Any:
    """Trained for 40 tokens only."""
    return helpers.model_of("llama", max_position_embeddings=40)


class Run:
    """A cache under random operations, its oracle, and what was written into it."""

    def __init__(self, seed: int, sizes: dict[str, Any], policy: str, positions: Any) -> None:
        self.random = random.Random(seed)
        self.sizes, self.policy, self.positions = sizes, policy, positions
        self.model = short_model() if positions == "auto" else model_named("llama")
        chosen = HeavyHitters() if policy == "heavy_hitters" else Recency()
        self.budget = Budget(**sizes)
        cache = EvictingCache(config=self.model.config, policy=chosen, budget=self.budget, positions=positions)
        self.pair = self.start(cache)

    def start(self, cache: EvictingCache) -> helpers.Pair:
        oracle = Oracle(self.model, **self.sizes, policy=self.policy, positions=self.positions)
        self.written: Written = []
        return helpers.Pair(self.model, cache, oracle, self.policy == "heavy_hitters")

    @property
    def cache(self) -> Any:
        return self.pair.cache

    @property
    def batch(self) -> int:
        return len(self.written)

    def prompt(self) -> None:
        """A left-padded batch of any size and length."""
        batch, length = self.random.randint(1, 4), self.random.randint(1, 30)
        lengths = [length, *(self.random.randint(1, length) for _ in range(batch - 1))]
        self.written = [{layer: _nothing(2, 12) for layer in range(3)} for _ in range(batch)]
        self.feed(*left_padded(self.ids(batch, length), lengths))

    def ids(self, batch: int, length: int) -> Tensor:
        return tokens(batch, length, seed=self.random.randrange(10**6))

    def feed(self, ids: Tensor, mask: Tensor) -> None:
        noted: dict[int, tuple[Tensor, Tensor]] = {}
        update = type(self.cache).update

        def noting(cache: Any, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            noted[layer_idx] = (keys.clone(), values.clone())
            return update(cache, keys, values, layer_idx, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self.cache), "update", noting)
            self.pair.step(ids, mask)
        for row, layers in enumerate(self.written):
            real = mask[row].bool()
            for layer, new in noted.items():
                layers[layer] = tuple(  # pyright: ignore[reportArgumentType]
                    torch.cat([old, part[row][:, real]], dim=1) for old, part in zip(layers[layer], new, strict=True)
                )

    # -- operations --------------------------------------------------------------------------------------------------

    def decode(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            self.feed(self.ids(self.batch, 1), torch.ones(self.batch, 1, dtype=torch.long))

    def chunk(self) -> None:
        n = self.random.randint(2, 20)
        self.feed(self.ids(self.batch, n), torch.ones(self.batch, n, dtype=torch.long))

    def padded_chunk(self) -> None:
        n = self.random.randint(1, 9)
        self.feed(*left_padded(self.ids(self.batch, n), [self.random.randint(0, n) for _ in range(self.batch)]))

    def reorder(self) -> None:
        rows = torch.tensor([self.random.randrange(self.batch) for _ in range(self.batch)])
        self.cache.reorder_cache(rows)
        self.take(rows)

    def select(self) -> None:
        rows = torch.tensor(sorted(self.random.sample(range(self.batch), self.random.randint(1, self.batch))))
        self.cache.batch_select_indices(rows)
        self.take(rows)

    def repeat(self) -> None:
        if self.batch <= 3:
            self.cache.batch_repeat_interleave(2)
            self.take(torch.arange(self.batch).repeat_interleave(2))

    def take(self, rows: Tensor) -> None:
        self.pair.rows(rows)
        self.written = [dict(self.written[row]) for row in rows.tolist()]

    def copied(self) -> None:
        """Go on with a copy, and let the original run into something else."""
        original = self.pair.cache
        self.pair.cache = copy.deepcopy(original)
        with torch.no_grad():
            mask = torch.cat([_filled(self.pair.mask), torch.ones(self.batch, 5, dtype=torch.long)], dim=-1)
            helpers.call(self.model, original, self.ids(self.batch, 5), attention_mask=mask)
        original.reorder_cache(torch.zeros(self.batch, dtype=torch.long))
        original.reset()

    def reset(self) -> None:
        cache = self.cache
        cache.reset()
        assert cache.get_seq_length() == 0
        self.pair = self.start(cache)
        self.prompt()

    # -- invariants --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for layer in range(3):
            sizes = self.budget.layer(layer, 3)
            held = helpers.kept(self.cache, layer)
            assert len(held) == self.batch
            for row, heads in enumerate(held):
                seen = self.written[row][layer][0].shape[1]
                for head, positions in enumerate(heads):
                    _check_positions(positions, seen, sizes)
                    self._check_content(layer, row, head, positions)
        self._check_bytes()

    def _check_content(self, layer: int, row: int, head: int, positions: list[int]) -> None:
        """3: what is kept is bit for bit what was written."""
        state: Any = self.cache.layers[layer]
        slots = state.positions[row, head].tolist()
        keys, values = self.written[row][layer]
        for position in positions:
            places = [slot for slot, there in enumerate(slots) if there == position]
            assert any(torch.equal(state.values[row, head, slot], values[head, position]) for slot in places)
            if self.positions == "absolute":
                assert any(torch.equal(state.keys[row, head, slot], keys[head, position]) for slot in places)

    def _check_bytes(self) -> None:
        """1: what is allocated is what the shapes say, and what was estimated."""
        stats = self.cache.stats()
        estimated = estimate_bytes(
            self.model.config, self.budget, batch=self.batch, dtype=torch.float64, positions=stats.positions
        )
        stored, logical = helpers.storage_bytes(self.cache), sum(t.nbytes for t in helpers.tensors_of(self.cache))
        assert stored <= 1.01 * logical, f"views keep {stored} bytes alive for {logical}"
        assert estimated == stats.bytes
        assert abs(stored - estimated) <= 0.01 * estimated, f"{stored} bytes stored, {estimated} estimated"
        for layer in stats.layers:
            sizes = self.budget.layer(layer.layer, 3)
            assert layer.capacity == sizes.capacity
            assert layer.slots <= layer.capacity  # 1: at rest


def _check_positions(positions: list[int], seen: int, sizes: Any) -> None:
    assert len(set(positions)) == len(positions)  # 3
    assert min(seen, sizes.slots) <= len(positions) <= min(seen, sizes.capacity)  # 1
    assert set(range(min(sizes.sinks, seen))) <= set(positions)  # 2
    assert set(range(max(0, seen - sizes.window), seen)) <= set(positions)  # 2
    assert all(0 <= position < seen for position in positions)  # 4


def _nothing(heads: int, dim: int) -> tuple[Tensor, Tensor]:
    return torch.empty(heads, 0, dim, dtype=torch.float64), torch.empty(heads, 0, dim, dtype=torch.float64)


def _filled(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


OPERATIONS: list[tuple[int, Callable[[Run], None]]] = [
    (6, Run.decode),
    (3, Run.chunk),
    (3, Run.padded_chunk),
    (2, Run.reorder),
    (1, Run.select),
    (1, Run.repeat),
    (2, Run.copied),
    (1, Run.reset),
]


@pytest.mark.fast
@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("policy", ["heavy_hitters", "recency"])
@pytest.mark.parametrize("sizes", SIZES, ids=range(len(SIZES)))
def test_random_operations(sizes: dict[str, Any], policy: str, positions: str) -> None:
    go(Run(0, sizes, policy, positions), 14)


@pytest.mark.parametrize("seed", range(24))
def test_random_operations_on_random_budgets(seed: int) -> None:
    """Small ones, so that every kind of eviction happens soon; some go past the trained length."""
    chance = random.Random(seed)
    parts = {"sinks": (0, 4), "window": (1, 6), "heavy_hitters": (0, 6), "margin": (1, 8)}
    per_layer = chance.random() < 0.5
    sizes: dict[str, Any] = {name: chance.randint(*ends) for name, ends in parts.items()}
    if per_layer:
        sizes = {name: [chance.randint(*ends) for _ in range(3)] for name, ends in parts.items()}
    positions = ("absolute", "cache", "auto")[seed % 3]
    go(Run(seed, sizes, chance.choice(["heavy_hitters", "recency"]), positions), 20)


def go(run: Run, count: int) -> None:
    """Any operations, all invariants after each."""
    weights, operations = zip(*OPERATIONS, strict=True)
    run.prompt()
    run.check()
    done = []
    for operation in run.random.choices(operations, weights, k=count):
        done.append(operation.__name__)
        try:
            operation(run)
            run.check()
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"{run.sizes} {run.positions}, after {' '.join(done)}: {error}") from error


@pytest.mark.fast
@pytest.mark.parametrize("margin", [1, 5])
def test_a_long_prompt_is_not_kept_alive(margin: int) -> None:
    """What remains after a prefill of 2,000 tokens is the size of the budget, while the cache lives and goes on."""
    model, budget = model_named("llama"), Budget(sinks=2, window=4, heavy_hitters=4, margin=margin)
    cache = EvictingCache(config=model.config, policy=HeavyHitters(), budget=budget, positions="absolute")
    for n in (2000, 1, 300, 1, 1):
        with torch.no_grad():
            helpers.call(model, cache, tokens(1, n))
        expected = estimate_bytes(model.config, budget, batch=1, dtype=torch.float64, positions="absolute")
        assert cache.stats().bytes == expected
        assert helpers.storage_bytes(cache) <= 1.01 * expected


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_estimate_for_every_dtype_and_architecture(dtype: torch.dtype) -> None:
    """Scores stay float32 whatever the model is; sliding layers are not the budget's."""
    budget = Budget(sinks=2, window=30, heavy_hitters=8, margin=4)
    cases: list[tuple[int, Any]] = [(1, "absolute"), (3, "cache")]
    for name in ("llama", "gpt_neox", "gemma2"):
        model = helpers.model_of(name, dtype=dtype, attn_implementation="eager")
        for batch, positions in cases:
            cache = EvictingCache(config=model.config, policy=HeavyHitters(), budget=budget, positions=positions)
            expected = estimate_bytes(model.config, budget, batch=batch, dtype=dtype, positions=positions)
            with torch.no_grad():
                helpers.call(model, cache, tokens(batch, 60))
            assert cache.stats().bytes == expected
            managed = [cache.layers[i] for i in helpers.managed_layers(cache)]
            assert abs(helpers.storage_bytes(managed) - expected) <= 0.01 * expected
            for layer in helpers.managed_layers(cache):
                assert cache.scores(layer).dtype == torch.float32


@pytest.mark.fast
def test_stats_add_up() -> None:
    model = model_named("llama")
    budget = Budget(sinks=1, window=3, heavy_hitters=2, margin=2)
    cache = EvictingCache(config=model.config, policy=HeavyHitters(), budget=budget, positions="absolute")
    oracle = Oracle(model, sinks=1, window=3, heavy_hitters=2, margin=2)
    pair = helpers.Pair(model, cache, oracle)
    for i, n in enumerate([4, 3, 1, 1, 1, 9, 1, 1]):
        pair.step(tokens(1, n, seed=i))
        seen = int(oracle.seen.sum()) if oracle.seen is not None else 0
        stats = cache.stats()
        for layer in stats.layers:
            held = oracle.kept(layer.layer)[0]
            assert (layer.seen, layer.slots) == (seen, len(held[0]))
            assert layer.evicted == seen - len(held[0])
            middle = [p for head in held for p in head if 1 <= p < seen - 3]
            assert layer.oldest_unprotected == (min(middle) if middle else None)
        assert stats.bytes == sum(layer.bytes for layer in stats.layers)
        assert stats.to_dict()["layers"][0]["seen"] == seen
        assert str(seen) in str(stats)
    # 7 > 8? no; 8 held: full; then evictions before the forwards of 1 (9th), at 9 and so on, once per layer each.
    assert {layer.evictions for layer in cache.stats().layers} == {len(_evictions([4, 3, 1, 1, 1, 9, 1, 1], 6, 8))}


def _evictions(forwards: list[int], slots: int, capacity: int) -> list[int]:
    """The forwards at which one row is cut down, before or after."""
    held, found = 0, []
    for i, n in enumerate(forwards):
        if held == capacity:
            held = slots
            found.append(i)
        held += n
        if held > capacity:
            held = slots
            found.append(i)
    return found
