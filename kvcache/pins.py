"""Pins: spans of positions that stay whatever the policy says."""

from collections.abc import Iterator

import torch
from torch import Tensor


class Pins:
    """Half-open spans of positions, disjoint and in order; the same for every row, layer and head."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._spans)

    def __len__(self) -> int:
        """Positions pinned."""
        return sum(stop - start for start, stop in self._spans)

    def with_span(self, start: int, stop: int) -> "Pins":
        """These and `start` to `stop`."""
        merged = Pins()
        for span in sorted([*self._spans, (start, stop)]):
            if merged._spans and span[0] <= merged._spans[-1][1]:
                merged._spans[-1] = (merged._spans[-1][0], max(span[1], merged._spans[-1][1]))
            else:
                merged._spans.append(span)
        return merged

    def without_span(self, start: int, stop: int) -> "Pins":
        """These less `start` to `stop`."""
        rest = Pins()
        for low, high in self._spans:
            rest._spans += [span for span in ((low, min(high, start)), (max(low, stop), high)) if span[0] < span[1]]
        return rest

    def beyond(self, position: int) -> int:
        """Positions pinned from `position` on."""
        return sum(max(0, stop - max(start, position)) for start, stop in self._spans)

    def replace(self, other: "Pins") -> None:
        """Become the other, for everyone who holds on to this one."""
        self._spans = other._spans

    def cover(self, positions: Tensor) -> Tensor:
        """Bool, of the shape of `positions`: which are pinned."""
        pinned = torch.zeros_like(positions, dtype=torch.bool)
        for start, stop in self._spans:
            pinned |= (positions >= start) & (positions < stop)
        return pinned

    def raise_priority(self, priority: Tensor, positions: Tensor) -> Tensor:
        """The same priorities, the highest possible where a position is pinned."""
        if not self._spans:
            return priority
        highest = float("inf") if priority.is_floating_point() else torch.iinfo(torch.int32).max
        return priority.masked_fill(self.cover(positions), highest)
