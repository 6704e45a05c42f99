"""TriAttention: what later queries will want, told from where they usually point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcache.kernels.rotate import cos_sin, rotate
from kvcache.kernels.select import from_host
from kvcache.policies.base import Policy, Queries, Slots
from kvcache.policies.query_statistics import COUNT, MAGNITUDE, SUM, add, count, pairs, unrotated

OFFSETS = tuple(2**i for i in range(17))  # 1 to 65,536


@dataclass(frozen=True)
class TriAttention(Policy):
    """The logits that the mean query would give a key from several distances ahead, and a part for the queries' spread.

    Source: Mao et al., arXiv 2604.04921. Before rotation a head's queries gather around a centre, so which distances it
    prefers is known without any attention mass. With q the centre of a query head, k a key at position p, t the next
    position, w_f the angle per position of pair f, and the mean over the offsets d:

        mean_d sum_f |q_f| |k_f| cos(w_f (t - p + d) + arg(q_f) - arg(k_f))  +  sum_f (E|q_f| - |q_f|) |k_f|

    The first sum is one dot product of the key as it lies in the cache with the mean of the rotated centres, the second
    a weighted sum of the key's magnitudes. Dimensions that the model does not rotate add their part of q k. Scores are
    standardised over each query head's slots; a key counts as much as it does for the query head that wants it most.

    The authors gather centres beforehand from any text; here they are running means of what the cache sees, to which
    `QueryStatistics.give` can add those of another text. Single tokens are looked at until `enough` tokens are seen:
    later ones change a mean by little. Distances are those of the attention: of ranks where positions are in the cache.

    Args:
        offsets: distances ahead, in tokens; powers of two up to 65,536 in the paper.
        enough: see above.
    """

    offsets: tuple[int, ...] = OFFSETS
    enough: int = 512

    observes_mass: ClassVar[bool] = False
    observes_queries: ClassVar[bool] = True
    needs_keys: ClassVar[bool] = True
    needs_rope: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.offsets or min(self.offsets) < 0:
            raise ValueError(f"offsets={self.offsets} must be distances ahead, from 0 on, and at least one")

    def observe_queries(self, memory: dict[str, Tensor], queries: Queries) -> None:
        if queries.query.shape[2] == 1 and queries.seen >= self.enough:
            return
        assert queries.rope is not None
        x = unrotated(queries)
        first, second = pairs(x, queries.rope)
        add(memory, COUNT, count(queries))
        add(memory, SUM, x.sum(2))
        add(memory, MAGNITUDE, torch.hypot(first, second).sum(2))

    def priority(self, slots: Slots) -> Tensor:
        assert slots.memory is not None and slots.rope is not None and slots.keys is not None
        seen = slots.memory[COUNT].clamp(min=1)[:, None, None]
        centre, magnitude = slots.memory[SUM] / seen, slots.memory[MAGNITUDE] / seen
        keys, ahead = slots.at_positions()
        wanted = self._centre_ahead(centre, ahead, slots)
        spread = magnitude - torch.hypot(*pairs(centre, slots.rope))
        heads = keys.shape[1]
        logits = torch.einsum("bkgd,bksd->bkgs", wanted.unflatten(1, (heads, -1)), keys)
        lengths = torch.hypot(*pairs(keys, slots.rope))
        spread = spread.unflatten(1, (heads, -1)) * slots.rope.scaling
        logits = logits + torch.einsum("bkgf,bksf->bkgs", spread, lengths)
        return _standardised(logits, slots.positions >= 0).amax(2)

    def _centre_ahead(self, centre: Tensor, ahead: Tensor, slots: Slots) -> Tensor:
        """`[batch, query_heads, head_dim]`: mean over the offsets of the centre rotated to that position.

        ahead: `[batch, kv_heads]` int, the next token's position as the keys' are counted.
        """
        assert slots.rope is not None
        offsets = from_host(self.offsets, torch.int64, ahead.device)
        cos, sin = cos_sin(ahead[..., None] + offsets, slots.rope.inverse_frequencies, slots.rope.scaling)
        group = centre.shape[1] // ahead.shape[1]
        cos, sin = (part.mean(2).to(centre.dtype).repeat_interleave(group, 1) for part in (cos, sin))
        return rotate(centre, cos, sin, slots.rope.interleaved)


def _standardised(x: Tensor, held: Tensor) -> Tensor:
    """`x` `[batch, kv_heads, group, slots]` less its mean over the held slots, in standard deviations."""
    mask = held[:, :, None].to(x.dtype)
    n = mask.sum(-1, keepdim=True).clamp(min=1)
    centred = x - (x * mask).sum(-1, keepdim=True) / n
    deviation = ((centred.square() * mask).sum(-1, keepdim=True) / n).sqrt()
    return centred / deviation.clamp(min=torch.finfo(x.dtype).eps)
