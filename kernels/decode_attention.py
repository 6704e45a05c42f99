"""Attention of one new token over the live slots, with each slot's attention mass as a by-product."""

import torch
from torch import Tensor


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    *,
    valid: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    with_mass: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention of a single query per row over all given slots.

    The query heads of a KV head's group are the rows of one matrix product, so keys and values are read once.

    Args:
        query: `[batch, query_heads, 1, head_dim]`.
        keys: `[batch, kv_heads, slots, head_dim]`; `values`: `[batch, kv_heads, slots, v_head_dim]`; same dtype.
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
    kv_heads, slots, v_head_dim = keys.shape[1], keys.shape[2], values.shape[3]
    group = query_heads // kv_heads
    grouped = query.reshape(batch * kv_heads, group, head_dim) * scaling
    logits = torch.bmm(grouped, keys.flatten(0, 1).mT)  # [batch * kv_heads, group, slots]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if valid is not None:
        logits = logits.masked_fill(~valid.reshape(batch * kv_heads, 1, slots), torch.finfo(logits.dtype).min)
    probabilities = torch.softmax(logits, dim=-1)
    if sink_logits is not None:
        probabilities = probabilities * sink_share(logits, sink_logits.view(kv_heads, group).repeat(batch, 1))
    output = torch.bmm(probabilities.to(values.dtype), values.flatten(0, 1))
    output = output.view(batch, 1, query_heads, v_head_dim)
    if not with_mass:
        return output, None
    return output, probabilities.sum(1).view(batch, kv_heads, slots)


def sink_share(logits: Tensor, sink_logits: Tensor) -> Tensor:
    """The part of the softmax's total that a sink logit leaves to the slots: exp(lse) / (exp(lse) + exp(sink)).

    Args:
        logits: `[..., slots]`; `sink_logits`: `[...]`.

    Returns:
        `[..., 1]`, a factor on the probabilities taken without the sink.
    """
    lse = torch.logsumexp(logits, dim=-1)
    return torch.sigmoid(lse - sink_logits.to(lse.dtype)).unsqueeze(-1)
