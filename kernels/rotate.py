"""Rotary position embedding by any angle: the change from one position to another as a single fp32 rotation."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the leading `2 * pairs` dimensions of each head; the rest passes through (partial rotary).

    Args:
        x: `[..., head_dim]`, any floating dtype; arithmetic is fp32 (float64 for float64).
        cos, sin: `[..., pairs]` broadcastable to `x` without its last dimension.
        interleaved: pair (2i, 2i+1) turns together (GPT-J), otherwise (i, i + pairs) (GPT-NeoX, Llama).

    Returns:
        A new tensor of `x`'s shape and dtype. Source: RoFormer, arXiv 2104.09864, eq. 34.
    """
    pairs = cos.shape[-1]
    turned = x[..., : 2 * pairs].to(torch.promote_types(x.dtype, torch.float32))
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :pairs], turned[..., pairs:]
    new_first, new_second = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        turned = torch.stack((new_first, new_second), dim=-1).flatten(-2)
    else:
        turned = torch.cat((new_first, new_second), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * pairs :]), dim=-1)
