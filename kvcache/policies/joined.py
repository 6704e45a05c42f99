"""Two policies at once: a token stays that either of them ranks high."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.policies.base import Policy, Queries, Slots
from kvcache.policies.observation import Votes


@dataclass(frozen=True)
class Joined(Policy):
    """The best places in the first policy's ranking and in the second's share the slots.

    What has been looked at and what will be wanted are different questions: `Joined(SnapKV(), TriAttention())` keeps
    answers to a question that is known and what continuing the text takes. Only ranks count, so that scores of any
    scale can be joined.

    Args:
        first: may observe attention mass; its `votes` and `observe` decide the score.
        second: observes no mass.
        share: of the slots that the first one fills, above 0 and below 1.

    Raises:
        ValueError: a second policy that observes mass, or a share that is none.
    """

    first: Policy
    second: Policy
    share: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.first, Policy) or not isinstance(self.second, Policy):
            raise ValueError(
                f"{self.first!r} and {self.second!r} must be policies, such as SnapKV() and TriAttention()"
            )
        if self.second.observes_mass:
            raise ValueError(
                f"second={self.second!r} observes attention mass, of which there is one score: put it first"
            )
        if not 0 < self.share < 1:
            raise ValueError(f"share={self.share} must be above 0 and below 1; for one policy alone do not join")
        for name in ("observes_mass", "observes_queries", "needs_keys", "needs_rope"):
            object.__setattr__(self, name, getattr(self.first, name) or getattr(self.second, name))

    def votes(self, n: int) -> Votes:
        return self.first.votes(n)

    def observe(self, score: Tensor, mass: Tensor) -> None:
        self.first.observe(score, mass)

    @property
    def sums_mass(self) -> bool:
        return self.first.sums_mass

    def observe_queries(self, memory: dict[str, Tensor], queries: Queries) -> None:
        for policy in (self.first, self.second):
            if policy.observes_queries:
                policy.observe_queries(memory, queries)

    def priority(self, slots: Slots) -> Tensor:
        first, second = (
            _place(policy.priority(slots), slots.positions) / share
            for policy, share in ((self.first, self.share), (self.second, 1 - self.share))
        )
        return -torch.minimum(first, second)


def _place(priority: Tensor, positions: Tensor) -> Tensor:
    """Place in the ranking of what is held, the highest first: 1, 2, ... in fp32, exact up to 16 million slots.

    Empty slots come last; of equals the later token comes first, wherever they lie.
    """
    order = positions.argsort(dim=-1, descending=True)
    by_priority = priority.gather(-1, order).argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, by_priority)
    empty = (positions.gather(-1, order) < 0).to(torch.int8)
    order = order.gather(-1, empty.argsort(dim=-1, stable=True))
    places = torch.arange(1, priority.shape[-1] + 1, dtype=torch.float32, device=priority.device)
    return torch.empty_like(priority, dtype=torch.float32).scatter_(-1, order, places.expand_as(priority))
