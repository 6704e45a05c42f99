"""Attention of one new token over the live slots, with each slot's attention mass as a by-product."""

from functools import cache

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: int,
    scaling: float,
    *,
    valid: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    with_mass: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention of a single query per row over the first `slots` slots.

    The query heads of a KV head's group are the rows of one matrix product, so keys and values are read once.

    Args:
        query: `[batch, query_heads, 1, head_dim]`.
        keys: `[batch, kv_heads, capacity, head_dim]`; `values`: `[batch, kv_heads, capacity, v_head_dim]`; contiguous,
            of the query's dtype.
        slots: how many slots are in use; those behind are never read.
        scaling: factor on the logits.
        valid: `[batch, kv_heads, slots]` bool, False where a slot holds nothing; None: all hold something.
        softcap: `softcap * tanh(logits / softcap)` before the softmax (Gemma 2).
        sink_logits: `[query_heads]`, a learned logit per head that takes part in the normalisation only (gpt-oss).
        with_mass: whether to return the mass.

    Returns:
        `(output, mass)`: `[batch, 1, query_heads, v_head_dim]` in the query's dtype, and `[batch, kv_heads, slots]`
        fp32 (float64 for float64), the probability summed over the group's query heads, or None.
    """
    batch, query_heads, _, head_dim = query.shape
    kv_heads, capacity, v_head_dim = values.shape[1:]
    group = query_heads // kv_heads
    # One view operation each for what narrow, flatten and mT would take three: they count at this size.
    live_keys = keys.as_strided((batch * kv_heads, head_dim, slots), (capacity * head_dim, 1, head_dim))
    live_values = values.as_strided((batch * kv_heads, slots, v_head_dim), (capacity * v_head_dim, v_head_dim, 1))
    grouped = query.reshape(batch * kv_heads, group, head_dim)
    logits = torch.baddbmm(_ignored(query.dtype, query.device), grouped, live_keys, beta=0, alpha=scaling)
    if logits.dtype in HALF:
        logits = logits.float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if valid is not None:
        logits = logits.masked_fill(~valid.reshape(batch * kv_heads, 1, slots), torch.finfo(logits.dtype).min)
    probabilities = torch.softmax(logits, dim=-1)  # [batch * kv_heads, group, slots]
    if sink_logits is not None:
        probabilities = probabilities * sink_share(logits, sink_logits.view(kv_heads, group).repeat(batch, 1))
    weights = probabilities if query.dtype not in HALF else probabilities.to(query.dtype)
    output = torch.bmm(weights, live_values).view(batch, 1, query_heads, v_head_dim)
    return output, probabilities.sum(1).view(batch, kv_heads, slots) if with_mass else None


@cache
def _ignored(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The first operand of a baddbmm whose beta is 0: never read."""
    return torch.zeros(1, dtype=dtype, device=device)


def sink_share(logits: Tensor, sink_logits: Tensor) -> Tensor:
    """The part of the softmax's total that a sink logit leaves to the slots: exp(lse) / (exp(lse) + exp(sink)).

    Args:
        logits: `[..., slots]`; `sink_logits`: `[...]`.

    Returns:
        `[..., 1]`, a factor on the probabilities taken without the sink.
    """
    lse = torch.logsumexp(logits, dim=-1)
    return torch.sigmoid(lse - sink_logits.to(lse.dtype)).unsqueeze(-1)
