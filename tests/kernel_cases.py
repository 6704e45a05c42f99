"""What the kernel tests share: both implementations of every operation, their device and dtypes, random inputs."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvcache.kernels import jit
from kvcache.kernels.choice import TORCH, TRITON

NAN, INF = math.nan, math.inf
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where both run. On a CPU, Triton interprets its kernels."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TORCH_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TRITON_DTYPES = (torch.float32, torch.float16) if INTERPRETED else TORCH_DTYPES[1:]  # bfloat16 is not interpreted right
needs_triton = [
    pytest.mark.skipif(not jit.INSTALLED, reason="Triton is not installed"),
    pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="Triton compiles, and there is no GPU"),
]


def name(value: object) -> str | None:
    """A dtype by its name; the rest as pytest likes."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


BUNDLES = [pytest.param(TORCH, id="torch"), pytest.param(TRITON, id="triton", marks=needs_triton)]
both = pytest.mark.parametrize("kernels", BUNDLES)
TRITON_ONLY = [BUNDLES[1]]
every_dtype = pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        *(pytest.param(TORCH, dtype, id=f"torch-{name(dtype)}") for dtype in TORCH_DTYPES),
        *(pytest.param(TRITON, dtype, id=f"triton-{name(dtype)}", marks=needs_triton) for dtype in TRITON_DTYPES),
    ],
)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def mostly(*shape: int, seed: int) -> Tensor:
    """Random bool, True in four of five."""
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.8).to(DEVICE)


def on_device(values: object, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of these numbers."""
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def cursor(number: int) -> Tensor:
    """A number as the device keeps it for a captured graph."""
    return on_device([number], torch.int32)


def as_models_give(x: Tensor) -> Tensor:
    """The same `[batch, heads, n, dim]` with the strides of a transposed `[batch, n, heads, dim]`."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def part_of_wider(x: Tensor, before: int = 3, behind: int = 5) -> Tensor:
    """The same, cut out of a longer last dimension whose rest is NaN, or for bool the opposite."""
    rest = (~x if x.dtype == torch.bool else torch.full_like(x, NAN))[..., :1]
    wide = torch.cat((rest.expand(*x.shape[:-1], before), x, rest.expand(*x.shape[:-1], behind)), dim=-1)
    return wide[..., before : before + x.shape[-1]]


def buffered(x: Tensor, spare: int = 5) -> Tensor:
    """A buffer of a layer: `[batch, kv_heads, slots + spare, dim]`, NaN in the spare slots."""
    buffer = x.new_full((*x.shape[:2], x.shape[2] + spare, x.shape[3]), NAN)
    buffer[:, :, : x.shape[2]] = x
    return buffer


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(ints), y.contiguous().view(ints))


def leaving_order(priority: Sequence[float], positions: Sequence[int], sinks: int, window_start: int) -> list[int]:
    """Indices of the slots that hold something, who leaves first first."""
    live = [slot for slot, position in enumerate(positions) if position >= 0]

    def rank(slot: int) -> tuple[bool, float, int]:
        position = positions[slot]
        protected = position < sinks or position >= window_start
        return protected, 0.0 if protected else priority[slot], position

    return sorted(live, key=rank)


def random_head(chance: random.Random, slots: int, dead: int, following: int) -> list[int]:
    """Positions of a head in random order, `dead` of its slots empty."""
    positions = [*chance.sample(range(following), slots - dead), *[-1] * dead]
    chance.shuffle(positions)
    return positions
