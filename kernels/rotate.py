"""Rotary position embedding by any angle: the change from one position to another as a single fp32 rotation."""

import torch
from torch import Tensor

from kvcache.kernels.jit import LAUNCH, jit, launcher, next_power_of_2, tl


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


def rerotate(
    x: Tensor,
    old: Tensor,
    new: Tensor,
    frequencies: Tensor,
    scaling: float,
    interleaved: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate from the positions `old`, at which a model rotated `x`, to the positions `new`.

    The model's cos and sin are those of fp32 angles, rounded to its dtype; the same numbers undo its rotation exactly
    (their rounding divides out), also where fp32 angles are far from the true ones.

    Args:
        x: `[batch, heads, n, head_dim]`, any strides.
        old, new: `[batch, heads or 1, n]` int.
        frequencies: `[pairs]` fp32, radians per position. scaling: the model's factor on cos and sin.
        interleaved: as in `rotate`.
        out: `[batch, heads, n, head_dim]` to write to; None: a new tensor.

    Returns:
        `out`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    old_cos, old_sin = (part.to(x.dtype).to(wide) for part in cos_sin(old, frequencies, scaling))
    new_cos, new_sin = (part.to(wide) for part in cos_sin(new, frequencies, scaling))
    norm = old_cos.square() + old_sin.square()
    cos = (new_cos * old_cos + new_sin * old_sin) / norm
    sin = (new_sin * old_cos - new_cos * old_sin) / norm
    rotated = rotate(x, cos, sin, interleaved)
    return rotated if out is None else out.copy_(rotated)


def cos_sin(positions: Tensor, frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """`[..., pairs]` fp32 cosines and sines of integer positions `[...]`, by the same fp32 product as a model's."""
    angles = positions.float()[..., None] * frequencies.to(positions.device, non_blocking=True)
    return angles.cos() * scaling, angles.sin() * scaling


# ---- Triton

BLOCK = 8  # rows of one program


@launcher
def rerotate_triton(
    x: Tensor,
    old: Tensor,
    new: Tensor,
    frequencies: Tensor,
    scaling: float,
    interleaved: bool,
    out: Tensor | None = None,
) -> Tensor:
    """The same in one launch."""
    if x.stride(3) != 1:
        x = x.contiguous()
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert out.stride(3) == 1, out.stride()
    batch, heads, n, head_dim = x.shape
    old, new = (positions.expand(batch, heads, n) for positions in (old, new))
    pairs = frequencies.numel()
    rest = head_dim - 2 * pairs
    _rerotate_kernel[(batch * heads, -(-n // BLOCK))](
        x,
        out,
        old,
        new,
        frequencies.to(x.device).contiguous(),
        scaling,
        n,
        *x.stride()[:3],
        *out.stride()[:3],
        *old.stride(),
        *new.stride(),
        HEADS=heads,
        PAIRS=pairs,
        REST=rest,
        BLOCK=BLOCK,
        BLOCK_P=next_power_of_2(pairs),
        BLOCK_R=next_power_of_2(max(1, rest)),
        INTERLEAVED=interleaved,
        **LAUNCH,
        num_warps=4,
    )
    return out


@jit(do_not_specialize=["n"])
def _rerotate_kernel(
    x,  # [batch, HEADS, n, head_dim], strides
    out,
    old,  # [batch, HEADS, n] int, strides
    new,
    frequencies,  # [PAIRS] fp32
    scaling,
    n,
    xb,
    xh,
    xn,
    ob,
    oh,
    on,
    old_b,
    old_h,
    old_n,
    new_b,
    new_h,
    new_n,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,  # dimensions behind the rotated ones
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    batch = (tl.program_id(0) // HEADS).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    row = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live = row < n
    pair = tl.arange(0, BLOCK_P)
    inside = live[:, None] & (pair < PAIRS)[None, :]
    frequency = tl.load(frequencies + pair, mask=pair < PAIRS, other=0.0)[None, :]
    old_at = tl.load(old + batch * old_b + head * old_h + row * old_n, mask=live, other=0).to(tl.float32)
    new_at = tl.load(new + batch * new_b + head * new_h + row * new_n, mask=live, other=0).to(tl.float32)
    dtype = x.dtype.element_ty
    old_angle = old_at[:, None] * frequency
    new_angle = new_at[:, None] * frequency
    old_cos = (tl.cos(old_angle) * scaling).to(dtype).to(tl.float32)
    old_sin = (tl.sin(old_angle) * scaling).to(dtype).to(tl.float32)
    new_cos = tl.cos(new_angle) * scaling
    new_sin = tl.sin(new_angle) * scaling
    norm = old_cos * old_cos + old_sin * old_sin
    norm = tl.where(inside, norm, 1.0)
    cos = (new_cos * old_cos + new_sin * old_sin) / norm
    sin = (new_sin * old_cos - new_cos * old_sin) / norm
    x_row = (x + batch * xb + head * xh + row * xn)[:, None]
    out_row = (out + batch * ob + head * oh + row * on)[:, None]
    if INTERLEAVED:
        at_first = 2 * pair[None, :]
        at_second = at_first + 1
    else:
        at_first = pair[None, :]
        at_second = at_first + PAIRS
    first = tl.load(x_row + at_first, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_row + at_second, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_row + at_first, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(out_row + at_second, (second * cos + first * sin).to(dtype), mask=inside)
    if REST > 0:
        r = tl.arange(0, BLOCK_R)
        beyond = live[:, None] & (r < REST)[None, :]
        at = 2 * PAIRS + r[None, :]
        tl.store(out_row + at, tl.load(x_row + at, mask=beyond), mask=beyond)
