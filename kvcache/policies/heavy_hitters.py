"""Heavy hitters: the tokens that attention keeps coming back to."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvcache.policies.base import Policy, Slots


@dataclass(frozen=True)
class HeavyHitters(Policy):
    """H2O: a slot's score is the attention mass of all queries seen while it was held.

    Source: Zhang et al., arXiv 2306.14048, section 4, algorithm 1; there per attention head, here per KV head with the
    mass summed over the query heads of its group.
    """

    observes_mass: ClassVar[bool] = True

    def priority(self, slots: Slots) -> Tensor:
        return slots.score
