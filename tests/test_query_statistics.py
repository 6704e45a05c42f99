"""TriAttention and ExpectedAttention against their papers' formulas, written out in complex numbers and loops."""

from __future__ import annotations

import cmath
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache import Budget, EvictingCache
from kvcache.errors import UnsupportedModelError
from kvcache.kernels.rotate import cos_sin, rotate
from kvcache.models.rope import Rope
from kvcache.policies import ExpectedAttention, Policy, Queries, QueryStatistics, Slots, TriAttention
from tests.helpers import left_padded, model_of, shared_model, tokens
from tests.test_policy_matrix import cache_of, feed

pytestmark = pytest.mark.fast

BOTH = [TriAttention(), ExpectedAttention(future=5)]
ROPES = {
    "half-split": Rope(torch.tensor([1.0, 0.3, 0.02]), 1.0, False),
    "interleaved": Rope(torch.tensor([1.0, 0.3, 0.02]), 1.0, True),
    "partial": Rope(torch.tensor([0.9, 0.05]), 1.0, False),
    "scaled": Rope(torch.tensor([1.0, 0.3, 0.02]), 1.3, False),
}
DIM, HEADS, GROUP, N, SLOTS, SCALING = 6, 2, 3, 11, 9, 0.4


def stage(rope: Rope, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys before rotation, values, positions of the queries and of the keys."""
    generator = torch.Generator().manual_seed(seed)
    plain_query = torch.randn(1, HEADS * GROUP, N, DIM, generator=generator, dtype=torch.float64) + 0.5
    plain_key = torch.randn(1, HEADS, SLOTS, DIM, generator=generator, dtype=torch.float64) - 0.3
    values = torch.randn(1, HEADS, SLOTS, DIM, generator=generator, dtype=torch.float64)
    at = torch.arange(N, dtype=torch.int32)[None]
    positions = torch.stack([torch.randperm(N, generator=generator)[:SLOTS] for _ in range(HEADS)])[None].int()
    return plain_query, plain_key, values, at, positions


def turned(x: Tensor, at: Tensor, rope: Rope) -> Tensor:
    cos, sin = (part.double() for part in cos_sin(at, rope.inverse_frequencies, rope.scaling))
    return rotate(x, cos, sin, rope.interleaved)


def slots_and_memory(policy: Policy, rope: Rope, cuts: tuple[int, ...] = (N,)) -> tuple[Slots, Any]:
    plain_query, plain_key, values, at, positions = stage(rope)
    query, keys = turned(plain_query, at[:, None], rope), turned(plain_key, positions, rope)
    memory: dict[str, Tensor] = {}
    start = 0
    for n in cuts:
        part = slice(start, start + n)
        policy.observe_queries(memory, Queries(query[:, :, part], at[:, part], None, HEADS, rope, SCALING, seen=start))
        start += n
    slots = Slots(torch.zeros(1, HEADS, SLOTS), positions, torch.tensor([N]), keys, values, positions, memory, rope)
    return slots, (plain_query, plain_key, values, positions)


def complexes(x: list[float], rope: Rope) -> tuple[list[complex], list[float]]:
    """The rotated pairs as complex numbers, and the other dimensions."""
    count = len(rope.inverse_frequencies)
    if rope.interleaved:
        return [complex(x[2 * i], x[2 * i + 1]) for i in range(count)], x[2 * count :]
    return [complex(x[i], x[i + count]) for i in range(count)], x[2 * count :]


def tri_attention_oracle(
    inputs: Any, rope: Rope, offsets: tuple[int, ...], t: list[int], at: Tensor
) -> list[list[float]]:
    """[head][slot]; t: per head, the next position; at: `[HEADS, SLOTS]` where each key is seen."""
    plain_query, plain_key, _, _ = inputs
    square = rope.scaling**2
    result = []
    for head in range(HEADS):
        standardised = []
        for g in range(GROUP):
            queries = [complexes(row, rope) for row in plain_query[0, head * GROUP + g].tolist()]
            count = len(rope.inverse_frequencies)
            centre = [sum(q[0][f] for q in queries) / N for f in range(count)]
            length = [sum(abs(q[0][f]) for q in queries) / N for f in range(count)]
            rest = [sum(q[1][i] for q in queries) / N for i in range(DIM - 2 * count)]
            scores = []
            for slot in range(SLOTS):
                key, still = complexes(plain_key[0, head, slot].tolist(), rope)
                total = 0.0
                for d in offsets:
                    for f, w in enumerate(rope.inverse_frequencies.double().tolist()):
                        angle = w * (t[head] - int(at[head, slot]) + d)
                        angle += cmath.phase(centre[f]) - cmath.phase(key[f])
                        total += abs(centre[f]) * abs(key[f]) * square * math.cos(angle) / len(offsets)
                for f in range(count):
                    total += (length[f] - abs(centre[f])) * abs(key[f]) * square
                scores.append(total + sum(a * b for a, b in zip(rest, still, strict=True)))
            mean = sum(scores) / SLOTS
            deviation = (sum((x - mean) ** 2 for x in scores) / SLOTS) ** 0.5
            standardised.append([(x - mean) / deviation for x in scores])
        result.append([max(column) for column in zip(*standardised, strict=True)])
    return result


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_tri_attention_is_the_formula(rope: Rope) -> None:
    offsets = (1, 2, 4, 8)
    policy = TriAttention(offsets)
    slots, inputs = slots_and_memory(policy, rope)
    t = [int(slots.positions[0, head].max()) + 1 for head in range(HEADS)]
    expected = tri_attention_oracle(inputs, rope, offsets, t, slots.positions[0])
    assert policy.priority(slots)[0].tolist() == [pytest.approx(row, abs=1e-5) for row in expected]


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_tri_attention_at_ranks(rope: Rope) -> None:
    """With positions in the cache, distances are those between ranks."""
    policy = TriAttention((1, 2, 4))
    slots, inputs = slots_and_memory(policy, rope)
    rank = slots.positions[0].argsort(-1).argsort(-1)
    expected = tri_attention_oracle(inputs, rope, (1, 2, 4), [SLOTS] * HEADS, rank)
    assert policy.priority(slots._replace(ranked=True))[0].tolist() == [
        pytest.approx(row, abs=1e-5) for row in expected
    ]


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_expected_attention_is_the_formula(rope: Rope, ranked: bool) -> None:
    """The mean rotation as a matrix, the Gaussian's moments from all queries."""
    policy = ExpectedAttention(future=4)
    slots, (plain_query, plain_key, values, _) = slots_and_memory(policy, rope)
    slots = slots._replace(ranked=ranked)
    at = slots.positions[0].argsort(-1).argsort(-1) if ranked else slots.positions[0]
    for head in range(HEADS):
        t = SLOTS if ranked else int(slots.positions[0, head].max()) + 1
        identity = torch.eye(DIM, dtype=torch.float64)
        rotations = [turned(identity, torch.full((DIM,), t + d), rope).T for d in range(4)]
        mean_rotation = torch.stack(rotations).mean(0)
        keys = turned(plain_key[0, head], at[head], rope)
        weights = torch.zeros(SLOTS, dtype=torch.float64)
        for g in range(GROUP):
            x = plain_query[0, head * GROUP + g] * SCALING
            mean = mean_rotation @ x.mean(0)
            covariance = mean_rotation @ torch.cov(x.T, correction=0) @ mean_rotation.T
            logits = [float(mean @ k + k @ covariance @ k / 2) for k in keys]
            weights += torch.tensor(logits, dtype=torch.float64).softmax(0) / GROUP
        expected = weights * values[0, head].norm(dim=-1)
        assert torch.allclose(policy.priority(slots)[0, head], expected, atol=1e-6)


@pytest.mark.parametrize("policy", BOTH, ids=["tri", "expected"])
@pytest.mark.parametrize("cuts", [(4, 7), (1,) * N, (10, 1)], ids=str)
def test_statistics_do_not_depend_on_the_cuts(policy: Policy, cuts: tuple[int, ...]) -> None:
    once, _ = slots_and_memory(policy, ROPES["scaled"])
    parts, _ = slots_and_memory(policy, ROPES["scaled"], cuts)
    assert torch.allclose(policy.priority(once), policy.priority(parts), atol=1e-9)


@pytest.mark.parametrize("policy", [TriAttention(enough=6), ExpectedAttention(enough=6)], ids=["tri", "expected"])
def test_single_tokens_count_until_enough_are_seen(policy: Any) -> None:
    few, _ = slots_and_memory(policy, ROPES["half-split"], (1,) * N)
    assert float(few.memory["query_count"]) == 6  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.parametrize("policy", BOTH, ids=["tri", "expected"])
def test_padding_counts_for_nothing(policy: Policy) -> None:
    model = shared_model("llama")
    padded, mask = left_padded(tokens(2, 30), [30, 17])
    together, alone = cache_of(model, policy), cache_of(model, policy)
    feed(model, together, padded, 30, mask=mask)
    feed(model, alone, padded[1:, 13:], 17)
    for one, other in zip(together.managed, alone.managed, strict=True):
        for name, part in other.memory.items():
            assert torch.allclose(one.memory[name][1:], part, atol=1e-3)  # RoPE is float32, at other positions


@pytest.mark.parametrize("policy", BOTH, ids=["tri", "expected"])
@pytest.mark.parametrize("architecture", ["gpt_neox", "gemma2", "qwen3", "phi3"])
def test_statistics_are_those_of_the_models_own_queries(policy: Policy, architecture: str) -> None:
    """Undoing the rotation gives what a model without positions (all of them 0) would have as queries."""
    model, ids = model_of(architecture), tokens(1, 12)
    still, moving = (EvictingCache(model.config, policy, Budget(1, 2, 60)) for _ in range(2))
    with torch.no_grad():
        model(ids[:, :1], past_key_values=moving)
        model(ids[:, :1], past_key_values=still)
    first = moving.managed[0].memory
    for name, part in still.managed[0].memory.items():
        assert torch.allclose(first[name], part)
    with torch.no_grad():  # the same token further on, in the first layer: the same query before rotation
        later = EvictingCache(model.config, policy, Budget(1, 2, 60))
        model(ids[:, :1].expand(1, 12), past_key_values=later)
    for name, part in later.managed[0].memory.items():
        assert torch.allclose(part / 12, still.managed[0].memory[name], atol=1e-4)


def test_saved_statistics_start_another_cache(tmp_path: Path) -> None:
    model, ids = shared_model("llama"), tokens(2, 40)
    read = cache_of(model, TriAttention())
    feed(model, read, ids, 40)
    QueryStatistics.of(read).save(tmp_path / "statistics.safetensors")
    cache = cache_of(model, TriAttention())
    QueryStatistics.load(tmp_path / "statistics.safetensors").give(cache)
    feed(model, cache, tokens(3, 30, seed=9), 10)
    for layer, before in zip(cache.managed, read.managed, strict=True):
        assert layer.memory["query_count"].tolist() == [80 + 30] * 3
        assert bool((layer.memory["query_magnitude"] > before.memory["query_magnitude"].sum(0)).all())
    with pytest.raises(ValueError, match="has seen tokens already"):
        QueryStatistics.of(read).give(cache)


def test_wrong_statistics(tmp_path: Path) -> None:
    model = shared_model("llama")
    with pytest.raises(ValueError, match="has gathered no statistics"):
        QueryStatistics.of(cache_of(model, TriAttention()))
    with pytest.raises(ValueError, match=r"statistics of the layers \[0\]"):
        QueryStatistics({0: {}}).give(cache_of(model, TriAttention()))
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, str(tmp_path / "other.safetensors"))
    with pytest.raises(ValueError, match="holds 'weight' and so no query statistics"):
        QueryStatistics.load(tmp_path / "other.safetensors")


def test_wrong_options_and_models() -> None:
    with pytest.raises(ValueError, match="distances ahead"):
        TriAttention(())
    with pytest.raises(ValueError, match="at least 1 position ahead"):
        ExpectedAttention(0)
    with pytest.raises(UnsupportedModelError, match="rotary"):
        EvictingCache(model_of("gpt2").config, TriAttention(), Budget())
