"""R-KV: what attention looks at, less what is there twice."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcache.policies.base import Policy, Slots
from kvcache.policies.observation import Last, Observation, Votes
from kvcache.policies.pooling import Pool

BLOCK_ELEMENTS = 1 << 24  # similarities at a time: 64 MB


@dataclass(frozen=True)
class RKV(Policy):
    """`weight * importance - (1 - weight) * redundancy`, both of sum 1 over a head's slots (before pooling).

    Source: Cai et al., arXiv 2505.24133, section 3: importance is the mass of the last queries, pooled; redundancy the
    softmax of a key's mean cosine to the others. Of keys alike (`threshold`) the latest are spared: key i counts not
    towards the redundancy of the `latest` newest keys that are like it. What differs: the mass of a group's query heads
    is summed, not the maximum of their logits.

    The slots x slots similarities are made in blocks of rows, at a cost of slots^2 per eviction and head.

    Args:
        weight: lambda of the paper.
        threshold: cosine above which two keys are alike.
        latest: beta of the paper, keys that are spared per key; the authors' code takes 1.
    """

    observed: Observation = Last(8)  # noqa: RUF009  # frozen
    pool: Pool | None = Pool(7, "max")  # noqa: RUF009
    weight: float = 0.1
    threshold: float = 0.5
    latest: int = 1

    observes_mass: ClassVar[bool] = True
    needs_keys: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight={self.weight} must be from 0 (redundancy alone) to 1 (importance alone)")
        if self.latest < 0:
            raise ValueError(f"latest={self.latest} must be 0 (nothing is spared) or more")

    def votes(self, n: int) -> Votes:
        return self.observed.votes(n)

    def priority(self, slots: Slots) -> Tensor:
        assert slots.keys is not None
        total = slots.score.sum(-1, keepdim=True)
        importance = slots.score / total.clamp(min=torch.finfo(total.dtype).tiny)
        if self.pool is not None:
            importance = self.pool(importance, slots.positions)
        return self.weight * importance - (1 - self.weight) * self._redundancy(slots.keys, slots.positions)

    def _redundancy(self, keys: Tensor, positions: Tensor) -> Tensor:
        """`[batch, kv_heads, slots]`, of sum 1 per head; 0 where nothing is held."""
        held = positions >= 0
        directions = torch.nn.functional.normalize(keys.float(), dim=-1).masked_fill(~held[..., None], 0)
        similarity = (directions * directions.sum(2, keepdim=True)).sum(-1)  # to itself 1 each, nothing to a softmax
        if self.latest:
            self._spare_the_latest(similarity, directions, positions)
        mean = similarity / held.sum(-1, keepdim=True).clamp(min=1)
        return mean.masked_fill(~held, -torch.inf).softmax(-1)

    def _spare_the_latest(self, similarity: Tensor, directions: Tensor, positions: Tensor) -> None:
        """Take out of each key's summed similarity, in place, the keys that have it among their latest."""
        order = positions[:, :, None] + 1  # times False: 0, before all
        latest = min(self.latest, positions.shape[-1])
        size = max(1, BLOCK_ELEMENTS // positions.numel())
        for rows, rows_at in zip(directions.split(size, 2), positions.split(size, 2), strict=True):
            cosine = rows @ directions.mT
            alike = (cosine > self.threshold) & (positions[:, :, None] != rows_at[..., None])
            newest, slot = (alike * order).topk(latest, -1, sorted=False)
            spared = cosine.gather(-1, slot).masked_fill(newest == 0, 0)
            similarity.scatter_add_(-1, slot.flatten(2), -spared.flatten(2))
