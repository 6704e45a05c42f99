"""Another budget on a cache that holds tokens: the same as that budget from the start, and the bytes are free."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache import Budget, EvictingCache, SinkH2OCache, estimate_bytes
from kvcache.errors import BudgetError
from kvcache.policies import HeavyHitters, Policy
from tests.helpers import left_padded, shared_model, tokens
from tests.test_policy_matrix import all_kept, every_policy, feed

pytestmark = pytest.mark.fast

SMALL = Budget(2, 3, 4, 4)
AMPLE = Budget(2, 3, 80, 4)


def cache_of(budget: Budget, policy: Policy | None = None, positions: Any = "absolute") -> EvictingCache:
    return EvictingCache(shared_model("llama").config, policy or HeavyHitters(), budget, positions)


def storage_bytes(cache: Any) -> int:
    return sum(part.untyped_storage().nbytes() for layer in cache.managed for part in layer.state())


@every_policy
@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("lengths", [[30, 30], [30, 19], [11, 5]], ids=str)  # the last: a row that fits as it is
def test_shrunk_after_reading_equals_read_with_the_small_budget(
    policy: Policy, positions: str, lengths: list[int]
) -> None:
    model = shared_model("llama")
    ids, mask = left_padded(tokens(2, max(lengths)), lengths)
    more = tokens(2, 20, seed=5)
    whole = torch.cat((mask, torch.ones_like(more)), dim=1)
    caches = cache_of(AMPLE, policy, positions), cache_of(SMALL, policy, positions)
    for cache in caches:
        feed(model, cache, ids, ids.shape[1], mask=mask)
    caches[0].resize(SMALL)
    assert all_kept(caches[0]) == all_kept(caches[1])
    after = []
    for cache in caches:
        logits = []
        for start, n in ((0, 7), *((i, 1) for i in range(7, 20))):
            part = whole[:, : ids.shape[1] + start + n]
            with torch.no_grad():
                logits.append(model(more[:, start : start + n], attention_mask=part, past_key_values=cache).logits)
        after.append(torch.cat(logits, dim=1))
    assert torch.allclose(*after, atol=1e-5)
    assert all_kept(caches[0]) == all_kept(caches[1])


def test_bytes_are_free_at_once() -> None:
    model = shared_model("llama")
    for positions in ("absolute", "cache"):
        cache = cache_of(AMPLE, positions=positions)
        feed(model, cache, tokens(2, 60), 60)
        cache.resize(SMALL)
        expected = estimate_bytes(model.config, SMALL, 2, model.dtype, positions)
        assert storage_bytes(cache) == expected == cache.stats().bytes


def test_more_room_keeps_everything() -> None:
    """What is held stays, and tokens to come have the new room."""
    model, ids = shared_model("llama"), tokens(1, 60)
    cache = cache_of(SMALL)
    feed(model, cache, ids[:, :30], 30)
    before = all_kept(cache)
    cache.resize(AMPLE)
    assert all_kept(cache) == before
    feed(model, cache, ids[:, 30:], 10)
    for layer, old in zip(all_kept(cache), before, strict=True):
        for new_head, old_head in zip(layer[0], old[0], strict=True):
            assert new_head == [*old_head, *range(30, 60)]


def test_per_layer_and_before_the_first_token() -> None:
    model = shared_model("llama")
    cache = cache_of(AMPLE)
    layers = len(cache.managed)
    cache.resize(Budget(1, 2, list(range(1, layers + 1)), 1))
    feed(model, cache, tokens(1, 30), 30)
    assert [len(layer[0][0]) for layer in all_kept(cache)] == [3 + i for i in range(1, layers + 1)]
    cache.reset()
    feed(model, cache, tokens(1, 30), 30)
    assert [len(layer[0][0]) for layer in all_kept(cache)] == [3 + i for i in range(1, layers + 1)]


def test_pins_hold() -> None:
    model = shared_model("llama")
    cache = cache_of(AMPLE)
    cache.pin(10, 13)
    feed(model, cache, tokens(1, 40), 40)
    cache.resize(SMALL)
    assert all(set(range(10, 13)) <= set(head) for layer in all_kept(cache) for head in layer[0])


def test_inside_and_outside_inference_mode() -> None:
    model, ids = shared_model("llama"), tokens(1, 40)
    cache = cache_of(AMPLE)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        cache.resize(SMALL)
    feed(model, cache, tokens(1, 10, seed=3))
    assert cache.stats().seen == 50


def test_wrong_budgets_change_nothing() -> None:
    model = shared_model("llama")
    cache = cache_of(AMPLE)
    cache.pin(10, 16)
    feed(model, cache, tokens(1, 40), 40)
    before = all_kept(cache)
    with pytest.raises(BudgetError, match="6 pinned tokens behind the sinks exceed its 9 slots"):
        cache.resize(SMALL)
    with pytest.raises(BudgetError, match="layers"):
        cache.resize(Budget(2, 3, [4, 5]))
    with pytest.raises(ValueError, match="must be a Budget"):
        cache.resize(64)  # pyright: ignore[reportArgumentType]
    assert all_kept(cache) == before and cache.budget == AMPLE


def test_named_caches() -> None:
    model = shared_model("llama")
    cache = SinkH2OCache(model.config, 2, 10, 60)
    feed(model, cache, tokens(1, 50), 50)
    cache.resize(Budget(2, 10, 8, 4))
    assert all(len(head) == 20 for layer in all_kept(cache) for head in layer[0])
