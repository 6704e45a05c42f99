"""One eviction, planned for any number of layers at once: who stays, and which entries move."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcache.budget import LayerBudget
from kvcache.kernels.compact import compact_bookkeeping, flat_rows, plan_moves
from kvcache.kernels.select import eviction_order, kept_slots


class Eviction(NamedTuple):
    """What an eviction does. Every tensor may have a leading dimension of layers.

    source: `[..., batch, kv_heads, moves]`, entries to copy.
    source_rows, target_rows: `[..., batch * kv_heads * moves]`, the same as rows of the flat buffers.
    score, positions, origins: `[..., batch, kv_heads, capacity]`, the bookkeeping after it, free slots included
        (score 0, and the position that a token there will have); origins may be None.
    """

    source: Tensor
    source_rows: Tensor
    target_rows: Tensor
    score: Tensor
    positions: Tensor
    origins: Tensor | None

    def by_layer(self) -> Iterator["Eviction"]:
        """Takes apart what was planned for several layers."""
        nothing = (None,) * self.score.shape[0]
        for parts in zip(*(nothing if part is None else part.unbind(0) for part in self), strict=True):
            yield Eviction(*parts)


def plan_eviction(
    priority: Tensor,
    score: Tensor,
    positions: Tensor,
    budget: LayerBudget,
    following: Tensor,
    keep: Sequence[int],
    front: int,
    origins: Tensor | None = None,
) -> Eviction:
    """Choose what stays and how it becomes dense.

    Args:
        priority: `[..., batch, kv_heads, entries]` from the policy; the lowest is evicted first.
        score: same shape, fp32; `positions`: same shape, int32, -1 where an entry holds nothing.
        following: `[batch]` int32, the position of each row's next token.
        keep: entries that each row keeps; the slots in use afterwards are the largest of them.
        front: entries below this lie in the slot of their number.
        origins: same shape as `positions`, moved along.
    """
    length = max(keep)
    front = min(front, length)
    free = budget.capacity - length
    order = eviction_order(priority, positions, budget.sinks, following - budget.window)
    kept = kept_slots(order, keep)
    moves = plan_moves(kept, front, length)
    score = compact_bookkeeping(score, kept, moves, front, length, empty=0)
    positions = compact_bookkeeping(positions, kept, moves, front, length, empty=-1)
    ahead = positions_ahead(following, free)[:, None].expand(*positions.shape[:-1], free)
    if origins is not None:
        origins = torch.nn.functional.pad(compact_bookkeeping(origins, kept, moves, front, length, empty=0), (0, free))
    return Eviction(
        moves.source,
        flat_rows(moves.source, budget.capacity),
        flat_rows(moves.target, budget.capacity),
        torch.nn.functional.pad(score, (0, free)),
        torch.cat((positions, ahead), dim=-1),
        origins,
    )


def positions_ahead(following: Tensor, count: int) -> Tensor:
    """`[batch, count]` int32: positions of each row's next `count` tokens; `following`: `[batch]` int32."""
    return following[:, None] + torch.arange(count, dtype=torch.int32, device=following.device)
