"""Value-aware: attention counts for as much as what it brings."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcache.policies.base import Policy, Queries, Slots
from kvcache.policies.observation import Votes


@dataclass(frozen=True)
class ValueAware(Policy):
    """Another policy's priority times the L1 norm of the slot's value.

    Source: Guo et al. (VATP), arXiv 2406.12335, section 3, there for the scores of H2O and Scissorhands; sinks, which
    have small values, are exempt as the budget's. A pooled score is pooled before. A negative priority is divided by
    the norm, so that a larger value never leaves earlier: a count of misses (`Scissorhands`) weighs less.

    Args:
        inner: the policy whose observations and priorities are taken, such as `HeavyHitters()` or `SnapKV()`.
    """

    inner: Policy

    needs_keys: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Policy):
            raise ValueError(f"inner={self.inner!r} must be a Policy, such as HeavyHitters() of kvcache.policies")
        for name in ("observes_mass", "observes_queries", "needs_rope"):
            object.__setattr__(self, name, getattr(self.inner, name))

    def votes(self, n: int) -> Votes:
        return self.inner.votes(n)

    def observe(self, score: Tensor, mass: Tensor) -> None:
        self.inner.observe(score, mass)

    @property
    def sums_mass(self) -> bool:
        return self.inner.sums_mass

    def observe_queries(self, memory: dict[str, Tensor], queries: Queries) -> None:
        self.inner.observe_queries(memory, queries)

    def priority(self, slots: Slots) -> Tensor:
        assert slots.values is not None
        priority = self.inner.priority(slots)
        norm = slots.values.float().norm(p=1, dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        return torch.where(priority < 0, priority / norm, priority * norm)
