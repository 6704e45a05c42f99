"""models/tiny.py: the small models run, are the same everywhere, and attend to something."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.utils import logging

from kvcache.models import tiny

pytestmark = pytest.mark.fast
DECODERS = (*tiny.ARCHITECTURES, "falcon", "bloom")


def _ids(rows: int = 2, length: int = 40) -> torch.Tensor:
    return torch.randint(2, tiny.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def _generate(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    result = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, **options)
    assert isinstance(result, torch.Tensor)
    return result


@contextmanager
def watched_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What transformers logs from warnings on; its loggers do not propagate."""
    logger, level = logging.get_logger("transformers"), logging.get_verbosity()
    logging.set_verbosity_warning()
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
    logging.set_verbosity(level)


@pytest.mark.contract
@pytest.mark.parametrize("architecture", DECODERS)
def test_generates_with_a_dynamic_cache(architecture: str) -> None:
    model, ids = tiny.build(architecture), _ids()
    cached = _generate(model, ids, past_key_values=DynamicCache(config=model.config))
    assert cached.shape == (2, 48)
    assert cached.equal(_generate(model, ids, use_cache=False))
    assert not cached[0, 40:].equal(cached[1, 40:])


def test_generates_t5() -> None:
    assert _generate(tiny.build("t5"), _ids()).shape[0] == 2


@pytest.mark.parametrize("architecture", DECODERS)
def test_float64_equals_float32(architecture: str) -> None:
    ids = _ids()
    with torch.no_grad():
        single = tiny.build(architecture)(input_ids=ids).logits
        double = tiny.build(architecture, dtype=torch.float64)(input_ids=ids).logits
    assert double.dtype == torch.float64
    assert 0.5 < double.std() < 3
    torch.testing.assert_close(single.double(), double, rtol=0, atol=1e-3)


@pytest.mark.parametrize("architecture", DECODERS)
def test_attention_is_neither_uniform_nor_one_hot(architecture: str) -> None:
    model = tiny.build(architecture, attn_implementation="eager")
    with torch.no_grad():
        attentions = model(input_ids=_ids(length=16), output_attentions=True).attentions
    entropies = []
    for probabilities in attentions:
        if probabilities is not None:  # [batch, heads, queries, keys]; None for a layer without attention
            last = probabilities[:, :, -1].double()
            last = last / last.sum(-1, keepdim=True)  # a sink logit takes its part
            entropies.append(-torch.xlogy(last, last).sum(-1).mean() / math.log(16))
    assert entropies
    assert all(0.3 < entropy < 0.97 for entropy in entropies), entropies


def test_same_arguments_same_weights_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second, other = tiny.build("llama"), tiny.build("llama"), tiny.build("llama", seed=1)
    assert torch.rand(1).equal(expected)
    for name, weight in first.state_dict().items():
        assert weight.equal(second.state_dict()[name])
        assert not weight.equal(other.state_dict()[name])


@pytest.mark.parametrize("architecture", [*tiny.ARCHITECTURES, *tiny.REFUSED])
def test_settings(architecture: str) -> None:
    model = tiny.build(architecture)
    assert not model.training
    assert model.dtype == torch.float32
    assert sum(weight.numel() for weight in model.parameters()) < 300_000
    config = model.config
    assert config.vocab_size == tiny.VOCABULARY
    assert 2 <= config.num_hidden_layers <= 4
    if architecture not in tiny.REFUSED:
        assert tiny.build_config(architecture, max_position_embeddings=64).max_position_embeddings == 64


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("layers", [2, 6])
def test_overrides(architecture: str, layers: int, caplog: pytest.LogCaptureFixture) -> None:
    with watched_log(caplog):
        model = tiny.build(architecture, max_position_embeddings=64, initializer_range=0.1, num_hidden_layers=layers)
    assert (model.config.max_position_embeddings, model.config.num_hidden_layers) == (64, layers)
    assert not caplog.records


def test_gemma_and_gpt_oss_bend_their_logits() -> None:
    assert tiny.build("gemma2").config._attn_implementation == "eager"
    oss = tiny.build("gpt_oss")
    sinks = [weight for name, weight in oss.named_parameters() if name.endswith("sinks")]
    assert len(sinks) == 4
    assert all(weight.std() > 0.3 for weight in sinks)
    ids = _ids()
    with torch.no_grad():
        before = oss(input_ids=ids).logits
        for weight in sinks:
            weight.zero_()
        assert (oss(input_ids=ids).logits - before).abs().max() > 0.05


def test_implementation_is_selectable() -> None:
    assert tiny.build("llama").config._attn_implementation == "sdpa"
    assert tiny.build("llama", attn_implementation="eager").config._attn_implementation == "eager"


def test_unknown_architecture() -> None:
    with pytest.raises(ValueError, match=r"unknown architecture 'lama'; known: llama, mistral"):
        tiny.build("lama")
