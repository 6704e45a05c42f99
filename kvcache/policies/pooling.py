"""Scores of neighbours, so that what belongs together stays together."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pool:
    """Mean or maximum over each token and its held neighbours in the text (SnapKV, arXiv 2404.14469, section 4).

    kernel: how many tokens, odd. At the ends fewer are there; a mean is over those.
    """

    kernel: int
    mode: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel} must be odd and positive")
        if self.mode not in ("mean", "max"):
            raise ValueError(f"mode={self.mode!r} must be mean or max")

    def __call__(self, score: Tensor, positions: Tensor) -> Tensor:
        """Pool `score` `[batch, kv_heads, slots]` in the order of `positions`; empty slots (-1) take no part."""
        by_position = positions.argsort(-1)
        ordered = score.gather(-1, by_position).flatten(0, 1)[:, None]
        held = (positions >= 0).gather(-1, by_position).flatten(0, 1)[:, None]
        around = self.kernel // 2
        if self.mode == "max":
            lowest = torch.finfo(score.dtype).min
            pooled = torch.nn.functional.max_pool1d(ordered.masked_fill(~held, lowest), self.kernel, 1, around)
        else:
            total, count = (
                torch.nn.functional.avg_pool1d(part, self.kernel, 1, around)
                for part in (ordered * held, held.to(score.dtype))
            )
            pooled = total / count.clamp(min=torch.finfo(score.dtype).tiny)
        return torch.empty_like(score).scatter_(-1, by_position, pooled.view_as(score))
