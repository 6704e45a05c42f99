"""Heads with budgets of their own: the division against loops, everything after it against the oracle."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from evals.caches import build_cache, parse_cache
from kvcache import AdaptiveHeads, Budget, EvictingCache, estimate_bytes
from kvcache.adaptive import AdaptiveLayer
from kvcache.errors import BudgetError, CacheMemoryError
from kvcache.kernels.select import DEAD, eviction_order
from kvcache.policies import HeavyHitters, KeyDiff, KeyNorm, Policy, Queries, Recency, Slots, SnapKV
from tests.helpers import Pair, call, generate, kept, left_padded, model_of, tokens
from tests.oracle import LayerState, Oracle, beam_search
from tests.test_stats_memory import slots_bytes

pytestmark = pytest.mark.fast

SINKS, WINDOW, HEAVY = 2, 3, 8
SLOTS = SINKS + WINDOW + HEAVY
SHARP = (0.5, 6.0, 2.0, 4.0)


@functools.cache
def sharpened(architecture: str) -> PreTrainedModel:
    """4 KV heads whose attention is spread or concentrated: their queries are scaled, the group's two alike."""
    model = model_of(architecture, num_attention_heads=8, num_key_value_heads=4)
    for name, weight in model.named_parameters():
        if name.endswith("q_proj.weight"):
            factors = torch.tensor(SHARP, dtype=weight.dtype).repeat_interleave(weight.shape[0] // 4)
            weight.data *= factors[:, None]
    return model


def divided_by_loops(
    candidates: list[list[list[float]]], heavy: int, floor: float, multiple: int, pinned: int = 0
) -> list[int]:
    """Heavy hitters of each head; `candidates[row][head]`: priorities of what may be chosen."""
    heads = len(candidates[0])
    counts = [0] * heads
    for row in candidates:
        ranking = sorted(((score, head) for head, own in enumerate(row) for score in own), reverse=True)
        for _, head in ranking[: heads * (heavy - pinned)]:
            counts[head] += 1
    by_ranking = multiple * int((1 - floor) * (heavy - pinned) / multiple)
    if by_ranking == 0:
        return [heavy] * heads
    steps = Fraction(heads * by_ranking, multiple)
    exact = [steps * count / sum(counts) for count in counts]
    given = [int(share) for share in exact]
    while sum(given) < steps:
        missing = [share - whole for share, whole in zip(exact, given, strict=True)]
        given[missing.index(max(missing))] += 1
    return [heavy - by_ranking + multiple * own for own in given]


class AdaptiveOracle(Oracle):
    """Divides a layer's slots in the middle of the first eviction, in float64."""

    def __init__(self, model: PreTrainedModel, heads: AdaptiveHeads, **arguments: Any) -> None:
        super().__init__(model, **arguments)
        self.heads = heads

    def _evict(self, layer: LayerState, margin: int) -> None:
        if layer.alive is not None and not layer.shares and int(layer.alive.sum(-1).max()) > layer.slots_of(0) + margin:
            fixed = self.heads.shares if isinstance(self.heads, Fixed) else self._divided(layer)
            layer.shares = dict(enumerate(fixed))
        super()._evict(layer, margin)

    def _divided(self, layer: LayerState) -> list[int]:
        assert layer.alive is not None and layer.score is not None
        assert self.position is not None and self.seen is not None
        candidates: list[list[list[float]]] = []
        for row, alive in enumerate(layer.alive):
            at = self.position[row]
            free = (at >= layer.sinks) & (at < self.seen[row] - layer.window)
            value = layer.score[row] if self.policy == "heavy_hitters" else at.expand_as(layer.score[row])
            candidates.append([value[head][alive[head] & free].tolist() for head in range(alive.shape[0])])
        return divided_by_loops(candidates, layer.heavy_hitters, self.heads.floor, self.heads.multiple)


@dataclass(frozen=True)
class Fixed(AdaptiveHeads):
    """Whatever the tokens weigh."""

    shares: tuple[int, ...] = ()

    def divide(self, order: Tensor, heavy_hitters: int, pinned: int = 0) -> tuple[int, ...]:
        return self.shares


EXACT = AdaptiveHeads(floor=0.25, multiple=1)
TWO_BY_TWO = Fixed(shares=(11, 5, 11, 5))
"""Equal heads are not neighbours."""


def cache_of(
    model: PreTrainedModel,
    heads: AdaptiveHeads | None = EXACT,
    policy: Policy | None = None,
    margin: int = 4,
    positions: Any = "absolute",
) -> EvictingCache:
    budget = Budget(SINKS, WINDOW, HEAVY, margin)
    return EvictingCache(model.config, policy or HeavyHitters(), budget, positions, heads)


def pair_of(
    architecture: str = "llama", heads: AdaptiveHeads = EXACT, margin: int = 4, positions: Any = "absolute"
) -> Pair:
    model = sharpened(architecture)
    sizes = {"sinks": SINKS, "window": WINDOW, "heavy_hitters": HEAVY, "margin": margin}
    oracle = AdaptiveOracle(model, heads, **sizes, positions=positions)
    return Pair(model, cache_of(model, heads, margin=margin, positions=positions), oracle)


def feed(model: Any, cache: Any, ids: Tensor, *cuts: int) -> None:
    """In forwards of these lengths, the rest token by token."""
    for part in ids.split([*cuts, *[1] * (ids.shape[1] - sum(cuts))], dim=1):
        with torch.no_grad():
            call(model, cache, part)


def shares(cache: EvictingCache) -> list[list[int]]:
    assert all(isinstance(layer, AdaptiveLayer) for layer in cache.managed)
    return [[budget.heavy_hitters for budget in layer.budgets] for layer in cache.managed]  # pyright: ignore[reportAttributeAccessIssue]


# -- the rule ----------------------------------------------------------------------------------------------------------


def order_of(priority: Tensor, taken: Tensor) -> Tensor:
    positions = torch.arange(priority.shape[-1], dtype=torch.int32).expand(priority.shape)
    order = eviction_order(priority, positions, 0, torch.full((priority.shape[0],), 1 << 20))
    return order.masked_fill(taken, DEAD)


@pytest.mark.parametrize("floor", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("multiple", [1, 2, 4, 16])
def test_division_against_loops(floor: float, multiple: int) -> None:
    chance = random.Random(multiple)
    for batch, heads, entries, heavy, pinned in [
        (1, 3, 40, 8, 0),
        (2, 4, 25, 16, 0),
        (3, 2, 60, 21, 5),
        (1, 1, 9, 4, 2),
    ]:
        spread = [chance.choice([0.3, 1, 4]) for _ in range(heads)]
        priority = torch.tensor(
            [[[chance.random() ** power for _ in range(entries)] for power in spread] for _ in range(batch)]
        )
        taken = torch.rand(priority.shape, generator=torch.Generator().manual_seed(heads)) < 0.2
        free = [
            [[float(x) for x, no in zip(*head, strict=True) if not no] for head in zip(*row, strict=True)]
            for row in zip(priority.tolist(), taken.tolist(), strict=True)
        ]
        actual = AdaptiveHeads(floor, multiple).divide(order_of(priority, taken), heavy, pinned)
        assert list(actual) == divided_by_loops(free, heavy, floor, multiple, pinned)
        assert sum(actual) == heads * heavy
        assert min(actual) >= pinned + floor * (heavy - pinned)
        assert all((share - actual[0]) % multiple == 0 for share in actual)


def test_division_by_hand() -> None:
    """Two slots per head: of the four highest one head has 9, 8 and 7, the other 5."""
    priority = torch.tensor([[[9.0, 8.0, 7.0, 1.0], [5.0, 4.0, 3.0, 2.0]]])
    order = order_of(priority, torch.zeros_like(priority, dtype=torch.bool))
    assert AdaptiveHeads(0, 1).divide(order, 2) == (3, 1)
    assert AdaptiveHeads(0.5, 1).divide(order, 2) == (3, 1)  # one each, 3/4 and 1/4 of the other two
    assert AdaptiveHeads(1, 1).divide(order, 2) == (2, 2)
    assert AdaptiveHeads(0, 2).divide(order, 2) == (4, 0)  # two steps, 1.5 and 0.5 of them: among equals the first
    assert AdaptiveHeads(0, 3).divide(order, 2) == (2, 2)  # less than a step


def test_ties_favour_no_head() -> None:
    same = torch.ones(1, 4, 30)
    order = order_of(same, torch.zeros_like(same, dtype=torch.bool))
    assert AdaptiveHeads(0, 1).divide(order, 6) == (6,) * 4


@pytest.mark.parametrize("wrong", [{"floor": -0.1}, {"floor": 1.5}, {"multiple": 0}])
def test_wrong_input(wrong: dict[str, Any]) -> None:
    with pytest.raises(BudgetError, match=f"{next(iter(wrong))}=.* must be"):
        AdaptiveHeads(**wrong)
    config = sharpened("llama").config
    with pytest.raises(ValueError, match=r"heads=0\.2 must be None .* or AdaptiveHeads"):
        EvictingCache(config, HeavyHitters(), Budget(), heads=0.2)  # pyright: ignore[reportArgumentType]


# -- the model, against all keys and values under a mask per head ------------------------------------------------------

CUTS = {
    "prompt": (40, *[1] * 12),
    "chunks": (9, 14, 20, 3, *[1] * 9),
    "decode": (4, *[1] * 34),
    "few at a time": (17, 2, 3, 2, 5, 1, 4, 9, 1, 1),
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("margin", [1, 5])
@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("heads", [EXACT, TWO_BY_TWO], ids=["exact", "fixed"])
def test_as_the_oracle(heads: AdaptiveHeads, positions: str, margin: int, cuts: tuple[int, ...]) -> None:
    pair = pair_of(heads=heads, margin=margin, positions=positions)
    for part in tokens(2, sum(cuts)).split(cuts, dim=1):
        pair.step(part)
    assert shares(pair.cache) == [[layer.shares[head] for head in range(4)] for layer in pair.oracle.layers.values()]
    assert any(len(set(own)) > 1 for own in shares(pair.cache))
    assert all(sum(own) == 4 * HEAVY for own in shares(pair.cache))


@pytest.mark.parametrize("lengths", [[40, 33, 8], [30, 30, 14], [12, 40, 2]], ids=str)
@pytest.mark.parametrize("margin", [1, 5])
@pytest.mark.parametrize("heads", [EXACT, TWO_BY_TWO], ids=["exact", "fixed"])
def test_padding_as_the_oracle(heads: AdaptiveHeads, margin: int, lengths: list[int]) -> None:
    """Short rows evict later than long ones, and in heads with many slots later than in others."""
    ids, mask = left_padded(tokens(3, 40), lengths)
    pair = pair_of(heads=heads, margin=margin)
    pair.step(ids, mask)
    for i, n in enumerate((1, 1, 6, *[1] * 14)):
        pair.step(tokens(3, n, seed=i))


@pytest.mark.parametrize("positions", ["absolute", "cache"])
def test_padding_after_the_division(positions: str) -> None:
    """The next turn of a conversation in a batch: shorter in one row than in the other."""
    pair = pair_of(heads=TWO_BY_TWO, positions=positions)
    pair.step(tokens(2, 30))
    for i, lengths in enumerate(([6, 2], [1, 9], [20, 3])):
        pair.step(*left_padded(tokens(2, max(lengths), seed=i), lengths))
        pair.step(tokens(2, 1, seed=i))


def test_only_padding_is_too_much() -> None:
    """Columns that do not fit, but no row has tokens to give up: nothing is divided."""
    ids, mask = left_padded(tokens(2, 40), [9, 5])
    pair = pair_of()
    pair.step(ids, mask)
    assert all(len(layer.parts) == 1 and layer.parts[0] is layer for layer in pair.cache.managed)
    for i in range(12):
        pair.step(tokens(2, 1, seed=i))
    assert all(len(layer.parts) > 1 for layer in pair.cache.managed)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "qwen3"])
def test_other_architectures(architecture: str) -> None:
    """Softcaps, sink logits, norms of queries; layers that slide stay as they are."""
    pair = pair_of(architecture, TWO_BY_TWO)
    for part in tokens(2, 44).split([30, 6, *[1] * 8], dim=1):
        pair.step(part)


def test_the_switch_to_ranks_after_the_division() -> None:
    model = model_of("llama", num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=36)
    sizes = {"sinks": SINKS, "window": WINDOW, "heavy_hitters": HEAVY, "margin": 4}
    oracle = AdaptiveOracle(model, TWO_BY_TWO, **sizes, positions="auto")
    pair = Pair(model, cache_of(model, TWO_BY_TWO, positions="auto"), oracle)
    for part in tokens(2, 50).split([30, *[1] * 20], dim=1):
        pair.step(part)
    assert pair.cache.stats().positions == "cache"


@pytest.mark.parametrize("seed", range(6))
def test_random_operations(seed: int) -> None:
    chance = random.Random(seed)
    pair = pair_of(heads=chance.choice([EXACT, TWO_BY_TWO]), margin=chance.choice([1, 2, 6]))
    batch, start = 2, chance.choice([3, 25])
    pair.step(*left_padded(tokens(batch, start, seed=seed), [start, chance.randint(1, start)]))
    for step in range(14):
        operation = chance.choice(["token", "token", "chunk", "rows", "repeat", "copy"])
        if operation == "rows" or (operation == "repeat" and batch > 3):
            rows = torch.tensor([chance.randrange(batch) for _ in range(chance.randint(1, batch))])
            pair.cache.batch_select_indices(rows)
            pair.rows(rows)
            batch = len(rows)
        elif operation == "repeat":
            pair.cache.batch_repeat_interleave(2)
            pair.rows(torch.arange(batch).repeat_interleave(2))
            batch *= 2
        elif operation == "copy":
            before, pair.cache = pair.cache, copy.deepcopy(pair.cache)
            feed(pair.model, before, tokens(batch, 5), 5)
        else:
            n = 1 if operation == "token" else chance.randint(2, 20)
            pair.step(tokens(batch, n, seed=step))


def test_generate_with_beams() -> None:
    model = sharpened("llama")
    ids, mask = left_padded(tokens(2, 30), [30, 22])
    pair = pair_of(heads=TWO_BY_TWO)
    arguments = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0}
    beams = generate(model, pair.cache, ids, 10, **arguments)
    assert torch.equal(beams.view(2, 3, -1), beam_search(pair.oracle, ids, 10, 3, mask))


def test_triton_kernels_hold_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(sharpened("llama")).float()
    caches = []
    for kernels in ("torch", "triton"):
        monkeypatch.setenv("KVCACHE_KERNELS", kernels)
        caches.append(cache_of(model, TWO_BY_TWO))
        feed(model, caches[-1], tokens(2, 32), 24, 4)
        assert caches[-1].stats().kernels == kernels
    for layer in range(3):
        assert kept(caches[0], layer) == kept(caches[1], layer)
        assert torch.allclose(caches[0].scores(layer), caches[1].scores(layer), atol=1e-4)


# -- what it takes and says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("margin", [1, 4])
@pytest.mark.parametrize("heads", [EXACT, TWO_BY_TWO], ids=["exact", "fixed"])
def test_bytes_are_those_of_equal_heads(heads: AdaptiveHeads, margin: int, positions: Any) -> None:
    model = sharpened("llama")
    cache, uniform = (cache_of(model, each, margin=margin, positions=positions) for each in (heads, None))
    expected = estimate_bytes(model.config, Budget(SINKS, WINDOW, HEAVY, margin), 2, torch.float64, positions)
    for forwards in ([200], [1, 1, 1], [7, 1], [30, *[1] * 20]):
        for i, n in enumerate(forwards):
            feed(model, cache, tokens(2, n, seed=i), n)
            feed(model, uniform, tokens(2, n, seed=i), n)
        assert slots_bytes(uniform) == expected
        assert expected <= slots_bytes(cache) <= expected + 3 * 2 * 4 * 8  # per layer two lists of 4 heads
        assert cache.stats().bytes == expected
    cache.reset()
    assert cache.stats().bytes == slots_bytes(cache) == 0


def test_stats_and_ragged_heads() -> None:
    model, cache = sharpened("llama"), cache_of(sharpened("llama"), TWO_BY_TWO)
    feed(model, cache, tokens(2, 30), 30)
    layer = cache.stats().layers[0]
    lengths = [16, 10, 16, 10]
    assert [len(head) for head in kept(cache, 0)[1]] == lengths
    assert cache.kept_positions(0).shape == (2, 4, 16) and bool((cache.kept_positions(0)[:, 1, :6] == -1).all())
    assert not bool(cache.scores(0)[:, 1, :6].any()) and bool((cache.scores(0)[:, 1, 6:] > 0).all())
    assert (layer.slots, layer.capacity, layer.seen) == (SLOTS, SLOTS + 4, 30)
    assert layer.evicted == 2 * sum(30 - length for length in lengths) // 4 and layer.evictions == 1
    assert layer.oldest_unprotected == min(head[SINKS] for row in kept(cache, 0) for head in row)


def test_reset_forgets_the_division() -> None:
    model, cache = sharpened("llama"), cache_of(sharpened("llama"))
    feed(model, cache, tokens(1, 30), 30)
    before, held = shares(cache), [kept(cache, layer.index) for layer in cache.managed]
    cache.reset()
    assert all(layer.parts[0] is layer for layer in cache.managed)
    feed(model, cache, tokens(1, 30), 30)
    assert shares(cache) == before and [kept(cache, layer.index) for layer in cache.managed] == held


def test_what_is_kept_weighs_more_than_with_equal_heads() -> None:
    """What the division is for; in the first layer, whose scores do not depend on evictions before."""
    model = sharpened("llama")
    kept_mass = []
    for heads in (AdaptiveHeads(0, 1), None):
        cache = cache_of(model, heads, SnapKV(pool=None))
        feed(model, cache, tokens(1, 40), 40)
        kept_mass.append(float(cache.scores(0).sum()))
    assert kept_mass[0] > kept_mass[1] + 1e-3


@pytest.mark.parametrize(
    "policy", [Recency(), KeyNorm(), KeyDiff(), SnapKV()], ids=lambda policy: type(policy).__name__
)
def test_every_policy_keeps_sinks_and_window(policy: Policy) -> None:
    model, cache = sharpened("llama"), cache_of(sharpened("llama"), EXACT, policy)
    ids = tokens(2, 50)
    feed(model, cache, ids[:, :30], 30)
    for n in range(30, 50):
        feed(model, cache, ids[:, n : n + 1], 1)
        for layer in cache.managed:
            assert isinstance(layer, AdaptiveLayer)
            for row in kept(cache, layer.index):
                for head, budget in zip(row, layer.budgets, strict=True):
                    assert head[:SINKS] == list(range(SINKS)) and head[-WINDOW:] == list(range(n - 2, n + 1))
                    assert len(head) <= budget.capacity and len(set(head)) == len(head)


def test_a_row_among_its_likes_equals_the_row_alone() -> None:
    model = sharpened("llama")
    ids = tokens(1, 36)
    padded, mask = left_padded(torch.nn.functional.pad(ids[:, :30], (6, 0)).expand(3, -1), [30] * 3)
    alone, together = cache_of(model), cache_of(model)
    feed(model, alone, ids, 30)
    with torch.no_grad():
        call(model, together, padded, attention_mask=mask)
        for column in range(30, 36):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            call(model, together, ids[:, column : column + 1].expand(3, -1), attention_mask=mask)
    assert shares(alone) == shares(together)
    for layer in alone.managed:
        assert kept(together, layer.index) == 3 * kept(alone, layer.index)


# -- pins and policies with a memory -----------------------------------------------------------------------------------


def test_pins_have_room_in_every_head() -> None:
    model, cache = sharpened("llama"), cache_of(sharpened("llama"), AdaptiveHeads(0, 1))
    cache.pin(4, 6)
    cache.pin(33, 36)  # not seen yet
    feed(model, cache, tokens(2, 60), 30)
    assert min(min(own) for own in shares(cache)) >= 5
    assert all(sum(own) == 4 * HEAVY for own in shares(cache))
    for layer in cache.managed:
        assert all({4, 5, 33, 34, 35} <= set(head) for row in kept(cache, layer.index) for head in row)
    with pytest.raises(BudgetError, match=r"exceed its \d+ slots"):
        cache.pin(70, 70 + HEAVY - 5)  # fits the mean, not the smallest
    assert list(cache.pins) == [(4, 6), (33, 36)]


@dataclass(frozen=True)
class Noting(AdaptiveHeads):
    """Counts what each head has to choose from."""

    choices: list[list[int]] = field(default_factory=list)

    def divide(self, order: Tensor, heavy_hitters: int, pinned: int = 0) -> tuple[int, ...]:
        self.choices.extend((order > DEAD).sum(-1).tolist())
        return super().divide(order, heavy_hitters, pinned)


def test_what_stays_anyway_is_not_ranked() -> None:
    """Of 30 tokens or 20 neither sinks nor window nor the two pinned ones; padding never."""
    model, heads = sharpened("llama"), Noting()
    cache = cache_of(model, heads)
    cache.pin(1, 2)  # a sink already
    cache.pin(4, 6)
    ids, mask = left_padded(tokens(2, 30), [30, 20])
    with torch.no_grad():
        call(model, cache, ids, attention_mask=mask)
    assert heads.choices == 3 * [[30 - SINKS - WINDOW - 2] * 4, [20 - SINKS - WINDOW - 2] * 4]


@dataclass(frozen=True)
class MeanQuery(Policy):
    """Keys along the sum of all queries of the group's first query head stay."""

    observes_mass: ClassVar[bool] = False
    observes_queries: ClassVar[bool] = True
    needs_keys: ClassVar[bool] = True

    def observe_queries(self, memory: dict[str, Tensor], queries: Queries) -> None:
        memory["sum"] = memory.get("sum", 0) + queries.query.sum(2)
        memory["count"] = memory.get("count", 0) + torch.full(queries.query.shape[:1], queries.query.shape[2])

    def priority(self, slots: Slots) -> Tensor:
        assert slots.memory is not None and slots.keys is not None
        total = slots.memory["sum"] / slots.memory["count"][:, None, None]
        return (slots.keys @ total[:, :: total.shape[1] // slots.keys.shape[1], :, None]).squeeze(-1)


@pytest.mark.parametrize("heads", [EXACT, TWO_BY_TWO], ids=["exact", "fixed"])
def test_memory_is_divided_with_the_heads(heads: AdaptiveHeads) -> None:
    model = sharpened("llama")
    cache, uniform = cache_of(model, heads, MeanQuery()), cache_of(model, None, MeanQuery())
    for each in (cache, uniform):
        feed(model, each, tokens(2, 50), 30)
    layer = cache.managed[0]
    assert isinstance(layer, AdaptiveLayer) and len(layer.parts) > 1
    sums = [part.memory["sum"] for part in layer.parts]
    assert torch.allclose(layer._joined(sums, 1), uniform.managed[0].memory["sum"], atol=1e-9)
    assert all(part.memory["count"].tolist() == [50, 50] for part in layer.parts)


# -- on the command line -----------------------------------------------------------------------------------------------


def test_evals_know_it() -> None:
    config = sharpened("llama").config
    for name in ("snapkv", "heavy_hitters"):
        cache: Any = build_cache(parse_cache(f"{name}:slots=64,head_floor=0.3"), config)
        assert all(layer.heads == AdaptiveHeads(0.3) for layer in cache.managed)
        cache = build_cache(parse_cache(f"{name}:slots=64"), config)
        assert not any(isinstance(layer, AdaptiveLayer) for layer in cache.managed)


# -- another budget ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("heads", [EXACT, TWO_BY_TWO], ids=["exact", "fixed"])
def test_resize_divides_what_was_read_with_room(heads: AdaptiveHeads, positions: Any) -> None:
    model, ids = sharpened("llama"), tokens(2, 50)
    small = cache_of(model, heads, positions=positions)
    ample = EvictingCache(model.config, HeavyHitters(), Budget(SINKS, WINDOW, 80, 4), positions, heads)
    for cache in (small, ample):
        feed(model, cache, ids[:, :40], 40)
    ample.resize(small.budget)
    assert shares(ample) == shares(small)
    for cache in (small, ample):
        feed(model, cache, ids[:, 40:], 6)
    for layer in range(3):
        assert kept(ample, layer) == kept(small, layer)
    assert ample.stats().bytes == small.stats().bytes


@pytest.mark.parametrize("heavy_hitters", [HEAVY // 2, HEAVY - 1, 3 * HEAVY])
def test_resize_keeps_a_division_in_proportion(heavy_hitters: int) -> None:
    model, cache = sharpened("llama"), cache_of(sharpened("llama"), EXACT)
    feed(model, cache, tokens(2, 40), 40)
    before, held = shares(cache), [kept(cache, layer) for layer in range(3)]
    cache.resize(Budget(SINKS, WINDOW, heavy_hitters, 4))
    assert shares(cache) == [[own * heavy_hitters // HEAVY for own in layer] for layer in before]
    if heavy_hitters >= HEAVY:
        assert [kept(cache, layer) for layer in range(3)] == held
    feed(model, cache, tokens(2, 30, seed=3), 9)
    for layer, own in enumerate(shares(cache)):
        for row in kept(cache, layer):
            assert all(len(head) <= SINKS + WINDOW + share + 4 for head, share in zip(row, own, strict=True))
    cache.reset()
    feed(model, cache, tokens(2, 200), 200)
    assert all(sum(own) == 4 * heavy_hitters for own in shares(cache))


def test_resize_leaves_room_for_pins_in_every_head() -> None:
    model, cache = sharpened("llama"), cache_of(sharpened("llama"), AdaptiveHeads(0, 1))
    cache.pin(4, 6)
    feed(model, cache, tokens(2, 60), 30)
    cache.resize(Budget(SINKS, WINDOW, 3, 4))
    assert min(min(own) for own in shares(cache)) >= 2
    feed(model, cache, tokens(2, 30, seed=3), 9)
    for layer in cache.managed:
        assert all({4, 5} <= set(head) for row in kept(cache, layer.index) for head in row)


def test_resize_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharpened("llama")
    cache = EvictingCache(model.config, HeavyHitters(), Budget(SINKS, WINDOW, 80, 4), "absolute", EXACT)
    feed(model, cache, tokens(2, 40), 40)
    before = [kept(cache, layer) for layer in range(3)]

    def no_memory(*_: object) -> None:
        raise CacheMemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr("kvcache.layer.allocate", no_memory)
        with pytest.raises(CacheMemoryError):
            cache.resize(Budget(SINKS, WINDOW, HEAVY, 4))
    assert [kept(cache, layer) for layer in range(3)] == before and cache.budget.heavy_hitters == 80
    cache.resize(Budget(SINKS, WINDOW, HEAVY, 4))
    feed(model, cache, tokens(2, 9, seed=3), 9)
