"""The caches that people pass to `generate`."""

import logging
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig

from kvcache.adaptive import AdaptiveLayer
from kvcache.budget import DEFAULT_MARGIN, Budget, LayerBudget
from kvcache.errors import BudgetError, NotRoutedError, StateError, UnsupportedModelError
from kvcache.eviction import plan_eviction
from kvcache.heads import AdaptiveHeads
from kvcache.layer import EvictingLayer
from kvcache.models.rope import Rope, find_rope
from kvcache.models.spec import decoder_config, describe
from kvcache.pins import Pins
from kvcache.policies import HeavyHitters, Policy, Recency
from kvcache.positions import Positions, Rerotation, check_positions
from kvcache.routing import AttentionCall, route, tag, uncompiled
from kvcache.stats import Stats, collect

logger = logging.getLogger("kvcache")

GROUP_ELEMENTS = 1 << 24  # slots of several layers whose victims are chosen together: 200 MB of temporaries


class EvictingCache(Cache):
    """A key-value cache with a fixed number of slots per layer and KV head.

    Pass it as `past_key_values=` to `generate` or to a forward of the model whose config it was made from; every
    attention implementation works, nothing else is to be called. Full-attention layers are managed; sliding-window and
    linear layers keep transformers' own cache layers.

    Args:
        config: `model.config`, the very object (its attention is routed through the cache).
        policy: ranks the tokens that are neither sinks nor in the window.
        budget: slots per layer and KV head.
        positions: "absolute": keys stay where the model put them, right up to the trained length. "cache": keys sit at
            their rank among the kept ones, right at any length (a second copy of the keys is kept). "auto": absolute,
            then by rank from the forward on that would pass the trained length.
        heads: how the heads of a layer share its slots; None: every head has the same.

    Raises:
        UnsupportedModelError: a model that cannot be served, or whose keys cannot be rotated to `positions="cache"`.
        BudgetError: a per-layer list of another length than the model has layers.
        ValueError: an unknown `positions`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: Policy,
        budget: Budget,
        positions: Positions = "auto",
        heads: AdaptiveHeads | None = None,
    ) -> None:
        check_positions(positions)
        _check_types(policy, budget, heads)
        text = decoder_config(config)
        self.spec = describe(config)
        self.policy, self.budget, self.positions = policy, budget, positions
        self.rope, self._rope_refusal = _rope(config, required=positions == "cache" or policy.needs_rope)
        self.pins = Pins()
        count = len(self.spec.layers)
        new_layer = EvictingLayer if heads is None else partial(AdaptiveLayer, heads)
        layers = [
            new_layer(index, budget.layer(index, count), policy, self.rope, self.pins) if layer.managed else native
            for index, (layer, native) in enumerate(
                zip(self.spec.layers, DynamicCache(config=text).layers, strict=True)
            )
        ]
        super().__init__(layers=layers)
        self.managed = [layer for layer in layers if isinstance(layer, EvictingLayer)]
        # A check costs a decode step as much as two operations, and what is not finite in one layer stays so in the
        # next ones: the first is checked before anything is written, the last for all between.
        for layer in self.managed[1:-1]:
            layer.checks_each_token = False
        self.ranked = False  # keys sit at their rank
        self.shifted = False  # the model counts positions in another way than we do
        self._current: EvictingLayer | None = None  # the layer updated last
        if not self.managed:
            logger.warning(
                "%s has no full-attention layer: its sliding-window caches are bounded already and stay as they are",
                self.spec.model_type,
            )
        if positions == "cache":
            self._use_ranks()
        route(text)

    # ---- transformers' interface

    @uncompiled
    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Take in a layer's new keys and values, `[batch, kv_heads, n, head_dim]`.

        A managed layer's keys come back with a tag that leads their attention to `attend`.

        Raises:
            NotRoutedError: the attention of an earlier update never came, or a forward was interrupted.
            StateError: see `EvictingLayer.update`.
        """
        layer = self.layers[layer_idx]
        if not isinstance(layer, EvictingLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._current is not None and self._current.staged is not None:
            raise NotRoutedError(_not_routed(self._current))
        if layer is self.managed[0]:
            self._check_complete()
        layer.update(key_states, value_states)
        self._current = layer
        return tag(key_states, self, layer), value_states

    def attend(self, layer: EvictingLayer, query: Tensor, call: AttentionCall) -> Tensor:
        """Attention of a layer's newest tokens: `[batch, query_heads, n, head_dim]` queries to
        `[batch, n, query_heads, v_head_dim]`. Called by the attention function that the model is routed to.

        Raises:
            StateError: position ids that go back.
            UnsupportedModelError: the trained length would be passed and ranks cannot take over.
        """
        if layer is self.managed[0]:
            self._begin_forward(layer, query.shape[2], call)
        if self.shifted:
            layer.track_origins()
        return layer.attend(query, call)

    def reset(self) -> None:
        """Forget everything and release the slots; the cache is as new."""
        super().reset()
        self._current = None
        self.ranked = self.shifted = False
        self.pins.replace(Pins())
        if self.positions == "cache":
            self._use_ranks()

    # ---- pins

    def pin(self, start: int, stop: int) -> None:
        """Keep the tokens at positions `start` to `stop` (not included) from now on, in every layer and row.

        What is evicted already does not come back; what is not seen yet will stay.

        Raises:
            BudgetError: sinks, window and pins together would not leave a slot to choose in some layer.
            ValueError: an empty or negative span.
        """
        if not 0 <= start < stop:
            raise ValueError(f"pin({start}, {stop}): give positions with 0 <= start < stop, as in a slice")
        pins = self.pins.with_span(start, stop)
        for part in (part for layer in self.managed for part in layer.parts):
            _check_pins(part.index, part.budget, pins)
        self.pins.replace(pins)

    def unpin(self, start: int, stop: int) -> None:
        """Let the tokens at positions `start` to `stop` (not included) go when the policy says so."""
        self.pins.replace(self.pins.without_span(start, stop))

    # ---- another budget

    def resize(self, budget: Budget) -> None:
        """Go on with another budget: a smaller one evicts at once what the policy ranks lowest, and frees the bytes.

        A text read with room for all of it and then resized holds the same tokens as one read with the small budget in
        one forward. Layer by layer: at most one layer's slots are there twice.

        Raises:
            BudgetError: per-layer numbers for another number of layers, or pins that leave no slot to choose.
            CacheMemoryError: not enough memory for a layer's new slots; it and those behind keep theirs. Nothing is
                lost, and another `resize` can follow.
            NotRoutedError: a forward was interrupted.
        """
        _check_types(self.policy, budget, None)
        self._check_complete()
        budgets = [budget.layer(layer.index, len(self.layers)) for layer in self.managed]
        for layer, new in zip(self.managed, budgets, strict=True):
            _check_pins(layer.index, new, self.pins)
        with torch.inference_mode(False), torch.no_grad():
            for layer, new in zip(self.managed, budgets, strict=True):
                layer.resize(new)
        self.budget = budget

    # ---- what people ask

    def stats(self) -> Stats:
        """Slots, bytes, tokens seen and evicted, per layer and in total."""
        return collect(self.managed, "cache" if self.ranked else "absolute")

    def kept_positions(self, layer: int) -> Tensor:
        """Positions of the tokens that layer `layer` holds: `[batch, kv_heads, slots]` int64, ascending per head.

        A position counts a row's real tokens from 0. Slots that hold nothing (padding, or in a head that has fewer
        slots than another) come first as -1.

        Raises:
            ValueError: the layer is not managed or holds nothing yet.
        """
        return self._layer(layer).sorted_slots()[0]

    def scores(self, layer: int) -> Tensor:
        """Scores in the order of `kept_positions`: `[batch, kv_heads, slots]` fp32, 0 where a slot holds nothing."""
        return self._layer(layer).sorted_slots()[1]

    def _layer(self, index: int) -> EvictingLayer:
        layer = self.layers[index] if -len(self.layers) <= index < len(self.layers) else None
        if not isinstance(layer, EvictingLayer) or not layer.is_initialized:
            managed = [layer.index for layer in self.managed if layer.is_initialized]
            raise ValueError(f"layer {index} holds no managed slots; those that do now: {managed}")
        return layer

    # ---- a forward

    def _check_complete(self) -> None:
        """Raise unless every layer has seen the same tokens."""
        first = self.managed[0]
        for layer in self.managed:
            if layer.seen != first.seen:
                raise NotRoutedError(
                    f"layer {layer.index} has seen {layer.seen} tokens but layer {first.index} {first.seen}: a forward "
                    "was interrupted. Call reset() and start over"
                )

    def _begin_forward(self, first: EvictingLayer, n: int, call: AttentionCall) -> None:
        """Before the first layer's attention over `n` new tokens: checks, then ranks and evictions that are due."""
        switch = not self.ranked and self._would_pass_trained_length(first, n, call)
        if switch and self.rope is None:
            raise UnsupportedModelError(
                f"{n} more tokens would pass the trained length of {self.spec.trained_length}, and positions cannot "
                f"move into the cache: {self._rope_refusal}"
            )
        shifted = _check_position_ids(first, n, call)
        if switch:
            self._announce_ranks(n)
            self._use_ranks()
        if self.positions != "absolute" or self.policy.needs_keys:
            self.shifted |= shifted and self.rope is not None
        full = [part for layer in self.managed for part in layer.full_parts()]
        if full:
            _evict_full(full, n)

    def _would_pass_trained_length(self, first: EvictingLayer, n: int, call: AttentionCall) -> bool:
        trained = self.spec.trained_length
        if self.positions != "auto" or trained is None or max(first.next_positions) + n <= trained:
            return False
        new = [n] * len(first.padding) if call.real is None else call.real.sum(1).tolist()
        return max(seen + real for seen, real in zip(first.next_positions, new, strict=True)) > trained

    def _announce_ranks(self, n: int) -> None:
        trained = self.spec.trained_length
        logger.warning("trained length of %d tokens reached: from here on keys sit at their rank in the cache", trained)
        if trained is not None and n > trained:
            logger.warning(
                "%d tokens in one forward are more than the model was trained for: prefill in chunks (generate's "
                "prefill_chunk_size)",
                n,
            )

    def _use_ranks(self) -> None:
        assert self.rope is not None
        rerotation = Rerotation(self.rope)
        for layer in self.managed:
            layer.use_ranks(rerotation)
        self.ranked = True


class SinkH2OCache(EvictingCache):
    """Attention sinks, a sliding window, and the heavy hitters between them (StreamingLLM + H2O).

    Args:
        config: `model.config`.
        sinks, window, heavy_hitters, margin: see `Budget`; one number, or one per layer.
        positions: see `EvictingCache`.
        policy: what makes a heavy hitter: by default H2O's sum over all queries. docs/policies.md measures others.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        sinks: int | Sequence[int] = 4,
        window: int | Sequence[int] = 508,
        heavy_hitters: int | Sequence[int] = 512,
        margin: int | Sequence[int] = DEFAULT_MARGIN,
        positions: Positions = "auto",
        policy: Policy = HeavyHitters(),  # noqa: B008  # frozen
    ) -> None:
        super().__init__(config, policy, Budget(sinks, window, heavy_hitters, margin), positions)


class StreamingLLMCache(EvictingCache):
    """Attention sinks and a sliding window, at positions in the cache (StreamingLLM, arXiv 2309.17453).

    Args:
        config: `model.config`.
        sinks, window, margin: see `Budget`; one number, or one per layer.
        positions: see `EvictingCache`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        sinks: int | Sequence[int] = 4,
        window: int | Sequence[int] = 1020,
        margin: int | Sequence[int] = DEFAULT_MARGIN,
        positions: Positions = "cache",
    ) -> None:
        super().__init__(config, Recency(), Budget(sinks, window, 0, margin), positions)


def _rope(config: PreTrainedConfig, required: bool) -> tuple[Rope | None, str]:
    """The model's rotary embedding, or None and why it cannot be used."""
    try:
        return find_rope(config), ""
    except UnsupportedModelError as error:
        if required:
            raise
        return None, str(error)


def _check_types(policy: object, budget: object, heads: object) -> None:
    if not isinstance(policy, Policy):
        raise ValueError(f"policy={policy!r} must be a Policy, such as HeavyHitters() or Recency() of kvcache.policies")
    if not isinstance(budget, Budget):
        raise ValueError(f"budget={budget!r} must be a Budget(sinks=, window=, heavy_hitters=, margin=)")
    if not (heads is None or isinstance(heads, AdaptiveHeads)):
        raise ValueError(f"heads={heads!r} must be None (all heads alike) or AdaptiveHeads(floor=, multiple=)")


def _check_pins(index: int, budget: LayerBudget, pins: Pins) -> None:
    """Raise `BudgetError` unless sinks, window and pins leave a layer with this budget within its slots."""
    pinned = pins.beyond(budget.sinks)
    if budget.sinks + budget.window + pinned > budget.slots:
        raise BudgetError(
            f"layer {index}: {budget.sinks} sinks, a window of {budget.window} and {pinned} pinned tokens behind the "
            f"sinks exceed its {budget.slots} slots: pin fewer, unpin others, or give the budget more heavy_hitters"
        )


def _check_position_ids(layer: EvictingLayer, n: int, call: AttentionCall) -> bool:
    """Whether the model puts the new tokens elsewhere than at the positions that follow.

    Asked of the device only where it does not make a decode step wait.

    Raises:
        StateError: a position below those already seen: transformers took new ids for the whole conversation.
    """
    if call.position_ids is None or (n == 1 and not call.position_ids.is_cpu):
        return False
    if n == 1 and call.real is None:  # the common case, in plain numbers
        given = call.position_ids.flatten().tolist()
        if given * (len(layer.padding) // len(given)) == list(layer.next_positions):
            return False
    offset = call.position_ids - layer.chunk_positions(call.real, n)
    if call.real is not None:
        offset = offset.masked_fill(~call.real, 0)
    if bool((offset < 0).any()):
        raise StateError(
            f"position ids {call.position_ids.flatten()[:4].tolist()}... go back behind the {layer.seen} tokens that "
            "the cache has seen. generate takes ids without a longer attention_mask for the whole conversation: pass "
            "all ids, or the new ones with a mask over all; reset() the cache for another conversation"
        )
    return bool(offset.any())


def _not_routed(layer: EvictingLayer) -> str:
    return (
        f"the attention of layer {layer.index} never reached the cache. Either a forward was interrupted (call reset), "
        "or the model does not use the config object that the cache was made from, or its attention was set anew "
        "(set_attn_implementation) afterwards, or it handles keys itself: make the cache from `model.config` after the "
        "last change; if it still fails, this model is not supported"
    )


def _evict_full(layers: Sequence[EvictingLayer], n: int) -> None:
    """Bring full layers down to their budget; layers alike are planned together, which saves most of the launches."""
    for group in _groups(layers):
        first = group[0]
        over = any(held == first.budget.capacity for held in first.held)  # else only padding gives way
        if n == 1 and first.budget.margin == 1 and not any(first.empty):
            for layer in group:
                layer.gives_way = True
        else:
            _evict_group(group)
        for layer in group:
            layer.evictions += over


def _evict_group(group: Sequence[EvictingLayer]) -> None:
    first = group[0]
    score = torch.stack([layer.score[:, :, : layer.length] for layer in group])
    positions = torch.stack([layer.positions[:, :, : layer.length] for layer in group])
    priority = torch.stack([layer.priority() for layer in group])
    keep = [first.budget.slots if held == first.budget.capacity else held for held in first.held]
    origins = None if first.origins is None else torch.stack([_live_origins(layer) for layer in group])
    eviction = plan_eviction(priority, score, positions, first.budget, first.following(), keep, first.length, origins)
    for layer, part in zip(group, eviction.by_layer(), strict=True):
        layer.apply(part, keep)


def _live_origins(layer: EvictingLayer) -> Tensor:
    assert layer.origins is not None
    return layer.origins[:, :, : layer.length]


def _groups(layers: Sequence[EvictingLayer]) -> Iterable[list[EvictingLayer]]:
    """Layers of the same shape, budget, padding and device, as many together as memory for the plan allows."""
    groups: dict[tuple, list[list[EvictingLayer]]] = {}
    for layer in layers:
        alike = groups.setdefault((layer.device, layer.score.shape, layer.budget, layer.empty, layer.padding), [[]])
        if len(alike[-1]) * layer.score.numel() >= GROUP_ELEMENTS:
            alike.append([])
        alike[-1].append(layer)
    return (group for alike in groups.values() for group in alike)
