"""What queries are like before the model rotates them: running sums, gathered while a text is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcache.kernels.rotate import cos_sin, rotate
from kvcache.policies.base import Queries

if TYPE_CHECKING:
    from kvcache.cache import EvictingCache
    from kvcache.models.rope import Rope

COUNT = "query_count"  # [batch] fp32, real queries seen
SUM = "query_sum"  # [batch, query_heads, head_dim] fp32, of the queries before rotation
MAGNITUDE = "query_magnitude"  # [batch, query_heads, pairs] fp32, sum of each rotated pair's length
OUTER = "query_outer"  # [batch, query_heads, head_dim, head_dim] fp32, sum of q q^T, scaled logits


def unrotated(queries: Queries) -> Tensor:
    """`[batch, query_heads, n, head_dim]` fp32 (float64 for float64), 0 for padding.

    The model's factor on cos and sin is taken out: what is left is what it rotated.
    """
    assert queries.rope is not None
    rope = queries.rope
    cos, sin = cos_sin(queries.origins[:, None], rope.inverse_frequencies, rope.scaling)
    wide = queries.query.to(torch.promote_types(queries.query.dtype, torch.float32))
    square = rope.scaling * rope.scaling
    back = rotate(wide, cos / square, -sin / square, rope.interleaved)
    return back if queries.real is None else back * queries.real[:, None, :, None]


def pairs(x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Both halves of the rotated dimensions of `x` `[..., head_dim]`: `[..., pairs]` each."""
    count = len(rope.inverse_frequencies)
    turned = x[..., : 2 * count]
    return (turned[..., 0::2], turned[..., 1::2]) if rope.interleaved else (turned[..., :count], turned[..., count:])


def add(memory: dict[str, Tensor], name: str, part: Tensor) -> None:
    """Add to a running sum that may not be there yet."""
    memory[name] = memory[name] + part if name in memory else part


def count(queries: Queries) -> Tensor:
    """`[batch]` fp32, how many of the queries are real."""
    batch, _, n, _ = queries.query.shape
    if queries.real is None:
        return torch.full((batch,), float(n), device=queries.query.device)
    return queries.real.sum(1).float()


@dataclass(frozen=True)
class QueryStatistics:
    """What a cache's policy has gathered of the queries, per layer, to start another cache with.

    layers: from layer to the policy's memory, each sum over the rows of the cache it comes from (batch 1).
    """

    layers: dict[int, dict[str, Tensor]]

    @classmethod
    def of(cls, cache: EvictingCache) -> QueryStatistics:
        """What this cache has gathered.

        Raises:
            ValueError: nothing, because it has seen no tokens or its policy does not look at queries.
        """
        layers = {
            layer.index: {name: part.sum(0, keepdim=True).cpu() for name, part in layer.memory.items()}
            for layer in cache.managed
            if layer.memory
        }
        if not layers:
            raise ValueError(
                "the cache has gathered no statistics: read a text into a cache whose policy observes queries, such as "
                "TriAttention(), first"
            )
        return cls(layers)

    def give(self, cache: EvictingCache) -> None:
        """Let an empty cache begin with these; what it sees counts in addition. `reset` forgets them.

        Raises:
            ValueError: the cache has seen tokens already, or has other layers.
        """
        indices = [layer.index for layer in cache.managed]
        if sorted(self.layers) != indices:
            raise ValueError(f"these are statistics of the layers {sorted(self.layers)}, the cache manages {indices}")
        if any(layer.is_initialized for layer in cache.managed):
            raise ValueError("the cache has seen tokens already: give statistics to a new cache, or reset() it first")
        for layer in cache.managed:
            layer.memory = dict(self.layers[layer.index])

    def save(self, file: str | Path) -> None:
        """Write them as safetensors."""
        parts = {f"{index}.{name}": part for index, layer in self.layers.items() for name, part in layer.items()}
        save_file(parts, str(file))

    @classmethod
    def load(cls, file: str | Path) -> QueryStatistics:
        """Read what `save` wrote.

        Raises:
            ValueError: a file of something else.
        """
        layers: dict[int, dict[str, Tensor]] = {}
        for key, part in load_file(str(file)).items():
            index, _, name = key.partition(".")
            if not index.isdigit() or not name.startswith("query_"):
                raise ValueError(
                    f"{file} holds {key!r} and so no query statistics: give what QueryStatistics.save wrote"
                )
            layers.setdefault(int(index), {})[name] = part
        return cls(layers)
