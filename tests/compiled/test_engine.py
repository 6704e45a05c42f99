"""A decode step of the engine on a device that cannot be asked anything: the host code that a GPU would see.

Meta tensors have no data, so `.item()`, `.tolist()`, `bool(tensor)` and `.cpu()` raise: a step that runs on them does
not wait for its device. Prefill may ask (is there padding? are the keys finite?), so it happens on the CPU first.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcache import Budget, EvictingCache
from kvcache.kernels.choice import TRITON, VARIABLE
from kvcache.layer import STATE
from kvcache.models import tiny
from kvcache.policies import HeavyHitters, Policy, Recency
from tests.compiled.fake_gpu import fake_gpu
from tests.helpers import call

META = torch.device("meta")
PROMPT = 21


class Allocations(TorchDispatchMode):
    """Counts the bytes of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {id(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and id(made) not in given and not made._is_view():
                self.bytes += made.nbytes
        return result


def on_meta(policy: Policy, margin: int, positions: Any, batch: int = 2) -> tuple[Any, EvictingCache]:
    """A bf16 model and its cache after a prefill on the CPU, both moved to a device without data."""
    model = tiny.build("llama", dtype=torch.bfloat16)
    cache = EvictingCache(model.config, policy, Budget(2, 6, 8, margin), positions)
    ids = torch.arange(PROMPT).expand(batch, PROMPT)
    with torch.no_grad():
        call(model, cache, ids)
    on_device: Any = model
    on_device.to(META)
    for layer in cache.managed:
        for name in STATE:
            if getattr(layer, name) is not None:
                setattr(layer, name, getattr(layer, name).to(META))
        layer.device, layer.kernels = META, TRITON
        layer.holds = (*layer.holds[:4], META)
    return model, cache


def step(model: Any, cache: EvictingCache, batch: int = 2) -> None:
    with torch.no_grad():
        call(model, cache, torch.zeros(batch, 1, dtype=torch.int64, device=META))


@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("margin", [1, 4])
@pytest.mark.parametrize("policy", [HeavyHitters(), Recency()], ids=["heavy_hitters", "recency"])
def test_a_decode_step_never_waits_and_launches_what_it_must(policy: Policy, margin: int, positions: Any) -> None:
    model, cache = on_meta(policy, margin, positions)
    layers = len(cache.managed)
    with fake_gpu("sm_90") as launches:
        for _ in range(margin):  # until every slot is full
            step(model, cache)
        launches.clear()
        for _ in range(2 * margin):
            step(model, cache)
    counts = Counter(launch.name for launch in launches)
    steps = 2 * margin
    assert counts["_split_kernel"] == counts["_combine_kernel"] == layers * steps
    if margin == 1:
        assert counts["_evict_and_write_kernel"] == layers * steps
        assert counts["_append_kernel"] == 0
    else:
        assert counts["_append_kernel"] == layers * steps
        assert counts["_moves_kernel"] == layers * 2, "one launch for each layer and eviction"
    rotations = 2 * steps + (steps if margin == 1 else 2)  # the query, the new key, and all keys when ranks change
    assert counts["_rerotate_kernel"] == (layers * rotations if positions == "cache" else 0)
    mass_blocks = 1 if policy.observes_mass else 0  # of 128 slots
    assert {launch.grid[1] for launch in launches if launch.name == "_combine_kernel"} == {1 + mass_blocks}


@pytest.mark.parametrize("margin", [1, 4])
def test_a_steady_decode_allocates_nothing_that_grows(margin: int) -> None:
    model, cache = on_meta(HeavyHitters(), margin, "absolute")
    rounds = []
    with fake_gpu("sm_90"):
        for _ in range(5):
            with Allocations() as allocations:
                for _ in range(margin):
                    step(model, cache)
            rounds.append(
                (allocations.bytes, sum(tensor.nbytes for layer in cache.managed for tensor in layer.state()))
            )
    assert len(set(rounds[1:])) == 1, f"bytes made and held in {margin} steps: {rounds}"


def test_small_chunks_take_the_decode_kernels() -> None:
    model, cache = on_meta(HeavyHitters(), 16, "absolute")
    for layer in cache.managed:
        layer.length = 16
    with fake_gpu("sm_90") as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcache.layer._is_finite", lambda keys: True)
        patch.setattr("kvcache.cache._check_position_ids", lambda *args: False)
        with torch.no_grad():
            call(model, cache, torch.zeros(2, 5, dtype=torch.int64, device=META))
    assert {launch.name for launch in launches} == {"_append_kernel", "_split_kernel", "_combine_kernel"}


def test_a_prefill_takes_flash_and_column_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr("kvcache.layer._is_finite", lambda keys: True)
    monkeypatch.setattr("kvcache.cache._check_position_ids", lambda *args: False)
    model: Any = tiny.build("llama", dtype=torch.bfloat16)
    model.to(META)
    cache = EvictingCache(model.config, HeavyHitters(), Budget(2, 6, 8, 4), "absolute")
    with fake_gpu("sm_90") as launches, torch.no_grad():
        call(model, cache, torch.zeros(2, 40, dtype=torch.int64, device=META))
        call(model, cache, torch.zeros(2, 40, dtype=torch.int64, device=META))
    counts = Counter(launch.name for launch in launches)
    layers = len(cache.managed)
    # the second chunk also attends to what is held
    assert counts == {"_flash_kernel": 3 * layers, "_column_sums_kernel": 3 * layers, "_moves_kernel": 2 * layers}


def test_the_meta_device_would_notice_a_wait() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.empty(1, device=META).item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(torch.empty(1, device=META).any())
