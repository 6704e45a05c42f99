"""What a policy is: what it observes, and the priority it gives to each slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvcache.kernels.rotate import rerotate
from kvcache.policies.observation import Everything, Votes
from kvcache.positions import ranks

if TYPE_CHECKING:
    from kvcache.models.rope import Rope

ALL = Everything()


class Slots(NamedTuple):
    """What a policy may look at when it ranks the slots of a layer.

    score: `[batch, kv_heads, slots]` fp32, what `Policy.observe` made of the attention mass.
    positions: `[batch, kv_heads, slots]` int32, -1 where a slot holds nothing.
    following: `[batch]` int32, the position of each row's next token; None where a test asks for nothing of it.
    keys, values: `[batch, kv_heads, slots, (v_)head_dim]`, keys as the model rotated them; for policies that say
        `needs_keys`, else None.
    origins: `[batch, kv_heads, slots]` int32, where the model put each key; with the keys only.
    memory: what `Policy.observe_queries` gathered, by name.
    rope: the model's rotary embedding, None where it has none that the engine knows.
    ranked: positions are in the cache: attention sees each key at its rank among the held ones.
    """

    score: Tensor
    positions: Tensor
    following: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    origins: Tensor | None = None
    memory: dict[str, Tensor] | None = None
    rope: Rope | None = None
    ranked: bool = False

    def at_positions(self) -> tuple[Tensor, Tensor]:
        """`(keys, ahead)`: keys at least in fp32, rotated as attention sees them, and `[batch, kv_heads]` int64, the
        position of a row's next token counted in the same way."""
        assert self.keys is not None and self.origins is not None
        keys = self.keys.to(torch.promote_types(self.keys.dtype, torch.float32))
        if not self.ranked or self.rope is None:
            newest = torch.where(self.positions >= 0, self.origins, -1).amax(-1)
            return keys, newest.long() + 1
        rank, rope = ranks(self.positions), self.rope
        origins = self.origins.clamp(min=0)
        keys = rerotate(keys, origins, rank, rope.inverse_frequencies, rope.scaling, rope.interleaved)
        return keys, (self.positions >= 0).sum(-1)


class Queries(NamedTuple):
    """A forward's queries, for policies that say `observes_queries`.

    query: `[batch, query_heads, n, head_dim]`, rotated by the model at `origins` `[batch, n]` int32.
    real: `[batch, n]` bool, False for padding; None: none is. kv_heads: of the layer. rope: as in `Slots`.
    scaling: factor on the logits. seen: tokens that the layer saw before, padding included.
    """

    query: Tensor
    origins: Tensor
    real: Tensor | None
    kv_heads: int
    rope: Rope | None
    scaling: float = 1.0
    seen: int = 0


class Policy(ABC):
    """Ranks the slots; the layer takes care of sinks, window, pins and padding. Subclass as a frozen dataclass."""

    observes_mass: ClassVar[bool]
    """Whether attention mass is wanted; False costs nothing in attention."""
    observes_queries: ClassVar[bool] = False
    """Whether `observe_queries` wants to see the queries of every forward."""
    needs_keys: ClassVar[bool] = False
    """Whether `priority` looks at keys and values."""
    needs_rope: ClassVar[bool] = False
    """Whether it cannot do without the model's rotary embedding."""

    def votes(self, n: int) -> Votes:
        """Which queries of a forward of `n` tokens count, and what the score keeps of what it was."""
        return ALL.votes(n)

    def observe(self, score: Tensor, mass: Tensor) -> None:
        """Take in one forward's attention mass, in place; the score has kept its part of what it was already.

        Args:
            score: `[batch, kv_heads, slots]` fp32, of the live slots; new ones are 0.
            mass: same shape, probabilities summed over the queries that vote and the group's query heads.
        """
        score.add_(mass)

    @property
    def sums_mass(self) -> bool:
        """Whether `observe` is the plain sum, which attention kernels do on the way."""
        return type(self).observe is Policy.observe

    def observe_queries(self, memory: dict[str, Tensor], queries: Queries) -> None:
        """Take in a forward's queries.

        Args:
            memory: of this layer, empty at first; tensors whose first dimension is the batch (rows are reordered,
                repeated and selected with the cache) and whose second, if any, is the KV or query heads (which may be
                divided into groups).
        """
        raise NotImplementedError(f"{type(self).__name__} observes queries but does not say what of them")

    @abstractmethod
    def priority(self, slots: Slots) -> Tensor:
        """`[batch, kv_heads, slots]`, floating or integer (within 31 bits); the lowest is evicted first."""
