"""Every policy under everything that happens to a cache, and each against numbers worked out apart."""

from __future__ import annotations

import copy
import itertools
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache import Budget, EvictingCache
from kvcache.errors import BudgetError
from kvcache.pins import Pins
from kvcache.policies import (
    RKV,
    TOVA,
    Everything,
    ExpectedAttention,
    HeavyHitters,
    Joined,
    KeyDiff,
    KeyNorm,
    LagKV,
    Last,
    Policy,
    Pool,
    Random,
    Recency,
    Scissorhands,
    Slots,
    SnapKV,
    TriAttention,
    ValueAware,
)
from tests.helpers import call, kept, left_padded, model_of, scores, shared_model, tokens
from tests.test_policies import ONE, Stage

POLICIES: dict[str, Policy] = {
    "heavy_hitters": HeavyHitters(),
    "decayed": HeavyHitters(Everything(0.9)),
    "normalised": HeavyHitters(normalised=True),
    "pooled": HeavyHitters(pool=Pool(3, "max")),
    "snapkv": SnapKV(),
    "snapkv_short": SnapKV(Last(3), Pool(5)),
    "tova": TOVA(),
    "key_norm": KeyNorm(),
    "key_diff": KeyDiff(),
    "lag_kv": LagKV(4),
    "r_kv": RKV(Last(3), Pool(3, "max")),
    "scissorhands": Scissorhands(Last(9)),
    "value_aware": ValueAware(HeavyHitters()),
    "value_aware_counts": ValueAware(Scissorhands()),
    "random": Random(seed=3),
    "recency": Recency(),
    "tri_attention": TriAttention(),
    "joined": Joined(SnapKV(), TriAttention(), 0.7),
    "expected_attention": ExpectedAttention(future=16),
}
SINKS, WINDOW, HEAVY = 2, 3, 4
SLOTS = SINKS + WINDOW + HEAVY

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


def cache_of(
    model: Any, policy: Policy, margin: int = 4, positions: Any = "absolute", heavy: int = HEAVY
) -> EvictingCache:
    return EvictingCache(model.config, policy, Budget(SINKS, WINDOW, heavy, margin), positions)


def feed(model: Any, cache: Any, ids: Tensor, *cuts: int, mask: Tensor | None = None) -> Tensor:
    """The logits of all forwards; the last cut may leave a rest that is fed token by token."""
    logits, start = [], 0
    for n in (*cuts, *[1] * (ids.shape[1] - sum(cuts))):
        part = None if mask is None else mask[:, : start + n]
        with torch.no_grad():
            logits.append(call(model, cache, ids[:, start : start + n], attention_mask=part).logits)
        start += n
    return torch.cat(logits, dim=1)


def all_kept(cache: Any) -> list[Any]:
    return [kept(cache, layer.index) for layer in cache.managed]


# -- the matrix --------------------------------------------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("margin", [1, 8])
def test_budget_sinks_and_window_hold(policy: Policy, margin: int, positions: str) -> None:
    model, ids = shared_model("llama"), tokens(2, 60)
    cache = cache_of(model, policy, margin, positions)
    start = 0
    for n in (25, 7, *[1] * 28):
        feed(model, cache, ids[:, start : start + n], n)
        start += n
        for layer in all_kept(cache):
            for head in (head for row in layer for head in row):
                assert SLOTS <= len(head) <= SLOTS + margin
                assert head == sorted(set(head))
                assert head[:SINKS] == list(range(SINKS))
                assert head[-WINDOW:] == list(range(start - WINDOW, start))


@every_policy
@pytest.mark.parametrize("margin", [1, 5])
def test_a_padded_row_equals_the_row_alone(policy: Policy, margin: int) -> None:
    model = shared_model("llama")
    padded, mask = left_padded(tokens(3, 40), [40, 33, 21])
    cache = cache_of(model, policy, margin)
    together = feed(model, cache, padded, 30, mask=mask)
    for row in range(3):
        alone = cache_of(model, policy, margin)
        real = padded[row : row + 1][:, mask[row].bool()]
        logits = feed(model, alone, real, real.shape[1] - 10)
        assert torch.allclose(together[row, -10:], logits[0, -10:], atol=1e-4)  # RoPE is float32, at other positions
        for layer in cache.managed:
            here = [[position for position in head if position >= 0] for head in kept(cache, layer.index)[row]]
            assert here == kept(alone, layer.index)[0]


@every_policy
def test_a_budget_that_holds_all_changes_nothing(policy: Policy) -> None:
    model, ids = shared_model("llama"), tokens(1, 30)
    logits = feed(model, cache_of(model, policy, heavy=100), ids, 20, 5)
    with torch.no_grad():
        assert torch.allclose(logits, model(ids).logits, atol=1e-6)


@every_policy
def test_rows_move_with_the_cache(policy: Policy) -> None:
    """Reorder, repeat and select, then go on: the same as rows that were there from the start."""
    model, ids = shared_model("llama"), tokens(3, 40)
    cache = cache_of(model, policy)
    feed(model, cache, ids[:, :30], 20)
    order_of_beams: Any = torch.tensor([2, 0, 1])
    cache.reorder_cache(order_of_beams)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 5]))
    order = [2, 0, 1]
    after = feed(model, cache, ids[order][:, 30:])
    expected = cache_of(model, policy)
    feed(model, expected, ids[order][:, :30], 20)
    assert torch.allclose(after, feed(model, expected, ids[order][:, 30:]), atol=1e-6)
    assert all_kept(cache) == all_kept(expected)


@every_policy
def test_a_copy_goes_its_own_way_and_reset_forgets(policy: Policy) -> None:
    model, ids = shared_model("llama"), tokens(1, 50)
    cache = cache_of(model, policy)
    feed(model, cache, ids[:, :30], 20)
    before = all_kept(cache)
    twin = copy.deepcopy(cache)
    feed(model, twin, ids[:, 30:])
    assert all_kept(cache) == before
    feed(model, cache, ids[:, 30:])
    assert all_kept(cache) == all_kept(twin)
    cache.reset()
    feed(model, cache, ids[:, :30], 20)
    assert all_kept(cache) == before


@every_policy
@pytest.mark.parametrize("architecture", ["gpt_neox", "gemma2", "gpt_oss"])
def test_other_architectures(policy: Policy, architecture: str) -> None:
    model, ids = model_of(architecture), tokens(2, 40)
    cache = cache_of(model, policy)
    assert bool(feed(model, cache, ids, 20, 8).isfinite().all())
    assert all(len(head) <= SLOTS + 4 for layer in all_kept(cache) for row in layer for head in row)


# -- what is observed --------------------------------------------------------------------------------------------------


def probabilities(model: Any, ids: Tensor, layer: int) -> Tensor:
    """`[batch, kv_heads, queries, keys]` of the model without a cache, summed over each group's query heads."""
    eager = model_of("llama", attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        attention = eager(ids, output_attentions=True).attentions[layer]
    return attention.unflatten(1, (model.config.num_key_value_heads, -1)).sum(2).double()


@pytest.mark.parametrize("cuts", [(30,), (11, 9, 10), (17, *[1] * 13), (5,) * 6], ids=str)
@pytest.mark.parametrize("decay", [1.0, 0.9, 0.5])
def test_everything_however_it_is_cut(cuts: tuple[int, ...], decay: float) -> None:
    """A query `a` tokens back counts `decay ** a`, whether it came alone or in a chunk."""
    model, ids = shared_model("llama"), tokens(2, 30)
    cache = cache_of(model, HeavyHitters(Everything(decay)), heavy=100)
    feed(model, cache, ids, *cuts)
    weights = decay ** torch.arange(29, -1, -1, dtype=torch.float64)
    for layer in cache.managed:
        expected = (probabilities(model, ids, layer.index) * weights[:, None]).sum(2)
        assert torch.allclose(cache.scores(layer.index).double(), expected, atol=1e-5)


@pytest.mark.parametrize("window", [1, 4, 29, 30, 50])
def test_the_last_queries_of_a_prompt(window: int) -> None:
    model, ids = shared_model("llama"), tokens(2, 30)
    cache = cache_of(model, SnapKV(Last(window), None), heavy=100)
    feed(model, cache, ids, 30)
    for layer in cache.managed:
        expected = probabilities(model, ids, layer.index)[:, :, -window:].sum(2)
        assert torch.allclose(cache.scores(layer.index).double(), expected, atol=1e-5)


def test_the_last_queries_of_a_prompt_that_overflows_and_is_padded() -> None:
    """Two rows, of which one has 5 real tokens less: scores of what stayed."""
    model = shared_model("llama")
    padded, mask = left_padded(tokens(2, 30), [30, 25])
    cache = cache_of(model, SnapKV(Last(4), None))
    feed(model, cache, padded, 30, mask=mask)
    for row, real in ((0, 30), (1, 25)):
        expected = probabilities(model, padded[row : row + 1, 30 - real :], 0)[0, :, -4:].sum(1)
        held = kept(cache, 0)[row]
        for head, positions in enumerate(held):
            assert scores(cache, 0)[row][head] == pytest.approx(expected[head][positions].tolist(), abs=1e-5)


def test_tova_looks_at_the_last_query_alone() -> None:
    stage = Stage(TOVA(), sinks=0, window=1, heavy_hitters=2, margin=1)
    stage.feed(1, 9, 1, 14, 1)
    assert stage.kept == [1, 3, 4]
    stage.assert_scores(2 * ONE * 9 / 26, 2 * ONE * 14 / 26, 2 * ONE / 26)
    stage.feed(2)  # a fourth slot: its query alone counts
    stage.assert_scores(*[2 * ONE * weight / 26 for weight in (9, 14, 1, 2)])


def test_a_window_while_decoding_forgets_by_its_length() -> None:
    """`Last(4)`: every new query leaves three quarters of the score."""
    stage = Stage(SnapKV(Last(4), None), sinks=0, window=1, heavy_hitters=9, margin=1)
    stage.feed(1, 3)
    first = [2 * (ONE + ONE / 4), 2 * 3 * ONE / 4]
    stage.feed(4)
    kept_part = Fraction(3, 4)
    stage.assert_scores(
        *[kept_part * old + 2 * ONE * weight / 8 for old, weight in zip([*first, 0], (1, 3, 4), strict=True)]
    )


def test_votes() -> None:
    assert Everything().votes(7) == (7, None, 1.0)
    tokens_, weights, factor = Everything(0.5).votes(3)
    assert tokens_ == 3 and weights is not None and weights.tolist() == [0.25, 0.5, 1.0] and factor == 0.125
    assert Everything(0.5).votes(1) == (1, None, 0.5)
    assert Last(4).votes(3) == (3, None, 0.25)
    assert Last(4).votes(9) == (4, None, 0.0)
    assert Last(1).votes(1) == (1, None, 0.0)


@pytest.mark.parametrize("wrong", [0, -0.5, 1.1])
def test_wrong_decay(wrong: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        Everything(wrong)


def test_wrong_window_and_pool() -> None:
    with pytest.raises(ValueError, match="queries=0 must be at least 1"):
        Last(0)
    with pytest.raises(ValueError, match="kernel=4 must be odd"):
        Pool(4)
    with pytest.raises(ValueError, match="must be mean or max"):
        Pool(3, "median")  # pyright: ignore[reportArgumentType]


# -- priorities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mean", "max"])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_pooling_in_the_order_of_the_text(kernel: int, mode: Any) -> None:
    """Slots in any order, gaps in the positions, empty slots: against lists."""
    chance = random.Random(kernel)
    for _ in range(20):
        held = chance.sample(range(100), 9)
        positions = [*held, -1, -1]
        chance.shuffle(positions)
        score = [chance.gauss(0, 1) for _ in positions]
        order = sorted(held)
        by_position = {position: score[positions.index(position)] for position in held}
        pooled = Pool(kernel, mode)(torch.tensor([[score]]), torch.tensor([[positions]], dtype=torch.int32))[0, 0]
        for slot, position in enumerate(positions):
            if position >= 0:
                at, around = order.index(position), kernel // 2
                near = [by_position[each] for each in order[max(0, at - around) : at + around + 1]]
                expected = max(near) if mode == "max" else sum(near) / len(near)
                assert float(pooled[slot]) == pytest.approx(expected, abs=1e-6)
        assert bool(pooled.isfinite().all())


def slots_of(batch: int = 2, heads: int = 3, n: int = 7, dim: int = 8, empty: int = 0) -> Slots:
    generator = torch.Generator().manual_seed(n + empty)
    keys = torch.randn(batch, heads, n, dim, generator=generator)
    positions = torch.stack([torch.randperm(50, generator=generator)[:n] for _ in range(batch * heads)])
    positions = positions.view(batch, heads, n).int()
    if empty:
        positions[..., :empty] = -1
        keys[..., :empty, :] = 1e3  # whatever lay there before
    score = torch.rand(batch, heads, n, generator=generator)
    return Slots(score, positions, torch.full((batch,), 60, dtype=torch.int32), keys, keys, positions)


def test_normalised() -> None:
    slots = slots_of()
    priority = HeavyHitters(normalised=True).priority(slots)
    for (b, h, s), score in {
        tuple(i): slots.score[tuple(i)] for i in torch.ones_like(slots.score).nonzero().tolist()
    }.items():
        assert float(priority[b, h, s]) == pytest.approx(float(score) / (60 - int(slots.positions[b, h, s])), rel=1e-6)


def test_key_norm() -> None:
    slots = slots_of()
    assert slots.keys is not None
    expected = [-(sum(x * x for x in key) ** 0.5) for key in slots.keys.flatten(0, 2).tolist()]
    assert KeyNorm().priority(slots).flatten().tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("empty", [0, 2])
def test_key_diff(empty: int) -> None:
    slots = slots_of(empty=empty)
    assert slots.keys is not None
    directions = torch.nn.functional.normalize(slots.keys.double(), dim=-1)
    mean = directions[:, :, empty:].mean(2, keepdim=True)
    expected = -(directions * mean).sum(-1) / mean.norm(dim=-1)
    assert torch.allclose(KeyDiff().priority(slots).double()[..., empty:], expected[..., empty:], atol=1e-6)


def test_random_draws_once_per_token() -> None:
    """The same number wherever a token lies and whenever it is asked for; another one in another head or seed."""
    slots = slots_of(batch=1, heads=2, n=40)
    draw = Random().priority(slots)
    assert draw.dtype == torch.int32 and bool((draw >= 0).all())
    order = torch.randperm(40)
    again = Random().priority(Slots(slots.score, slots.positions[..., order]))
    assert torch.equal(draw[..., order], again)
    same = torch.arange(2000, dtype=torch.int32).expand(1, 2, 2000)
    first, other = Random(1).priority(Slots(same.float(), same)), Random(2).priority(Slots(same.float(), same))
    assert not torch.equal(first, other) and not torch.equal(first[:, 0], first[:, 1])
    assert float((first.double() / 2**30).mean()) == pytest.approx(0.5, abs=0.02)


# -- pins --------------------------------------------------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize("margin", [1, 4])
def test_pinned_tokens_stay(policy: Policy, margin: int) -> None:
    model, ids = shared_model("llama"), tokens(2, 60)
    cache = cache_of(model, policy, margin)
    feed(model, cache, ids[:, :8], 8)
    cache.pin(4, 6)
    cache.pin(20, 21)  # not seen yet
    feed(model, cache, ids[:, 8:50], 5, 20)
    for layer in all_kept(cache):
        assert all({4, 5, 20} <= set(head) for row in layer for head in row)
    cache.unpin(4, 6)
    feed(model, cache, ids[:, 50:])
    if isinstance(policy, Recency):
        assert not any({4, 5} & set(head) for layer in all_kept(cache) for row in layer for head in row)
    assert all(20 in head for layer in all_kept(cache) for row in layer for head in row)
    twin = copy.deepcopy(cache)
    twin.unpin(20, 21)
    assert list(cache.pins) == [(20, 21)] and not list(twin.pins)
    cache.reset()
    assert not list(cache.pins)


def test_more_pins_than_slots_are_refused() -> None:
    cache = cache_of(shared_model("llama"), HeavyHitters())
    cache.pin(0, 6)  # two are sinks already
    with pytest.raises(BudgetError, match=r"layer 0: 2 sinks, a window of 3 and 5 pinned tokens .* exceed its 9 slots"):
        cache.pin(10, 11)
    assert list(cache.pins) == [(0, 6)], "nothing changes"
    for wrong in ((3, 3), (-1, 2), (5, 4)):
        with pytest.raises(ValueError, match="0 <= start < stop"):
            cache.pin(*wrong)


def test_spans_against_sets() -> None:
    chance = random.Random(0)
    for _ in range(200):
        pins, expected = Pins(), set()
        for _ in range(6):
            start = chance.randrange(20)
            stop = start + chance.randrange(1, 8)
            if chance.random() < 0.6:
                pins, expected = pins.with_span(start, stop), expected | set(range(start, stop))
            else:
                pins, expected = pins.without_span(start, stop), expected - set(range(start, stop))
            spans = list(pins)
            assert {i for low, high in spans for i in range(low, high)} == expected
            assert len(pins) == len(expected)
            assert pins.beyond(7) == len({i for i in expected if i >= 7})
            assert all(high < low for (_, high), (low, _) in itertools.pairwise(spans))


def test_joined_fills_its_share_from_each_ranking() -> None:
    """Scores rank one way, positions the other: the best of both stay, by the share."""
    score = torch.tensor([[[9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0]]])
    positions = torch.arange(10, dtype=torch.int32)[None, None]
    for share, expected in ((0.5, {0, 1, 8, 9}), (0.75, {0, 1, 2, 9}), (0.25, {0, 7, 8, 9})):
        priority = Joined(HeavyHitters(), Recency(), share).priority(Slots(score, positions))
        assert set(priority[0, 0].topk(4).indices.tolist()) == expected


def test_wrong_joins() -> None:
    with pytest.raises(ValueError, match="observes attention mass"):
        Joined(Recency(), HeavyHitters())
    with pytest.raises(ValueError, match="share=1 must be above 0 and below 1"):
        Joined(HeavyHitters(), Recency(), 1)
    with pytest.raises(ValueError, match="must be policies"):
        Joined(HeavyHitters(), "recency")  # pyright: ignore[reportArgumentType]
