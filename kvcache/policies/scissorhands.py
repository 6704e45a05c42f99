"""Scissorhands: what attention passed over again and again goes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcache.policies.base import Policy, Slots
from kvcache.policies.observation import Last, Votes


@dataclass(frozen=True)
class Scissorhands(Policy):
    """Minus the number of recent queries that gave a slot less than the mean, 1 / visible tokens.

    Source: Liu et al., arXiv 2305.17118, algorithm 2: it too counts unimportance, so that new tokens, which few queries
    have seen, are not the first to go. What differs: only the mass summed over a forward and over the group's query
    heads is known. A decode step is therefore one comparison for the whole group; a prefill compares the mean over its
    voting queries and counts for all of them at once, and the tokens that came within it appear less important than
    they are (the budget's window protects these). Old queries fade as `Last` says, instead of leaving a list of them.

    Args:
        observed: the history window, 400 queries in the paper.
    """

    observed: Last = Last(400)  # noqa: RUF009  # frozen

    observes_mass: ClassVar[bool] = True

    def votes(self, n: int) -> Votes:
        return self.observed.votes(n)

    def observe(self, score: Tensor, mass: Tensor) -> None:
        """Add to slots below the mean the whole mass of their head: a 1 for each voting query and query head."""
        queries = mass.sum(-1, keepdim=True)
        visible = (mass > 0).sum(-1, keepdim=True)  # padding and empty slots get exactly 0
        score.add_(torch.where(mass * visible < queries, queries, 0))

    def priority(self, slots: Slots) -> Tensor:
        return -slots.score
