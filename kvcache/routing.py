"""How a model's attention reaches the cache. The one file that knows transformers' interfaces and versions.

`route` points a decoder's config at an attention implementation of ours, which delegates to the one the model had
unless the keys carry the tag that `EvictingLayer.update` hung on them. The tag is an attribute of the key tensor: the
only channel between a cache and an attention function that exists in every transformers 5.
"""

import inspect
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcache.errors import NotRoutedError, StateError, UnsupportedModelError

if TYPE_CHECKING:
    from kvcache.cache import EvictingCache
    from kvcache.layer import EvictingLayer

# transformers 5.24 renamed the argument and warns about the old name.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
# An opaque name: transformers searches implementation names for "flash", "sdpa", "flex", "paged|" and "/".
PREFIX = "kvcache_evicting_"
TAG = "_kvcache_layer"
_names: dict[str, str] = {}  # implementation that a model had -> the name of ours that delegates to it
_lock = threading.Lock()
_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Keep torch.compile out: it would trace a cache's bookkeeping, and fails on `ChunkLength`."""
    return cast("_Function", torch.compiler.disable(function))


class AttentionCall(NamedTuple):
    """What an attention module passes along with its queries.

    scaling: factor on the logits. softcap: Gemma 2's. sink_logits: `[query_heads]`, gpt-oss'.
    real: `[batch, n]` bool, False where a new token is padding; None: none is.
    position_ids: `[batch or 1, n]`, where the model put the new tokens; None where it does not say.
    """

    scaling: float
    softcap: float | None = None
    sink_logits: Tensor | None = None
    real: Tensor | None = None
    position_ids: Tensor | None = None


class ChunkLength(int):
    """A mask length that tells our mask function which layer asks; transformers hands it through unchanged."""

    layer: "EvictingLayer"

    def __new__(cls, length: int, layer: "EvictingLayer") -> "ChunkLength":
        self = super().__new__(cls, length)
        self.layer = layer
        return self


def route(text_config: PreTrainedConfig) -> None:
    """Send the attention of every model that holds this decoder config through us. Idempotent, thread-safe."""
    previous = text_config._attn_implementation or "eager"
    if previous.startswith(PREFIX):
        return
    with _lock:
        if previous not in _names:
            name = f"{PREFIX}{len(_names)}"
            AttentionInterface.register(name, _attention_over(previous))
            AttentionMaskInterface.register(name, _mask_over(previous))
            _names[previous] = name
    text_config._attn_implementation = _names[previous]


def tag(keys: Tensor, cache: "EvictingCache", layer: "EvictingLayer") -> Tensor:
    """The same keys as a fresh tensor object that leads its attention to `layer` of `cache`."""
    tagged = keys.detach()
    setattr(tagged, TAG, (cache, layer))
    return tagged


def _attention_over(previous: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Our attention function for models whose implementation was `previous`."""

    @uncompiled
    def evicting_attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        tagged = getattr(key, TAG, None)
        if tagged is None:
            delegate = _attention_function(previous, module)
            return delegate(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        cache, layer = tagged
        if layer.staged is None:
            raise NotRoutedError(
                f"layer {layer.index}: attention was called twice for one update, as models that share keys between "
                "layers do; they are not supported: use DynamicCache"
            )
        try:
            output = cache.attend(layer, query, _call(layer, query, attention_mask, scaling, kwargs))
        finally:
            layer.staged = None
        return _inference_only(output, query), None

    return evicting_attention


def _attention_function(name: str, module: torch.nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _call(
    layer: "EvictingLayer", query: Tensor, mask: Any, scaling: float | None, kwargs: dict[str, Any]
) -> AttentionCall:
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError("attention with a position bias (T5, ALiBi) cannot be evicted: use DynamicCache")
    return AttentionCall(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        kwargs.get("softcap"),
        kwargs.get("s_aux"),
        _real_tokens(layer, query, mask),
        _position_ids(kwargs.get("position_ids")),
    )


def _position_ids(given: Any) -> Tensor | None:
    """Ids with one axis; several (M-RoPE) are of no use, since such a model's keys are never rotated again."""
    return given if isinstance(given, Tensor) and given.ndim == 2 else None


def _real_tokens(layer: "EvictingLayer", query: Tensor, mask: Any) -> Tensor | None:
    """`[batch, n]` bool from the `[batch, 1, 1, n]` that our mask function made; None: no padding."""
    if mask is None:
        return None
    batch, _, n, _ = query.shape
    if not (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == (batch, 1, 1, n)):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise StateError(
            f"layer {layer.index} was given a ready-made attention mask {shape}: evicted tokens have no column in it. "
            "Pass the 2-D mask [batch, tokens seen + new] with 0 for padding, or none"
        )
    return mask[:, 0, 0]


def _mask_over(previous: str) -> Callable[..., Any]:
    """Our mask function for models whose implementation was `previous`."""

    @uncompiled
    def evicting_mask(*args: Any, **kwargs: Any) -> Any:
        length = kwargs.get("kv_length")
        if isinstance(length, ChunkLength):
            return _padding_of_chunk(length, kwargs)
        delegate = ALL_MASK_ATTENTION_FUNCTIONS.get(previous)
        return None if delegate is None else delegate(*args, **kwargs)

    return evicting_mask


def _padding_of_chunk(length: ChunkLength, kwargs: dict[str, Any]) -> Tensor | None:
    """`[batch, 1, 1, n]` bool, False for padding among the new tokens; None where there is none.

    Whether there is any is asked of the device only where it can matter: for one new token not once every row has
    begun, since a decode step must not wait for the device.
    """
    if kwargs.get("mask_function") is not causal_mask_function:
        raise UnsupportedModelError(
            "this model changes the causal mask (bidirectional or packed spans), which an evicting cache cannot "
            "follow; use DynamicCache"
        )
    mask, layer, n = kwargs.get("attention_mask"), length.layer, int(length)
    if mask is None:
        return None
    if mask.shape[1] not in (n, layer.seen + n):
        raise StateError(
            f"the attention mask has {mask.shape[1]} columns but {layer.seen} tokens were seen and {n} are new: pass "
            f"{layer.seen + n} columns (padding 0), as generate does when it is given the whole conversation"
        )
    if n == 1 and mask.device.type != "cpu" and layer.seen > 0 and min(layer.next_positions) > 0:
        return None
    real = mask[:, -n:]
    return None if bool(real.all()) else real[:, None, None]


class _InferenceOnly(torch.autograd.Function):
    """Passes a tensor on and refuses to go back."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, query: Tensor) -> Tensor:
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("gradients do not flow through an evicting cache: train without one (use_cache=False)")


def _inference_only(output: Tensor, query: Tensor) -> Tensor:
    """The output, through which an attempt to backpropagate raises instead of giving wrong gradients."""
    return _InferenceOnly.apply(output, query) if torch.is_grad_enabled() and query.requires_grad else output
