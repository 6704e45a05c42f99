"""The rotary position embedding of a model, taken from its own code and checked against it by numbers."""

import importlib
import inspect
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvcache.kernels.rotate import cos_sin, rotate
from kvcache.models.spec import UnsupportedModelError, decoder_config

MOVING_FREQUENCIES = ("dynamic", "longrope")  # scalings whose frequencies depend on the longest position seen


@dataclass(frozen=True)
class Rope:
    """A rotary embedding with fixed frequencies.

    inverse_frequencies: `[pairs]` fp32, radians per position. scaling: factor on cos and sin (YaRN's attention factor).
    interleaved: which dimensions form a pair, see `kernels.rotate.rotate`.
    """

    inverse_frequencies: Tensor
    scaling: float
    interleaved: bool


def find_rope(config: PreTrainedConfig) -> Rope:
    """The rotary embedding of a model's full-attention layers.

    Raises:
        UnsupportedModelError: no rotary embedding (learned positions, ALiBi, none in some layers), frequencies that
            move with the length (dynamic, longrope), several position axes (M-RoPE), keys normalised after the
            rotation, or a rotation that is neither of the two known layouts.
    """
    text = decoder_config(config)
    parameters = _parameters(text)
    if parameters.get("rope_type") in MOVING_FREQUENCIES:
        raise _unsupported(text, f"its {parameters['rope_type']} RoPE changes frequencies with the length")
    if "mrope_section" in parameters:
        raise _unsupported(text, "its positions have several axes (M-RoPE)")
    module = importlib.import_module(type(text).__module__.replace("configuration_", "modeling_"))
    apply = getattr(module, "apply_rotary_pos_emb", None)
    embedding_class = _embedding_class(module, type(text).__name__)
    if apply is None or embedding_class is None:
        raise _unsupported(text, "it has no rotary position embedding")
    _refuse_conditional_rotation(text, module)
    return _checked(text, embedding_class(text), apply)


def _unsupported(text: PreTrainedConfig, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{text.model_type}: keys cannot be rotated to a position in the cache, since {reason}. Use "
        'positions="absolute" and stay within the trained length'
    )


def _parameters(text: PreTrainedConfig) -> dict[str, Any]:
    parameters = getattr(text, "rope_parameters", None) or {}
    return parameters.get("full_attention") or parameters


def _embedding_class(module: ModuleType, config_name: str) -> type | None:
    """Of the module's rotary embedding classes the one named most like the config, vision towers left out."""
    names = [name for name in vars(module) if name.endswith("RotaryEmbedding") and "Vision" not in name]
    best = max(names, key=lambda name: _common_start(name, config_name), default=None)
    return None if best is None else getattr(module, best)


def _common_start(one: str, other: str) -> int:
    """How many leading characters two names share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _refuse_conditional_rotation(text: PreTrainedConfig, module: ModuleType) -> None:
    for name, member in vars(module).items():
        if not (inspect.isclass(member) and name.endswith("Attention") and member.__module__ == module.__name__):
            continue
        source = inspect.getsource(member)
        if re.search(
            r"\n {12,}[^\n]*= apply_rotary_pos_emb\(", source
        ):  # deeper than a method's own lines: under an if
            raise _unsupported(text, "it rotates under a condition, in some of its layers only")
        if re.search(r"apply_rotary_pos_emb\(.*norm\(.*\.update\(", source, re.DOTALL):
            raise _unsupported(text, "it normalises keys after the rotation")


def _checked(text: PreTrainedConfig, embedding: Any, apply: Any) -> Rope:
    """The layout under which our rotation equals the model's own at several positions."""
    prefix = "full_attention_" if hasattr(embedding, "full_attention_inv_freq") else ""
    frequencies = getattr(embedding, prefix + "inv_freq", None)
    if frequencies is None:
        raise _unsupported(text, "its rotary embedding keeps no frequencies")
    frequencies = frequencies.float()
    scaling = float(getattr(embedding, prefix + "attention_scaling", 1.0))
    positions = torch.tensor([[0, 1, 2, 7, 100]])
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    x = torch.randn(1, 1, positions.shape[1], head_dim, generator=torch.Generator().manual_seed(0))
    kind = ("full_attention",) if prefix else ()
    with torch.no_grad():
        given = embedding(x, positions, *kind)
        try:
            expected = apply(x, x, *given)[0]
        except RuntimeError:  # an attention that cuts off what is not rotated before it calls this
            x = x[..., : 2 * len(frequencies)]
            expected = apply(x, x, *given)[0]
    for interleaved in (False, True):
        rope = Rope(frequencies, scaling, interleaved)
        cos, sin = cos_sin(positions[0], frequencies, scaling)
        if torch.allclose(rotate(x, cos, sin, interleaved), expected, atol=1e-5, rtol=1e-4):
            return rope
    raise _unsupported(text, "its rotation has a layout that the engine does not know")
