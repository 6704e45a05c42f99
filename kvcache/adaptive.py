"""A layer whose KV heads have budgets of their own (`AdaptiveHeads`)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcache.budget import LayerBudget
from kvcache.errors import CacheMemoryError
from kvcache.heads import AdaptiveHeads
from kvcache.kernels.select import DEAD, eviction_order
from kvcache.layer import STATE, Chunk, EvictingLayer
from kvcache.models.rope import Rope
from kvcache.pins import Pins
from kvcache.policies import Policy
from kvcache.positions import Rerotation
from kvcache.routing import AttentionCall


class AdaptiveLayer(EvictingLayer):
    """An `EvictingLayer` until its first eviction, which divides the slots among the heads. From then on heads of equal
    budgets are a layer by themselves, with buffers of its own size, and this one only hands out and collects.

    The division lasts until `reset`: with a prompt in chunks, the first one that does not fit decides. Batch rows share
    it, so that buffers stay dense. After it a group is full, and evicts, when its own slots are used up.
    """

    def __init__(
        self,
        heads: AdaptiveHeads,
        index: int,
        budget: LayerBudget,
        policy: Policy,
        rope: Rope | None = None,
        pins: Pins | None = None,
    ) -> None:
        self.heads = heads
        super().__init__(index, budget, policy, rope, pins)

    def _clear(self) -> None:
        super()._clear()
        self.groups: list[EvictingLayer] = []  # none before the division
        self.sizes: list[int] = []  # KV heads of each group
        self.grouped: Tensor | None = None  # `[kv_heads]`, heads in the order of the groups; None: as they come
        self.ungrouped: Tensor | None = None  # where each head is in that order

    def __repr__(self) -> str:
        return f"AdaptiveLayer({self.groups})" if self.groups else f"AdaptiveLayer({super().__repr__()})"

    @property
    def parts(self) -> Sequence[EvictingLayer]:
        return self.groups or (self,)

    @property
    def budgets(self) -> tuple[LayerBudget, ...]:
        """Of each KV head."""
        if not self.groups:
            return (self.budget,) * (self.holds[1] if self.is_initialized else 1)
        by_group = [group.budget for group, size in zip(self.groups, self.sizes, strict=True) for _ in range(size)]
        return tuple(by_group if self.ungrouped is None else (by_group[at] for at in self.ungrouped.tolist()))

    # ---- the division

    def full_parts(self) -> list[EvictingLayer]:
        if not self.groups and self.is_full and max(self.held) == self.budget.capacity:
            self._divide_live()
        return super().full_parts()

    def _cut(self, chunk: Chunk, totals: Sequence[int]) -> None:
        if max(totals) > self.budget.capacity:
            self._divide(chunk, totals)
        else:  # only padding is too much
            super()._cut(chunk, totals)

    def resize(self, budget: LayerBudget) -> None:
        """As of `EvictingLayer`; a division that was made already stays, in proportion.

        Raises:
            CacheMemoryError: not enough memory; groups of heads that had their turn have their new slots.
        """
        if not self.is_initialized or (not self.groups and max(self.held) <= budget.capacity):
            return super().resize(budget)
        before, self.budget = self.budget, budget
        if self.groups:
            for group in self.groups:
                group.resize(budget._replace(heavy_hitters=self._in_proportion(group.budget, before)))
            return
        try:
            self._divide_live()
        except CacheMemoryError:
            self.budget = before
            raise

    def _in_proportion(self, share: LayerBudget, before: LayerBudget) -> int:
        """Heavy hitters of a group whose `share` was made for `before`; pins come first, remainders are left out."""
        pinned = self.pins.beyond(self.budget.sinks)
        spare = before.heavy_hitters - pinned
        if share.heavy_hitters == before.heavy_hitters or spare <= 0:
            return self.budget.heavy_hitters
        return pinned + (share.heavy_hitters - pinned) * (self.budget.heavy_hitters - pinned) // spare

    def _divide_live(self) -> None:
        """Divide when nothing is new."""
        live, none = slice(0, self.length), slice(self.length, self.length)
        origins = None if self.origins is None else self.origins[:, :, live]
        bookkeeping = (self.score[:, :, live], self.positions[:, :, live])
        self._divide(Chunk(*bookkeeping, self.keys[:, :, none], self.values[:, :, none], origins), self.held)

    def _divide(self, chunk: Chunk, totals: Sequence[int]) -> None:
        """From now on each head has its own budget; of the live slots and the chunk it keeps what that allows."""
        pinned = self.pins.beyond(self.budget.sinks)
        shares = self.heads.divide(self._candidates(chunk), self.budget.heavy_hitters, pinned)
        self._arrange(shares)
        entries = [self._by_group(part) for part in self._with_live(chunk)]
        memory = {name: self._by_group(part) for name, part in self.memory.items()}
        self.groups = [
            self._new_group(
                share,
                Chunk(*(part[index] for part in entries)),
                {name: part[index].clone() for name, part in memory.items()},
                totals,
            )
            for index, share in enumerate(dict.fromkeys(shares))
        ]
        for name in STATE:
            setattr(self, name, None)
        self.length, self.empty, self.memory = 0, (0,) * self.batch_size, {}

    def _candidates(self, chunk: Chunk) -> Tensor:
        """`[batch, kv_heads, entries]` int64: `eviction_order`, `DEAD` for sinks, window, pins and empty slots."""
        positions, window_start = chunk.positions, self.following() - self.budget.window
        order = eviction_order(self.priority(chunk), positions, self.budget.sinks, window_start)
        fixed = (positions < self.budget.sinks) | (positions >= window_start[:, None, None])
        return order.masked_fill_(fixed | self.pins.cover(positions), DEAD)

    def _arrange(self, shares: Sequence[int]) -> None:
        """Heads of the same share become a group."""
        members = [[head for head, own in enumerate(shares) if own == share] for share in dict.fromkeys(shares)]
        self.sizes = [len(heads) for heads in members]
        order = torch.tensor([head for heads in members for head in heads])
        self.grouped = self.ungrouped = None
        if order.tolist() != sorted(order.tolist()):
            self.grouped, self.ungrouped = order.to(self.device), order.argsort().to(self.device)

    def _with_live(self, chunk: Chunk) -> Chunk:
        """The chunk with the keys and values of the live slots in front."""
        if self.length == 0:
            return chunk
        keys = torch.cat((self.keys[:, :, : self.length], chunk.keys), dim=2)
        return chunk._replace(keys=keys, values=torch.cat((self.values[:, :, : self.length], chunk.values), dim=2))

    def _new_group(
        self, heavy_hitters: int, entries: Chunk, memory: dict[str, Tensor], totals: Sequence[int]
    ) -> EvictingLayer:
        """A layer of its own for some heads, which keeps of their entries what its budget allows."""
        budget = self.budget._replace(heavy_hitters=heavy_hitters)
        group = EvictingLayer(self.index, budget, self.policy, self.rope, self.pins)
        group.lazy_initialization(entries.keys, entries.values)
        group.seen, group.padding, group.evictions = self.seen, self.padding, self.evictions
        group.memory, group.rerotation = memory, self.rerotation
        if entries.origins is not None:
            group.track_origins()
        group._cut(entries, totals)
        return group

    def _by_group(self, x: Tensor | None) -> Sequence[Any]:
        """Each group's part of `x` `[batch, KV or query heads, ...]`; of what has no heads, all."""
        if x is None or x.ndim == 1:
            return [x] * len(self.sizes)
        per_head = x.shape[1] // sum(self.sizes)
        if self.grouped is not None:
            x = x.unflatten(1, (-1, per_head)).index_select(1, self.grouped).flatten(1, 2)
        return x.split([size * per_head for size in self.sizes], dim=1)

    def _joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The groups' parts put together along `dim` (KV or query heads), in the order of the heads."""
        joined = torch.cat(list(parts), dim)
        if self.ungrouped is None:
            return joined
        return joined.unflatten(dim, (sum(self.sizes), -1)).index_select(dim, self.ungrouped).flatten(dim, dim + 1)

    # ---- handing out and collecting

    def attend(self, query: Tensor, call: AttentionCall) -> Tensor:
        if not self.groups:
            return super().attend(query, call)
        assert self.staged is not None
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.attend(query, call)
        keys, values = (self._by_group(part) for part in self.staged)
        self.staged = None
        sinks = self._by_group(None if call.sink_logits is None else call.sink_logits[None])
        outputs = []
        for index, (group, part) in enumerate(zip(self.groups, self._by_group(query), strict=True)):
            group.staged = (keys[index], values[index])
            own = call if call.sink_logits is None else call._replace(sink_logits=sinks[index][0])
            outputs.append(group.attend(part, own))
            self.seen, self.padding = group.seen, group.padding
        return self._joined(outputs, 2)

    def state(self) -> list[Tensor]:
        if not self.groups:
            return super().state()
        return [tensor for group in self.groups for tensor in group.state()]

    def sorted_slots(self) -> tuple[Tensor, Tensor]:
        """As of `EvictingLayer`; heads with fewer slots than the one with most begin with empty ones."""
        if not self.groups:
            return super().sorted_slots()
        longest = max(group.length for group in self.groups)
        parts = [(*group.sorted_slots(), longest - group.length) for group in self.groups]
        pad = torch.nn.functional.pad
        positions = [pad(positions, (missing, 0), value=-1) for positions, _, missing in parts]
        return self._joined(positions, 1), self._joined([pad(score, (missing, 0)) for _, score, missing in parts], 1)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        for group in self.groups:
            group.batch_select_indices(indices)

    def use_ranks(self, rerotation: Rerotation) -> None:
        if not self.groups:
            return super().use_ranks(rerotation)
        for group in self.groups:
            group.use_ranks(rerotation)

    def track_origins(self) -> None:
        if not self.groups:
            return super().track_origins()
        for group in self.groups:
            group.track_origins()
