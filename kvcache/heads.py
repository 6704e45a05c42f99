"""A layer's slots shared among its KV heads by what their tokens weigh."""

from dataclasses import dataclass

from torch import Tensor

from kvcache.errors import BudgetError
from kvcache.kernels.select import DEAD


@dataclass(frozen=True)
class AdaptiveHeads:
    """Ada-KV: more slots for heads in which many tokens weigh much, fewer where a few hold all the attention.

    All tokens of a layer that may be chosen are ranked together, whatever their head; of the heavy hitters' slots of
    all heads, each head is given what falls to its tokens among the first so many. Sinks, window, pins and margin are
    the same in every head. The slots of a layer are as many as without.
    Source: Feng et al., arXiv 2407.11550, algorithm 1 (the ranking), and the safeguard alpha there is `floor`; KV heads
    take the place of attention heads.

    Args:
        floor: share of the heavy hitters' slots that every head has in any case, 0 to 1 (1: all heads alike).
        multiple: what goes by the ranking does so in steps of so many slots. Heads that come out equal run together, so
            large steps save time while decoding.

    Raises:
        BudgetError: a floor or multiple outside these ranges.
    """

    floor: float = 0.2
    multiple: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise BudgetError(f"floor={self.floor} must be from 0 to 1: the share of its slots that every head keeps")
        if self.multiple < 1:
            raise BudgetError(f"multiple={self.multiple} must be 1 slot or more")

    def divide(self, order: Tensor, heavy_hitters: int, pinned: int = 0) -> tuple[int, ...]:
        """The heavy hitters' slots of each head, `kv_heads` numbers whose mean is `heavy_hitters`. Asks the device.

        Rows of a batch share one division, by the sum of their rankings. Of tokens that tie with the last one chosen,
        all count.

        Args:
            order: `[batch, kv_heads, entries]` int64 as of `eviction_order`, `DEAD` where there is nothing to choose.
            heavy_hitters: slots of one head before the division.
            pinned: how many of them every head needs for its pins.
        """
        heads, entries = order.shape[1:]
        spare = heavy_hitters - pinned
        adaptive = int((1 - self.floor) * spare) // self.multiple * self.multiple  # of one head, on average
        if adaptive == 0:
            return (heavy_hitters,) * heads
        last = order.flatten(1).topk(min(heads * spare, heads * entries)).values[:, -1]
        chosen = (order >= last[:, None, None]) & (order > DEAD)
        steps = _apportion(heads * adaptive // self.multiple, chosen.sum((0, 2)).tolist())
        return tuple(heavy_hitters - adaptive + self.multiple * step for step in steps)


def _apportion(steps: int, counts: list[int]) -> list[int]:
    """`steps` divided in proportion to `counts`, the remainder to those that miss most (among equals to the first)."""
    shares = [divmod(steps * count, sum(counts)) for count in counts]
    given = [whole for whole, _ in shares]
    by_rest = sorted(range(len(counts)), key=lambda head: -shares[head][1])
    for head in by_rest[: steps - sum(given)]:
        given[head] += 1
    return given
