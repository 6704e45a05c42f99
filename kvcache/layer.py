"""The slots of one layer, and everything that may happen to them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcache.budget import LayerBudget
from kvcache.errors import StateError
from kvcache.eviction import Eviction, plan_eviction, positions_ahead
from kvcache.kernels.choice import TORCH, Kernels, choose
from kvcache.kernels.decode_attention import MOST_ROWS, MOST_TOKENS
from kvcache.kernels.select import from_host
from kvcache.memory import allocate, allocate_rotated
from kvcache.models.rope import Rope
from kvcache.pins import Pins
from kvcache.policies import Policy, Queries, Slots, Votes
from kvcache.positions import Rerotation, ranks
from kvcache.routing import AttentionCall, ChunkLength

STATE = ("keys", "values", "rotated", "score", "positions", "origins")


class Chunk(NamedTuple):
    """New keys and values `[batch, kv_heads, n, (v_)head_dim]` that are not in the buffers, and the bookkeeping of the
    live slots and of them together, `[batch, kv_heads, length + n]`."""

    score: Tensor
    positions: Tensor
    keys: Tensor
    values: Tensor
    origins: Tensor | None


class EvictingLayer(CacheLayerMixin):
    """Keys and values of the tokens that stay, `[batch, kv_heads, capacity, head_dim]` allocated once.

    The first `length` slots are in use. `update` only takes the new keys and values in; the layer's attention then
    comes here (`attend`), since what stays depends on it. Eviction to the budget happens before a forward when all
    slots are full (`EvictingCache` does it for all layers at once), and after a forward that does not fit.
    """

    keys: Tensor  # these four are None until the first update
    values: Tensor
    score: Tensor  # [batch, kv_heads, capacity] fp32, 0 in free slots
    positions: Tensor  # the same, int32; in free slots the position that a token there will have
    rotated: Tensor | None  # keys at their rank, where positions are in the cache
    origins: Tensor | None  # int32, where the model put each key, once that differs from `positions`

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(
        self, index: int, budget: LayerBudget, policy: Policy, rope: Rope | None = None, pins: Pins | None = None
    ) -> None:
        super().__init__()
        self.index = index
        self.budget = budget
        self.policy = policy
        self.rope = rope
        self.pins = Pins() if pins is None else pins  # shared by all layers of a cache
        self.checks_each_token = True  # that keys are finite; chunks are checked anyway
        self._clear()

    def _clear(self) -> None:
        for name in STATE:
            setattr(self, name, None)
        self.rerotation: Rerotation | None = None
        self.is_initialized = False
        self.length = 0
        self.seen = 0
        self.evictions = 0
        self.padding: tuple[int, ...] = ()  # per row: padding among the seen
        self.empty: tuple[int, ...] = ()  # per row: slots among the `length` first that hold nothing
        self.staged: tuple[Tensor, Tensor] | None = None  # new keys and values whose attention is still to come
        self.memory: dict[str, Tensor] = {}  # what the policy gathers of the queries, batch first
        self.gives_way = False  # the next token overwrites a victim in each head (margin 1)
        self.kernels: Kernels = TORCH

    def __repr__(self) -> str:
        return f"EvictingLayer({self.budget}, length={self.length}, seen={self.seen})"

    # ---- transformers' interface

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all slots for keys `[batch, kv_heads, n, head_dim]` and values like these."""
        batch, heads, _, head_dim = key_states.shape
        shape = (batch, heads, self.budget.capacity)
        dims = (head_dim, value_states.shape[3])
        buffers = allocate(self.budget, shape, dims, key_states)
        self.keys, self.values = buffers[:2]  # pyright: ignore[reportIncompatibleVariableOverride]
        self.score, self.positions = buffers[2:]
        self.device, self.batch_size = key_states.device, batch
        self.kernels = choose(key_states.device, key_states.dtype, dims)
        self.holds = (batch, heads, head_dim, key_states.dtype, key_states.device)
        self.padding = self.empty = (0,) * batch
        self.is_initialized = True
        self._number_free_slots()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Take in new keys and values, `[batch, kv_heads, n, (v_)head_dim]`; `attend` is to follow.

        Raises:
            StateError: another batch size, head count, dtype or device than what is held, or keys that are not finite.
        """
        self.check(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.staged = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens seen, not slots in use: transformers slices inputs and numbers positions by it."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Ask for the new tokens' part of the mask only: what was seen before no longer lies in columns.

        Raises:
            StateError: there are no new tokens, as when `generate` is given no more ids than the cache has seen.
        """
        if query_length == 0:
            raise StateError(
                f"no new tokens: the cache has seen {self.seen}. generate takes ids without a longer attention_mask "
                "for the whole conversation: pass all ids, or the new ones with a mask over all"
            )
        return ChunkLength(query_length, self), self.seen

    def get_max_length(self) -> int:
        """-1: any number of tokens may be seen."""
        return -1

    def reset(self) -> None:
        """Forget everything and release the slots."""
        self._clear()

    def crop(self, tokens: int) -> None:
        """Refused, except for nothing to crop: evicted tokens and the votes of cropped queries cannot come back.

        Args:
            tokens: minus the tokens to remove; before transformers 5.17 the length to keep.

        Raises:
            StateError: anything would be removed.
        """
        if tokens == 0 or tokens >= self.seen > 0:
            return
        raise StateError(
            f"crop({tokens}) after {self.seen} tokens: an evicting cache cannot take tokens back, so assisted decoding "
            "and prompt lookup do not work with it; use DynamicCache for these, or deepcopy the cache beforehand"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was; `[batch]` int."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order: `[rows]` int, or `[batch]` bool."""
        if not self.is_initialized:
            return
        indices = torch.as_tensor(indices, device=self.device)
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        with torch.inference_mode(False), torch.no_grad():
            for name in STATE:
                if getattr(self, name) is not None:
                    setattr(self, name, getattr(self, name).index_select(0, indices))
            self.memory = {name: part.index_select(0, indices) for name, part in self.memory.items()}
        if len(set(self.padding)) > 1 or len(set(self.empty)) > 1:
            rows = indices.tolist()
            self.padding = tuple(self.padding[row] for row in rows)
            self.empty = tuple(self.empty[row] for row in rows)
        else:
            self.padding, self.empty = self.padding[:1] * len(indices), self.empty[:1] * len(indices)
        self.batch_size = len(indices)
        self.holds = (len(indices), *self.holds[1:])

    # ---- what the tokens of a row amount to; plain numbers, known without asking the device

    @property
    def next_positions(self) -> tuple[int, ...]:
        """Per row: real tokens seen, which is the position of the next one."""
        return tuple(self.seen - padding for padding in self.padding)

    @property
    def held(self) -> tuple[int, ...]:
        """Per row: real tokens held, the same number in every head; a victim counts no longer."""
        return tuple(self.length - self.gives_way - empty for empty in self.empty)

    def priority(self, chunk: Chunk | None = None) -> Tensor:
        """`[batch, kv_heads, slots]` of the slots in use and of a chunk behind them: the lowest leaves first."""
        slots = Slots(
            self.score[:, :, : self.length] if chunk is None else chunk.score,
            self.positions[:, :, : self.length] if chunk is None else chunk.positions,
            self.following(),
            memory=self.memory,
            rope=self.rope,
            ranked=self.rerotation is not None,
        )
        if self.policy.needs_keys:
            keys, values = self.keys[:, :, : self.length], self.values[:, :, : self.length]
            origins = (self.positions if self.origins is None else self.origins)[:, :, : self.length]
            if chunk is not None:
                keys, values = torch.cat((keys, chunk.keys), dim=2), torch.cat((values, chunk.values), dim=2)
                origins = chunk.positions if chunk.origins is None else chunk.origins
            slots = slots._replace(keys=keys, values=values, origins=origins)
        return self.pins.raise_priority(self.policy.priority(slots), slots.positions)

    @property
    def is_full(self) -> bool:
        """Whether an eviction is due before the next token."""
        return self.length == self.budget.capacity

    @property
    def parts(self) -> Sequence["EvictingLayer"]:
        """What evicts by itself: this layer, or its groups of heads where these have budgets of their own."""
        return (self,)

    def full_parts(self) -> list["EvictingLayer"]:
        """Those to be brought down to their budget before the next token."""
        return [part for part in self.parts if part.is_full]

    def state(self) -> list[Tensor]:
        """Every tensor that the layer holds on to."""
        return [*(tensor for name in STATE if (tensor := getattr(self, name)) is not None), *self.memory.values()]

    def sorted_slots(self) -> tuple[Tensor, Tensor]:
        """`(positions, score)` of the live slots, `[batch, kv_heads, length]` int64 and fp32, by ascending position."""
        positions, order = self.positions[:, :, : self.length].long().sort(-1)
        return positions, self.score[:, :, : self.length].gather(-1, order)

    # ---- attention

    def attend(self, query: Tensor, call: AttentionCall) -> Tensor:
        """Attention of the staged tokens' queries over the live slots and themselves; then the tokens are in.

        An exception leaves the layer as it was, or with more tokens seen than its fellow layers.

        Args:
            query: `[batch, query_heads, n, head_dim]`, rotated by the model like the staged keys.

        Returns:
            `[batch, n, query_heads, v_head_dim]`.
        """
        assert self.staged is not None
        if torch.is_grad_enabled():  # entering no_grad only where needed: it costs as much as an operation
            with torch.no_grad():
                return self.attend(query, call)
        keys, values = self.staged
        self.staged = None
        positions = None if call.real is None else self.chunk_positions(call.real, keys.shape[2])
        if self.policy.observes_queries:
            origins = self._chunk_origins(positions, call, keys.shape[2])
            seen = Queries(query, origins, call.real, keys.shape[1], self.rope, call.scaling, self.seen)
            self.policy.observe_queries(self.memory, seen)
        rotated = None
        if self.rerotation is not None:
            query, rotated = self._rotate_chunk(query, keys, positions, call)
        fits = self.gives_way or self.length + keys.shape[2] <= self.budget.capacity
        take_in = self._append if fits else self._overflow
        return take_in(query, keys, values, rotated, positions, call)

    def _append(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rotated: Tensor | None,
        positions: Tensor | None,
        call: AttentionCall,
    ) -> Tensor:
        """The new tokens fit behind the live slots, or one of them over each head's victim."""
        n = keys.shape[2]
        if self.gives_way:
            self._overwrite(keys, values, positions, call)
        else:
            self.kernels.append(self.keys, self.values, keys, values, self.length)
            if rotated is not None and self.rotated is not None:
                self.rotated.narrow(2, self.length, n).copy_(rotated)
            if positions is not None:
                self.positions.narrow(2, self.length, n).copy_(positions[:, None])
            if self.origins is not None:
                origins = self._chunk_origins(positions, call, n)
                self.origins.narrow(2, self.length, n).copy_(origins[:, None])
            self.length += n
        if positions is not None:
            self._count_padding(call.real, len(self.padding) * (0,))
        self.seen += n
        if positions is not None:
            self._number_free_slots()
        small = n <= MOST_TOKENS and n * query.shape[1] <= MOST_ROWS * keys.shape[1]
        return self._decode(query, call) if small else self._prefill(query, call)

    def _overwrite(self, keys: Tensor, values: Tensor, positions: Tensor | None, call: AttentionCall) -> None:
        """One token per row over the slot that each head gives up; nothing else moves."""
        rows = self.kernels.evict_and_write(
            self.keys,
            self.values,
            self.score,
            self.positions,
            keys,
            values,
            self.priority(),
            self.budget.sinks,
            self.budget.window,
            self.following(),
        )
        heads = keys.shape[1]
        if positions is not None:
            self.positions.view(-1).index_copy_(0, rows, positions.flatten().repeat_interleave(heads))
        if self.origins is not None:
            origins = self._chunk_origins(positions, call, 1)
            self.origins.view(-1).index_copy_(0, rows, origins.flatten().repeat_interleave(heads))
        self.gives_way = False
        self._rotate_slots()

    def _decode(self, query: Tensor, call: AttentionCall) -> Tensor:
        """Attention of a few tokens per row over the live slots, the last of which (or any one) are their own."""
        mass = weights = None
        if self.policy.observes_mass:
            mass, weights = self._mass_to_add(query.shape[2], call)
        output = self.kernels.decode_attention(
            query,
            self.keys if self.rotated is None else self.rotated,
            self.values,
            self.length,
            call.scaling,
            positions=self.positions if any(self.empty) else None,
            softcap=call.softcap,
            sink_logits=call.sink_logits,
            score=mass,
            voters=weights,
        )
        if mass is not None and mass is not self.score:
            self.policy.observe(self.score[:, :, : self.length], mass[:, :, : self.length])
        return output

    def _mass_to_add(self, n: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Where attention adds its mass: the score, unless the policy makes something else of it; and its weights."""
        votes = self.policy.votes(n)
        if votes.kept != 1:
            self.score.narrow(2, 0, self.length).mul_(votes.kept)
        target = self.score if self.policy.sums_mass else torch.zeros_like(self.score)
        return target, self._weights(votes, n, call)

    def _weights(self, votes: Votes, n: int, call: AttentionCall) -> Tensor | None:
        """`[batch, n]` bool or fp32, how much each query counts; None: all count 1."""
        weights = votes.weights
        if weights is None and votes.tokens < n:
            weights = torch.arange(n) >= n - votes.tokens
        if weights is None:
            return call.real
        weights = weights.to(self.device, non_blocking=True).expand(self.batch_size, n)
        return weights if call.real is None else weights * call.real

    def _prefill(self, query: Tensor, call: AttentionCall) -> Tensor:
        """Attention of several tokens per row over the live slots, the last of which are their own."""
        keys = self.keys if self.rotated is None else self.rotated
        sources = [(keys[:, :, : self.length], self.values[:, :, : self.length])]
        output, mass = self._attention(query, sources, self._valid(), call)
        if mass is not None:
            self._take_in(self.score[:, :, : self.length], mass, query.shape[2])
        return output

    def _attention(
        self, query: Tensor, sources: list[tuple[Tensor, Tensor]], valid: Tensor | None, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        """`(output, mass or None)`. Where only the last queries vote, their mass is computed apart: it is little."""
        n = query.shape[2]

        def attention(newest: int, voters: Tensor | None, with_mass: bool) -> tuple[Tensor, Tensor | None]:
            return self.kernels.prefill_attention(
                query[:, :, n - newest :],
                sources,
                call.scaling,
                valid=valid,
                voters=voters,
                softcap=call.softcap,
                sink_logits=call.sink_logits,
                with_mass=with_mass,
            )

        if not self.policy.observes_mass:
            return attention(n, None, False)
        votes = self.policy.votes(n)
        if votes.tokens == n:
            return attention(n, self._weights(votes, n, call), True)
        output, _ = attention(n, None, False)
        real = None if call.real is None else call.real[:, n - votes.tokens :]
        _, mass = attention(votes.tokens, self._weights(votes, votes.tokens, call._replace(real=real)), True)
        return output, mass

    def _take_in(self, score: Tensor, mass: Tensor, n: int) -> None:
        kept = self.policy.votes(n).kept
        if kept != 1:
            score.mul_(kept)
        self.policy.observe(score, mass)

    def _valid(self) -> Tensor | None:
        """`[batch, kv_heads, length]` bool, False where a slot holds nothing; None: all hold something."""
        return self.positions[:, :, : self.length] >= 0 if any(self.empty) else None

    def _overflow(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rotated: Tensor | None,
        positions: Tensor | None,
        call: AttentionCall,
    ) -> Tensor:
        """More new tokens than slots: attend over held and new ones, then keep of both what the budget allows."""
        n = keys.shape[2]
        live = self.keys if self.rotated is None else self.rotated
        sources = [(keys if rotated is None else rotated, values)]
        if self.length > 0:
            sources.insert(0, (live[:, :, : self.length], self.values[:, :, : self.length]))
        new_positions = self.chunk_positions(None, n) if positions is None else positions
        all_positions = self._with_chunk(self.positions, new_positions)
        all_origins = None
        if self.origins is not None:
            all_origins = self._with_chunk(self.origins, self._chunk_origins(positions, call, n))
        valid = all_positions >= 0 if positions is not None or any(self.empty) else None
        output, mass = self._attention(query, sources, valid, call)
        score = torch.nn.functional.pad(self.score[:, :, : self.length], (0, n))
        if mass is not None:
            self._take_in(score, mass, n)
        self.seen += n
        totals = self._count_padding(call.real, tuple(held + n for held in self.held))
        self._cut(Chunk(score, all_positions, keys, values, all_origins), totals)
        return output

    def _cut(self, chunk: Chunk, totals: Sequence[int]) -> None:
        """Of the live slots and a chunk behind them, `totals[row]` tokens, keep what the budget allows."""
        over = [total > self.budget.capacity for total in totals]  # these go down to the budget, the others keep all
        keep = [self.budget.slots if too_many else total for too_many, total in zip(over, totals, strict=True)]
        eviction = plan_eviction(
            self.priority(chunk),
            chunk.score,
            chunk.positions,
            self.budget,
            self.following(),
            keep,
            self.length,
            chunk.origins,
        )
        self.evictions += any(over)
        self.apply(eviction, keep, (chunk.keys, chunk.values))

    def _with_chunk(self, bookkeeping: Tensor, chunk: Tensor) -> Tensor:
        """`[batch, kv_heads, length + n]`: the live slots' numbers and, the same for all heads, the new tokens'."""
        live = bookkeeping[:, :, : self.length]
        return torch.cat((live, chunk[:, None].expand(-1, live.shape[1], -1)), dim=-1)

    # ---- eviction

    def following(self) -> Tensor:
        """`[batch]` int32: the position of each row's next token."""
        return from_host(self.next_positions, torch.int32, self.device)

    def apply(self, eviction: Eviction, keep: Sequence[int], chunk: tuple[Tensor, Tensor] | None = None) -> None:
        """Carry out an eviction that was planned for this layer.

        Args:
            keep: tokens that each row keeps.
            chunk: new keys and values `[batch, kv_heads, n, (v_)head_dim]` that follow the live slots in the plan.
        """
        self.kernels.apply_moves(
            self.keys,
            self.values,
            self.score,
            self.positions,
            eviction.score,
            eviction.positions,
            eviction.source,
            eviction.source_rows,
            eviction.target_rows,
            self.length,
            chunk,
        )
        self.length = max(keep)
        self.empty = tuple(self.length - kept for kept in keep)
        if self.origins is not None and eviction.origins is not None:
            self.origins.copy_(eviction.origins)
        self._rotate_slots()

    def resize(self, budget: LayerBudget) -> None:
        """Move the live slots, or what `budget` allows of them, into buffers of its size.

        Raises:
            CacheMemoryError: not enough memory; nothing is changed.
        """
        if budget == self.budget or not self.is_initialized:
            self.budget = budget
            return
        live = slice(0, self.length)
        keys, values, score, positions = (
            part[:, :, live] for part in (self.keys, self.values, self.score, self.positions)
        )
        origins = None if self.origins is None else self.origins[:, :, live]
        over = [held > budget.capacity for held in self.held]
        keep = [budget.slots if too_many else held for too_many, held in zip(over, self.held, strict=True)]
        plan = plan_eviction(self.priority(), score, positions, budget, self.following(), keep, 0, origins)
        shape = (keys.shape[0], keys.shape[1], budget.capacity)
        dims = (keys.shape[3], values.shape[3])
        buffers = allocate(budget, shape, dims, keys)
        self.rotated = None if self.rotated is None else allocate_rotated(buffers[0])
        self.keys, self.values, self.score, self.positions = buffers  # pyright: ignore[reportIncompatibleVariableOverride]
        self.origins = None if origins is None else torch.zeros_like(self.positions)
        self.budget, self.length = budget, 0
        self.evictions += any(over)
        self.apply(plan, keep, (keys, values))

    def _number_free_slots(self) -> None:
        """Write ahead the positions of the tokens to come, so that a decode step writes none."""
        ahead = positions_ahead(self.following(), self.budget.capacity - self.length)
        self.positions[:, :, self.length :] = ahead[:, None]

    # ---- padding

    def chunk_positions(self, real: Tensor | None, n: int) -> Tensor:
        """`[batch, n]` int32: positions of the new tokens, -1 for padding."""
        if real is None:
            return positions_ahead(self.following(), n)
        return (self.following()[:, None] + real.cumsum(1, dtype=torch.int32) - 1).masked_fill(~real, -1)

    def _count_padding(self, real: Tensor | None, totals: tuple[int, ...]) -> tuple[int, ...]:
        """Note the padding among the newest tokens; `totals` less it, per row."""
        if real is None:
            return totals
        padding = (~real).sum(1).tolist()
        self.padding = tuple(old + new for old, new in zip(self.padding, padding, strict=True))
        self.empty = tuple(old + new for old, new in zip(self.empty, padding, strict=True))
        return tuple(total - new for total, new in zip(totals, padding, strict=True))

    # ---- positions in the cache

    def use_ranks(self, rerotation: Rerotation) -> None:
        """From now on keys sit at their rank among the kept ones."""
        self.rerotation = rerotation
        self._rotate_slots()

    def track_origins(self) -> None:
        """From now on the model's positions are not ours (position ids of the caller's own, or padding counted)."""
        if self.origins is None and self.is_initialized:
            with torch.inference_mode(False), torch.no_grad():
                self.origins = self.positions.clone()

    def _chunk_origins(self, positions: Tensor | None, call: AttentionCall, n: int) -> Tensor:
        """`[batch, n]` int32: where the model put the new tokens."""
        if call.position_ids is not None:
            return call.position_ids.to(self.device, torch.int32).expand(self.batch_size, n)
        return self.chunk_positions(None, n) if positions is None else positions

    def _rotate_slots(self) -> None:
        """Rotate every live key from where the model put it to its present rank."""
        if self.rerotation is None or not self.is_initialized:
            return
        if self.rotated is None:
            self.rotated = allocate_rotated(self.keys)
        origins = self.positions if self.origins is None else self.origins
        self.rerotation(
            self.keys[:, :, : self.length],
            origins[:, :, : self.length].clamp(min=0),
            ranks(self.positions[:, :, : self.length]),
            self.kernels,
            out=self.rotated[:, :, : self.length],
        )

    def _rotate_chunk(
        self, query: Tensor, keys: Tensor, positions: Tensor | None, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """New queries and keys at the ranks behind the held ones."""
        assert self.rerotation is not None
        if self.rotated is None:
            self._rotate_slots()
        n = keys.shape[2]
        origins = self._chunk_origins(positions, call, n)
        if positions is None:
            positions = self.chunk_positions(None, n)
        behind = [held - position for held, position in zip(self.held, self.next_positions, strict=True)]
        shift = from_host(behind, torch.int32, self.device)[:, None]
        old, new = origins.clamp(min=0)[:, None], (positions + shift).clamp(min=0)[:, None]
        return self.rerotation(query, old, new, self.kernels), self.rerotation(keys, old, new, self.kernels)

    # ---- checks

    def check(self, keys: Tensor) -> None:
        """Raise `StateError` if these new keys do not fit what the layer holds or are not finite; changes nothing."""
        if self.is_initialized:
            batch, heads, _, head_dim = keys.shape
            given = (batch, heads, head_dim, keys.dtype, keys.device)
            if given != self.holds:
                raise StateError(
                    f"layer {self.index} holds (batch, KV heads, head_dim, dtype, device) = {self.holds} but was given "
                    f"{given}: reset() the cache for another batch or model; batch_select_indices and "
                    "batch_repeat_interleave change the batch"
                )
        if (keys.shape[2] > 1 or (self.checks_each_token and keys.is_cpu)) and not _is_finite(keys):
            raise StateError(
                f"layer {self.index} was given keys with NaN or infinite entries: the model's activations overflowed "
                "or its weights are broken; this layer wrote nothing. If an earlier one did, reset() the cache"
            )


def _is_finite(x: Tensor) -> bool:
    """A sum is finite only if all its terms are; fp32 sums of real activations do not overflow."""
    return math.isfinite((x if x.dtype == torch.float32 else x.to(torch.float64)).sum().item())
