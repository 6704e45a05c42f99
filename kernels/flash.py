"""Attention of many queries together with its log-sum-exp, from which probabilities can be computed again.

torch's own flash attention gives both for the plain case in half precision on a GPU and in any precision on the CPU;
everything else (padding, soft caps, fp32 on a GPU, values of another size than keys) has a kernel here.
"""

import torch
from torch import Tensor

from kvcache.kernels.decode_attention import HALF, LOG2E
from kvcache.kernels.jit import LAUNCH, jit, launcher, next_power_of_2, tanh, tl

BLOCK_ROWS = 256  # queries of one block of the torch function


def flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    offset: int,
    *,
    valid: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention where query `i` sees the keys up to `i + offset`.

    Args:
        query: `[batch, query_heads, n, head_dim]`.
        keys: `[batch, kv_heads, length, head_dim]`; `values`: `[batch, kv_heads, length, v_head_dim]`.
        scaling, softcap: as in `decode_attention`.
        offset: 0 where keys and queries are of the same tokens, at least `length - 1` where every key is earlier,
            negative where the first queries see none.
        valid: `[batch, kv_heads or 1, length]` bool, False where a key is padding; None: none is.

    Returns:
        `(output, lse)`: `[batch, n, query_heads, v_head_dim]` in the query's dtype, 0 where a query sees nothing, and
        `[batch, query_heads, n]` fp32 (float64 for float64), natural logarithm, -inf where a query sees nothing.
    """
    n = query.shape[2]
    if query.is_cpu and _is_plain(query, keys, values, offset, valid, softcap) and query.dtype not in HALF:
        causal = offset == 0 and n > 1
        heads = query.shape[1] // keys.shape[1]
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys.repeat_interleave(heads, 1), values.repeat_interleave(heads, 1), 0.0, causal, scale=scaling
        )
        return output.transpose(1, 2), lse
    wide = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty(query.shape[0], n, query.shape[1], values.shape[3])
    lse = torch.empty(query.shape[:3], dtype=wide, device=query.device)
    for start in range(0, n, BLOCK_ROWS):
        rows = slice(start, min(n, start + BLOCK_ROWS))
        logits = block_logits(query, keys, scaling, offset, rows, valid, softcap)
        lse[:, :, rows] = torch.logsumexp(logits, -1).flatten(1, 2)
        shift = lse[:, :, rows].unflatten(1, logits.shape[1:3])[..., None]
        weights = torch.exp(logits - shift.nan_to_num(neginf=0.0))
        mixed = torch.einsum("bkgns,bksd->bnkgd", weights, values[:, :, : logits.shape[-1]].to(wide))
        output[:, rows] = mixed.flatten(2, 3).to(query.dtype)
    return output, lse


def _is_plain(
    query: Tensor, keys: Tensor, values: Tensor, offset: int, valid: Tensor | None, softcap: float | None
) -> bool:
    """Whether torch's operators can do it: their causal mask is for keys and queries of the same tokens."""
    square = offset == 0 and query.shape[2] == keys.shape[2]
    same_dim = keys.shape[3] == values.shape[3]
    return valid is None and softcap is None and same_dim and (square or offset >= keys.shape[2] - 1)


def block_logits(
    query: Tensor,
    keys: Tensor,
    scaling: float,
    offset: int,
    rows: slice,
    valid: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """`[batch, kv_heads, group, rows, visible]`, at least fp32, -inf where a query of `rows` does not see a key."""
    visible = max(1, min(keys.shape[2], rows.stop + offset))
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query[:, :, rows].unflatten(1, (keys.shape[1], -1)).to(wide)
    logits = torch.einsum("bkgnd,bksd->bkgns", grouped, keys[:, :, :visible].to(wide)) * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    index = torch.arange(visible, device=query.device)
    later = index > torch.arange(rows.start, rows.stop, device=query.device)[:, None] + offset
    hidden = later if valid is None else later | ~valid[:, :, None, None, :visible]
    return logits.masked_fill(hidden, float("-inf"))


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys from the attention over each: `(output, lse)` as of `flash`."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    total = parts[0][0].new_zeros(parts[0][0].shape, dtype=lse.dtype)
    for output, part_lse in parts:
        total += output * share(part_lse, lse)
    return total.to(parts[0][0].dtype), lse


def share(part: Tensor, whole: Tensor) -> Tensor:
    """`exp(part - whole)`, 0 where both are -inf, as a factor on an output: `[batch, n, query_heads, 1]`."""
    return torch.exp(part - whole.nan_to_num(neginf=0.0)).transpose(1, 2)[..., None]


# ---- Triton


@launcher
def flash_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    offset: int,
    *,
    valid: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same by torch's flash attention where it serves, else by our kernel (one launch)."""
    if _is_plain(query, keys, values, offset, valid, softcap) and _torch_serves(query):
        causal = offset == 0 and query.shape[2] > 1
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, causal, False, scale=scaling
        )
        return output.transpose(1, 2), lse[:, :, : query.shape[2]]
    query, keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (query, keys, values))
    batch, query_heads, n, head_dim = query.shape
    kv_heads, length, v_head_dim = values.shape[1:]
    output = torch.empty(batch, n, query_heads, v_head_dim, dtype=query.dtype, device=query.device)
    lse = torch.empty(batch, query_heads, n, dtype=torch.float32, device=query.device)
    if valid is not None:
        valid = valid.expand(batch, kv_heads, length)
    inner, outer = (scaling * LOG2E, 1.0) if softcap is None else (scaling / softcap, softcap * LOG2E)
    rows, block, warps = _tile(max(head_dim, v_head_dim), query.element_size())
    _flash_kernel[(-(-n // rows), batch * query_heads)](
        query,
        keys,
        values,
        query if valid is None else valid,
        output,
        lse,
        n,
        length,
        offset,
        inner,
        outer,
        *query.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        *((0, 0, 0) if valid is None else valid.stride()),
        QUERY_HEADS=query_heads,
        GROUP=query_heads // kv_heads,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        ROWS=rows,
        BLOCK=block,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_V=max(16, next_power_of_2(v_head_dim)),
        HAS_VALID=valid is not None,
        SOFTCAP=softcap is not None,
        **LAUNCH,
        num_warps=warps,
        num_stages=2,
    )
    return output, lse


def _torch_serves(query: Tensor) -> bool:
    """Whether torch has flash attention for such queries: half precision, rows of 16 bytes, sm_80 and later."""
    if not query.is_cuda or query.dtype not in HALF or query.shape[3] % 8 or query.shape[3] > 256:
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def _tile(dim: int, element_size: int) -> tuple[int, int, int]:
    """`(queries, keys, warps)` of a program: what fits the registers of sm_80 and later."""
    if element_size == 4:  # no matrix instructions: every thread multiplies
        return (32, 32, 8) if dim <= 128 else (16, 16, 8)
    return (128, 64, 8) if dim <= 128 else (64, 32, 8)


@jit(do_not_specialize=["n", "length", "offset"])
def _flash_kernel(
    query,  # [batch, QUERY_HEADS, n, HEAD_DIM], strides
    keys,  # [batch, kv_heads, length, HEAD_DIM], strides
    values,  # [batch, kv_heads, length, V_HEAD_DIM], strides
    valid,  # [batch, kv_heads, length] bool, strides
    output,  # [batch, n, QUERY_HEADS, V_HEAD_DIM], written
    lse,  # [batch, QUERY_HEADS, n] fp32, written
    n,
    length,
    offset,
    inner,
    outer,
    qb,
    qh,
    qn,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    mb,
    mh,
    mn,
    QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_VALID: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    batch = (tl.program_id(1) // QUERY_HEADS).to(tl.int64)
    query_head = (tl.program_id(1) % QUERY_HEADS).to(tl.int64)
    head = query_head // GROUP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real_row = row < n
    d = tl.arange(0, BLOCK_D)
    v = tl.arange(0, BLOCK_V)
    q_row = batch * qb + query_head * qh + row.to(tl.int64) * qn
    q = tl.load(query + q_row[:, None] + d[None, :], mask=real_row[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK_V], tl.float32)
    stop = tl.minimum(length, tl.program_id(0) * ROWS + ROWS + offset)
    for first in range(0, stop, BLOCK):
        key = first + tl.arange(0, BLOCK)
        live = key < length
        at = key.to(tl.int64)
        k = tl.load(
            keys + batch * kb + head * kh + at[:, None] * kn + d[None, :],
            mask=live[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * inner
        if SOFTCAP:
            x = tanh(x) * outer
        seen = live[None, :] & (key[None, :] <= row[:, None] + offset)
        if HAS_VALID:
            seen = seen & (tl.load(valid + batch * mb + head * mh + at * mn, mask=live, other=0) != 0)[None, :]
        x = tl.where(seen, x, -float("inf"))
        new_top = tl.maximum(top, tl.max(x, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(x - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        value = tl.load(
            values + batch * vb + head * vh + at[:, None] * vn + v[None, :],
            mask=live[:, None] & (v < V_HEAD_DIM)[None, :],
            other=0.0,
        )
        mixed = mixed * shrink[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        top = new_top
    something = total > 0
    safe = tl.where(something, total, 1.0)
    natural = tl.where(something, (top + tl.log2(safe)) * 0.6931471805599453, -float("inf"))
    tl.store(lse + tl.program_id(1).to(tl.int64) * n + row, natural, mask=real_row)
    out_row = (batch * n + row) * QUERY_HEADS + query_head
    tl.store(
        output + out_row[:, None] * V_HEAD_DIM + v[None, :],
        (mixed / safe[:, None]).to(output.dtype.element_ty),
        mask=real_row[:, None] & (v < V_HEAD_DIM)[None, :],
    )
