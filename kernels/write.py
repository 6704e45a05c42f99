"""New keys and values into their slots: behind the live ones, or over the victim of each head."""

import torch
from torch import Tensor

from kvcache.kernels.jit import LAUNCH, jit, launcher, next_power_of_2, tl
from kvcache.kernels.select import eviction_order


def append(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, start: int) -> None:
    """Write `n` tokens into the slots from `start` on, in place.

    Args:
        keys: `[batch, kv_heads, capacity, head_dim]` contiguous; `values`: the same with v_head_dim.
        new_keys, new_values: `[batch, kv_heads, n, (v_)head_dim]`, any strides; `start + n` at most the capacity.
    """
    keys.narrow(2, start, new_keys.shape[2]).copy_(new_keys)
    values.narrow(2, start, new_values.shape[2]).copy_(new_values)


def evict_and_write(
    keys: Tensor,
    values: Tensor,
    score: Tensor,
    positions: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    priority: Tensor,
    sinks: int,
    window: int,
    following: Tensor,
) -> Tensor:
    """Each head's victim gives its slot to the new token, in place (margin 1): nothing moves.

    The victim is the slot of the lowest priority outside sinks and window, among equals the one of the lowest position.

    Args:
        keys, values: `[batch, kv_heads, capacity, (v_)head_dim]` contiguous, every slot in use.
        score: `[batch, kv_heads, capacity]` fp32, set to 0; `positions`: the same int32, set to `following`.
        new_keys, new_values: `[batch, kv_heads, 1, (v_)head_dim]`, any strides.
        priority: `[batch, kv_heads, capacity]`, floating or int32.
        sinks: positions below this are protected; window: as many of the last positions are.
        following: `[batch]` int32, the new token's position in each row.

    Returns:
        `[batch * kv_heads]` int64: the victims as rows of a `[batch * kv_heads * capacity, dim]` view.
    """
    batch, heads, capacity, _ = keys.shape
    victim = eviction_order(priority, positions, sinks, following - window).argmin(-1).flatten()
    rows = victim + torch.arange(batch * heads, device=keys.device) * capacity
    keys.view(-1, keys.shape[3]).index_copy_(0, rows, new_keys.flatten(0, 2))
    values.view(-1, values.shape[3]).index_copy_(0, rows, new_values.flatten(0, 2))
    score.view(-1).index_fill_(0, rows, 0)
    positions.view(-1).index_copy_(0, rows, following.repeat_interleave(heads))
    return rows


# ---- Triton


@launcher
def append_triton(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, start: int | Tensor) -> None:
    """The same in one launch; `start` may be an int32 tensor of one element on the device."""
    batch, heads, n, head_dim = new_keys.shape
    assert keys.is_contiguous() and values.is_contiguous()
    new_keys, new_values = (x if x.stride(3) == 1 else x.contiguous() for x in (new_keys, new_values))
    _append_kernel[(batch * heads, n)](
        keys,
        values,
        new_keys,
        new_values,
        start,
        keys.shape[2],
        *new_keys.stride()[:3],
        *new_values.stride()[:3],
        KV_HEADS=heads,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=values.shape[3],
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_V=next_power_of_2(values.shape[3]),
        CURSOR=isinstance(start, Tensor),
        **LAUNCH,
        num_warps=1,
    )


@launcher
def evict_and_write_triton(
    keys: Tensor,
    values: Tensor,
    score: Tensor,
    positions: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    priority: Tensor,
    sinks: int,
    window: int,
    following: Tensor,
) -> Tensor:
    """The same in one launch, one program for each head."""
    batch, heads, capacity, head_dim = keys.shape
    assert all(x.is_contiguous() for x in (keys, values, score, positions))
    assert positions.dtype == following.dtype == torch.int32 and score.dtype == torch.float32
    priority = priority if priority.dtype == torch.int32 else priority.float()
    assert priority.stride(2) == 1 and priority.stride(0) == heads * priority.stride(1), priority.stride()
    new_keys, new_values = (x if x.stride(3) == 1 else x.contiguous() for x in (new_keys, new_values))
    rows = torch.empty(batch * heads, dtype=torch.int64, device=keys.device)
    _evict_and_write_kernel[(batch * heads,)](
        keys,
        values,
        score,
        positions,
        new_keys,
        new_values,
        priority,
        following,
        rows,
        capacity,
        priority.stride(1),
        sinks,
        window,
        *new_keys.stride()[:2],
        *new_values.stride()[:2],
        KV_HEADS=heads,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=values.shape[3],
        BLOCK=min(1024, next_power_of_2(capacity)),
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_V=next_power_of_2(values.shape[3]),
        FLOATING=priority.dtype == torch.float32,
        **LAUNCH,
        num_warps=4,
    )
    return rows


@jit(do_not_specialize=["start"])
def _append_kernel(
    keys,
    values,
    new_keys,
    new_values,
    start,
    capacity,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CURSOR: tl.constexpr,
):
    if CURSOR:
        first = tl.load(start)
    else:
        first = start
    head = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1)
    batch = head // KV_HEADS
    slot = head * capacity + first + token
    d = tl.arange(0, BLOCK_D)
    v = tl.arange(0, BLOCK_V)
    key = tl.load(new_keys + batch * kb + (head % KV_HEADS) * kh + token * kn + d, mask=d < HEAD_DIM)
    value = tl.load(new_values + batch * vb + (head % KV_HEADS) * vh + token * vn + v, mask=v < V_HEAD_DIM)
    tl.store(keys + slot * HEAD_DIM + d, key, mask=d < HEAD_DIM)
    tl.store(values + slot * V_HEAD_DIM + v, value, mask=v < V_HEAD_DIM)


@jit(do_not_specialize=["sinks", "window"])
def _evict_and_write_kernel(
    keys,
    values,
    score,
    positions,
    new_keys,
    new_values,
    priority,  # [heads, capacity] fp32 or int32, rows a stride apart
    following,  # [batch] int32
    rows,  # [heads] int64, written
    capacity,
    priority_stride,
    sinks,
    window,
    kb,
    kh,
    vb,
    vh,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FLOATING: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    batch = head // KV_HEADS
    position = tl.load(following + batch)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], 0x7FFFFFFFFFFFFFFF, tl.int64)
    best_slot = tl.zeros([BLOCK], tl.int64)
    for first in range(0, capacity, BLOCK):
        slot = first + lane
        live = slot < capacity
        held = tl.load(positions + head * capacity + slot, mask=live, other=0)
        level = tl.load(priority + head * priority_stride + slot, mask=live, other=0)
        if FLOATING:
            bits = (level + 0.0).to(tl.int32, bitcast=True)  # plus zero: a negative zero becomes a positive one
            level = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        level = tl.where((held < sinks) | (held >= position - window), 0x7FFFFFFF, level)
        order = (level.to(tl.int64) << 32) | held.to(tl.int64)
        order = tl.where(held < 0, -0x8000000000000000, order)
        order = tl.where(live, order, 0x7FFFFFFFFFFFFFFF)
        best_slot = tl.where(order < best, slot.to(tl.int64), best_slot)
        best = tl.minimum(order, best)
    least = tl.min(best, 0)
    victim = tl.min(tl.where(best == least, best_slot, 0x7FFFFFFFFFFFFFFF), 0)
    row = head * capacity + victim
    d = tl.arange(0, BLOCK_D)
    v = tl.arange(0, BLOCK_V)
    key = tl.load(new_keys + batch * kb + (head % KV_HEADS) * kh + d, mask=d < HEAD_DIM)
    value = tl.load(new_values + batch * vb + (head % KV_HEADS) * vh + v, mask=v < V_HEAD_DIM)
    tl.store(keys + row * HEAD_DIM + d, key, mask=d < HEAD_DIM)
    tl.store(values + row * V_HEAD_DIM + v, value, mask=v < V_HEAD_DIM)
    tl.store(score + row, 0.0)
    tl.store(positions + row, position)
    tl.store(rows + head, row)
