"""Which slots stay: one int64 per slot that orders a head's slots for eviction, on every device the same way."""

from collections.abc import Sequence

import torch
from torch import Tensor

DEAD = torch.iinfo(torch.int64).min  # padding and dropped slots: always the first to go
PROTECTED = 0x7FFFFFFF  # above the bits of every float, infinity included


def eviction_order(priority: Tensor, positions: Tensor, sinks: int, window_start: Tensor) -> Tensor:
    """Keys that sort a head's slots by who leaves first.

    The upper 32 bits hold the priority, the lower 32 the position, so keys are unique within a head and no device's
    tie-breaking matters: among equal priorities the lowest position leaves first.

    Args:
        priority: `[..., batch, kv_heads, slots]`, floating (compared in fp32) or integer within 31 bits.
        positions: `[..., batch, kv_heads, slots]` int32, -1 where a slot holds nothing.
        sinks: positions below this are protected.
        window_start: `[batch]` int, positions from here on are protected.

    Returns:
        `[..., batch, kv_heads, slots]` int64, the lowest leaves first.
    """
    level = _sortable(priority)
    protected = (positions < sinks) | (positions >= window_start[:, None, None])
    level = level.masked_fill(protected, PROTECTED)
    return level.bitwise_left_shift_(32).bitwise_or_(positions).masked_fill_(positions < 0, DEAD)


def _sortable(priority: Tensor) -> Tensor:
    """int64 in the order of `priority`: a float's bits sort like the float once negative ones are flipped."""
    if not priority.is_floating_point():
        return priority.to(torch.int64)
    bits = (priority.float() + 0.0).view(torch.int32)  # plus zero: a negative zero becomes a positive one
    return (bits ^ ((bits >> 31) & PROTECTED)).to(torch.int64)


def from_host(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small `[len(values)]` tensor; a GPU takes it in without this process waiting for what it still has to do."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def kept_slots(order: Tensor, keep: Sequence[int]) -> Tensor:
    """The `keep[row]` slots of each head that leave last.

    Args:
        order: `[..., batch, kv_heads, slots]` int64 from `eviction_order`.
        keep: how many slots each row keeps, at most `slots`.

    Returns:
        `[..., batch, kv_heads, slots]` bool.
    """
    slots, most = order.shape[-1], max(keep)
    if min(keep) == most and slots - most < most:
        dropped = order.topk(slots - most, largest=False, sorted=False).indices
        return torch.ones_like(order, dtype=torch.bool).scatter_(-1, dropped, False)
    best = order.topk(most, sorted=min(keep) < most).indices
    counts = from_host(keep, torch.int64, order.device)[:, None, None]
    stays = (torch.arange(most, device=order.device) < counts).expand(best.shape)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, best, stays)
