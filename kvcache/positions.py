"""Where a key sits: at its absolute position, or at its rank among the kept ones (positions in the cache).

In the cache, a key sits at its rank among the kept keys of its head, and queries and new keys at the ranks behind
(StreamingLLM, arXiv 2309.17453, section 3.2). The model rotates at absolute positions; the change to the rank is one
rotation, always from the key as the model wrote it, never from an already changed one: errors do not add up.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from kvcache.kernels.choice import Kernels
from kvcache.models.rope import Rope

Positions = Literal["absolute", "cache", "auto"]


def check_positions(positions: str) -> None:
    """Raise `ValueError` unless `positions` is one of the three modes."""
    if positions not in get_args(Positions):
        raise ValueError(f"positions={positions!r} must be one of {', '.join(get_args(Positions))}")


class Rerotation:
    """Moves keys and queries from the positions at which the model rotated them to others."""

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self._frequencies: dict[torch.device, Tensor] = {}

    def __call__(self, x: Tensor, old: Tensor, new: Tensor, kernels: Kernels, out: Tensor | None = None) -> Tensor:
        """Rotate `x` `[batch, heads, n, head_dim]` from positions `old` to `new`, both `[batch, heads or 1, n]` ints.

        See `kernels.rotate.rerotate`.
        """
        if x.device not in self._frequencies:
            self._frequencies[x.device] = self.rope.inverse_frequencies.to(x.device)
        frequencies = self._frequencies[x.device]
        return kernels.rerotate(x, old, new, frequencies, self.rope.scaling, self.rope.interleaved, out)


def ranks(positions: Tensor) -> Tensor:
    """Rank of each slot among its head's occupied ones: `[batch, kv_heads, slots]` int64, 0 where a slot is empty."""
    by_position = positions.argsort(-1)
    rank = torch.empty_like(by_position).scatter_(
        -1, by_position, torch.arange(positions.shape[-1], device=positions.device).expand_as(by_position)
    )
    empty = (positions < 0).sum(-1, keepdim=True)
    return (rank - empty).clamp(min=0)
