"""kvcache/policies/: what a policy is asked and told, the two that come along, and new ones written here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcache import Budget, EvictingCache
from kvcache.models import tiny
from kvcache.policies import HeavyHitters, Policy, Recency, Slots
from tests.contract import model_named
from tests.helpers import Pair, call, generate, kept, left_padded, scores, tokens
from tests.oracle import Oracle

pytestmark = pytest.mark.fast


def evicting(model: PreTrainedModel, policy: Policy, positions: Any = "absolute", **budget: Any) -> EvictingCache:
    return EvictingCache(config=model.config, policy=policy, budget=Budget(**budget), positions=positions)


def feed(model: PreTrainedModel, cache: Any, *forwards: int, batch: int = 1) -> None:
    for i, n in enumerate(forwards):
        with torch.no_grad():
            call(model, cache, tokens(batch, n, seed=i))


# -- attention whose mass can be counted by hand -----------------------------------------------------------------------


class Stage:
    """One layer with one KV head and two query heads, driven as a model would drive it. A token's key is the
    logarithm of its weight, and every query attends in proportion to the weights: masses are plain fractions."""

    def __init__(self, policy: Policy, **budget: int) -> None:
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "num_hidden_layers": 1}
        self.config = tiny.build_config("llama", **heads)
        self.cache = EvictingCache(self.config, policy, Budget(**budget), "absolute")

    def feed(self, *weights: int) -> Tensor:
        """Tokens of these weights in one forward; the attention's output `[n, query_heads, 1]` of values 1, 2, ..."""
        n, seen = len(weights), self.cache.get_seq_length()
        keys = torch.tensor([[math.log(weight), 0.0] for weight in weights]).view(1, 1, n, 2)
        values = torch.arange(seen + 1.0, seen + 1.0 + n).view(1, 1, n, 1)
        queries = torch.tensor([1.0, 0.0]).expand(1, 2, n, 2)
        attention = ALL_ATTENTION_FUNCTIONS[str(self.config._attn_implementation)]
        with torch.no_grad():
            tagged, values = self.cache.update(keys, values, 0)
            output, _ = attention(nn.Module(), queries, tagged, values, None, scaling=1.0)
        return output[0]

    @property
    def kept(self) -> list[int]:
        return kept(self.cache, 0)[0][0]

    def assert_scores(self, *expected: Fraction | float) -> None:
        assert scores(self.cache, 0)[0][0] == pytest.approx([float(score) for score in expected], rel=1e-5, abs=1e-7)


ONE = Fraction(1)


def test_heavy_hitters_by_hand() -> None:
    """4 slots and a margin of 1: a sink, the last token, and the two between that attracted most."""
    stage = Stage(HeavyHitters(), sinks=1, window=1, heavy_hitters=2, margin=1)
    stage.feed(1, 2, 1, 4)
    # Queries see weights of 1, 3, 4 and 8 in total; two query heads.
    prompt = [
        2 * (1 + ONE / 3 + ONE / 4 + ONE / 8),
        2 * (2 * ONE / 3 + 2 * ONE / 4 + 2 * ONE / 8),
        2 * (ONE / 4 + ONE / 8),
        2 * (4 * ONE / 8),
    ]
    assert stage.kept == [0, 1, 2, 3]
    stage.assert_scores(*prompt)
    output = stage.feed(8)  # 16 in total; the fifth slot is the margin
    assert stage.kept == [0, 1, 2, 3, 4]
    fifth = [score + 2 * ONE * weight / 16 for score, weight in zip([*prompt, 0], [1, 2, 1, 4, 8], strict=True)]
    stage.assert_scores(*fifth)
    assert output.flatten().tolist() == pytest.approx([(1 + 2 * 2 + 3 + 4 * 4 + 5 * 8) / 16] * 2)
    output = stage.feed(16)  # 1, 2 and 3 compete: 2 has least; 31 without it
    assert stage.kept == [0, 1, 3, 4, 5]
    without = [fifth[0], fifth[1], fifth[3], fifth[4], 0]
    sixth = [score + 2 * ONE * weight / 31 for score, weight in zip(without, [1, 2, 4, 8, 16], strict=True)]
    stage.assert_scores(*sixth)
    assert output.flatten().tolist() == pytest.approx([(1 + 2 * 2 + 4 * 4 + 5 * 8 + 6 * 16) / 31] * 2)
    stage.feed(1)  # 1 has 37/12 + 4/31, 3 has 3/2 + 8/31, 4 has 1 + 16/31
    assert stage.kept == [0, 1, 3, 5, 6]
    assert stage.cache.stats().evicted == 2


def test_recency_by_hand() -> None:
    """The same stream: whatever attention does, the newest stay behind the sink, and no score is counted."""
    stage = Stage(Recency(), sinks=1, window=1, heavy_hitters=2, margin=1)
    expected = [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 2, 3, 4, 5], [0, 3, 4, 5, 6]]
    for forward, positions in zip([(1, 2, 1, 4), (8,), (16,), (1,)], expected, strict=True):
        stage.feed(*forward)
        assert stage.kept == positions
        stage.assert_scores(*[0.0] * len(positions))


def test_a_prompt_is_cut_by_the_votes_of_all_its_queries() -> None:
    """The last query decides nothing alone: 1 was heavy for a long time, 5 is so only at the end."""
    stage = Stage(HeavyHitters(), sinks=0, window=1, heavy_hitters=1, margin=1)
    stage.feed(1, 9, 1, 1, 1, 14, 1)
    assert stage.kept == [1, 6]
    weights = [1, 9, 1, 1, 1, 14, 1]
    totals = [sum(weights[: i + 1]) for i in range(7)]
    stage.assert_scores(2 * sum(ONE * 9 / total for total in totals[1:]), 2 * ONE / totals[6])


def test_a_margin_lets_attention_see_more() -> None:
    stage = Stage(HeavyHitters(), sinks=1, window=2, heavy_hitters=1, margin=3)
    stage.feed(1, 1, 1, 1)
    for i in range(4, 7):
        stage.feed(1)
        assert stage.kept == list(range(i + 1))
    stage.feed(1)  # of equal weights the earliest has most mass
    assert stage.kept == [0, 1, 5, 6, 7]


@dataclass(frozen=True)
class Equal(Policy):
    """Everything is worth the same."""

    worth: float = 0.0
    observes_mass: ClassVar[bool] = False

    def priority(self, slots: Slots) -> Tensor:
        return torch.full_like(slots.score, self.worth)


@pytest.mark.parametrize("worth", [0.0, -2.5, 7.0, math.inf, -math.inf])
def test_of_equals_the_lowest_position_leaves_first(worth: float) -> None:
    stage = Stage(Equal(worth), sinks=2, window=1, heavy_hitters=2, margin=1)
    stage.feed(*[3] * 9)
    assert stage.kept == [0, 1, 6, 7, 8]
    stage.feed(1)
    stage.feed(1)
    assert stage.kept == [0, 1, 7, 8, 9, 10]


def test_no_priority_outranks_a_sink_or_the_window() -> None:
    stage = Stage(OddFirst(), sinks=1, window=2, heavy_hitters=1, margin=1)
    stage.feed(*[1] * 8)
    assert stage.kept == [0, 5, 6, 7]


# -- a policy as one small class ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OddFirst(Policy):
    """Odd positions stay longest, an integer ranking."""

    observes_mass: ClassVar[bool] = False

    def priority(self, slots: Slots) -> Tensor:
        return slots.positions % 2


@dataclass(frozen=True)
class OldestStay(Policy):
    """A float ranking, of negative numbers."""

    observes_mass: ClassVar[bool] = False

    def priority(self, slots: Slots) -> Tensor:
        return -slots.positions.double()


@dataclass(frozen=True)
class LastQueries(Policy):
    """TOVA: only the mass of the last forward counts."""

    observes_mass: ClassVar[bool] = True

    def observe(self, score: Tensor, mass: Tensor) -> None:
        score.copy_(mass)

    def priority(self, slots: Slots) -> Tensor:
        return slots.score


@dataclass(frozen=True)
class Decayed(Policy):
    """Old mass fades."""

    factor: float
    observes_mass: ClassVar[bool] = True

    def observe(self, score: Tensor, mass: Tensor) -> None:
        score.mul_(self.factor).add_(mass)

    def priority(self, slots: Slots) -> Tensor:
        return slots.score


def middle(policy: Policy, seen: Sequence[int], heavy_hitters: int) -> list[int]:
    """Of positions, those that a policy of this file would keep."""
    worth = {OddFirst: lambda p: p % 2, OldestStay: lambda p: -p, Equal: lambda p: 0}[type(policy)]
    return sorted(sorted(seen, key=lambda p: (worth(p), p))[len(seen) - heavy_hitters :])


@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("policy", [OddFirst(), OldestStay(), Equal()], ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("margin", [1, 4])
def test_a_new_policy_decides_who_stays(policy: Policy, margin: int, positions: Any) -> None:
    """Prompt, chunk and single tokens, two rows, three layers: what is neither sink nor window is up to the policy."""
    model = model_named("llama")
    cache = evicting(model, policy, positions, sinks=2, window=3, heavy_hitters=4, margin=margin)
    held: list[int] = []
    seen = 0
    for i, n in enumerate([20, *[1] * 7, 6, 1, 1]):
        if len(held) == 9 + margin:
            held = _evict(policy, held, seen)
        feed(model, cache, n, batch=2)
        held += range(seen, seen + n)
        seen += n
        if len(held) > 9 + margin:
            held = _evict(policy, held, seen)
        for layer in range(3):
            assert kept(cache, layer) == [[held, held]] * 2, f"forward {i}"


def _evict(policy: Policy, held: list[int], seen: int) -> list[int]:
    protected = [p for p in held if p < 2 or p >= seen - 3]
    return sorted([*protected, *middle(policy, [p for p in held if p not in protected], 4)])


def test_a_new_policy_generates() -> None:
    model = model_named("llama")
    cache = evicting(model, LastQueries(), sinks=1, window=3, heavy_hitters=3, margin=2)
    ids, mask = left_padded(tokens(2, 15), [15, 6])
    result = generate(model, cache, ids, 12, attention_mask=mask)
    assert result.shape == (2, 27)
    assert cache.stats().slots <= 9


def test_the_last_forward_alone() -> None:
    stage = Stage(LastQueries(), sinks=0, window=1, heavy_hitters=2, margin=2)
    stage.feed(1, 2, 4)
    stage.assert_scores(2 * (1 + ONE / 3 + ONE / 7), 2 * (2 * ONE / 3 + 2 * ONE / 7), 2 * 4 * ONE / 7)
    stage.feed(1)
    stage.assert_scores(*(2 * ONE * weight / 8 for weight in (1, 2, 4, 1)))
    stage.feed(8)
    stage.feed(16)
    assert stage.kept == [1, 2, 4, 5]
    stage.assert_scores(*(2 * ONE * weight / 30 for weight in (2, 4, 8, 16)))


def test_a_policy_with_a_setting() -> None:
    stage = Stage(Decayed(0.5), sinks=1, window=1, heavy_hitters=2, margin=1)
    stage.feed(1, 1)
    stage.assert_scores(3, 1)
    stage.feed(2)
    stage.assert_scores(ONE * 3 / 2 + ONE / 2, ONE / 2 + ONE / 2, 1)
    assert Decayed(0.5) == Decayed(0.5) != Decayed(0.25)


def test_scores_are_the_models_own_attention() -> None:
    """While nothing is evicted: the probabilities that eager attention reports, summed over queries and groups."""
    model = tiny.build("llama", dtype=torch.float64, attn_implementation="eager")
    ids = tokens(2, 12)
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True).attentions
    policies = (HeavyHitters(), LastQueries())
    caches = [evicting(model, policy, sinks=1, window=30, heavy_hitters=2) for policy in policies]
    for cache in caches:
        with torch.no_grad():
            for a, b in ((0, 7), (7, 8), (8, 11), (11, 12)):
                call(model, cache, ids[:, a:b])
    for layer, probabilities in enumerate(attentions):  # [batch, query_heads, queries, keys]
        by_kv_head = probabilities.unflatten(1, (2, 2)).sum(2)
        torch.testing.assert_close(caches[0].scores(layer).double(), by_kv_head.sum(2), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(caches[1].scores(layer).double(), by_kv_head[:, :, -1], rtol=1e-5, atol=1e-6)


# -- what a policy is told and asked -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Witness(Policy):
    """Heavy hitters, and a record of the calls."""

    observed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    asked: list[Slots] = field(default_factory=list)
    observes_mass: ClassVar[bool] = True

    def observe(self, score: Tensor, mass: Tensor) -> None:
        self.observed.append((score.clone(), mass.clone()))
        super().observe(score, mass)

    def priority(self, slots: Slots) -> Tensor:
        self.asked.append(Slots(slots.score.clone(), slots.positions.clone()))
        return slots.score


def test_observe_is_told_once_per_forward_and_layer() -> None:
    model, policy = model_named("llama"), Witness()
    cache = evicting(model, policy, sinks=1, window=3, heavy_hitters=2, margin=2)
    held = 0
    for n in (5, 1, 1, 1, 4):
        policy.observed.clear()
        held = 6 if held == 8 else held
        feed(model, cache, n, batch=2)
        held += n
        assert len(policy.observed) == 3
        for score, mass in policy.observed:
            assert score.shape == mass.shape == (2, 2, held)
            assert score.dtype == mass.dtype == torch.float32 or mass.dtype == torch.float64
            assert bool((score[:, :, held - n :] == 0).all()), "new tokens start at 0"
            assert float(mass.sum()) == pytest.approx(2 * 4 * n, rel=1e-5), "a probability of 1 for each query head"
        held = 6 if held > 8 else held


def test_padding_does_not_vote_and_gets_no_mass() -> None:
    model, policy = model_named("llama"), Witness()
    cache = evicting(model, policy, sinks=1, window=20, heavy_hitters=2, margin=2)
    ids, mask = left_padded(tokens(2, 10), [10, 4])
    with torch.no_grad():
        call(model, cache, ids, attention_mask=mask)
    for _, mass in policy.observed:
        assert float(mass[0].sum()) == pytest.approx(10 * 4, rel=1e-5)
        assert float(mass[1].sum()) == pytest.approx(4 * 4, rel=1e-5)
        assert bool((mass[1, :, :6] == 0).all())


@dataclass(frozen=True)
class Blind(Policy):
    """Wants no mass and fails if it gets some."""

    observes_mass: ClassVar[bool] = False

    def observe(self, score: Tensor, mass: Tensor) -> None:
        raise AssertionError("nobody asked for the mass")

    def priority(self, slots: Slots) -> Tensor:
        assert bool((slots.score == 0).all())
        return slots.positions


def test_a_policy_that_observes_nothing_is_told_nothing() -> None:
    model = model_named("llama")
    cache, like = (
        evicting(model, policy, sinks=1, window=3, heavy_hitters=2, margin=2) for policy in (Blind(), Recency())
    )
    for forwards in ((12, 1, 1, 1), (5, 1)):
        feed(model, cache, *forwards)
        feed(model, like, *forwards)
        assert kept(cache, 1) == kept(like, 1)


@pytest.mark.parametrize(
    "forwards",
    [(20,), (9, 1), (9, 2)],
    ids=str,
)
@pytest.mark.parametrize("margin", [1, 3])
def test_priority_is_asked_with_the_shapes_that_are_promised(forwards: tuple[int, ...], margin: int) -> None:
    """`[batch, kv_heads, slots]`, whichever way an eviction comes about."""
    model, policy = model_named("llama"), Witness()
    cache = evicting(model, policy, sinks=1, window=3, heavy_hitters=4 - margin + 1, margin=margin)
    feed(model, cache, *forwards, batch=2)
    assert cache.stats().evictions >= 1  # two where a full layer is followed by more tokens than its margin
    assert policy.asked
    for slots in policy.asked:
        assert slots.score.dtype == torch.float32 and slots.positions.dtype == torch.int32
        assert slots.score.shape == slots.positions.shape
        assert slots.score.ndim == 3 and slots.score.shape[:2] == (2, 2)


@dataclass(frozen=True)
class Together(Policy):
    """The heads of a layer agree on what to keep."""

    observes_mass: ClassVar[bool] = True

    def priority(self, slots: Slots) -> Tensor:
        # Slot i of all heads is the same token: they have evicted the same ones in the same order.
        return slots.score.sum(dim=1, keepdim=True).expand_as(slots.score)


def test_a_policy_over_all_heads_never_mixes_rows() -> None:
    """A row decides as it does alone, and its heads alike."""
    model, sizes = model_named("llama"), {"sinks": 1, "window": 2, "heavy_hitters": 4, "margin": 2}
    ids = torch.cat((tokens(3, 6, seed=1), tokens(3, 8, seed=2)), dim=1)
    both = evicting(model, Together(), **sizes)
    alone = [evicting(model, Together(), **sizes) for _ in range(3)]
    for a, b in ((0, 6), *((i, i + 1) for i in range(6, 14))):
        with torch.no_grad():
            call(model, both, ids[:, a:b])
            for row, cache in enumerate(alone):
                call(model, cache, ids[row : row + 1, a:b])
        for layer in range(3):
            together = kept(both, layer)
            assert together == [kept(cache, layer)[0] for cache in alone], f"after {b} tokens, layer {layer}"
            assert all(heads[0] == heads[1] for heads in together), f"after {b} tokens, layer {layer}"


# -- the two that come along -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize(("policy", "name"), [(HeavyHitters(), "heavy_hitters"), (Recency(), "recency")])
def test_against_the_oracle(policy: Policy, name: str, positions: Any) -> None:
    sizes: dict[str, Any] = {"sinks": 1, "window": 2, "heavy_hitters": 3, "margin": 2}
    model = model_named("llama")
    cache = evicting(model, policy, positions, **sizes)
    oracle = Oracle(model, **sizes, policy=name, positions=positions)
    pair = Pair(model, cache, oracle, scored=name == "heavy_hitters")
    for i, n in enumerate([11, 1, 1, 1, 5, 1]):
        pair.step(tokens(2, n, seed=i), what=name)


def test_policies_are_values() -> None:
    assert HeavyHitters() == HeavyHitters() and Recency() == Recency() and HeavyHitters() != Recency()
    assert len({HeavyHitters(), HeavyHitters(), Recency()}) == 2
    assert HeavyHitters.observes_mass and not Recency.observes_mass
    with pytest.raises(dataclasses.FrozenInstanceError):
        HeavyHitters().factor = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_priorities_of_the_two() -> None:
    slots = Slots(torch.tensor([[[0.5, 0.25]]]), torch.tensor([[[7, 9]]], dtype=torch.int32))
    assert HeavyHitters().priority(slots).tolist() == [[[0.5, 0.25]]]
    assert Recency().priority(slots).tolist() == [[[7, 9]]]


def test_observing_adds_up_in_place() -> None:
    score, mass = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.5, 0.25]]])
    HeavyHitters().observe(score, mass)
    assert score.tolist() == [[[1.5, 0.25]]] and mass.tolist() == [[[0.5, 0.25]]]


def test_a_policy_without_a_priority_is_none() -> None:
    class Nothing(Policy):
        observes_mass = False

    with pytest.raises(TypeError, match="priority"):
        Nothing()  # pyright: ignore[reportAbstractUsage]


@pytest.mark.parametrize("wrong", [HeavyHitters, "h2o", None, 3])
def test_what_is_no_policy(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"policy=.*HeavyHitters\(\)") as caught:
        EvictingCache(model_named("llama").config, wrong, Budget())
    assert repr(wrong) in str(caught.value)
