"""models/rope.py and models/spec.py: rotation and layers are the model's own, or both refuse."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, MambaConfig, PreTrainedConfig, PreTrainedModel

from kvcache.errors import UnsupportedModelError
from kvcache.kernels.rotate import cos_sin, rotate
from kvcache.models import tiny
from kvcache.models.rope import Rope, find_rope
from kvcache.models.spec import LayerSpec, decoder_config, describe
from tests.helpers import tokens

pytestmark = pytest.mark.fast
ROTARY = tuple(name for name in tiny.ARCHITECTURES if name not in ("gpt2", "deepseek_v3"))
THETA = {"rope_theta": 10000.0}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, **THETA},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, **THETA},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        **THETA,
    },
}
# Families that the engine's own small models leave out: other layouts, partial rotation, layers without rotation.
OTHERS: dict[str, dict[str, Any]] = {
    "cohere": {},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16},
    "ernie4_5": {"head_dim": 12},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16},
    "glm": {"head_dim": 12},
    "gptj": {"rotary_dim": 4},
    "granite": {},
    "hunyuan_v1_dense": {"head_dim": 12},
    "nemotron": {},
    "olmo": {},
    "persimmon": {"num_key_value_heads": None},
    "phi": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {"hidden_size": 64},  # it rotates a quarter of each head
    "starcoder2": {},
}


def other_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """A small config of a family that `tiny` does not know."""
    settings: dict[str, Any] = {
        "vocab_size": tiny.VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": tiny.TRAINED_LENGTH,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **OTHERS.get(family, {}),
        **overrides,
    }
    return AutoConfig.for_model(family, **{name: value for name, value in settings.items() if value is not None})


# -- the rotation ------------------------------------------------------------------------------------------------------


def rotated_by_the_model(model: PreTrainedModel, positions: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Queries and keys before and after rotation, of every attention that rotates, in the order of the layers."""
    module, calls = sys.modules[type(model).__module__], []
    original = vars(module)["apply_rotary_pos_emb"]

    def noting(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new_q, new_k = original(q, k, *args, **kwargs)
        calls.append((q, k, new_q, new_k))
        return new_q, new_k

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(module, "apply_rotary_pos_emb", noting)
        model(input_ids=tokens(*positions.shape), position_ids=positions, use_cache=False)
    return calls


def assert_rotates_like(model: PreTrainedModel, rope: Rope, positions: Tensor) -> None:
    """`rope` is what the model does to queries and keys in each of its full-attention layers."""
    kinds = [layer.kind for layer in describe(model.config).layers if layer.kind in ("full", "sliding")]
    calls = rotated_by_the_model(model, positions)
    assert len(calls) == len(kinds), "some layers do not rotate"
    cos, sin = (part[:, None] for part in cos_sin(positions, rope.inverse_frequencies, rope.scaling))
    assert cos.dtype == torch.float32
    compared = 0
    for kind, (*before, new_q, new_k) in zip(kinds, calls, strict=True):
        if kind != "full":  # these may have a RoPE of their own
            continue
        for raw, new in zip(before, (new_q, new_k), strict=True):
            assert float((rotate(raw, cos, sin, rope.interleaved) - new).abs().max()) < 2e-5
            assert float((raw - new).abs().max()) > 0.1
            compared += 1
    assert compared >= 2


def random_positions(highest: int, seed: int = 0) -> Tensor:
    positions = torch.randint(highest, (2, 15), generator=torch.Generator().manual_seed(seed))
    return torch.cat((torch.tensor([[0], [1]]), positions), dim=1)


@functools.cache
def small(architecture: str) -> PreTrainedModel:
    if architecture == "mistral":
        return tiny.build(architecture, sliding_window=None)
    return tiny.build(architecture)


@pytest.mark.contract
@pytest.mark.parametrize("highest", [tiny.TRAINED_LENGTH, 4_000_000])
@pytest.mark.parametrize("architecture", ROTARY)
def test_the_rotation_is_the_models_own(architecture: str, highest: int) -> None:
    """Also where fp32 angles have lost their meaning: the same wrong numbers, or undoing would not undo."""
    model = small(architecture)
    assert_rotates_like(model, find_rope(model.config), random_positions(highest))


@pytest.mark.parametrize("scaling", SCALED)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_scaled_rotations(architecture: str, scaling: str) -> None:
    model = tiny.build(architecture, rope_parameters=SCALED[scaling])
    rope = find_rope(model.config)
    assert (rope.scaling > 1.05) == (scaling == "yarn")
    assert_rotates_like(model, rope, random_positions(tiny.TRAINED_LENGTH))


def test_two_rotations_in_one_model() -> None:
    """Gemma 3's sliding layers turn with a base of their own: the full ones' is meant."""
    model = small("gemma3")
    rope, positions = find_rope(model.config), random_positions(400)
    cos, sin = (part[:, None] for part in cos_sin(positions, rope.inverse_frequencies, rope.scaling))
    sliding, full = rotated_by_the_model(model, positions)[:2]
    assert torch.allclose(rotate(full[1], cos, sin, rope.interleaved), full[3], atol=2e-5)
    assert not torch.allclose(rotate(sliding[1], cos, sin, rope.interleaved), sliding[3], atol=0.1)


REFUSABLE = ("cohere2", "exaone4", "smollm3", "hunyuan_v1_dense", "gptj", "ernie4_5")


def rope_or_refusal(config: PreTrainedConfig) -> Rope | str:
    try:
        return find_rope(config)
    except UnsupportedModelError as error:
        return str(error)


@pytest.mark.contract
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_right_or_refused(family: str) -> None:
    config = other_config(family)
    rope = rope_or_refusal(config)
    if isinstance(rope, str):
        assert re.search(rf'{family}.*positions="absolute"', rope)
        assert family in REFUSABLE, "no reason to refuse"
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
    assert rope.interleaved or family not in ("cohere", "glm")
    assert_rotates_like(model, rope, random_positions(tiny.TRAINED_LENGTH))


def test_partial_rotation_and_layouts() -> None:
    pairs = {name: len(find_rope(tiny.build_config(name)).inverse_frequencies) for name in ROTARY}
    assert pairs == {**dict.fromkeys(ROTARY, 6), "gpt_neox": 3, "qwen3_next": 2}
    assert not any(find_rope(tiny.build_config(name)).interleaved for name in ROTARY)
    glm = find_rope(other_config("glm"))
    assert glm.interleaved and len(glm.inverse_frequencies) == 3


def _dynamic() -> PreTrainedConfig:
    return tiny.build_config("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, **THETA})


def _longrope() -> PreTrainedConfig:
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "original_max_position_embeddings": 128}
    parameters = {"rope_type": "longrope", **factors, **THETA}
    return tiny.build_config("phi3", rope_parameters=parameters, original_max_position_embeddings=128)


def _several_axes() -> PreTrainedConfig:
    return other_config("qwen2_vl_text", rope_parameters={"rope_type": "default", "mrope_section": [2, 2, 2], **THETA})


REFUSED_ROTATIONS = {
    "learned": (lambda: tiny.build_config("gpt2"), r"gpt2.*no rotary"),
    "alibi": (lambda: tiny.build_config("bloom"), r"bloom.*no rotary"),
    "dynamic": (_dynamic, r"llama.*dynamic"),
    "longrope": (_longrope, r"phi3.*longrope"),
    "several axes": (_several_axes, r"qwen2_vl.*M-RoPE"),
    "some layers without": (lambda: other_config("cohere2"), r"cohere2.*some of its layers"),
    "norm after rotation": (lambda: other_config("hunyuan_v1_dense"), r"hunyuan.*after the rotation"),
    "encoder-decoder": (lambda: tiny.build_config("t5"), r"t5.*encoder-decoder"),
}


@pytest.mark.contract
@pytest.mark.parametrize("case", REFUSED_ROTATIONS)
def test_rotations_that_cannot_be_moved(case: str) -> None:
    make, reason = REFUSED_ROTATIONS[case]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        find_rope(make())
    assert any(way_out in str(caught.value) for way_out in ('positions="absolute"', "EncoderDecoderCache"))


# -- the layers --------------------------------------------------------------------------------------------------------

KINDS = {
    "gemma2": ["sliding", "full"] * 2,
    "gemma3": ["sliding", "full"] * 2,
    "gpt_oss": ["sliding", "full"] * 2,
    "qwen3_next": ["linear", "full"] * 2,
    "lfm2": ["linear", "full"] * 2,
    "mistral": ["sliding"] * 3,
}


@pytest.mark.contract
@pytest.mark.parametrize("architecture", [name for name in tiny.ARCHITECTURES if name != "deepseek_v3"])
def test_layers_are_what_the_model_runs(architecture: str) -> None:
    """Kinds as configured, and the shapes that arrive at the cache in a forward."""
    model: Any = tiny.build(architecture)
    spec = describe(model.config)
    assert [layer.kind for layer in spec.layers] == KINDS.get(architecture, ["full"] * 3)
    assert all(layer.managed == (layer.kind == "full") for layer in spec.layers)
    assert spec.trained_length == tiny.TRAINED_LENGTH
    with torch.no_grad():
        cache = model(input_ids=tokens(2, 7), use_cache=True).past_key_values
    assert len(cache.layers) == len(spec.layers)
    for layer, native in zip(spec.layers, cache.layers, strict=True):
        if layer.kind != "linear":
            assert native.keys.shape == (2, layer.kv_heads, 7, layer.head_dim)
            assert native.values.shape == (2, layer.kv_heads, 7, layer.v_head_dim)


def test_shapes_of_unusual_configs() -> None:
    one = tiny.build_config("llama", num_key_value_heads=1, head_dim=20)
    assert describe(one).layers == (LayerSpec("full", True, 1, 20, 20),) * 3
    every = tiny.build_config("llama", num_key_value_heads=4)
    assert describe(every).layers[0].kv_heads == 4
    full = describe(tiny.build_config("mistral", sliding_window=None))
    assert [layer.managed for layer in full.layers] == [True] * 3
    assert describe(tiny.build_config("llama", num_hidden_layers=5)).layers == (LayerSpec("full", True, 2, 12, 12),) * 5


def test_a_trained_length_that_the_config_says() -> None:
    assert describe(tiny.build_config("qwen2", max_position_embeddings=77)).trained_length == 77


def test_a_vision_language_config_is_described_by_its_decoder() -> None:
    """The decoder's config is the very object that its attention modules hold."""
    text = tiny.build_config("gemma3")
    config = AutoConfig.for_model("gemma3", text_config=text.to_dict())
    assert decoder_config(config) is config.get_text_config(decoder=True)
    assert describe(config).layers == describe(text).layers
    assert decoder_config(text) is text


REFUSED: dict[str, tuple[Any, str]] = {
    "falcon": (lambda: tiny.build_config("falcon"), r"falcon.*attention interface.*DynamicCache"),
    "bloom": (lambda: tiny.build_config("bloom"), r"bloom.*attention interface.*DynamicCache"),
    "t5": (lambda: tiny.build_config("t5"), r"t5.*encoder-decoder.*EncoderDecoderCache"),
    "latents": (lambda: tiny.build_config("deepseek_v3"), r"deepseek_v3.*latents.*DynamicCache"),
    "shared": (lambda: other_config("gemma3n_text", num_kv_shared_layers=2), r"gemma3n.*shares.*DynamicCache"),
    "no attention": (lambda: MambaConfig(num_hidden_layers=2), "mamba"),
}


@pytest.mark.contract
@pytest.mark.parametrize("case", REFUSED)
def test_models_that_are_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        describe(make())


@pytest.mark.parametrize("wrong", [None, "gpt2", {"num_hidden_layers": 3}, 7])
@pytest.mark.parametrize("function", [describe, find_rope, decoder_config])
def test_what_is_no_config(function: Any, wrong: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config=.*model\.config") as caught:
        function(wrong)
    assert repr(wrong) in str(caught.value)
    assert isinstance(caught.value, ValueError)
