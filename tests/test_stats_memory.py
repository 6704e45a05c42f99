"""kvcache/stats.py and kvcache/memory.py: the numbers of a cache against numbers counted by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvcache import Budget, EvictingCache, LayerBudget, LayerStats, Stats, estimate_bytes
from kvcache.errors import BudgetError, CacheMemoryError, UnsupportedModelError
from kvcache.memory import allocate, allocate_rotated, free_bytes, slot_bytes
from kvcache.models import tiny
from kvcache.policies import HeavyHitters, Recency
from tests.helpers import call, left_padded, managed_layers, native_attention, right_padded, tensors_of, tokens

pytestmark = pytest.mark.fast
SUPPORTED = tuple(name for name in tiny.ARCHITECTURES if name != "deepseek_v3")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@functools.cache
def small(architecture: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny.build(architecture, dtype=dtype, attn_implementation=native_attention(architecture))


def run(model: PreTrainedModel, cache: Any, *forwards: int, batch: int = 1) -> None:
    for i, n in enumerate(forwards):
        with torch.no_grad():
            call(model, cache, tokens(batch, n, seed=i))


def slots_bytes(cache: EvictingCache) -> int:
    """Bytes of all storages that the managed layers keep alive, but for the model's rotary frequencies."""
    tensors = [tensor for index in managed_layers(cache) for tensor in tensors_of(cache.layers[index])]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    if cache.rope is not None:
        storages.pop(cache.rope.inverse_frequencies.untyped_storage().data_ptr(), None)
    return sum(storages.values())


# -- bytes -------------------------------------------------------------------------------------------------------------


def bytes_by_hand(
    architecture: str, capacities: dict[int, int], batch: int, element: int, copies_of_keys: int = 1
) -> int:
    """A slot holds a key, perhaps its copy, and a value of 12 numbers, a score of 4 bytes and a position of 4."""
    kv_heads = 4 if architecture in ("gpt_neox", "gpt2") else 2
    slot = (copies_of_keys + 1) * 12 * element + 8
    return sum(batch * kv_heads * capacity * slot for capacity in capacities.values())


MANAGED = {
    "mistral": (),
    **dict.fromkeys(("gemma2", "gemma3", "gpt_oss", "qwen3_next", "lfm2"), (1, 3)),
}


@pytest.mark.contract
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_estimate_is_what_is_allocated(architecture: str, dtype: torch.dtype) -> None:
    model = small(architecture, dtype)
    layers = model.config.num_hidden_layers
    budget = Budget(sinks=2, window=list(range(3, 3 + layers)), heavy_hitters=4, margin=3)
    capacities = {index: 12 + index for index in MANAGED.get(architecture, range(3))}
    cases: list[tuple[int, Any]] = [(1, "absolute"), (3, "absolute"), (3, "cache"), (2, "auto")]
    for batch, positions in cases:
        if architecture == "gpt2" and positions == "cache":
            continue
        cache = EvictingCache(model.config, HeavyHitters(), budget, positions)
        expected = estimate_bytes(model.config, budget, batch, dtype, positions)
        copies = 2 if positions == "cache" else 1
        assert expected == bytes_by_hand(architecture, capacities, batch, dtype.itemsize, copies)
        assert cache.stats().bytes == slots_bytes(cache) == 0
        run(model, cache, 2, 1, batch=batch)
        layers_bytes = [layer.bytes for layer in cache.stats().layers]
        assert managed_layers(cache) == list(capacities)
        assert cache.stats().bytes == sum(layers_bytes) == expected
        assert slots_bytes(cache) == expected
        cache.reset()
        assert cache.stats().bytes == 0
        assert slots_bytes(cache) == 0


@pytest.mark.parametrize("positions", ["absolute", "cache"])
def test_evictions_allocate_nothing_that_stays(positions: Any) -> None:
    """Prompts longer than the slots, chunks, single tokens at margin 1 and more: the same storages' bytes."""
    model = small("llama")
    for margin in (1, 4):
        budget = Budget(sinks=1, window=3, heavy_hitters=2, margin=margin)
        cache = EvictingCache(model.config, HeavyHitters(), budget, positions)
        expected = estimate_bytes(model.config, budget, 2, torch.float32, positions)
        for forwards in ([50], [1, 1, 1], [7, 1], [30, 1, 1]):
            run(model, cache, *forwards, batch=2)
            assert slots_bytes(cache) == expected


def test_auto_takes_the_second_copy_with_the_switch() -> None:
    model = tiny.build("llama", max_position_embeddings=16)
    budget = Budget(sinks=1, window=4, heavy_hitters=2, margin=2)
    cache = EvictingCache(model.config, HeavyHitters(), budget, "auto")
    for forwards, positions in (([15, 1], "absolute"), ([1], "cache")):
        run(model, cache, *forwards)
        assert cache.stats().positions == positions
        expected = estimate_bytes(model.config, budget, 1, torch.float32, positions)
        assert cache.stats().bytes == slots_bytes(cache) == expected
    cache.reset()
    run(model, cache, 3)
    assert cache.stats().bytes == estimate_bytes(model.config, budget, 1, torch.float32, "absolute")


def test_estimates_by_default_and_by_hand() -> None:
    config = tiny.build_config("llama")
    budget = Budget(sinks=4, window=92, heavy_hitters=0, margin=4)
    assert estimate_bytes(config, budget) == 3 * 2 * 100 * (24 * 2 + 8)
    assert estimate_bytes(config, budget, 5, torch.float64) == 5 * 3 * 2 * 100 * (24 * 8 + 8)
    assert estimate_bytes(config, budget, positions="auto") == estimate_bytes(config, budget)
    assert slot_bytes(64, 32, 2) == 200
    assert slot_bytes(64, 32, 2, ranked=True) == 328


def test_estimates_refuse_what_a_cache_refuses() -> None:
    with pytest.raises(UnsupportedModelError, match="falcon"):
        estimate_bytes(tiny.build_config("falcon"), Budget())
    with pytest.raises(BudgetError, match=r"window lists 2 .* 3 layers"):
        estimate_bytes(tiny.build_config("llama"), Budget(window=[8, 8]))


def test_an_estimate_of_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match=r"relative.*absolute"):
        estimate_bytes(tiny.build_config("llama"), Budget(), positions="relative")


# -- allocating --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allocated_slots(dtype: torch.dtype, inference: bool) -> None:
    """Empty, and usable after an inference mode in which they were made."""
    budget = LayerBudget(1, 3, 2, 4)
    with torch.inference_mode(inference):
        like = torch.ones(2, 3, 5, 8, dtype=dtype)
        keys, values, score, positions = buffers = allocate(budget, (2, 3, 10), (8, 6), like)
        rotated = allocate_rotated(keys)
    assert keys.shape == rotated.shape == (2, 3, 10, 8)
    assert values.shape == (2, 3, 10, 6)
    assert keys.dtype == values.dtype == rotated.dtype == dtype
    assert score.shape == positions.shape == (2, 3, 10)
    assert score.dtype == torch.float32 and bool((score == 0).all())
    assert positions.dtype == torch.int32 and bool((positions == -1).all())
    assert all(buffer.is_contiguous() and not buffer.is_inference() for buffer in (*buffers, rotated))
    assert len({buffer.untyped_storage().data_ptr() for buffer in (*buffers, rotated)}) == 5
    assert all(buffer.untyped_storage().nbytes() == buffer.nbytes for buffer in (*buffers, rotated))


def test_slots_that_were_never_written_reach_no_output() -> None:
    """A row may have empty slots among those in use, never written to: whatever memory held there must not show.
    Eleven slots in use; the second row holds six tokens, and of its empty slots the last lay in no buffer before."""
    model = small("llama")
    budget = Budget(sinks=2, window=4, heavy_hitters=5, margin=1)
    ids, mask = left_padded(tokens(2, 13), [13, 6])
    cache = EvictingCache(model.config, HeavyHitters(), budget, "absolute")
    filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    assert filled
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    try:
        with torch.no_grad():
            for a, b in ((0, 10), (10, 13)):
                call(model, cache, ids[:, a:b], attention_mask=mask[:, :b])
            mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), dim=1)
            logits = call(model, cache, tokens(2, 1), attention_mask=mask).logits
    finally:
        torch.use_deterministic_algorithms(False)
    assert bool(logits.isfinite().all())


def test_more_memory_than_there_is() -> None:
    budget = LayerBudget(1, 10**13 - 5, 2, 2)
    with pytest.raises(CacheMemoryError) as caught:
        allocate(budget, (1, 2, 10**13), (64, 64), torch.ones(1))
    needed = 2 * (128 * 4 + 8) * 10**13
    assert f"{needed:,} bytes" in str(caught.value) and "batch 1, 2 KV heads" in str(caught.value)
    with pytest.raises(CacheMemoryError):
        allocate_rotated(torch.ones(1).expand(1, 2, 10**13, 64))


def test_what_would_fit_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots that the message offers, margin aside, take what is free and no more."""
    monkeypatch.setattr("kvcache.memory.free_bytes", lambda device: 100 * 2 * 3 * (24 * 4 + 8) + 7)
    with pytest.raises(CacheMemoryError, match="at most 96 slots"):
        allocate(LayerBudget(1, 10**13, 2, 4), (2, 3, 10**13), (12, 12), torch.ones(1))
    with pytest.raises(CacheMemoryError, match="at most 0 slots"):
        allocate(LayerBudget(1, 10**13, 2, 400), (2, 3, 10**13), (12, 12), torch.ones(1))


def test_free_bytes() -> None:
    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50


# -- stats -------------------------------------------------------------------------------------------------------------

BYTES = 2 * 6 * (24 * 4 + 8)
"""Of a layer of the small Llama in float32, at 6 slots for a row."""


def recent(model: PreTrainedModel, **budget: Any) -> EvictingCache:
    return EvictingCache(model.config, Recency(), Budget(**budget), "absolute")


def numbers(cache: EvictingCache, layer: int = 0) -> tuple[Any, ...]:
    """slots, capacity, seen, evicted, evictions, oldest_unprotected of a layer that must be like its fellows."""
    rows = [dataclasses.replace(row, layer=0) for row in cache.stats().layers]
    assert rows == rows[:1] * len(rows)
    row = rows[layer]
    return row.slots, row.capacity, row.seen, row.evicted, row.evictions, row.oldest_unprotected


def test_a_count_by_hand() -> None:
    """4 slots and a margin of 2: after the tokens 0 to 6, an eviction has left 0, 3, 4 and 5; then comes 6."""
    model = small("llama")
    cache = recent(model, sinks=1, window=2, heavy_hitters=1, margin=2)
    assert numbers(cache) == (0, 0, 0, 0, 0, None)
    expected = {
        3: (3, 6, 3, 0, 0, None),  # a sink and the window
        2: (5, 6, 5, 0, 0, 1),
        1: (6, 6, 6, 0, 0, 1),
    }
    for n, row in expected.items():
        run(model, cache, n)
        assert numbers(cache) == row
    run(model, cache, 1)
    assert numbers(cache) == (5, 6, 7, 2, 1, 3)
    assert cache.kept_positions(2).tolist() == [[[0, 3, 4, 5, 6]] * 2]
    run(model, cache, 10)
    assert numbers(cache) == (4, 6, 17, 13, 2, 14)
    run(model, cache, 1, 1)
    assert numbers(cache) == (6, 6, 19, 13, 2, 14)
    stats = cache.stats()
    assert (stats.slots, stats.capacity, stats.bytes) == (6, 6, 3 * BYTES)
    assert (stats.seen, stats.evicted, stats.evictions, stats.positions) == (19, 13, 2, "absolute")
    cache.reset()
    assert numbers(cache) == (0, 0, 0, 0, 0, None)


def test_at_margin_1_every_token_evicts_one() -> None:
    model = small("llama")
    cache = recent(model, sinks=1, window=3, margin=1, heavy_hitters=0)
    run(model, cache, *[1] * 9)
    assert numbers(cache) == (5, 5, 9, 4, 4, 5)  # 0, then 5, 6, 7, 8; the window by now begins at 6
    run(model, cache, 6)
    assert numbers(cache) == (4, 5, 15, 11, 6, None)  # one before the forward, when all was full, one after it


def test_evicted_is_summed_over_the_rows_and_padding_is_none() -> None:
    """Rows of 5 and 2 tokens: at the second of two more, the first row gives up 2 of its 6, the other nothing."""
    model = small("llama")
    cache = recent(model, sinks=1, window=2, heavy_hitters=1, margin=2)
    ids, mask = left_padded(tokens(2, 5), [5, 2])
    for i in range(3):
        with torch.no_grad():
            call(model, cache, ids if i == 0 else ids[:, -1:], attention_mask=mask)
        mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), dim=1)
    assert numbers(cache) == (5, 6, 7, 2, 1, 1)  # position 1 of the second row
    cache.batch_select_indices(torch.tensor([1, 1, 1]))
    assert numbers(cache)[3:] == (0, 1, 1)
    assert cache.stats().bytes == 3 * 3 * BYTES


def test_both_rows_evict() -> None:
    model = small("llama")
    cache = recent(model, sinks=1, window=2, heavy_hitters=1, margin=2)
    ids, mask = right_padded(tokens(2, 9), [9, 7])
    with torch.no_grad():
        call(model, cache, ids, attention_mask=mask)
    assert numbers(cache) == (4, 6, 9, (9 - 4) + (7 - 4), 1, 4)  # position 4 of the second row


def test_the_oldest_unprotected_of_any_head() -> None:
    """Heads keep different heavy hitters; the smallest position of them all."""
    model = small("llama")
    cache = EvictingCache(model.config, HeavyHitters(), Budget(sinks=2, window=3, heavy_hitters=4, margin=2))
    run(model, cache, 40, batch=2)
    for layer in cache.stats().layers:
        middle = [p for p in cache.kept_positions(layer.layer).flatten().tolist() if 2 <= p < 37]
        assert len(middle) == 2 * 2 * 4
        assert layer.oldest_unprotected == min(middle)


def test_totals_of_layers_that_differ() -> None:
    """`bytes` is the sum, the others are the largest of any layer."""
    model = small("llama")
    cache = recent(model, sinks=1, window=[2, 9, 4], heavy_hitters=1, margin=[1, 5, 2])
    run(model, cache, 9, 1, 1)
    rows = {row.layer: (row.slots, row.capacity, row.evicted, row.evictions) for row in cache.stats().layers}
    assert rows == {0: (5, 5, 6, 2), 1: (11, 16, 0, 0), 2: (8, 8, 3, 1)}
    stats = cache.stats()
    assert (stats.slots, stats.capacity, stats.evicted, stats.evictions, stats.seen) == (11, 16, 6, 2, 11)
    assert stats.bytes == sum(2 * capacity * (24 * 4 + 8) for capacity in (5, 16, 8))


@pytest.mark.parametrize("architecture", ["gemma2", "qwen3_next", "mistral"])
def test_only_managed_layers_are_counted(architecture: str) -> None:
    model = small(architecture)
    cache = recent(model, sinks=1, window=3, heavy_hitters=0, margin=2)
    run(model, cache, 20, 1)
    assert [row.layer for row in cache.stats().layers] == list(MANAGED[architecture])
    assert cache.stats().seen == (0 if architecture == "mistral" else 21)
    assert cache.get_seq_length() == 21


def test_the_table() -> None:
    """A heading, a line for each layer and a total, with the numbers under their names."""
    rows = (
        LayerStats(3, 1021, 1056, 12_345_678, 70_000, 68_979, 2154, 17),
        LayerStats(11, 8, 16, 512, 70_000, 69_992, 9, None),
    )
    stats = Stats(1021, 1056, 12_346_190, 70_000, 69_992, 2154, "cache", "torch", rows)
    heading, first, second, total = str(stats).split("\n")
    assert heading.split() == ["layer", "slots", "bytes", "seen", "evicted", "evictions", "oldest"]
    assert first.replace("/", " ").split() == ["3", "1021", "1056", "12,345,678", "70000", "68979", "2154", "17"]
    assert second.replace("/", " ").split() == ["11", "8", "16", "512", "70000", "69992", "9", "-"]
    assert total.replace("/", " ").split()[:7] == ["total", "1021", "1056", "12,346,190", "70000", "69992", "2154"]
    assert total.endswith("positions: cache   kernels: torch")
    assert len(heading) == len(first) == len(second)
    for name, number in (("bytes", "12,345,678"), ("seen", "70000"), ("evictions", "2154"), ("oldest", "17")):
        assert heading.index(name) + len(name) == first.index(number) + len(number)


def test_stats_are_plain_and_frozen() -> None:
    model = small("gemma2")
    cache = recent(model, sinks=1, window=3, heavy_hitters=0, margin=2)
    for forwards in ([], [20, 1]):
        run(model, cache, *forwards)
        stats = cache.stats()
        plain = json.loads(json.dumps(stats.to_dict()))
        layers = tuple(LayerStats(**layer) for layer in plain.pop("layers"))
        assert Stats(layers=layers, **plain) == stats
    assert all(type(value) in (int, type(None)) for row in layers for value in dataclasses.astuple(row))
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.seen = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_stats_change_nothing() -> None:
    model = small("llama")
    asked, unasked = (recent(model, sinks=1, window=3, heavy_hitters=2, margin=2) for _ in range(2))
    for i in range(12):
        logits = []
        for cache in (asked, unasked):
            with torch.no_grad():
                logits.append(call(model, cache, tokens(1, 1 + i % 3, seed=i)).logits)
        str(asked.stats())
        assert torch.equal(*logits)
    assert asked.stats() == unasked.stats()
