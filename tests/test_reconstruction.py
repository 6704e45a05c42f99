"""Scores from repeating the context, against attention probabilities of the whole text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kvcache import Budget, EvictingCache
from kvcache.policies import HeavyHitters, SnapKV
from kvcache.reconstruction import LEAD, score_by_reconstruction
from tests.helpers import left_padded, model_of, shared_model, tokens
from tests.test_policy_matrix import all_kept, cache_of, feed, probabilities

pytestmark = pytest.mark.fast

N = 24
INSTRUCTION = tokens(1, 3, seed=9)[0]


@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize(("chunk", "heavy"), [(100, 200), (10, 200), (10, N - 4), (1, 30)])
def test_scores_are_the_mass_of_the_repeated_queries(chunk: int, heavy: int, positions: Any) -> None:
    """With room for the repetition, and where it overflows the copy."""
    model, ids = shared_model("llama"), tokens(2, N)
    cache = cache_of(model, HeavyHitters(), positions=positions, heavy=heavy)
    feed(model, cache, ids, 15, 9)
    before = copy.deepcopy(cache)
    score_by_reconstruction(model, cache, ids, INSTRUCTION, chunk)
    for layer in cache.managed:
        expected = torch.zeros(2, 2, N, dtype=torch.float64)
        for start in range(0, N, chunk):
            part = ids[:, start : start + chunk]
            lead = ids[:, max(0, start - LEAD) : start]
            text = torch.cat((ids, INSTRUCTION.expand(2, -1), lead, part), 1)
            expected += probabilities(model, text, layer.index)[:, :, -part.shape[1] :, :N].sum(2)
        assert torch.allclose(cache.scores(layer.index).double(), expected, atol=1e-4)
    assert cache.get_seq_length() == N and all_kept(cache) == all_kept(before)
    for mine, theirs in zip(cache.managed, before.managed, strict=True):
        assert mine.policy is cache.policy
        for name in ("keys", "values", "positions"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name))


def test_the_next_eviction_goes_by_it() -> None:
    """25 slots become 16: those with the highest scores and the newest token, others than without the repetition."""
    model, ids, more = shared_model("llama"), tokens(1, N), tokens(1, 2, seed=5)
    cache = EvictingCache(model.config, HeavyHitters(), Budget(0, 1, N - 9, 9), "absolute")
    feed(model, cache, ids, 16)
    without = copy.deepcopy(cache)
    score_by_reconstruction(model, cache, ids, INSTRUCTION)
    feed(model, cache, more[:, :1])
    scored = copy.deepcopy(cache)
    for each, part in ((cache, more[:, 1:]), (without, more)):
        feed(model, each, part)
    for layer in cache.managed:
        for head, kept in enumerate(all_kept(cache)[layer.index][0]):
            score = scored.scores(layer.index)[0, head].tolist()
            best = sorted(range(N), key=lambda p: -score[p])[: N - 9]
            assert kept == sorted([*best, N, N + 1])
    assert all_kept(cache) != all_kept(without)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_layers_of_other_kinds_stay(architecture: str) -> None:
    model, ids = model_of(architecture), tokens(2, N)
    cache = cache_of(model, SnapKV(), heavy=100)
    feed(model, cache, ids, N)
    before = copy.deepcopy(cache)
    score_by_reconstruction(model, cache, ids, INSTRUCTION, 7)
    more = tokens(2, 1, seed=3)
    assert torch.allclose(feed(model, cache, more), feed(model, before, more), atol=1e-9)
    assert bool(cache.scores(cache.managed[0].index)[..., :N].gt(0).all())


def test_refuses() -> None:
    model, ids = shared_model("llama"), tokens(2, N)
    ample = cache_of(model, HeavyHitters(), heavy=100)
    with pytest.raises(ValueError, match="are not the 0 tokens"):
        score_by_reconstruction(model, ample, ids, INSTRUCTION)
    feed(model, ample, ids, N)
    with pytest.raises(ValueError, match=r"\(2, 23\) are not the 24 tokens"):
        score_by_reconstruction(model, ample, ids[:, 1:], INSTRUCTION)
    with pytest.raises(ValueError, match="chunk=0"):
        score_by_reconstruction(model, ample, ids, INSTRUCTION, 0)
    with pytest.raises(ValueError, match="one row of ids"):
        score_by_reconstruction(model, ample, ids, ids)
    small = cache_of(model, HeavyHitters())
    feed(model, small, ids, N)
    with pytest.raises(ValueError, match="does not hold all its tokens"):
        score_by_reconstruction(model, small, ids, INSTRUCTION)
    full = cache_of(model, HeavyHitters(), margin=1, heavy=N - 6)
    feed(model, full, ids, N)
    with pytest.raises(ValueError, match="no free slot"):
        score_by_reconstruction(model, full, ids, INSTRUCTION)
    padded, mask = left_padded(ids, [N, N - 3])
    with_padding = cache_of(model, HeavyHitters(), heavy=100)
    feed(model, with_padding, padded, N, mask=mask)
    with pytest.raises(ValueError, match="or holds padding"):
        score_by_reconstruction(model, with_padding, padded, INSTRUCTION)
