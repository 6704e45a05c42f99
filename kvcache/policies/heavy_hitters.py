"""Heavy hitters: the tokens that attention keeps coming back to."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvcache.policies.base import Policy, Slots
from kvcache.policies.observation import Everything, Observation, Votes
from kvcache.policies.pooling import Pool


@dataclass(frozen=True)
class HeavyHitters(Policy):
    """H2O: a slot's score is the attention mass of all queries seen while it was held.

    Source: Zhang et al., arXiv 2306.14048, section 4, algorithm 1; there per attention head, here per KV head with the
    mass summed over the query heads of its group. `published()` is the paper's.

    Args:
        observed: which queries count; everything by default. A sum favours tokens that were there for long:
            `Everything(decay=0.999)` forgets.
        pool: over neighbours in the text, before the ranking; None: each token for itself.
        normalised: mass per query that could see the slot, instead of its sum.
    """

    observed: Observation = Everything()  # noqa: RUF009  # frozen
    pool: Pool | None = None
    normalised: bool = False

    observes_mass: ClassVar[bool] = True

    @classmethod
    def published(cls) -> "HeavyHitters":
        """As in the paper: the plain sum over every query, each token for itself."""
        return cls(Everything(), None, normalised=False)

    def votes(self, n: int) -> Votes:
        return self.observed.votes(n)

    def priority(self, slots: Slots) -> Tensor:
        score = slots.score
        if self.normalised:
            assert slots.following is not None
            score = score / (slots.following[:, None, None] - slots.positions).clamp(min=1)
        return score if self.pool is None else self.pool(score, slots.positions)
