"""LagKV: tokens that stand out against the text that follows them."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcache.kernels.rotate import cos_sin, rotate
from kvcache.policies.base import Policy, Slots

LEAST_RANGE = 1e-6  # of a channel that is constant in the reference


@dataclass(frozen=True)
class LagKV(Policy):
    """How unevenly a token's channels lie within the range of the next partition's. Observes nothing.

    Source: Liang et al., arXiv 2504.04704, section 2. The held tokens, in the order of the text, are cut into
    partitions of `lag`. Each channel of keys and values is scaled by its minimum and maximum in the following
    partition, and a token's score is the softmax within its partition of the standard deviation over channels, keys'
    plus values'. Keys are rotated to their position in the text, as in the authors' code. Every partition gives up the
    same share of its tokens (their top-k per partition), so the priority is the rank within it, from 0 to below 1. The
    newest partition has nothing to be compared with and stays (1).

    What differs: partitions are counted from the newest token and cut anew at each eviction; the oldest may be short.

    Args:
        lag: tokens per partition, at least 2; with fewer than `2 * lag` tokens mostly the newest stay.
    """

    lag: int = 128

    observes_mass: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.lag < 2:
            raise ValueError(f"lag={self.lag} must be at least 2 tokens, to have a range")

    def priority(self, slots: Slots) -> Tensor:
        assert slots.values is not None
        if slots.positions.shape[-1] <= self.lag:
            return torch.ones_like(slots.score)
        by_position = slots.positions.argsort(-1)  # what is empty comes first
        missing = -by_position.shape[-1] % self.lag
        held = (slots.positions >= 0).gather(-1, by_position)
        held = torch.nn.functional.pad(held, (missing, 0)).unflatten(-1, (-1, self.lag))
        score = torch.zeros((), device=held.device)
        for states in (_keys_at_positions(slots), slots.values.float()):
            ordered = states.gather(2, by_position[..., None].expand_as(states))
            partitions = torch.nn.functional.pad(ordered, (0, 0, missing, 0)).unflatten(2, (-1, self.lag))
            score = score + _spread(partitions, held).softmax(-1)
        share = _share(score, held[:, :, :-1])
        newest = share.new_ones(*share.shape[:2], self.lag)
        ordered = torch.cat((share.flatten(2), newest), dim=-1)[..., missing:]
        return torch.empty_like(ordered).scatter_(-1, by_position, ordered)


def _keys_at_positions(slots: Slots) -> Tensor:
    """fp32, rotated as if padding had taken no positions: a channel's range is another in a frame that is turned."""
    assert slots.keys is not None and slots.origins is not None
    keys = slots.keys.float()
    if slots.rope is None:
        return keys
    frequencies = slots.rope.inverse_frequencies.to(keys.device, non_blocking=True)
    cos, sin = cos_sin(slots.positions - slots.origins, frequencies, scaling=1)
    return rotate(keys, cos, sin, slots.rope.interleaved)


def _spread(partitions: Tensor, held: Tensor) -> Tensor:
    """Standard deviation over channels, scaled by the next partition: `[batch, kv_heads, parts, lag, channels]` and
    `[batch, kv_heads, parts, lag]` to `[batch, kv_heads, parts - 1, lag]`, -inf where nothing is held."""
    reference = partitions[:, :, 1:]  # all held, or what is compared with it is not
    low, high = reference.amin(3, keepdim=True), reference.amax(3, keepdim=True)
    scaled = (partitions[:, :, :-1] - low) / (high - low).clamp(min=LEAST_RANGE)
    return scaled.std(-1).masked_fill(~held[:, :, :-1], -torch.inf)


def _share(score: Tensor, held: Tensor) -> Tensor:
    """Which share of a partition's held tokens has a lower score."""
    rank = score.masked_fill(~held, -1).argsort(-1).argsort(-1)
    count = held.sum(-1, keepdim=True)
    return (rank - (held.shape[-1] - count)) / count.clamp(min=1)
