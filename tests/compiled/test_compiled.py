"""Every kernel in every configuration, launched by its own host code and compiled for real targets without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache.kernels import decode_attention as decode_module
from kvcache.kernels.column_sums import column_sums_triton
from kvcache.kernels.compact import apply_moves_triton
from kvcache.kernels.decode_attention import decode_attention_triton
from kvcache.kernels.flash import flash_triton
from kvcache.kernels.rotate import rerotate_triton
from kvcache.kernels.write import append_triton, evict_and_write_triton
from tests.compiled.fake_gpu import SHARED_LIMIT, TARGETS, Launch, fake_gpu, meta, resources

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NVIDIA = [target for target in TARGETS if target.startswith("sm_")]
HEADS, CAPACITY = 4, 1056
MOST_REGISTERS = 255
RANGE_REDUCTION = {"_rerotate_kernel": 192}
"""Bytes of stack that the exact cosine of a large angle takes: an array of digits, not spilled registers."""


def as_models_give(batch: int, heads: int, n: int, dim: int, dtype: torch.dtype) -> Tensor:
    return meta(batch, n, heads, dim, dtype=dtype).transpose(1, 2)


def decode(
    dim: int,
    dtype: torch.dtype = BF16,
    group: int = 4,
    n: int = 1,
    v_dim: int | None = None,
    mass: bool = True,
    cursor: bool = False,
    more: bool = False,
) -> None:
    query = as_models_give(2, HEADS * group, n, dim, dtype)
    keys, values = meta(2, HEADS, CAPACITY, dim, dtype=dtype), meta(2, HEADS, CAPACITY, v_dim or dim, dtype=dtype)
    numbers = meta(2, HEADS, CAPACITY, dtype=torch.int32)
    options: dict[str, Any] = {}
    if more:
        options = {"softcap": 30.0, "positions": numbers, "sink_logits": meta(HEADS * group, dtype=dtype)}
        options["voters"] = meta(2, n, dtype=torch.bool)
    slots = meta(1, dtype=torch.int32) if cursor else 1031
    score = meta(2, HEADS, CAPACITY, dtype=FP32) if mass else None
    decode_attention_triton(query, keys, values, slots, 0.1, score=score, **options)


def flash(dim: int, dtype: torch.dtype = BF16, v_dim: int | None = None, more: bool = False) -> None:
    query, keys = as_models_give(2, HEADS * 4, 513, dim, dtype), as_models_give(2, HEADS, 513, dim, dtype)
    values = as_models_give(2, HEADS, 513, v_dim or dim, dtype)
    options: dict[str, Any] = {"softcap": 30.0, "valid": meta(2, 1, 513, dtype=torch.bool)} if more else {}
    flash_triton(query, keys, values, 0.1, 0, **options)


def sums(dim: int, dtype: torch.dtype = BF16, more: bool = False) -> None:
    query, keys = as_models_give(2, HEADS * 4, 513, dim, dtype), as_models_give(2, HEADS, 513, dim, dtype)
    options: dict[str, Any] = {"softcap": 30.0, "valid": meta(2, HEADS, 513, dtype=torch.bool)} if more else {}
    column_sums_triton(query, keys, meta(2, HEADS * 4, 513, dtype=FP32), 0.1, 0, **options)


def append(dim: int, dtype: torch.dtype = BF16) -> None:
    keys = meta(2, HEADS, CAPACITY, dim, dtype=dtype)
    append_triton(keys, keys, as_models_give(2, HEADS, 1, dim, dtype), as_models_give(2, HEADS, 1, dim, dtype), 1031)


def evict_and_write(dim: int, dtype: torch.dtype = BF16, integers: bool = False) -> None:
    keys, new = meta(2, HEADS, CAPACITY, dim, dtype=dtype), as_models_give(2, HEADS, 1, dim, dtype)
    score, positions = meta(2, HEADS, CAPACITY, dtype=FP32), meta(2, HEADS, CAPACITY, dtype=torch.int32)
    priority = positions if integers else score
    evict_and_write_triton(keys, keys, score, positions, new, new, priority, 4, 508, meta(2, dtype=torch.int32))


def moves(dim: int, dtype: torch.dtype = BF16, chunk: bool = False) -> None:
    keys = meta(2, HEADS, CAPACITY, dim, dtype=dtype)
    score, positions = meta(2, HEADS, CAPACITY, dtype=FP32), meta(2, HEADS, CAPACITY, dtype=torch.int32)
    source, rows = meta(2, HEADS, 32, dtype=torch.int64), meta(2 * HEADS * 32, dtype=torch.int64)
    part = as_models_give(2, HEADS, 513, dim, dtype)
    new = (part, part) if chunk else None
    apply_moves_triton(keys, keys, score, positions, score, positions, source, rows, rows, 1031, new)


def rerotate(dim: int, dtype: torch.dtype = BF16, pairs: int | None = None, interleaved: bool = False) -> None:
    keys = meta(2, HEADS, CAPACITY, dim, dtype=dtype)
    old, new = meta(2, HEADS, CAPACITY, dtype=torch.int32), meta(2, HEADS, CAPACITY, dtype=torch.int64)
    frequencies = meta(pairs or dim // 2, dtype=FP32)
    rerotate_triton(keys, old, new, frequencies, 1.0, interleaved, out=meta(*keys.shape, dtype=dtype))


Configuration = tuple[Callable[..., None], dict[str, Any]]
ATTENTION: list[Configuration] = [
    *((decode, {"dim": dim}) for dim in (64, 80, 96, 128, 256)),
    (decode, {"dim": 128, "dtype": FP16}),
    (decode, {"dim": 128, "mass": False}),
    (decode, {"dim": 128, "more": True}),
    (decode, {"dim": 128, "cursor": True}),
    (decode, {"dim": 192, "v_dim": 128}),
    (decode, {"dim": 128, "group": 1}),
    (decode, {"dim": 128, "group": 8, "n": 16}),
    (decode, {"dim": 256, "group": 8, "n": 16}),
    (decode, {"dim": 64, "dtype": FP32}),
    (decode, {"dim": 128, "dtype": FP32, "group": 8, "n": 16}),
    *((flash, {"dim": dim}) for dim in (64, 80, 128, 256)),
    (flash, {"dim": 128, "more": True}),
    (flash, {"dim": 192, "v_dim": 128}),
    (flash, {"dim": 64, "dtype": FP32}),
    (flash, {"dim": 256, "dtype": FP32}),
    *((sums, {"dim": dim}) for dim in (64, 80, 128, 256)),
    (sums, {"dim": 128, "more": True}),
    (sums, {"dim": 64, "dtype": FP32}),
    (sums, {"dim": 256, "dtype": FP32}),
]
SLOTS: list[Configuration] = [
    (append, {"dim": 128}),
    (append, {"dim": 80, "dtype": FP32}),
    (evict_and_write, {"dim": 128}),
    (evict_and_write, {"dim": 64, "dtype": FP32, "integers": True}),
    (moves, {"dim": 128}),
    (moves, {"dim": 128, "chunk": True}),
    (moves, {"dim": 80, "dtype": FP32}),
    (rerotate, {"dim": 128}),
    (rerotate, {"dim": 80, "pairs": 16}),
    (rerotate, {"dim": 128, "interleaved": True}),
    (rerotate, {"dim": 64, "dtype": FP32}),
]


def described(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    function, options = value
    parts = [
        str(option).removeprefix("torch.") if not isinstance(option, bool) else name for name, option in options.items()
    ]
    return "-".join([function.__name__, *parts])


@pytest.fixture(autouse=True)
def as_many_processors_as_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "processors", lambda device: 132)


def launch(target: str, configuration: Configuration) -> list[Launch]:
    function, options = configuration
    with fake_gpu(target) as launches:
        function(**options)
    assert launches, "the host code launched nothing"
    return launches


@pytest.mark.parametrize("configuration", [*ATTENTION, *SLOTS], ids=described)
@pytest.mark.parametrize("target", NVIDIA)
def test_resources(
    target: str, configuration: Configuration, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """No spills, registers and shared memory within limits, wide loads, matrix instructions where a product is."""
    limit = SHARED_LIMIT[int(target.removeprefix("sm_"))]
    half = configuration[1].get("dtype", BF16) in (BF16, FP16)
    for each in launch(target, configuration):
        taken = resources(each.kernel, tmp_path)
        name = described(configuration)
        numbers = (taken.registers, taken.spilled, taken.shared, taken.wide)
        record_property("kernel", (target, each.name, name, *map(str, numbers), " ".join(taken.tensor_core) or "-"))
        assert taken.spilled <= RANGE_REDUCTION.get(each.name, 0), "registers spill to local memory"
        assert taken.registers <= MOST_REGISTERS
        assert taken.shared <= limit, f"{taken.shared} bytes of shared memory, {limit} exist"
        if each.name in ("_split_kernel", "_flash_kernel", "_column_sums_kernel"):
            assert taken.wide > 0, "keys and values are not read 16 bytes at a time"
            assert bool(taken.tensor_core) == half, "matrix instructions where the inputs are in half precision"
        if each.name == "_moves_kernel":
            assert taken.wide > 0, "entries are not copied 16 bytes at a time"


@pytest.mark.parametrize("configuration", [ATTENTION[3], ATTENTION[16], ATTENTION[24], *SLOTS[::2]], ids=described)
def test_compiles_for_rocm(configuration: Configuration) -> None:
    """For information: AMD's compiler accepts the kernels too."""
    for each in launch("gfx942", configuration):
        assert each.kernel.asm["hsaco"]


def test_programs_fill_the_device() -> None:
    """Few heads are split over the slots, many heads are not."""
    (split, combine) = launch("sm_90", (decode, {"dim": 128}))
    assert split.grid == (2 * HEADS, 17, 1)
    assert combine.grid == (2 * HEADS, 1 + 9, 1), "one program for the output, one for every 128 slots' mass"
    assert len(launch("sm_90", (decode, {"dim": 128, "mass": False}))) == 2
