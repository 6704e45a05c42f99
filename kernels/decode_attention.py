"""Attention of a few new tokens over the live slots, with each slot's attention mass as a by-product.

On a GPU: flash decoding (split over the slots, then combine), two launches. The split also stores the logits, since a
probability needs the log-sum-exp over all splits; the combining programs turn them into mass, each slot by one owner:
no atomics, and 4 bytes per slot and query head beside the keys and values that attention reads anyway.
"""

import math
from functools import cache

import torch
from torch import Tensor

from kvcache.kernels.jit import LAUNCH, jit, launcher, next_power_of_2, tanh, tl

HALF = (torch.float16, torch.bfloat16)
LOG2E = 1 / math.log(2)
MOST_TOKENS = 16  # of one decode
MOST_ROWS = 128  # the same times the query heads of a group: on a GPU these are the rows of one tile
MASS_BLOCK = 128  # slots of one combining program


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: int,
    scaling: float,
    *,
    positions: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    score: Tensor | None = None,
    voters: Tensor | None = None,
) -> Tensor:
    """Softmax attention of the newest `n` tokens of each row over the first `slots` slots.

    The query heads of a KV head's group are the rows of one matrix product, so keys and values are read once.

    Args:
        query: `[batch, query_heads, n, head_dim]`; token `i` sees all slots but the last `n - 1 - i`.
        keys: `[batch, kv_heads, capacity, head_dim]`; `values`: `[batch, kv_heads, capacity, v_head_dim]`; contiguous,
            of the query's dtype.
        slots: how many slots are in use; those behind are never read.
        scaling: factor on the logits.
        positions: `[batch, kv_heads, capacity]` int32, negative where a slot holds nothing; None: all hold something.
        softcap: `softcap * tanh(logits / softcap)` before the softmax (Gemma 2).
        sink_logits: `[query_heads]`, a learned logit per head that takes part in the normalisation only (gpt-oss).
        score: `[batch, kv_heads, capacity]` fp32: each slot's probabilities, summed over the tokens and the group's
            query heads, are added to the first `slots` in place; None: nothing is observed.
        voters: `[batch, n]` bool or fp32, contiguous, how much each token's probabilities count; None: all count 1.

    Returns:
        `[batch, n, query_heads, v_head_dim]` in the query's dtype.
    """
    batch, query_heads, n, head_dim = query.shape
    _, kv_heads, capacity, v_head_dim = values.shape
    group, rows, dtype = query_heads // kv_heads, batch * kv_heads, query.dtype
    # One view operation each for what narrow, flatten and mT would take three: they count at this size.
    live_keys = keys.as_strided((rows, head_dim, slots), (capacity * head_dim, 1, head_dim))
    live_values = values.as_strided((rows, slots, v_head_dim), (capacity * v_head_dim, v_head_dim, 1))
    grouped = query.reshape(rows, group * n, head_dim)
    logits = torch.baddbmm(_ignored(dtype, query.device), grouped, live_keys, beta=0, alpha=scaling)
    if dtype in HALF:
        logits = logits.float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if n > 1 or positions is not None:
        unseen = _unseen(positions, rows, n, group, slots, query.device)
        logits = logits.masked_fill(unseen, torch.finfo(logits.dtype).min)
    probabilities = torch.softmax(logits, dim=-1)  # [batch * kv_heads, group * n, slots]
    if sink_logits is not None:
        sinks = sink_logits.view(kv_heads, group).repeat_interleave(n, 1).repeat(batch, 1)
        probabilities = probabilities * sink_share(logits, sinks)
    weights = probabilities.to(dtype) if dtype in HALF else probabilities
    output = torch.bmm(weights, live_values)
    if score is not None:
        if voters is not None:
            probabilities = probabilities * voters.repeat_interleave(kv_heads, 0).repeat(1, group)[..., None]
        score.as_strided((rows, slots), (capacity, 1)).add_(probabilities.sum(1))
    if n == 1:
        return output.view(batch, 1, query_heads, v_head_dim)
    return output.view(batch, query_heads, n, v_head_dim).transpose(1, 2).contiguous()


@cache
def _ignored(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The first operand of a baddbmm whose beta is 0: never read."""
    return torch.zeros(1, dtype=dtype, device=device)


def _unseen(positions: Tensor | None, rows: int, n: int, group: int, slots: int, device: torch.device) -> Tensor:
    """`[rows or 1, group * n or 1, slots]` bool, True where a slot is empty or later than the token."""
    empty = None if positions is None else (positions[:, :, :slots] < 0).reshape(rows, 1, slots)
    if n == 1 and empty is not None:
        return empty
    slot = torch.arange(slots, device=device)
    later = (slot > slot[slots - n :, None]).repeat(group, 1)
    return later[None] if empty is None else later | empty


def sink_share(logits: Tensor, sink_logits: Tensor) -> Tensor:
    """The part of the softmax's total that a sink logit leaves to the slots: exp(lse) / (exp(lse) + exp(sink)).

    Args:
        logits: `[..., slots]`; `sink_logits`: `[...]`.

    Returns:
        `[..., 1]`, a factor on the probabilities taken without the sink.
    """
    lse = torch.logsumexp(logits, dim=-1)
    return torch.sigmoid(lse - sink_logits.to(lse.dtype)).unsqueeze(-1)


# ---- Triton


@launcher
def decode_attention_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: int | Tensor,
    scaling: float,
    *,
    positions: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    score: Tensor | None = None,
    voters: Tensor | None = None,
) -> Tensor:
    """The same in two launches: fp16, bf16 or fp32, `n` times the group's size up to `MOST_ROWS`.

    `slots` may be an int32 tensor of one element on the device, so that a captured CUDA graph can be replayed for any
    number of slots; the launches then cover the capacity.
    """
    batch, query_heads, n, head_dim = query.shape
    kv_heads, capacity, v_head_dim = values.shape[1:]
    group, heads = query_heads // kv_heads, batch * kv_heads
    assert group * n <= MOST_ROWS, (group, n, MOST_ROWS)
    assert positions is None or (positions.is_contiguous() and positions.shape == keys.shape[:3]), positions
    assert score is None or (score.is_contiguous() and score.dtype == torch.float32)
    assert keys.is_contiguous() and values.is_contiguous() and keys.shape[2] == capacity, (keys.shape, values.shape)
    assert query.dtype == keys.dtype == values.dtype, (query.dtype, keys.dtype, values.dtype)
    if query.stride(3) != 1:
        query = query.contiguous()
    most = capacity if isinstance(slots, Tensor) else slots
    rows = group * n
    tile_rows = max(16, next_power_of_2(rows))
    block, warps, stages = _tile(tile_rows, max(head_dim, v_head_dim), query.element_size())
    splits, blocks_per_split = _splits(most, block, heads, query.device)
    partial = torch.empty(heads, splits, rows, v_head_dim, dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(heads, splits, rows, dtype=torch.float32, device=query.device)
    logits = partial_lse if score is None else torch.empty(heads, rows, capacity, device=query.device)
    output = torch.empty(batch, n, query_heads, v_head_dim, dtype=query.dtype, device=query.device)
    inner, outer = (scaling * LOG2E, 1.0) if softcap is None else (scaling / softcap, softcap * LOG2E)
    shape = {"KV_HEADS": kv_heads, "GROUP": group, "TOKENS": n, "ROWS": tile_rows, "CURSOR": isinstance(slots, Tensor)}
    _split_kernel[(heads, splits)](
        query,
        keys,
        values,
        query if positions is None else positions,
        partial,
        partial_lse,
        logits,
        slots,
        blocks_per_split,
        splits,
        capacity,
        inner,
        outer,
        query.stride(0),
        query.stride(1),
        query.stride(2),
        **shape,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        BLOCK=block,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_V=max(16, next_power_of_2(v_head_dim)),
        HAS_POSITIONS=positions is not None,
        SOFTCAP=softcap is not None,
        WITH_MASS=score is not None,
        **LAUNCH,
        num_warps=warps,
        num_stages=stages,
    )
    mass_blocks = 0 if score is None else -(-most // MASS_BLOCK)
    _combine_kernel[(heads, 1 + mass_blocks)](
        partial,
        partial_lse,
        logits,
        query if sink_logits is None else sink_logits.contiguous(),
        query if voters is None else voters.contiguous(),
        output,
        partial if score is None else score,
        slots,
        splits,
        capacity,
        **shape,
        V_HEAD_DIM=v_head_dim,
        BLOCK=MASS_BLOCK,
        BLOCK_V=min(128, max(16, next_power_of_2(v_head_dim))),
        SPLITS=next_power_of_2(splits),
        HAS_SINKS=sink_logits is not None,
        HAS_VOTERS=voters is not None,
        **LAUNCH,
        num_warps=4 if tile_rows * v_head_dim <= 8192 else 16,
    )
    return output


def _tile(rows: int, dim: int, element_size: int) -> tuple[int, int, int]:
    """`(slots of a block, warps, pipeline stages)`: what fits registers and shared memory of sm_80 and later."""
    block = 64 if dim * element_size <= 256 else 32
    if element_size == 4 and rows >= 64:  # no matrix instructions: every thread multiplies
        return 16, 8, 1
    return block, 4 if rows < 64 else 8, 3 if dim * element_size <= 256 else 2


def _splits(slots: int, block: int, heads: int, device: torch.device) -> tuple[int, int]:
    """`(splits, blocks of each)`: as many programs as keep every processor of the device busy twice."""
    blocks = max(1, -(-slots // block))
    wanted = -(-2 * processors(device) // heads)
    per_split = -(-blocks // max(1, min(blocks, wanted, 128)))
    return -(-blocks // per_split), per_split


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; elsewhere a number that gives several splits."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@jit(do_not_specialize=["slots", "blocks_per_split", "splits"])
def _split_kernel(
    query,  # [batch, query_heads, TOKENS, HEAD_DIM] with strides
    keys,  # [heads, capacity, HEAD_DIM], heads = batch * KV_HEADS
    values,  # [heads, capacity, V_HEAD_DIM]
    positions,  # [heads, capacity] int32
    partial,  # [heads, splits, rows, V_HEAD_DIM] fp32, written: output of the split alone
    partial_lse,  # [heads, splits, rows] fp32, written: its log-sum-exp, base 2
    logits,  # [heads, rows, capacity] fp32, written: base 2
    slots,
    blocks_per_split,
    splits,
    capacity,
    inner,  # factor on the product; base 2 in it unless there is a softcap
    outer,  # factor on the tanh
    query_batch_stride,
    query_head_stride,
    query_token_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,  # rows = GROUP * TOKENS, padded for the matrix product
    CURSOR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WITH_MASS: tl.constexpr,
):
    head = tl.program_id(0)
    split = tl.program_id(1)
    if CURSOR:
        length = tl.load(slots)
    else:
        length = slots
    row = tl.arange(0, ROWS)
    real_row = row < GROUP * TOKENS
    token = row % TOKENS
    query_head = (head % KV_HEADS) * GROUP + row // TOKENS
    d = tl.arange(0, BLOCK_D)
    v = tl.arange(0, BLOCK_V)
    query_row = (
        (head // KV_HEADS).to(tl.int64) * query_batch_stride
        + query_head.to(tl.int64) * query_head_stride
        + token.to(tl.int64) * query_token_stride
    )
    q = tl.load(query + query_row[:, None] + d[None, :], mask=real_row[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    first_slot = head.to(tl.int64) * capacity
    last_seen = length - TOKENS + token
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK_V], tl.float32)
    start = split * blocks_per_split * BLOCK
    stop = tl.minimum(length, start + blocks_per_split * BLOCK)
    for first in range(start, stop, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        live = slot < length
        at = first_slot + slot
        k = tl.load(keys + at[:, None] * HEAD_DIM + d[None, :], mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * inner
        if SOFTCAP:
            x = tanh(x) * outer
        seen = live[None, :] & (slot[None, :] <= last_seen[:, None])  # `live` repeats it: ptxas spills float32 without
        if HAS_POSITIONS:
            seen = seen & (tl.load(positions + at, mask=live, other=-1) >= 0)[None, :]
        x = tl.where(seen, x, -float("inf"))
        if WITH_MASS:
            logits_row = logits + (head.to(tl.int64) * (GROUP * TOKENS) + row) * capacity
            tl.store(logits_row[:, None] + slot[None, :], x, mask=real_row[:, None] & live[None, :])
        new_top = tl.maximum(top, tl.max(x, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(x - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        value = tl.load(
            values + at[:, None] * V_HEAD_DIM + v[None, :], mask=live[:, None] & (v < V_HEAD_DIM)[None, :], other=0.0
        )
        mixed = mixed * shrink[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        top = new_top
    something = total > 0
    lse = tl.where(something, top + tl.log2(tl.where(something, total, 1.0)), -float("inf"))
    mixed = mixed / tl.where(something, total, 1.0)[:, None]
    out_row = (head.to(tl.int64) * splits + split) * (GROUP * TOKENS) + row
    tl.store(partial_lse + out_row, lse, mask=real_row)
    tl.store(
        partial + out_row[:, None] * V_HEAD_DIM + v[None, :],
        mixed,
        mask=real_row[:, None] & (v < V_HEAD_DIM)[None, :],
    )


@jit(do_not_specialize=["slots", "splits"])
def _combine_kernel(
    partial,
    partial_lse,
    logits,
    sink_logits,  # [query_heads]
    voters,  # [batch, TOKENS] bool or fp32
    output,  # [batch, TOKENS, query_heads, V_HEAD_DIM], written
    score,  # [heads, capacity] fp32, added to
    slots,
    splits,
    capacity,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CURSOR: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_VOTERS: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.arange(0, ROWS)
    real_row = row < GROUP * TOKENS
    token = row % TOKENS
    query_head = (head % KV_HEADS) * GROUP + row // TOKENS
    split = tl.arange(0, SPLITS)
    lse_row = partial_lse + head.to(tl.int64) * splits * (GROUP * TOKENS) + row
    parts = tl.load(
        lse_row[None, :] + split[:, None] * (GROUP * TOKENS),
        mask=(split < splits)[:, None] & real_row[None, :],
        other=-float("inf"),
    )
    sink = tl.full([ROWS], -float("inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sink_logits + query_head, mask=real_row, other=0.0).to(tl.float32) * 1.4426950408889634
    top = tl.maximum(tl.max(parts, 0), sink)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.exp2(sink - base) + tl.sum(tl.exp2(parts - base[None, :]), 0)
    # A row that sees nothing gets an infinite log-sum-exp: all its weights are 0.
    something = total > 0.0
    lse = tl.where(something, base + tl.log2(tl.where(something, total, 1.0)), float("inf"))
    if tl.program_id(1) == 0:
        out_row = ((head // KV_HEADS).to(tl.int64) * TOKENS + token) * (KV_HEADS * GROUP) + query_head
        for first in tl.static_range(0, V_HEAD_DIM, BLOCK_V):  # pyright: ignore[reportGeneralTypeIssues]
            v = first + tl.arange(0, BLOCK_V)
            inside = real_row[:, None] & (v < V_HEAD_DIM)[None, :]
            mixed = tl.zeros([ROWS, BLOCK_V], tl.float32)
            for s in range(splits):
                weight = tl.exp2(tl.load(lse_row + s * (GROUP * TOKENS), mask=real_row, other=-float("inf")) - lse)
                at = (head.to(tl.int64) * splits + s) * (GROUP * TOKENS) + row
                part = tl.load(partial + at[:, None] * V_HEAD_DIM + v[None, :], mask=inside, other=0.0)
                mixed += weight[:, None] * part
            tl.store(
                output + out_row[:, None] * V_HEAD_DIM + v[None, :], mixed.to(output.dtype.element_ty), mask=inside
            )
    else:
        if CURSOR:
            length = tl.load(slots)
        else:
            length = slots
        slot = (tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)
        live = slot < length
        logits_row = logits + (head.to(tl.int64) * (GROUP * TOKENS) + row) * capacity
        x = tl.load(logits_row[:, None] + slot[None, :], mask=real_row[:, None] & live[None, :], other=-float("inf"))
        p = tl.exp2(x - lse[:, None])
        if HAS_VOTERS:
            p *= tl.load(voters + (head // KV_HEADS) * TOKENS + token, mask=real_row, other=0).to(tl.float32)[:, None]
        here = score + head.to(tl.int64) * capacity + slot
        tl.store(here, tl.load(here, mask=live, other=0.0) + tl.sum(p, 0), mask=live)
