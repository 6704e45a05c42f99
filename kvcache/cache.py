"""The caches that people pass to `generate`."""

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig

from kvcache.budget import DEFAULT_MARGIN, Budget
from kvcache.errors import NotRoutedError, UnsupportedModelError
from kvcache.eviction import plan_eviction
from kvcache.kernels.select import eviction_order
from kvcache.layer import EvictingLayer
from kvcache.models.rope import Rope, find_rope
from kvcache.models.spec import decoder_config, describe
from kvcache.policies import HeavyHitters, Policy, Recency, Slots
from kvcache.positions import Positions, Rerotation, check_positions
from kvcache.routing import route
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

    Raises:
        UnsupportedModelError: a model that cannot be served, or whose RoPE cannot be re-rotated for `positions="cache"`.
        BudgetError: a per-layer list of another length than the model has layers.
        ValueError: an unknown `positions`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: Policy,
        budget: Budget,
        positions: Positions = "auto",
    ) -> None:
        check_positions(positions)
        text = decoder_config(config)
        self.spec = describe(config)
        self.policy, self.budget, self.positions = policy, budget, positions
        self.rope, self._rope_refusal = _rope(config, required=positions == "cache")
        count = len(self.spec.layers)
        layers = [
            EvictingLayer(index, budget.layer(index, count), policy) if layer.managed else native
            for index, (layer, native) in enumerate(zip(self.spec.layers, DynamicCache(config=text).layers, strict=True))
        ]
        super().__init__(layers=layers)
        self.managed = [layer for layer in layers if isinstance(layer, EvictingLayer)]
        self.ranked = False
        self._current: EvictingLayer | None = None  # the layer updated last
        if not self.managed:
            logger.warning(
                "%s has no full-attention layer: its own sliding-window caches are bounded already and stay as they are",
                self.spec.model_type,
            )
        if positions == "cache":
            self._use_ranks()
        route(text)

    # ---- transformers' interface

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Take in a layer's new keys and values, `[batch, kv_heads, n, head_dim]`; see `EvictingLayer.update`.

        Raises:
            NotRoutedError: the attention of an earlier update never came, or a forward was interrupted.
            UnsupportedModelError: the trained length would be passed and ranks cannot take over.
            StateError: see `EvictingLayer.update`.
        """
        layer = self.layers[layer_idx]
        if isinstance(layer, EvictingLayer):
            if self._current is not None and self._current.staged is not None:
                raise NotRoutedError(_not_routed(self._current))
            if layer is self.managed[0]:
                layer.check(key_states)
                self._begin_forward(key_states.shape[2])
            self._current = layer
        return layer.update(key_states, value_states, *args, **kwargs)

    def reset(self) -> None:
        """Forget everything and release the slots; the cache is as new."""
        super().reset()
        self._current = None
        self.ranked = False
        if self.positions == "cache":
            self._use_ranks()

    # ---- what people ask

    def stats(self) -> Stats:
        """Slots, bytes, tokens seen and evicted, per layer and in total."""
        return collect(self.managed, "cache" if self.ranked else "absolute")

    def kept_positions(self, layer: int) -> Tensor:
        """Positions of the tokens that layer `layer` holds: `[batch, kv_heads, slots]` int64, ascending per head.

        A position counts a row's real tokens from 0. Slots that hold nothing (padding) come first as -1.

        Raises:
            ValueError: the layer is not managed or holds nothing yet.
        """
        return self._layer(layer).sorted_slots()[0]

    def scores(self, layer: int) -> Tensor:
        """Scores in the order of `kept_positions`: `[batch, kv_heads, slots]` fp32."""
        return self._layer(layer).sorted_slots()[1]

    def _layer(self, index: int) -> EvictingLayer:
        layer = self.layers[index] if -len(self.layers) <= index < len(self.layers) else None
        if not isinstance(layer, EvictingLayer) or not layer.is_initialized:
            managed = [layer.index for layer in self.managed if layer.is_initialized]
            raise ValueError(f"layer {index} holds no managed slots; those that do now: {managed}")
        return layer

    # ---- a forward

    def _begin_forward(self, n: int) -> None:
        """Before the first layer takes in `n` tokens: ranks take over if they must, full layers go to the budget."""
        seen = self.managed[0].seen
        for layer in self.managed:
            if layer.seen != seen:
                raise NotRoutedError(
                    f"layer {layer.index} has seen {layer.seen} tokens but layer {self.managed[0].index} {seen}: a "
                    "forward was interrupted. Call reset() and start over"
                )
        if not self.ranked and self._would_pass_trained_length(n):
            self._switch_to_ranks(n)
        full = [layer for layer in self.managed if layer.is_full]
        if full:
            _evict_full(full, n)

    def _would_pass_trained_length(self, n: int) -> bool:
        trained = self.spec.trained_length
        if self.positions != "auto" or trained is None:
            return False
        return max(self.managed[0].next_positions, default=0) + n > trained

    def _switch_to_ranks(self, n: int) -> None:
        trained = self.spec.trained_length
        if self.rope is None:
            raise UnsupportedModelError(
                f"{n} more tokens would pass the trained length of {trained}, and positions cannot move into the cache: "
                f"{self._rope_refusal}"
            )
        if n > trained:
            logger.warning(
                "%d tokens in one forward exceed the trained length of %d: attention within it is outside what the model "
                "knows; prefill in chunks (generate's prefill_chunk_size)",
                n,
                trained,
            )
        logger.warning("trained length of %d tokens reached: from here on keys sit at their rank in the cache", trained)
        self._use_ranks()

    def _use_ranks(self) -> None:
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
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        sinks: int | Sequence[int] = 4,
        window: int | Sequence[int] = 508,
        heavy_hitters: int | Sequence[int] = 512,
        margin: int | Sequence[int] = DEFAULT_MARGIN,
        positions: Positions = "auto",
    ) -> None:
        super().__init__(config, HeavyHitters(), Budget(sinks, window, heavy_hitters, margin), positions)


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


def _not_routed(layer: EvictingLayer) -> str:
    return (
        f"the attention of layer {layer.index} never reached the cache. Either a forward was interrupted (call reset()), "
        "or the model does not use the config object that the cache was made from, or its attention was set anew "
        "(set_attn_implementation) afterwards, or it handles keys itself: make the cache from `model.config` after the "
        "last change; if it still fails, this model is not supported"
    )


def _evict_full(layers: Sequence[EvictingLayer], n: int) -> None:
    """Bring full layers down to their budget; layers alike are planned together, which saves most of the launches."""
    for group in _groups(layers):
        first = group[0]
        score, positions = (torch.stack([live(layer) for layer in group]) for live in (_live_score, _live_positions))
        following = first.following()
        if n == 1 and first.budget.margin == 1 and not any(first.empty):
            priority = first.policy.priority(Slots(score, positions))
            order = eviction_order(priority, positions, first.budget.sinks, following - first.budget.window)
            for layer, victim in zip(group, order.argmin(-1), strict=True):
                layer.open_hole(victim)
        else:
            keep = [first.budget.slots if held == first.budget.capacity else held for held in first.held]
            eviction = plan_eviction(score, positions, first.policy, first.budget, following, keep, first.length)
            for layer, part in zip(group, eviction.by_layer(), strict=True):
                layer.apply(part, keep)
        for layer in group:
            layer.evictions += 1


def _live_score(layer: EvictingLayer) -> Tensor:
    return layer.score[:, :, : layer.length]


def _live_positions(layer: EvictingLayer) -> Tensor:
    return layer.positions[:, :, : layer.length]


def _groups(layers: Sequence[EvictingLayer]) -> Iterable[list[EvictingLayer]]:
    """Layers of the same shape, budget, padding and device, as many together as memory for the plan allows."""
    groups: dict[tuple, list[list[EvictingLayer]]] = {}
    for layer in layers:
        alike = groups.setdefault((layer.device, layer.score.shape, layer.budget, layer.empty, layer.padding), [[]])
        if len(alike[-1]) * layer.score.numel() >= GROUP_ELEMENTS:
            alike.append([])
        alike[-1].append(layer)
    return (group for alike in groups.values() for group in alike)
