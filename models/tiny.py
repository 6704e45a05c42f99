"""Small models with random weights, one per architecture, for tests and examples: `build("llama")`.

Each is the real transformers class with its real config, shrunk to 3 or 4 layers, 4 query heads, 2 KV heads where
the architecture groups them, and 97 tokens. The weights are large enough that attention is neither uniform nor
one-hot, biases and norms are not trivial, and a wrong key, mask or score therefore shows in the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

VOCABULARY = 97
SLIDING_WINDOW = 16
TRAINED_LENGTH = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": TRAINED_LENGTH,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,  # a tied head on random embeddings only repeats its input
    "bos_token_id": 1,
    "eos_token_id": None,  # random weights would stop a generation anywhere
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
_ALTERNATING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": SLIDING_WINDOW,
}
_UNGROUPED = {"num_key_value_heads": None, "head_dim": None}
# Settings per architecture: they win over the common ones, the caller's overrides win over both.
# layer_types repeats itself. None takes a common name away, where the config class computes it or has no use for it.
_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": SLIDING_WINDOW},  # every layer slides; sliding_window=None makes them all full
    "qwen2": {},
    "qwen3": {},
    "gemma2": {
        **_ALTERNATING,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 2.0,  # low enough to bend the logits
        "final_logit_softcapping": 20.0,
    },
    "gemma3": {**_ALTERNATING, "query_pre_attn_scalar": 12},
    "phi3": {},
    "gpt_neox": {"rotary_pct": 0.5, **_UNGROUPED},
    "gpt_oss": {**_ALTERNATING, **_EXPERTS},
    "olmo2": {},
    "mixtral": _EXPERTS,
    "gpt2": {**_UNGROUPED, "intermediate_size": None},
    "qwen3_next": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"], "head_dim": None},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
    "falcon": _UNGROUPED,
    "bloom": {**_UNGROUPED, "intermediate_size": None, "n_layer": 3, "n_head": 4},
    "t5": {**_UNGROUPED, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 3, "num_heads": 4},
}
_MODEL_TYPES = {"gemma3": "gemma3_text"}
_EAGER = ("gemma2", "gpt_oss", "bloom")  # sdpa knows neither softcap nor sink logits

REFUSED = ("falcon", "bloom", "t5")
"""Architectures whose attention cannot be routed: an evicting cache refuses them."""
HYBRID = ("qwen3_next", "lfm2")
"""Architectures in which full-attention layers alternate with linear-attention or convolution layers."""
ARCHITECTURES = tuple(name for name in _SETTINGS if name not in REFUSED)
"""Decoder architectures that `build` knows and that run with a KV cache, `REFUSED` ones left out."""


def build(
    architecture: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """A small random model in eval mode, the same one for the same arguments; the global generator is left alone.

    `overrides` are config settings. The weights are drawn in float32 and converted, so that a float64 model equals
    the float32 one up to rounding. `attn_implementation` None: sdpa where the architecture allows it, else eager.

    Raises ValueError for an unknown architecture.
    """
    config = build_config(architecture, **overrides)
    implementation = attn_implementation or ("eager" if architecture in _EAGER else "sdpa")
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The default grouped matrix product of experts knows no float64.
        options = {"experts_implementation": "eager"} if _has_experts(config) else {}
        model = auto.from_config(config, attn_implementation=implementation, dtype=torch.float32, **options)
        _disturb(model)
    return model.to(dtype).eval()


def build_config(architecture: str, **overrides: Any) -> PreTrainedConfig:
    """The config of `build(architecture, **overrides)`, without any weights."""
    if architecture not in _SETTINGS:
        raise ValueError(f"unknown architecture {architecture!r}; known: {', '.join(_SETTINGS)}")
    settings = {**_COMMON, **_SETTINGS[architecture], **overrides}
    trained = settings["max_position_embeddings"]
    if architecture == "gpt_oss":  # its own default stretches 4,096 positions by 32
        yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
        settings.setdefault("rope_parameters", {**yarn, "original_max_position_embeddings": trained // 4})
    if architecture == "phi3":
        settings.setdefault("original_max_position_embeddings", trained)
    if "layer_types" in settings and "layer_types" not in overrides:
        pattern = settings["layer_types"]
        settings["layer_types"] = [pattern[i % len(pattern)] for i in range(settings["num_hidden_layers"])]
    for name in [name for name in _COMMON if settings[name] is None and name != "eos_token_id"]:
        del settings[name]
    return AutoConfig.for_model(_MODEL_TYPES.get(architecture, architecture), **settings)


def _has_experts(config: PreTrainedConfig) -> bool:
    return getattr(config, "num_experts_per_tok", None) is not None


def _disturb(model: nn.Module) -> None:
    """Random biases, norm weights and sink logits: their initial ones and zeros would hide that they are ignored."""
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1 and parameter.is_floating_point():
            spread = 1.0 if name.endswith("sinks") else 0.1
            parameter.data.add_(torch.randn(parameter.shape) * spread)
