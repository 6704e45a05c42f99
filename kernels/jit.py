"""Triton where it is installed. Without it the kernels of this folder are plain functions that nobody launches."""

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # not on this platform: the torch functions beside the kernels serve
    triton: Any = None
    tl: Any = SimpleNamespace(constexpr=object)

_Function = TypeVar("_Function", bound=Callable[..., Any])
INSTALLED = triton is not None
LAUNCH = {"enable_fp_fusion": True}  # of every launch; Triton's default, which 3.9 wants to see said


def jit(**options: Any) -> Any:
    """`triton.jit`, or the function as it stands where there is no Triton."""
    return triton.jit(**options) if INSTALLED else lambda function: function


def launcher(function: _Function) -> _Function:
    """Launch on the device of the first argument: Triton takes the current one, wherever the tensors are."""

    @wraps(function)
    def on_its_device(first: torch.Tensor, /, *arguments: Any, **options: Any) -> Any:
        with torch.cuda.device_of(first):
            return function(first, *arguments, **options)

    return on_its_device  # pyright: ignore[reportReturnType]


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least `n` (`n >= 1`)."""
    return 1 << (n - 1).bit_length()


@jit()
def tanh(x):
    return 2 / (1 + tl.exp(-2 * x)) - 1
