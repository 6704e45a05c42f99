"""KeyDiff: keys unlike the others stay."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcache.policies.base import Policy, Slots


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Minus the cosine between a key and the mean direction of the head's held keys. Observes nothing.

    Source: Park et al., arXiv 2504.15364, section 3.2; keys are compared as the model rotated them.
    """

    observes_mass: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = True

    def priority(self, slots: Slots) -> Tensor:
        assert slots.keys is not None
        directions = torch.nn.functional.normalize(slots.keys.float(), dim=-1)
        held = (slots.positions >= 0)[..., None]
        mean = (directions * held).sum(2, keepdim=True) / held.sum(2, keepdim=True).clamp(min=1)
        return -torch.nn.functional.cosine_similarity(directions, mean, dim=-1)
