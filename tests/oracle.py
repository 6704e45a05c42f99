"""The reference that every cache is compared with: slow, plain, and written without the engine.

`Oracle` runs a private copy of the model with ALL keys and values and decides, per layer and KV head, which of them a
query may see. Nothing is ever dropped, moved, or re-rotated: a token is evicted by a bit in a visibility mask, and in
cache positions the keys are rotated anew from their state before RoPE at every forward.

Scores are summed in float64. Where two of them are closer than the engine's float32 can tell apart, the choice between
them means nothing: `Oracle.closest` is the smallest relative gap any eviction had to decide on.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import eager_mask

from tests.helpers import call, native_attention

REFERENCE = "visibility_reference"
_running: list[Oracle] = []  # the oracle whose forward is under way: the attention function is not told


class LayerState:
    """What one managed layer knows: all columns so far, T of them.

    alive [batch, kv_heads, T] bool: not evicted, not padding.
    score [batch, kv_heads, T] float64: attention mass received.
    raw_keys [batch, kv_heads, T, head_dim] or None: keys before RoPE, where the model has one.
    """

    def __init__(self, sinks: int, window: int, heavy_hitters: int, margin: int) -> None:
        self.sinks, self.window, self.heavy_hitters = sinks, window, heavy_hitters
        self.margin = margin
        self.shares: dict[int, int] = {}  # heavy hitters of heads that have a number of their own
        self.alive: Tensor | None = None
        self.score: Tensor | None = None
        self.raw_keys: Tensor | None = None

    def slots_of(self, head: int) -> int:
        return self.sinks + self.window + self.shares.get(head, self.heavy_hitters)

    def append(self, batch: int, heads: int, real: Tensor) -> None:
        """Adds one column per column of `real` [batch, n]; the real ones are visible from now on."""
        new = real[:, None].expand(batch, heads, -1).clone()
        zero = torch.zeros(new.shape, dtype=torch.float64)
        self.alive = new if self.alive is None else torch.cat([self.alive, new], dim=-1)
        self.score = zero if self.score is None else torch.cat([self.score, zero], dim=-1)

    def take_rows(self, rows: Tensor) -> None:
        for name in ("alive", "score", "raw_keys"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value[rows].clone())


class Oracle:
    """The untouched model under an explicit visibility mask.

    sinks, window, heavy_hitters, margin: an int, or one int per decoder layer.
    policy: "heavy_hitters" (attention mass) or "recency" (the position).
    positions: "absolute", "cache" or "auto".
    native: the attention implementation of the layers that no budget manages (sliding ones), by default that of
        `helpers.native_attention`; the model's own setting may be the engine's by now.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        sinks: int | Sequence[int],
        window: int | Sequence[int],
        heavy_hitters: int | Sequence[int] = 0,
        margin: int | Sequence[int] = 1,
        policy: str = "heavy_hitters",
        positions: str = "absolute",
        native: str | None = None,
    ) -> None:
        assert policy in ("heavy_hitters", "recency") and positions in ("absolute", "cache", "auto")
        AttentionInterface.register(REFERENCE, _attend)
        AttentionMaskInterface.register(REFERENCE, eager_mask)
        self.model = copy.deepcopy(model).eval()
        self.config = self.model.config.get_text_config(decoder=True)
        self.config._attn_implementation = REFERENCE
        self.native = native or native_attention(self.config.model_type)
        self.policy, self.positions = policy, positions
        self.in_cache = positions == "cache"
        self.cache = DynamicCache(config=self.config)
        self.layers: dict[int, LayerState] = {}
        for index, layer in enumerate(self.cache.layers):
            if type(layer) is DynamicLayer:  # full attention; sliding and linear layers keep their own cache
                sizes = (_of(size, index) for size in (sinks, window, heavy_hitters, margin))
                self.layers[index] = LayerState(*sizes)
        self.position: Tensor | None = None  # [batch, T], -1 for padding
        self.seen: Tensor | None = None  # [batch] real tokens so far
        self.closest = math.inf
        self._real = torch.empty(0)  # of the forward under way, [batch, n] bool
        self._raw: tuple[Tensor, Tensor] | None = None  # queries and keys before RoPE, of the attention under way

    # -- running -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        """One forward of `ids` [batch, n]; logits [batch, n, vocabulary]. Masks cover all columns, as transformers'."""
        batch, n = ids.shape
        real = torch.ones(batch, n, dtype=torch.bool) if attention_mask is None else attention_mask[:, -n:].bool()
        if self.seen is None or self.position is None:
            self.seen, self.position = torch.zeros(batch, dtype=torch.long), torch.empty(batch, 0, dtype=torch.long)
        self._maybe_switch(real)
        for layer in self.layers.values():
            self._evict(layer, layer.margin - 1)
        counted = self.seen[:, None] + real.long().cumsum(-1) - 1
        self.position = torch.cat([self.position, counted.masked_fill(~real, -1)], dim=-1)
        self._real = real
        _running.append(self)
        try:
            with _raw_queries_and_keys(self):
                arguments = {"attention_mask": attention_mask, "position_ids": position_ids}
                logits = call(self.model, self.cache, ids, **arguments).logits
        finally:
            _running.pop()
        self.seen = self.seen + real.sum(-1)
        for layer in self.layers.values():
            self._evict(layer, layer.margin)
        return logits

    def _maybe_switch(self, real: Tensor) -> None:
        assert self.seen is not None
        highest = int((self.seen + real.sum(-1)).max()) - 1
        if self.positions == "auto" and highest >= self.config.max_position_embeddings:
            self.in_cache = True

    def _evict(self, layer: LayerState, margin: int) -> None:
        """Every head of every row that holds more than its slots and `margin` goes down to its slots."""
        if layer.alive is None:
            return
        for row, heads in enumerate(layer.alive.sum(-1).tolist()):
            for head, held in enumerate(heads):
                if held > layer.slots_of(head) + margin:
                    self._evict_head(layer, row, head)

    def _evict_head(self, layer: LayerState, row: int, head: int) -> None:
        assert self.position is not None and self.seen is not None
        alive, score = _filled(layer.alive)[row, head], _filled(layer.score)[row, head]
        position = self.position[row].tolist()
        first_of_window = int(self.seen[row]) - layer.window
        candidates = []
        for column in alive.nonzero().flatten().tolist():
            if layer.sinks <= position[column] < first_of_window:
                priority = float(score[column]) if self.policy == "heavy_hitters" else float(position[column])
                candidates.append((priority, position[column], column))
        candidates.sort()  # lowest priority first, then the lowest position
        dropped = len(candidates) - layer.shares.get(head, layer.heavy_hitters)
        for _, _, column in candidates[:dropped]:
            alive[column] = False
        if 0 < dropped < len(candidates):
            lost, stays = candidates[dropped - 1][0], candidates[dropped][0]
            self.closest = min(self.closest, (stays - lost) / max(abs(stays), 1e-30))
        assert int(alive.sum()) == layer.slots_of(head)

    # -- what it holds -------------------------------------------------------------------------------------------

    def kept(self, layer: int) -> list[list[list[int]]]:
        """Per row, per KV head: the positions held, ascending."""
        alive = _filled(self.layers[layer].alive)
        position = _filled(self.position)
        return [[position[row][head_alive].tolist() for head_alive in alive[row]] for row in range(alive.shape[0])]

    def scores(self, layer: int) -> list[list[list[float]]]:
        """The scores of what `kept` returns, in its order."""
        state = self.layers[layer]
        alive, score = _filled(state.alive), _filled(state.score)
        heads = range(alive.shape[1])
        return [[score[row, head][alive[row, head]].tolist() for head in heads] for row in range(alive.shape[0])]

    # -- what generate does to a cache ----------------------------------------------------------------------------

    def clone(self) -> Oracle:
        """An independent oracle in the same state; the model is shared, it has none."""
        memo = {id(self.model): self.model, id(self.config): self.config}
        return copy.deepcopy(self, memo)

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was; selecting and repeating rows is the same thing."""
        self.position, self.seen = _filled(self.position)[rows], _filled(self.seen)[rows]
        for state in self.layers.values():
            state.take_rows(rows)
        self.cache.batch_select_indices(rows)

    def repeat(self, repeats: int) -> None:
        self.reorder(torch.arange(_filled(self.seen).shape[0]).repeat_interleave(repeats))

    def generate_greedy(self, ids: Tensor, new_tokens: int, attention_mask: Tensor | None = None) -> Tensor:
        """The ids [batch, n + new_tokens] that `generate` without sampling must produce; as there, the last one is
        not fed any more."""
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        feed = ids
        for _ in range(new_tokens):
            position_ids = positions_from_mask(mask)[:, -feed.shape[1] :]
            feed = self.forward(feed, mask, position_ids)[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, feed], dim=-1)
            mask = torch.cat([mask, torch.ones_like(feed)], dim=-1)
        return ids


def beam_search(
    oracle: Oracle, ids: Tensor, new_tokens: int, beams: int, attention_mask: Tensor | None = None
) -> Tensor:
    """Brute-force beam search without an end token: every beam of every row is expanded by the whole vocabulary.

    ids [batch, n]. Returns [batch, beams, n + new_tokens], best first. The oracle is left in the beams' state.
    """
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    batch = ids.shape[0]
    logits = oracle.forward(ids, mask, positions_from_mask(mask))[:, -1]
    scores, first = logits.log_softmax(-1).topk(beams, dim=-1)  # [batch, beams]
    oracle.repeat(beams)
    sequences = torch.cat([ids.repeat_interleave(beams, 0), first.reshape(-1, 1)], dim=-1)
    mask = mask.repeat_interleave(beams, 0)
    for _ in range(new_tokens - 1):
        mask = torch.cat([mask, torch.ones(batch * beams, 1, dtype=mask.dtype)], dim=-1)
        logits = oracle.forward(sequences[:, -1:], mask, positions_from_mask(mask)[:, -1:])[:, -1]
        vocabulary = logits.shape[-1]
        total = (scores.reshape(-1, 1) + logits.log_softmax(-1)).reshape(batch, beams * vocabulary)
        scores, chosen = total.topk(beams, dim=-1)
        rows = (torch.arange(batch)[:, None] * beams + chosen // vocabulary).flatten()
        oracle.reorder(rows)
        sequences = torch.cat([sequences[rows], (chosen % vocabulary).reshape(-1, 1)], dim=-1)
    return sequences.reshape(batch, beams, -1)


def positions_from_mask(mask: Tensor) -> Tensor:
    """Position ids as `generate` makes them: a row counts from its first real token, padding gets 0."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


# -- the attention of the managed layers ----------------------------------------------------------------------------


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [batch, heads, n, dim], key and value [batch, kv_heads, T, dim]: every column ever seen."""
    oracle = _running[-1]
    index: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    if index not in oracle.layers:
        arguments = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, **kwargs}
        return _native(oracle, module)(module, query, key, value, attention_mask, **arguments)
    layer, batch, kv_heads, n = oracle.layers[index], key.shape[0], key.shape[1], query.shape[2]
    layer.append(batch, kv_heads, oracle._real)
    if oracle._raw is not None:
        raw_query, raw_key = oracle._raw
        layer.raw_keys = raw_key if layer.raw_keys is None else torch.cat([layer.raw_keys, raw_key], dim=-2)
        if oracle.in_cache:
            query, key = _at_ranks(oracle, index, raw_query, layer.raw_keys, _filled(layer.alive))
    visible = _visible(layer, oracle._real)  # [batch, kv_heads, n, T]
    group = query.shape[1] // kv_heads
    q = query.double().reshape(batch, kv_heads, group, n, -1)
    logits = q @ key.double()[:, :, None].transpose(-1, -2)  # [batch, kv_heads, group, n, T]
    logits = logits * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible[:, :, None], -math.inf)
    if s_aux is not None:
        sink = s_aux.detach().double().reshape(1, kv_heads, group, 1, 1).expand(batch, -1, -1, n, 1)
        probabilities = torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = logits.softmax(-1)
    # A padding query sees nothing: its row of the softmax is undefined and votes for nothing.
    probabilities = probabilities.masked_fill(~oracle._real[:, None, None, :, None], 0.0)
    layer.score = _filled(layer.score) + probabilities.sum(dim=(2, 3))
    out = probabilities @ value.double()[:, :, None]  # [batch, kv_heads, group, n, dim]
    out = out.reshape(batch, kv_heads * group, n, -1).transpose(1, 2).contiguous()
    return out.to(value.dtype), None


def _visible(layer: LayerState, real: Tensor) -> Tensor:
    """[batch, kv_heads, n, T]: held columns, and of the new ones those not later than the query."""
    alive = _filled(layer.alive)
    n, total = real.shape[1], alive.shape[-1]
    not_later = torch.arange(total)[None] <= (total - n + torch.arange(n))[:, None]
    return alive[:, :, None] & not_later


def _at_ranks(oracle: Oracle, index: int, query: Tensor, keys: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated to their rank among the tokens held: columns are in the order of positions, so the
    rank is the number of live columns before, and the new tokens simply go on counting."""
    rank = (alive.long().cumsum(-1) - 1).clamp(min=0)  # [batch, kv_heads, T]
    n, group = query.shape[2], query.shape[1] // keys.shape[1]
    of_query = rank[:, :, -n:].repeat_interleave(group, dim=1)
    return _rotate(oracle, index, query, of_query), _rotate(oracle, index, keys, rank)


def _rotate(oracle: Oracle, index: int, x: Tensor, at: Tensor) -> Tensor:
    """x [batch, heads, n, dim] rotated to positions `at` [batch, heads, n], by the model's own functions."""
    flat = x.reshape(-1, 1, *x.shape[2:])
    rotary = next(m for m in oracle.model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    per_type = "layer_type" in inspect.signature(rotary.forward).parameters
    extra = {"layer_type": oracle.config.layer_types[index]} if per_type else {}
    cos, sin = rotary(flat, position_ids=at.reshape(-1, at.shape[-1]), **extra)
    rotated, _ = _modeling(oracle.model).apply_rotary_pos_emb(flat, flat, cos, sin)
    return rotated.reshape(x.shape)


@contextmanager
def _raw_queries_and_keys(oracle: Oracle) -> Iterator[None]:
    """While it runs, `oracle._raw` is what went last into the model's RoPE: the attention at hand's (q, k)."""
    oracle._raw = None
    module = _modeling(oracle.model)
    original = getattr(module, "apply_rotary_pos_emb", None)
    if original is None:
        yield
        return

    def noting(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        oracle._raw = (q, k)
        return original(q, k, *args, **kwargs)

    module.apply_rotary_pos_emb = noting
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = original
        oracle._raw = None


def _native(oracle: Oracle, module: nn.Module) -> Any:
    if oracle.native == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return AttentionInterface()[oracle.native]


def _modeling(model: nn.Module) -> Any:
    return sys.modules[type(model).__module__]


def _of(size: int | Sequence[int], layer: int) -> int:
    return size if isinstance(size, int) else size[layer]


def _filled(x: Tensor | None) -> Tensor:
    assert x is not None, "nothing has run yet"
    return x
