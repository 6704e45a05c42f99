"""One eviction, planned for any number of layers at once: who stays, and which entries move."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvcache.budget import LayerBudget
from kvcache.kernels.compact import Moves, compact_bookkeeping, plan_moves
from kvcache.kernels.select import eviction_order, kept_slots
from kvcache.policies import Policy, Slots


class Eviction(NamedTuple):
    """What an eviction does. All tensors may have a leading dimension of layers.

    moves: entries to copy. score, positions: `[..., batch, kv_heads, slots]`, the bookkeeping afterwards.
    """

    moves: Moves
    score: Tensor
    positions: Tensor


def plan_eviction(
    score: Tensor,
    positions: Tensor,
    policy: Policy,
    budget: LayerBudget,
    window_start: Tensor,
    keep: Sequence[int],
    front: int,
) -> Eviction:
    """Choose what stays and how it becomes dense.

    Args:
        score: `[..., batch, kv_heads, entries]` fp32; `positions`: same shape, int32, -1 where an entry holds nothing.
        window_start: `[batch]` int32, positions from here on are protected.
        keep: entries that each row keeps; the slots in use afterwards are the largest of them.
        front: entries below this lie in the slot of their number.
    """
    length = max(keep)
    front = min(front, length)
    order = eviction_order(policy.priority(Slots(score, positions)), positions, budget.sinks, window_start)
    kept = kept_slots(order, keep)
    moves = plan_moves(kept, front, length)
    return Eviction(
        moves,
        compact_bookkeeping(score, kept, moves, front, length, empty=0),
        compact_bookkeeping(positions, kept, moves, front, length, empty=-1),
    )
