"""Causal attention of many new tokens over held slots and themselves, with each key's attention mass.

On a GPU: flash attention over the held slots and over the new tokens, merged by their log-sum-exp, then column sums.
The torch function works through blocks of query rows: a block's logits over all the keys it may see fit the processor's
cache, so one pass gives the softmax, the output and the column sums. Nothing of size queries x keys ever exists.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcache.kernels.column_sums import column_sums_triton
from kvcache.kernels.decode_attention import HALF, sink_share
from kvcache.kernels.flash import flash_triton, merge, share

BLOCK_ELEMENTS = 1 << 21  # logits of one block: 8 MB in fp32, about half of a core's share of a last-level cache
MIN_ROWS = 64  # fewer query rows than this make the matrix products inefficient
ALIGNMENT = 64  # rows of logits start at multiples of this: unaligned ones slow the matrix products by a third


def prefill_attention(
    query: Tensor,
    sources: Sequence[tuple[Tensor, Tensor]],
    scaling: float,
    *,
    valid: Tensor | None = None,
    voters: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    with_mass: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attention where query `i` of `n` sees all keys but the last `n - 1 - i`.

    Args:
        query: `[batch, query_heads, n, head_dim]`.
        sources: `(keys, values)` pairs, `[batch, kv_heads, length_i, (v_)head_dim]`, read as if concatenated; the last
            `n` keys are those of the queries' own tokens.
        scaling, softcap, sink_logits: as in `decode_attention`.
        valid: `[batch, kv_heads or 1, keys]` bool, False where a key is padding; None: none is.
        voters: `[batch, n]` bool or fp32, how much each query's probabilities count as mass; None: all count 1.
        with_mass: whether to return the mass.

    Returns:
        `(output, mass)`: `[batch, n, query_heads, v_head_dim]` in the query's dtype (finite, without meaning, where a
        query sees no valid key), and `[batch, kv_heads, keys]` fp32 (float64 for float64) or None.
    """
    batch, query_heads, n, _ = query.shape
    kv_heads, v_head_dim = sources[0][0].shape[1], sources[0][1].shape[3]
    total = sum(keys.shape[2] for keys, _ in sources)
    plain = not with_mass and valid is None and softcap is None and sink_logits is None
    if plain and n == total and len(sources) == 1:
        ((keys, values),) = sources  # nothing to observe and nothing held: torch's own attention does it all
        output = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scaling, enable_gqa=kv_heads < query_heads
        )
        return output.transpose(1, 2), None
    accumulate = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty(batch, n, query_heads, v_head_dim)
    mass = torch.zeros(batch, kv_heads, total, dtype=accumulate, device=query.device) if with_mass else None
    for row, head, heads in _head_blocks(batch, kv_heads, (query_heads // kv_heads) * min(n, MIN_ROWS) * total):
        _attend_heads(
            query[row].unflatten(0, (kv_heads, -1))[head : head + heads],
            [(keys[row, head : head + heads], values[row, head : head + heads]) for keys, values in sources],
            scaling,
            None if valid is None else (valid[row] if valid.shape[1] == 1 else valid[row, head : head + heads]),
            None if voters is None else voters[row],
            softcap,
            None if sink_logits is None else sink_logits.view(kv_heads, -1)[head : head + heads],
            output[row].unflatten(1, (kv_heads, -1))[:, head : head + heads],
            None if mass is None else mass[row, head : head + heads],
        )
    return output, mass


def _head_blocks(batch: int, kv_heads: int, elements: int) -> Iterator[tuple[int, int, int]]:
    """`(row, first head, heads)`: as many heads at once as keep a block of the fewest rows within its size."""
    heads = max(1, min(kv_heads, BLOCK_ELEMENTS // max(1, elements)))
    for row in range(batch):
        for head in range(0, kv_heads, heads):
            yield row, head, min(heads, kv_heads - head)


def _attend_heads(
    query: Tensor,  # [heads, group, n, head_dim]
    sources: Sequence[tuple[Tensor, Tensor]],  # [heads, length_i, (v_)head_dim]
    scaling: float,
    valid: Tensor | None,  # [heads or 1, keys]
    voters: Tensor | None,  # [n]
    softcap: float | None,
    sink_logits: Tensor | None,  # [heads, group]
    output: Tensor,  # [n, heads, group, v_head_dim], written
    mass: Tensor | None,  # [heads, keys], added to
) -> None:
    heads, group, n, _ = query.shape
    keys, values = (torch.cat(parts, dim=1) for parts in zip(*sources, strict=True))
    total = keys.shape[1]
    rows = min(n, max(MIN_ROWS, BLOCK_ELEMENTS // (heads * group * total) // MIN_ROWS * MIN_ROWS))
    index = torch.arange(rows + ALIGNMENT, device=query.device)
    later = index > index[:rows, None]
    scratch = query.new_empty(heads * group * rows * total)
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        count, first = stop - start, total - n + start  # the block's rows, and the key of its first row
        visible = min(total, -(-(first + count) // ALIGNMENT) * ALIGNMENT)
        block = (query[:, :, start:stop] * scaling).flatten(1, 2)  # [heads, group * count, head_dim]
        logits = scratch[: heads * group * count * visible].view(heads, group * count, visible)
        logits = torch.bmm(block, keys[:, :visible].mT, out=logits)
        if logits.dtype in HALF:
            logits = logits.float()
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        lowest = torch.finfo(logits.dtype).min
        own = logits.view(heads, group, count, visible)[..., first:]
        own.masked_fill_(later[:count, : visible - first], lowest)
        if valid is not None:
            logits.masked_fill_(~valid[:, None, :visible], lowest)
        share = None
        if sink_logits is not None:
            share = sink_share(logits, sink_logits[..., None].expand(heads, group, count).flatten(1))
        probabilities = torch.softmax(logits, dim=-1, out=logits)
        if share is not None:
            probabilities.mul_(share)
        mixed = torch.bmm(probabilities.to(query.dtype), values[:, :visible])
        output[start:stop] = mixed.view(heads, group, count, -1).permute(2, 0, 1, 3)
        if mass is not None:
            mass[:, :visible] += _column_sums(probabilities, voters, start, stop, group)


def _column_sums(probabilities: Tensor, voters: Tensor | None, start: int, stop: int, group: int) -> Tensor:
    """Mass of each visible key, padding queries left out: `[heads, visible]`."""
    if voters is None:
        return probabilities.sum(1)
    weights = voters[start:stop].to(probabilities.dtype).repeat(group)
    return torch.matmul(weights, probabilities)


# ---- Triton


def prefill_attention_triton(
    query: Tensor,
    sources: Sequence[tuple[Tensor, Tensor]],
    scaling: float,
    *,
    valid: Tensor | None = None,
    voters: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    with_mass: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The same by flash attention and column sums; the output is 0 where a query sees no valid key."""
    pieces = list(_pieces(sources, query.shape[2], valid))
    parts = [
        flash_triton(query, piece.keys, piece.values, scaling, piece.offset, valid=piece.valid, softcap=softcap)
        for piece in pieces
    ]
    output, lse = merge(parts)
    if sink_logits is not None:
        with_sink = torch.logaddexp(lse, sink_logits.to(lse.dtype)[:, None])
        output, lse = (output * share(lse, with_sink)).to(output.dtype), with_sink
    if not with_mass:
        return output, None
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    if voters is not None:  # exp(logit - (lse - log weight)) counts by its weight, not at all at an infinite shift
        lse = lse - voters.to(lse.dtype).log()[:, None]
    sums = [
        column_sums_triton(query, piece.keys, lse, scaling, piece.offset, valid=piece.valid, softcap=softcap)
        for piece in pieces
    ]
    return output, torch.cat(sums, dim=-1)


class _Piece(NamedTuple):
    """Keys that all queries see (`offset` is their number), or of the queries' own tokens, so far behind the first."""

    keys: Tensor
    values: Tensor
    offset: int
    valid: Tensor | None


def _pieces(sources: Sequence[tuple[Tensor, Tensor]], n: int, valid: Tensor | None) -> Iterator[_Piece]:
    start = 0
    total = sum(keys.shape[2] for keys, _ in sources)
    for keys, values in sources:
        for part in (slice(0, min(keys.shape[2], total - n - start)), slice(max(0, total - n - start), keys.shape[2])):
            length = part.stop - part.start
            if length <= 0:
                continue
            first = start + part.start
            here = None if valid is None else valid[:, :, first : first + length]
            offset = length if first < total - n else total - n - first
            yield _Piece(keys[:, :, part], values[:, :, part], offset, here)
        start += keys.shape[2]
