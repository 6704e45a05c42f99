"""Whose attention counts: all queries, or the last ones; and what a score keeps when new mass comes in."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Votes(NamedTuple):
    """How a forward's queries count.

    tokens: how many of the last queries vote; weights: `[tokens]` fp32 on the CPU, None: all count 1.
    kept: factor on the score that was there before.
    """

    tokens: int
    weights: Tensor | None
    kept: float


@dataclass(frozen=True)
class Everything:
    """Every query seen while a slot is held; a query `a` tokens back counts `decay ** a` (1: all the same, H2O)."""

    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay} must be above 0 and at most 1; for the last query alone use Last(1)")

    def votes(self, n: int) -> Votes:
        """Of a forward of `n` tokens."""
        if self.decay == 1:
            return Votes(n, None, 1.0)
        weights = None if n == 1 else self.decay ** torch.arange(n - 1, -1, -1, dtype=torch.float32)
        return Votes(n, weights, self.decay**n)


@dataclass(frozen=True)
class Last:
    """The last `queries` queries. A forward of at least so many replaces the score; a shorter one of `n` tokens leaves
    `1 - n / queries` of it, as if each new query took the place of an average one: no window per slot is kept."""

    queries: int

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ValueError(f"queries={self.queries} must be at least 1")

    def votes(self, n: int) -> Votes:
        """Of a forward of `n` tokens."""
        return Votes(min(n, self.queries), None, max(0.0, 1 - n / self.queries))


Observation = Everything | Last
