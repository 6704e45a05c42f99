"""Attention mass of every key from queries, keys and the log-sum-exp: the column sums of softmax(QK^T).

The probabilities are computed again, tile by tile, by one of attention's two matrix products; next to no memory is
written, and no q x k matrix exists.
"""

import torch
from torch import Tensor

from kvcache.kernels.decode_attention import LOG2E
from kvcache.kernels.flash import BLOCK_ROWS, block_logits
from kvcache.kernels.jit import LAUNCH, jit, launcher, next_power_of_2, tanh, tl


def column_sums(
    query: Tensor,
    keys: Tensor,
    lse: Tensor,
    scaling: float,
    offset: int,
    *,
    first: int = 0,
    valid: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Probabilities summed over the queries and over the query heads of each key's group.

    Args:
        query, keys, scaling, offset, valid, softcap: as in `flash`.
        lse: `[batch, query_heads, n]` fp32 or float64, natural, over all the keys that a query sees anywhere; inf for a
            query that does not count (padding).
        first: the queries before this one do not count (an observation window of the last `n - first`).

    Returns:
        `[batch, kv_heads, length]` of the log-sum-exp's dtype.
    """
    n, length = query.shape[2], keys.shape[2]
    mass = torch.zeros(*keys.shape[:3], dtype=lse.dtype, device=query.device)
    for start in range(first, n, BLOCK_ROWS):
        rows = slice(start, min(n, start + BLOCK_ROWS))
        logits = block_logits(query, keys, scaling, offset, rows, valid, softcap)
        shift = lse[:, :, rows].unflatten(1, (keys.shape[1], -1))[..., None]
        mass[:, :, : min(length, logits.shape[-1])] += torch.exp(logits - shift).sum((2, 3)).to(lse.dtype)
    return mass


# ---- Triton


@launcher
def column_sums_triton(
    query: Tensor,
    keys: Tensor,
    lse: Tensor,
    scaling: float,
    offset: int,
    *,
    first: int = 0,
    valid: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The same in one launch, one program for each block of keys."""
    query, keys = (x if x.stride(3) == 1 else x.contiguous() for x in (query, keys))
    batch, query_heads, n, head_dim = query.shape
    kv_heads, length = keys.shape[1:3]
    assert lse.is_contiguous() and lse.shape == (batch, query_heads, n), lse.shape
    mass = torch.empty(batch, kv_heads, length, dtype=torch.float32, device=query.device)
    if valid is not None:
        valid = valid.expand(batch, kv_heads, length)
    inner, outer = (scaling * LOG2E, 1.0) if softcap is None else (scaling / softcap, softcap * LOG2E)
    block, rows, warps = _tile(head_dim, query.element_size())
    _column_sums_kernel[(-(-length // block), batch * kv_heads)](
        query,
        keys,
        lse,
        query if valid is None else valid,
        mass,
        n,
        length,
        offset,
        first,
        inner,
        outer,
        *query.stride()[:3],
        *keys.stride()[:3],
        *((0, 0, 0) if valid is None else valid.stride()),
        KV_HEADS=kv_heads,
        GROUP=query_heads // kv_heads,
        HEAD_DIM=head_dim,
        ROWS=rows,
        BLOCK=block,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        HAS_VALID=valid is not None,
        SOFTCAP=softcap is not None,
        **LAUNCH,
        num_warps=warps,
        num_stages=2,
    )
    return mass


def _tile(dim: int, element_size: int) -> tuple[int, int, int]:
    """`(keys, queries, warps)` of a program: what fits the registers of sm_80 and later."""
    if element_size == 4:  # no matrix instructions: every thread multiplies
        return (32, 32, 8) if dim <= 128 else (16, 32, 8)
    return (64, 128, 8) if dim <= 128 else (64, 32, 4)


@jit(do_not_specialize=["n", "length", "offset", "first"])
def _column_sums_kernel(
    query,  # [batch, query_heads, n, HEAD_DIM], strides
    keys,  # [batch, KV_HEADS, length, HEAD_DIM], strides
    lse,  # [batch, query_heads, n] fp32
    valid,  # [batch, KV_HEADS, length] bool, strides
    mass,  # [batch, KV_HEADS, length] fp32, written
    n,
    length,
    offset,
    first,
    inner,
    outer,
    qb,
    qh,
    qn,
    kb,
    kh,
    kn,
    mb,
    mh,
    mn,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_VALID: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    batch = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    head = (tl.program_id(1) % KV_HEADS).to(tl.int64)
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = key < length
    at = key.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    k = tl.load(
        keys + batch * kb + head * kh + at[:, None] * kn + d[None, :],
        mask=live[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    here = tl.zeros([BLOCK], tl.float32)
    start = tl.maximum(first, tl.program_id(0) * BLOCK - offset)  # the first query that sees any of these keys
    for g in range(GROUP):
        query_head = head * GROUP + g
        lse_row = lse + (batch * (KV_HEADS * GROUP) + query_head) * n
        for begin in range(start, n, ROWS):
            row = begin + tl.arange(0, ROWS)
            real_row = row < n
            q_row = batch * qb + query_head * qh + row.to(tl.int64) * qn
            q = tl.load(
                query + q_row[:, None] + d[None, :], mask=real_row[:, None] & (d < HEAD_DIM)[None, :], other=0.0
            )
            x = tl.dot(k, tl.trans(q), input_precision="ieee") * inner
            if SOFTCAP:
                x = tanh(x) * outer
            shift = tl.load(lse_row + row, mask=real_row, other=float("inf")) * 1.4426950408889634
            p = tl.exp2(x - shift[None, :])
            p = tl.where(key[:, None] <= row[None, :] + offset, p, 0.0)
            here += tl.sum(p, 1)
    if HAS_VALID:
        seen = tl.load(valid + batch * mb + head * mh + at * mn, mask=live, other=0)
        here = tl.where(seen != 0, here, 0.0)
    tl.store(mass + (batch * KV_HEADS + head) * length + at, here, mask=live)
