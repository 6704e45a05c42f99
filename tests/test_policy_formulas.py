"""Policies' formulas in float64, written out in loops over heads, tokens and channels."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache.kernels.rotate import cos_sin, rotate
from kvcache.models.rope import find_rope
from kvcache.policies import (
    RKV,
    TOVA,
    Everything,
    HeavyHitters,
    KeyNorm,
    LagKV,
    Last,
    Pool,
    Scissorhands,
    Slots,
    SnapKV,
    ValueAware,
    rkv,
)
from tests.helpers import shared_model
from tests.test_policies import ONE, Stage
from tests.test_policy_matrix import all_kept, cache_of, feed, model_of, tokens

pytestmark = pytest.mark.fast


def slots_of(n: int, empty: int = 0, batch: int = 2, heads: int = 2, dim: int = 6, seed: int = 0) -> Slots:
    """Random slots in any order; the empty ones lie among the others and hold NaN."""
    generator = torch.Generator().manual_seed(seed + n)
    keys, values = torch.randn(2, batch, heads, n, dim, generator=generator).unbind()
    keys[..., n // 2, :] = keys[..., 0, :] * 2 + 0.1  # two tokens alike
    order = torch.stack([torch.randperm(3 * n, generator=generator)[:n] for _ in range(batch * heads)])
    positions = order.view(batch, heads, n).int()
    score = torch.rand(batch, heads, n, generator=generator)
    gone = torch.stack([torch.randperm(n, generator=generator) < empty for _ in range(batch * heads)])
    gone = gone.view(batch, heads, n)
    score[gone], positions[gone], keys[gone], values[gone] = 0, -1, math.nan, math.nan
    return Slots(score, positions, torch.full((batch,), 3 * n, dtype=torch.int32), keys, values, positions)


def heads_of(slots: Slots) -> list[tuple[int, int, list[int]]]:
    """`(row, head, held slots in the order of the text)`."""
    batch, heads, n = slots.positions.shape
    at = slots.positions.tolist()
    return [
        (b, h, sorted((s for s in range(n) if at[b][h][s] >= 0), key=lambda s: at[b][h][s]))
        for b in range(batch)
        for h in range(heads)
    ]


def softmax(numbers: list[float]) -> list[float]:
    top = max(numbers)
    weights = [math.exp(number - top) for number in numbers]
    return [weight / sum(weights) for weight in weights]


# -- Scissorhands ------------------------------------------------------------------------------------------------------


def test_scissorhands_by_hand() -> None:
    """Tokens of these weights, two query heads: a query counts 2 against all tokens that got less than their mean."""
    stage = Stage(Scissorhands(Last(4)), sinks=0, window=1, heavy_hitters=3, margin=1)
    stage.feed(1, 6, 1)  # mass 2 * (1 + 1/7 + 1/8), 2 * (6/7 + 6/8), 2 * 1/8; the mean is 2
    stage.assert_scores(0, 0, 6)
    stage.feed(2)  # of 10, the mean 10/4: only the second is above; a quarter of the past fades
    stage.assert_scores(2, 0, ONE * 6 * 3 / 4 + 2, 2)
    stage.feed(14)  # of 24, the mean is 24/5
    faded = [Fraction(3, 4) * score + 2 for score in (2, Fraction(13, 2), 2)]
    stage.assert_scores(faded[0], 0, faded[1], faded[2], 0)
    stage.feed(1)
    assert stage.kept == [0, 1, 3, 4, 5], "the third token was passed over most often"


def test_scissorhands_counts_as_many_queries_as_vote() -> None:
    """Mass of 3 voting queries and 2 query heads, padding at the end: the mean is over 4 tokens."""
    mass = torch.tensor([[[0.5, 2.5, 1.4, 1.6, 0.0]]])
    score = torch.tensor([[[1.0, 1.0, 0.0, 0.0, 0.0]]])
    Scissorhands().observe(score, mass)
    assert score[..., :4].flatten().tolist() == pytest.approx([7, 1, 6, 0])
    slots = Slots(score, torch.arange(5, dtype=torch.int32)[None, None])
    assert torch.equal(Scissorhands().priority(slots), -score)


@pytest.mark.parametrize("cuts", [(20,), (12, *[1] * 8)], ids=str)
def test_scissorhands_of_a_model(cuts: tuple[int, ...]) -> None:
    """Against the probabilities of eager attention, forward by forward."""
    ids, window = tokens(2, 20), 6
    model = shared_model("llama")
    eager = model_of("llama", attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        attentions = eager(ids, output_attentions=True).attentions
    cache = cache_of(model, Scissorhands(Last(window)), heavy=100)
    feed(model, cache, ids, *cuts)
    for layer in cache.managed:
        probabilities = attentions[layer.index].double().unflatten(1, (2, 2)).sum(2)
        expected = torch.zeros(2, 2, 20, dtype=torch.float64)
        start = 0
        for n in cuts:
            voters = min(n, window)
            mass = probabilities[:, :, start + n - voters : start + n].sum(2)
            start += n
            for place in torch.ones(2, 2, start).nonzero().tolist():
                b, h, s = place
                unimportant = float(mass[b, h, s]) < 2 * voters / start
                expected[b, h, s] = expected[b, h, s] * max(0.0, 1 - n / window) + 2 * voters * unimportant
        assert torch.allclose(cache.scores(layer.index).double(), expected, atol=1e-4)


# -- LagKV -------------------------------------------------------------------------------------------------------------


def lag_kv(keys: list[list[float]], values: list[list[float]], lag: int) -> list[float]:
    """Of one head's tokens in the order of the text: their priorities."""
    n = len(keys)
    cuts = [slice(max(0, stop - lag), stop) for stop in range(n, 0, -lag)][::-1]
    priority: list[float] = []
    for part, following in itertools.pairwise(cuts):
        score = [0.0] * (part.stop - part.start)
        for states in (keys, values):
            reference = list(zip(*states[following], strict=True))
            spread = [
                statistics.stdev((x - min(r)) / (max(r) - min(r)) for x, r in zip(token, reference, strict=True))
                for token in states[part]
            ]
            score = [old + new for old, new in zip(score, softmax(spread), strict=True)]
        priority += [sum(other < mine for other in score) / len(score) for mine in score]
    return priority + [1.0] * (n - len(priority))


@pytest.mark.parametrize(
    ("n", "lag", "empty"), [(12, 4, 0), (13, 4, 0), (15, 4, 2), (9, 2, 5), (11, 4, 6), (7, 4, 1), (5, 8, 1)]
)
def test_lag_kv(n: int, lag: int, empty: int) -> None:
    slots = slots_of(n, empty)
    priority = LagKV(lag).priority(slots)
    assert priority.shape == slots.positions.shape
    assert slots.keys is not None and slots.values is not None
    for b, h, order in heads_of(slots):
        keys, values = (states[b, h][order].double().tolist() for states in (slots.keys, slots.values))
        assert priority[b, h][order].tolist() == pytest.approx(lag_kv(keys, values, lag))


def test_lag_kv_of_a_text_that_repeats_itself() -> None:
    """A channel without a range in the reference: finite, and the token that is unlike the rest stays longest."""
    keys = torch.ones(1, 1, 8, 4)
    keys[..., 1, :] = torch.tensor([1.0, 1.0, 1.0, 3.0])
    positions = torch.arange(8, dtype=torch.int32)[None, None]
    priority = LagKV(4).priority(Slots(torch.zeros(1, 1, 8), positions, None, keys, keys, positions))
    assert sorted(priority.flatten().tolist()) == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]
    assert float(priority[0, 0, 1]) == 0.75


def test_lag_kv_sees_keys_where_they_are_without_padding() -> None:
    """Keys that the model rotated 5 positions further on have the same priorities."""
    rope = find_rope(shared_model("llama").config)
    slots = slots_of(12, dim=12)._replace(rope=rope)
    assert slots.keys is not None
    further = rotate(slots.keys, *cos_sin(torch.tensor(5), rope.inverse_frequencies, 1), rope.interleaved)
    moved = slots._replace(keys=further, origins=slots.positions + 5)
    assert torch.equal(LagKV(4).priority(moved), LagKV(4).priority(slots))
    assert not torch.equal(LagKV(4).priority(slots._replace(keys=further)), LagKV(4).priority(slots))


# -- R-KV --------------------------------------------------------------------------------------------------------------


def redundancy(keys: Tensor, order: list[int], threshold: float, latest: int) -> list[float]:
    """Of one head's held slots, `order` by position."""
    n = len(order)
    cosine = [[0.0] * n for _ in order]
    for i in range(n):
        for j in range(n):
            a, b = keys[order[i]].double(), keys[order[j]].double()
            cosine[i][j] = 0.0 if i == j else float(a @ b / (a.norm() * b.norm()))
    for row in cosine:
        alike = [j for j in range(n) if row[j] > threshold]
        for j in alike[max(0, len(alike) - latest) :]:
            row[j] = 0.0
    return softmax([sum(row[j] for row in cosine) / n for j in range(n)])


@pytest.mark.parametrize("block", [1, 100, 1 << 24])
@pytest.mark.parametrize(("n", "empty", "latest", "threshold"), [(9, 0, 1, 0.5), (11, 3, 2, 0.1), (8, 1, 0, 0.3)])
def test_rkv(n: int, empty: int, latest: int, threshold: float, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rkv, "BLOCK_ELEMENTS", block)
    slots = slots_of(n, empty)
    assert slots.keys is not None
    priority = RKV(pool=Pool(3, "max"), weight=0.3, threshold=threshold, latest=latest).priority(slots)
    for b, h, order in heads_of(slots):
        mass = [float(slots.score[b, h, s]) for s in order]
        share = [one / sum(mass) for one in mass]
        importance = [max(share[max(0, i - 1) : i + 2]) for i in range(len(order))]
        similar = redundancy(slots.keys[b, h], order, threshold, latest)
        expected = [0.3 * one - 0.7 * other for one, other in zip(importance, similar, strict=True)]
        assert priority[b, h][order].tolist() == pytest.approx(expected, abs=1e-6)


def test_rkv_keeps_the_latest_of_equals() -> None:
    """Three times the same key and one of its own, no mass: the older copies leave first."""
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[None, None]
    positions = torch.tensor([[[4, 7, 1, 9]]], dtype=torch.int32)
    priority = RKV().priority(Slots(torch.zeros(1, 1, 4), positions, None, keys, keys, positions))[0, 0].tolist()
    assert priority[0] < priority[1] < priority[3] == pytest.approx(priority[2])


# -- value-aware -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [HeavyHitters(), SnapKV(Last(3), Pool(3)), KeyNorm(), Scissorhands()], ids=repr)
def test_value_aware(inner: Any) -> None:
    slots = slots_of(7)
    assert slots.values is not None
    priority, plain = ValueAware(inner).priority(slots), inner.priority(slots)
    for b, h, s in torch.ones_like(plain).nonzero().tolist():
        norm = sum(abs(x) for x in slots.values[b, h, s].double().tolist())
        own = float(plain[b, h, s])
        assert float(priority[b, h, s]) == pytest.approx(own / norm if own < 0 else own * norm, rel=1e-5)


@pytest.mark.parametrize("inner", [HeavyHitters(Everything(0.9)), TOVA(), KeyNorm(), Scissorhands(Last(5))], ids=repr)
def test_value_aware_observes_what_the_inner_policy_does(inner: Any) -> None:
    outer = ValueAware(inner)
    for each in (outer, copy.deepcopy(outer)):
        assert each.needs_keys and each == ValueAware(inner)
        assert (each.observes_mass, each.observes_queries) == (inner.observes_mass, inner.observes_queries)
        assert each.sums_mass == inner.sums_mass and str(each.votes(3)) == str(inner.votes(3))
    model, ids = shared_model("llama"), tokens(2, 30)
    caches = [cache_of(model, policy, heavy=100) for policy in (inner, outer)]
    for cache in caches:
        feed(model, cache, ids, 20)
    for layer in caches[0].managed:
        assert torch.equal(*(cache.scores(layer.index) for cache in caches))


# -- as published ------------------------------------------------------------------------------------------------------


def test_published() -> None:
    assert HeavyHitters.published() == HeavyHitters(Everything(1.0), None, False)
    assert SnapKV.published() == SnapKV(Last(32), Pool(7, "max"))
    assert TOVA.published() == TOVA(Last(1), None)
    model, ids = shared_model("llama"), tokens(1, 60)
    for policy in (HeavyHitters.published(), SnapKV.published()):
        cache = cache_of(model, policy)
        feed(model, cache, ids, 50)
        assert all(len(head) <= 13 for layer in all_kept(cache) for row in layer for head in row)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LagKV(1), "lag=1 must be at least 2"),
        (lambda: RKV(weight=1.5), "weight=1.5 must be from 0"),
        (lambda: RKV(latest=-1), "latest=-1 must be 0"),
        (lambda: ValueAware(3), "inner=3 must be a Policy"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_refuses(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
