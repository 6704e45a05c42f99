"""Key norm: keys of low norm stay."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvcache.policies.base import Policy, Slots


@dataclass(frozen=True)
class KeyNorm(Policy):
    """The lower a key's L2 norm, the more attention it tends to get (Devoto et al., arXiv 2406.11430, section 3).

    Rotation leaves norms as they are, so where keys sit does not matter. Observes nothing.
    """

    observes_mass: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = True

    def priority(self, slots: Slots) -> Tensor:
        assert slots.keys is not None
        return -slots.keys.float().norm(dim=-1)
