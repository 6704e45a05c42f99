"""Which functions of this folder serve a device: Triton's on a GPU, torch's everywhere else."""

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvcache.kernels import compact, decode_attention, jit, prefill_attention, rotate, write

logger = logging.getLogger("kvcache")

VARIABLE = "KVCACHE_KERNELS"
CHOICES = ("auto", "triton", "torch")
MOST_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Kernels(NamedTuple):
    """One implementation of every operation."""

    name: str
    decode_attention: Callable[..., Tensor]
    prefill_attention: Callable[..., tuple[Tensor, Tensor | None]]
    append: Callable[..., None]
    evict_and_write: Callable[..., Tensor]
    apply_moves: Callable[..., None]
    rerotate: Callable[..., Tensor]


TORCH = Kernels(
    "torch",
    decode_attention.decode_attention,
    prefill_attention.prefill_attention,
    write.append,
    write.evict_and_write,
    compact.apply_moves,
    rotate.rerotate,
)
TRITON = Kernels(
    "triton",
    decode_attention.decode_attention_triton,
    prefill_attention.prefill_attention_triton,
    write.append_triton,
    write.evict_and_write_triton,
    compact.apply_moves_triton,
    rotate.rerotate_triton,
)


def choose(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> Kernels:
    """The kernels for keys and values of `dims` (head_dim, v_head_dim).

    The environment variable KVCACHE_KERNELS forces one: "torch" for debugging on a GPU, "triton" for Triton's
    interpreter on a CPU (slow). Where Triton cannot serve a GPU, one warning says why.

    Raises:
        ValueError: an unknown value of the variable, or "triton" where it cannot serve.
    """
    forced = os.environ.get(VARIABLE, "auto")
    if forced not in CHOICES:
        raise ValueError(f"{VARIABLE}={forced!r} must be one of {', '.join(CHOICES)}")
    if forced == "torch" or (forced == "auto" and device.type != "cuda"):
        return TORCH
    reason = refusal(dtype, dims)
    if reason is None:
        return TRITON
    if forced == "triton":
        raise ValueError(f"{VARIABLE}=triton cannot be served: {reason}; use auto or torch")
    _warn(reason)
    return TORCH


def describe(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """What serves a device, for people to read; with head dimensions that every kernel takes."""
    if choose(device, dtype, (MOST_DIM, MOST_DIM)) is TRITON:
        return "Triton kernels: flash decoding with attention mass, flash prefill with column sums"
    forced = f" ({VARIABLE}=torch)" if os.environ.get(VARIABLE) == "torch" else ""
    reason = refusal(dtype, (MOST_DIM, MOST_DIM)) if device.type == "cuda" and not forced else None
    because = f" since {reason}" if reason else ""
    return f"torch operations{forced}{because}: bmm and softmax for decode, row blocks for prefill"


def refusal(dtype: torch.dtype, dims: tuple[int, int]) -> str | None:
    """Why Triton's kernels cannot serve such keys and values; None: they can."""
    if not jit.INSTALLED:
        return "Triton is not installed (pip install triton)"
    if dtype not in DTYPES:
        return f"{dtype} is not one of {', '.join(str(each) for each in DTYPES)}"
    if max(dims) > MOST_DIM:
        return f"of the head dimensions {dims} one is above {MOST_DIM}"
    return None


@cache
def _warn(reason: str) -> None:
    """Once for each reason."""
    logger.warning("attention over evicting layers runs by torch's operations on this GPU: %s", reason)
