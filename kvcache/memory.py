"""Bytes: allocating a layer's slots, and saying beforehand what they take."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvcache.budget import Budget, LayerBudget
from kvcache.errors import CacheMemoryError
from kvcache.models.spec import LayerSpec, describe
from kvcache.positions import check_positions

BOOKKEEPING_BYTES = 4 + 4  # of a slot: its score in fp32, its position in int32


def slot_bytes(head_dim: int, v_head_dim: int, element_size: int, ranked: bool = False) -> int:
    """Bytes of one slot of one KV head; `ranked`: a second copy of the key, at its rank in the cache."""
    return (head_dim * (1 + ranked) + v_head_dim) * element_size + BOOKKEEPING_BYTES


def allocate(
    budget: LayerBudget, shape: tuple[int, int, int], dims: tuple[int, int], like: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, score and positions of a layer, never tied to inference mode.

    Zeroed, since a row may have empty slots among those in use: their weight is 0, and 0 times garbage may be NaN.

    Args:
        shape: `(batch, kv_heads, capacity)`. dims: `(head_dim, v_head_dim)`. like: gives dtype and device.

    Raises:
        CacheMemoryError: not enough memory.
    """
    with _or_say_what_fits(shape, slot_bytes(*dims, like.element_size()), budget.margin, like.device):
        keys, values = (torch.zeros(*shape, dim, dtype=like.dtype, device=like.device) for dim in dims)
        score = torch.zeros(shape, dtype=torch.float32, device=like.device)
        positions = torch.full(shape, -1, dtype=torch.int32, device=like.device)
    return keys, values, score, positions


def allocate_rotated(keys: Tensor) -> Tensor:
    """A second buffer like `keys` `[batch, kv_heads, capacity, head_dim]`, for keys at their ranks.

    Raises:
        CacheMemoryError: not enough memory.
    """
    with _or_say_what_fits(tuple(keys.shape[:3]), keys.shape[3] * keys.element_size(), 0, keys.device):
        return torch.zeros_like(keys)


@contextmanager
def _or_say_what_fits(shape: tuple[int, ...], per_slot: int, margin: int, device: torch.device) -> Iterator[None]:
    """Allocate within this: outside inference mode, and with an error that helps when memory is short."""
    batch, heads, capacity = shape
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        free, needed = free_bytes(device), batch * heads * per_slot
        raise CacheMemoryError(
            f"{capacity:,} slots per head (batch {batch}, {heads} KV heads) take {needed * capacity:,} bytes for each "
            f"layer and {device} has {free:,} free: at most {max(0, free // needed - margin):,} slots would fit one "
            "layer; divide by the number of layers and lower the budget or the batch"
        ) from error


def free_bytes(device: torch.device) -> int:
    """Memory that an allocation on `device` could still get, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def estimate_bytes(
    config: PreTrainedConfig,
    budget: Budget,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    positions: str = "absolute",
) -> int:
    """Bytes that the managed layers' slots will take once allocated: keys, values, scores and positions.

    Args:
        positions: "cache" counts the second copy of the keys at their ranks. "auto" is "absolute" until the trained
            length is passed and "cache" from then on, and counted as "absolute".

    Raises:
        UnsupportedModelError, BudgetError, ValueError: as at construction of a cache.
    """
    check_positions(positions)
    spec = describe(config)

    def layer_bytes(index: int, layer: LayerSpec) -> int:
        slots = budget.layer(index, len(spec.layers)).capacity * batch * layer.kv_heads
        return slots * slot_bytes(layer.head_dim, layer.v_head_dim, dtype.itemsize, positions == "cache")

    return sum(layer_bytes(index, layer) for index, layer in enumerate(spec.layers) if layer.managed)
