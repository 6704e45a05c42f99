"""What a policy is: what it observes, and the priority it gives to each slot."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from torch import Tensor


class Slots(NamedTuple):
    """What a policy may look at when it ranks the slots of a layer.

    score: `[batch, kv_heads, slots]` fp32, what `Policy.observe` made of the attention mass.
    positions: `[batch, kv_heads, slots]` int32, -1 where a slot holds nothing.
    """

    score: Tensor
    positions: Tensor


class Policy(ABC):
    """Ranks the slots; sinks, window and padding are taken care of by the layer. Subclass as a frozen dataclass."""

    observes_mass: ClassVar[bool]
    """Whether the attention mass of every query is wanted; False costs nothing in attention."""

    def observe(self, score: Tensor, mass: Tensor) -> None:
        """Take in one forward's attention mass, in place.

        Args:
            score: `[batch, kv_heads, slots]` fp32, of the live slots; new ones are 0.
            mass: same shape, probabilities summed over the queries of the forward and the group's query heads.
        """
        score.add_(mass)

    @property
    def sums_mass(self) -> bool:
        """Whether `observe` is the plain sum, which attention kernels do on the way."""
        return type(self).observe is Policy.observe

    @abstractmethod
    def priority(self, slots: Slots) -> Tensor:
        """`[batch, kv_heads, slots]`, floating or integer (within 31 bits); the lowest is evicted first."""
