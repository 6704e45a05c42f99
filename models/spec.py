"""What the engine must know of a model, read from its config: which layers it manages, and their shapes."""

import sys
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING


class UnsupportedModelError(ValueError):
    """A model, or an option on this model, that the engine cannot serve; the message gives the reason and way out."""


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. `managed`: full attention, whose slots the engine evicts; others keep their own cache."""

    kind: str
    managed: bool
    kv_heads: int
    head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelSpec:
    """A decoder as the engine sees it. `trained_length` is in tokens, None where the config does not say."""

    model_type: str
    layers: tuple[LayerSpec, ...]
    trained_length: int | None


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The text decoder's part of a config: the very object that the decoder's attention modules hold."""
    if not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(
            f"config={config!r} is not a transformers config: pass `model.config` of the model that will use the cache"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder-decoder: its cross-attention cache does not grow and its decoder is "
            "not managed; use transformers' EncoderDecoderCache"
        )
    return config.get_text_config(decoder=True)


def describe(config: PreTrainedConfig) -> ModelSpec:
    """Read a model's config.

    Args:
        config: `model.config`, or any config of the same class and values.

    Raises:
        UnsupportedModelError: encoder-decoder models, models whose attention does not go through transformers'
            attention interface, latent (MLA) or shared key-value caches, models without an attention layer.
    """
    text = decoder_config(config)
    _refuse_foreign_attention(text)
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{text.model_type} caches compressed latents (MLA), not keys and values per head: use DynamicCache"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"{text.model_type} shares key-value caches between layers, and an eviction for one would be wrong for the "
            "other: use DynamicCache"
        )
    native = DynamicCache(config=text).layers
    shapes = [_shape(text, index) for index in range(len(native))]
    layers = tuple(
        LayerSpec(_kind(text, layer), type(layer) is DynamicLayer, *shape)
        for layer, shape in zip(native, shapes, strict=True)
    )
    if not any(spec.kind in ("full", "sliding") for spec in layers):
        raise UnsupportedModelError(f"{text.model_type} has no attention layer: there is no key-value cache to evict")
    return ModelSpec(text.model_type, layers, getattr(text, "max_position_embeddings", None))


def _refuse_foreign_attention(text: PreTrainedConfig) -> None:
    """A modeling file that never imports the attention interface computes attention by itself."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        if type(text) in mapping:
            if not hasattr(sys.modules[mapping[type(text)].__module__], "ALL_ATTENTION_FUNCTIONS"):
                raise UnsupportedModelError(
                    f"{text.model_type}'s attention does not go through transformers' attention interface, so the "
                    "cache would never see the queries: use DynamicCache"
                )
            return


def _kind(text: PreTrainedConfig, layer: Any) -> str:
    kinds = {DynamicLayer: "full", DynamicSlidingWindowLayer: "sliding", LinearAttentionLayer: "linear"}
    if type(layer) in kinds:
        return kinds[type(layer)]
    if type(layer).__name__ == "DummyLayer":
        return "none"
    raise UnsupportedModelError(
        f"{text.model_type} has layers with a {type(layer).__name__}, a kind of cache that the engine does not know: "
        "use DynamicCache"
    )


def _shape(text: PreTrainedConfig, index: int) -> tuple[int, int, int]:
    """`(kv_heads, head_dim, v_head_dim)` of a layer; configs that differ by layer hold one config for each."""
    per_layer = getattr(text, "per_layer_config", None)
    config = per_layer[index] if per_layer is not None else text
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return kv_heads, head_dim, getattr(config, "v_head_dim", None) or head_dim
