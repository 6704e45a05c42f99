"""ExpectedAttention: the attention that a Gaussian of later queries would pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcache.kernels.rotate import cos_sin, rotate
from kvcache.policies.base import Policy, Queries, Slots
from kvcache.policies.query_statistics import COUNT, OUTER, SUM, add, count, unrotated


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """The mean attention of queries drawn from a Gaussian, over the next positions, times the value's norm.

    Source: Devoto et al., arXiv 2510.00636, section 3. With mean m and covariance S of a query head's queries before
    rotation, scaled like its logits, and R the mean rotation to the next `future` positions, a key k weighs
    exp((R m) k + k^T R S R^T k / 2); weights are normalised over the slots, averaged over the group's query heads and
    multiplied by the L2 norm of the slot's value.

    The memory of a layer is `4 * query_heads * head_dim * (head_dim + 1)` bytes per row. Single tokens are looked at
    until `enough` tokens are seen. Distances are those of the attention: of ranks where positions are in the cache.

    Args:
        future: positions ahead; 512 in the authors' code.
        enough: see above.
    """

    future: int = 512
    enough: int = 512

    observes_mass: ClassVar[bool] = False
    observes_queries: ClassVar[bool] = True
    needs_keys: ClassVar[bool] = True
    needs_rope: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.future < 1:
            raise ValueError(f"future={self.future} must be at least 1 position ahead")

    def observe_queries(self, memory: dict[str, Tensor], queries: Queries) -> None:
        if queries.query.shape[2] == 1 and queries.seen >= self.enough:
            return
        x = unrotated(queries) * queries.scaling
        add(memory, COUNT, count(queries))
        add(memory, SUM, x.sum(2))
        add(memory, OUTER, x.mT @ x)

    def priority(self, slots: Slots) -> Tensor:
        assert slots.memory is not None and slots.keys is not None and slots.values is not None
        seen = slots.memory[COUNT].clamp(min=1)[:, None, None]
        mean = slots.memory[SUM] / seen
        covariance = slots.memory[OUTER] / seen[..., None] - mean[..., None] * mean[..., None, :]
        keys, ahead = slots.at_positions()
        heads, group = keys.shape[1], mean.shape[1] // keys.shape[1]
        mean = self._rotated(mean, ahead, slots).unflatten(1, (heads, group))
        covariance = self._rotated(covariance, ahead, slots)
        covariance = self._rotated(covariance.mT, ahead, slots).unflatten(1, (heads, group))
        logits = torch.einsum("bkgd,bksd->bkgs", mean, keys)
        for g in range(group):  # one query head at a time: [slots, head_dim] instead of a group of them
            logits[:, :, g] += ((keys @ covariance[:, :, g]) * keys).sum(-1) / 2
        held = (slots.positions >= 0)[:, :, None]
        weights = logits.masked_fill(~held, -torch.inf).softmax(-1).mean(2)
        return weights.nan_to_num(nan=0.0) * slots.values.to(keys.dtype).norm(dim=-1)

    def _rotated(self, x: Tensor, ahead: Tensor, slots: Slots) -> Tensor:
        """`x` `[batch, query_heads, (rows,) head_dim]` times the mean rotation to the positions ahead."""
        assert slots.rope is not None
        offsets = torch.arange(self.future, device=ahead.device)
        cos, sin = cos_sin(ahead[..., None] + offsets, slots.rope.inverse_frequencies, slots.rope.scaling)
        group = x.shape[1] // ahead.shape[1]
        cos, sin = (part.mean(2).to(x.dtype).repeat_interleave(group, 1) for part in (cos, sin))
        if x.ndim == 4:
            cos, sin = cos[:, :, None], sin[:, :, None]
        return rotate(x, cos, sin, slots.rope.interleaved)
