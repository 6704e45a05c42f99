"""Recency: the newest tokens stay."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvcache.policies.base import Policy, Slots


@dataclass(frozen=True)
class Recency(Policy):
    """StreamingLLM: position alone decides; with sinks, attention keeps its anchor (arXiv 2309.17453, section 3)."""

    observes_mass: ClassVar[bool] = False

    def priority(self, slots: Slots) -> Tensor:
        return slots.positions
