"""Random: a control that knows nothing."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcache.policies.base import Policy, Slots


@dataclass(frozen=True)
class Random(Policy):
    """Every token draws a number once, from its position, its head and the seed; the lowest go. Observes nothing."""

    seed: int = 0

    observes_mass: ClassVar[bool] = False

    def priority(self, slots: Slots) -> Tensor:
        heads = torch.arange(slots.positions.shape[1], device=slots.positions.device)[:, None]
        x = slots.positions.long() + (heads + 1) * 0x9E3779B1 + self.seed * 0x85EBCA77
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # a 32-bit integer hash
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        return ((x ^ (x >> 16)) >> 2).int()
