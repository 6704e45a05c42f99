"""What a cache holds, in numbers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.layer import EvictingLayer


@dataclass(frozen=True)
class LayerStats:
    """One managed layer.

    slots, capacity: in use and allocated, per row and KV head. bytes: allocated. seen: tokens per row, padding
    included. evicted: tokens that each head gave up, summed over the rows. evictions: how often. oldest_unprotected:
    position of the oldest token held that is neither a sink nor in the window, None if there is none. Where heads
    have slots of their own, slots, capacity and evicted are the mean of the heads, evictions the most.
    """

    layer: int
    slots: int
    capacity: int
    bytes: int
    seen: int
    evicted: int
    evictions: int
    oldest_unprotected: int | None


@dataclass(frozen=True)
class Stats:
    """All managed layers, and totals: `bytes` is the sum, the others are the largest of any layer.

    positions: "absolute", or "cache" once keys sit at their ranks. kernels: "triton" or "torch", what computes
    attention and evictions ("torch, triton" where layers differ, "-" before the first token).
    """

    slots: int
    capacity: int
    bytes: int
    seen: int
    evicted: int
    evictions: int
    positions: str
    kernels: str
    layers: tuple[LayerStats, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        head = f"{'layer':>5} {'slots':>12} {'bytes':>14} {'seen':>9} {'evicted':>9} {'evictions':>9} {'oldest':>7}"
        rows = [
            f"{layer.layer:>5} {layer.slots:>5} /{layer.capacity:>5} {layer.bytes:>14,} {layer.seen:>9} "
            f"{layer.evicted:>9} {layer.evictions:>9} "
            f"{'-' if layer.oldest_unprotected is None else layer.oldest_unprotected:>7}"
            for layer in self.layers
        ]
        total = (
            f"{'total':>5} {self.slots:>5} /{self.capacity:>5} {self.bytes:>14,} {self.seen:>9} {self.evicted:>9} "
            f"{self.evictions:>9}   positions: {self.positions}   kernels: {self.kernels}"
        )
        return "\n".join([head, *rows, total])


def collect(layers: Sequence["EvictingLayer"], positions: str) -> Stats:
    """Numbers of the given layers; asks the device for the oldest unprotected positions."""
    each = tuple(_layer_stats(layer) for layer in layers)

    def largest(name: str) -> int:
        return max((getattr(layer, name) for layer in each), default=0)

    return Stats(
        largest("slots"),
        largest("capacity"),
        sum(layer.bytes for layer in each),
        largest("seen"),
        largest("evicted"),
        largest("evictions"),
        positions,
        ", ".join(sorted({layer.kernels.name for layer in layers if layer.is_initialized})) or "-",
        each,
    )


def _layer_stats(layer: "EvictingLayer") -> LayerStats:
    parts = layer.parts
    oldest = [position for part in parts if (position := _oldest_unprotected(part)) is not None]
    return LayerStats(
        layer=layer.index,
        slots=_mean(parts, [part.length for part in parts]),
        capacity=_mean(parts, [part.budget.capacity for part in parts]) if layer.is_initialized else 0,
        bytes=sum(tensor.nbytes for tensor in layer.state()),
        seen=layer.seen,
        evicted=_mean(parts, [_evicted(part) for part in parts]),
        evictions=max(part.evictions for part in parts),
        oldest_unprotected=min(oldest, default=None),
    )


def _mean(parts: Sequence["EvictingLayer"], numbers: Sequence[int]) -> int:
    """Per KV head, rounded up, of numbers that are the same for all heads of a part."""
    heads = [part.holds[1] if part.is_initialized else 1 for part in parts]
    return -(-sum(count * number for count, number in zip(heads, numbers, strict=True)) // sum(heads))


def _evicted(part: "EvictingLayer") -> int:
    return sum(seen - held for seen, held in zip(part.next_positions, part.held, strict=True))


def _oldest_unprotected(layer: "EvictingLayer") -> int | None:
    if layer.positions is None or layer.length == 0:
        return None
    positions = layer.positions[:, :, : layer.length]
    exposed = (positions >= layer.budget.sinks) & (positions < (layer.following() - layer.budget.window)[:, None, None])
    return int(positions[exposed].min()) if bool(exposed.any()) else None
