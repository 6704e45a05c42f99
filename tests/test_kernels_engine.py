"""The caches by Triton's kernels, beside the same run by torch's: the same tokens held, the same logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcache import SinkH2OCache, StreamingLLMCache
from kvcache.budget import Budget
from kvcache.cache import EvictingCache
from kvcache.kernels import choice
from kvcache.kernels.choice import TORCH, TRITON
from kvcache.models import tiny
from kvcache.policies import HeavyHitters
from kvcache.positions import Positions
from tests.helpers import assert_close, call, left_padded, managed_layers, right_padded, tokens
from tests.kernel_cases import DEVICE, needs_triton

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("poisoned_memory"), *needs_triton]
TOLERANCE = 1e-4
"""Largest difference of two logits: float32 models."""
Make = Callable[[PreTrainedModel], Any]


def model_of(architecture: str) -> PreTrainedModel:
    """Few layers: the interpreter takes a while for each. Head dimensions of 12."""
    layers = 2 if architecture in ("gemma2", "gpt_oss") else 1
    return on_device(tiny.build(architecture, num_hidden_layers=layers))


def on_device(model: PreTrainedModel) -> PreTrainedModel:
    torch.nn.Module.to(model, DEVICE)
    return model


class Run:
    """One cache fed step by step."""

    def __init__(self, model: PreTrainedModel, make: Make) -> None:
        self.model, self.cache = model, make(model)
        self.mask: Tensor | None = None
        self.logits: list[Tensor] = []  # of every step, and per managed layer what was held after it
        self.held: list[list[Tensor]] = []
        self.scores: list[list[Tensor]] = []

    def step(self, ids: Tensor, mask: Tensor | None) -> None:
        """Feed new ids `[batch, n]`; `mask` is of these alone."""
        new = torch.ones_like(ids) if mask is None else mask
        self.mask = new if self.mask is None else torch.cat([self.mask, new], dim=-1)
        positions = (self.mask.cumsum(-1) - 1).masked_fill(self.mask == 0, 0)[:, -ids.shape[1] :]
        given = {"attention_mask": self.mask.to(DEVICE), "position_ids": positions.to(DEVICE)}
        with torch.no_grad():
            self.logits.append(call(self.model, self.cache, ids.to(DEVICE), **given).logits.cpu())
        layers = managed_layers(self.cache)
        self.held.append([self.cache.kept_positions(layer) for layer in layers])
        self.scores.append([self.cache.scores(layer) for layer in layers])


def check_same(
    model: PreTrainedModel, make: Make, steps: list[tuple[Tensor, Tensor | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's and Triton's kernels after every step."""
    runs = []
    for kernels in (TORCH, TRITON):
        monkeypatch.setenv(choice.VARIABLE, kernels.name)
        run = Run(model, make)
        for ids, mask in steps:
            run.step(ids, mask)
        assert run.cache.managed and all(layer.kernels is kernels for layer in run.cache.managed)
        runs.append(run)
    expected, actual = runs
    for step, (_, mask) in enumerate(steps):
        real = slice(None) if mask is None else mask.bool()
        assert_close(actual.logits[step][real], expected.logits[step][real], f"step {step}: logits", TOLERANCE)
        for held, same in zip(actual.held[step], expected.held[step], strict=True):
            assert torch.equal(held, same), f"step {step}: what is held"
        for scores, same in zip(actual.scores[step], expected.scores[step], strict=True):
            assert_close(scores, same, f"step {step}: scores", TOLERANCE)


def split(ids: Tensor, *lengths: int) -> list[tuple[Tensor, Tensor | None]]:
    """Chunks of these lengths, then one token at a time."""
    single = ids.shape[1] - sum(lengths)
    return [(chunk, None) for chunk in ids.split([*lengths, *[1] * single], dim=1)]


def h2o(margin: int, positions: Positions = "absolute") -> Make:
    def make(model: PreTrainedModel) -> SinkH2OCache:
        return SinkH2OCache(model.config, 2, 4, 6, margin, positions)

    return make


def streaming(margin: int) -> Make:
    return lambda model: StreamingLLMCache(model.config, 2, 8, margin)


@pytest.mark.parametrize("margin", [1, 4])
@pytest.mark.parametrize("positions", ["absolute", "cache"])
def test_heavy_hitters(margin: int, positions: Positions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that fits, one token at a time past several evictions."""
    check_same(model_of("llama"), h2o(margin, positions), split(tokens(2, 22), 9), monkeypatch)


@pytest.mark.parametrize("margin", [1, 4])
def test_streaming(margin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is observed, and keys are rotated to their rank."""
    check_same(model_of("llama"), streaming(margin), split(tokens(2, 22), 7), monkeypatch)


@pytest.mark.parametrize("make", [h2o(1), h2o(4), h2o(3, "cache"), streaming(2)], ids=["h2o1", "h2o4", "ranks", "slm"])
def test_chunked_prefill(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt longer than the budget, more chunks that overflow, a few tokens at once that fit, then one by one."""
    check_same(model_of("llama"), make, split(tokens(1, 76), 40, 20, 9, 1, 1, 2), monkeypatch)


@pytest.mark.parametrize(
    ("padded", "make"),
    [(left_padded, h2o(1)), (right_padded, h2o(4)), (left_padded, streaming(2))],
    ids=["left-h2o1", "right-h2o4", "left-slm"],
)
def test_padded_batch(padded: Any, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of three lengths, one of them shorter than the budget, and a padded chunk later on."""
    ids, mask = padded(tokens(3, 20), [20, 5, 13])
    later, later_mask = padded(tokens(3, 3, seed=1), [3, 1, 2])
    steps = [(ids, mask), *split(tokens(3, 3, seed=2)), (later, later_mask), *split(tokens(3, 4, seed=3))]
    check_same(model_of("llama"), make, steps, monkeypatch)


@pytest.mark.parametrize("padded", [left_padded, right_padded])
def test_padded_batch_that_fits(padded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding takes slots until the first eviction; the prompts come in two chunks."""
    ids, mask = padded(tokens(3, 9), [9, 1, 4])
    steps = [(ids[:, :5], mask[:, :5]), (ids[:, 5:], mask[:, 5:]), *split(tokens(3, 12, seed=1))]
    check_same(model_of("llama"), h2o(2), steps, monkeypatch)


@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma2", "qwen3"])
@pytest.mark.parametrize("margin", [1, 4])
def test_other_attention(architecture: str, margin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sink logits; a softcap; norms. Sliding layers in between stay the model's own."""
    check_same(model_of(architecture), h2o(margin), split(tokens(2, 30), 20, 2), monkeypatch)


class Fading(HeavyHitters):
    """A score that is not a sum."""

    def observe(self, score: Tensor, mass: Tensor) -> None:
        score.mul_(0.5).add_(mass)


def test_a_policy_that_makes_something_else_of_the_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: PreTrainedModel) -> EvictingCache:
        return EvictingCache(model.config, Fading(), Budget(2, 4, 6, 2), "absolute")

    check_same(model_of("llama"), make, split(tokens(2, 24), 9, 2), monkeypatch)


def test_a_model_that_triton_does_not_serve_is_refused_when_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "triton")
    model = on_device(tiny.build("llama", num_hidden_layers=1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"KVCACHE_KERNELS=triton cannot be served: .*float64"):
        Run(model, h2o(1)).step(tokens(1, 3), None)


@pytest.mark.parametrize("margin", [1, 4])
@pytest.mark.parametrize("kernels", [TORCH, TRITON] if DEVICE.type == "cuda" else [TORCH], ids=lambda each: each.name)
def test_bfloat16(kernels: choice.Kernels, margin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision (Triton's only on a GPU): near the run in float64; budget, sinks and window hold."""
    monkeypatch.setenv(choice.VARIABLE, kernels.name)
    ids, logits = tokens(2, 40), []
    for dtype in (torch.bfloat16, torch.float64):
        model = on_device(tiny.build("llama", dtype=dtype))
        plenty = Run(model, lambda model: SinkH2OCache(model.config, 2, 30, 30, margin))
        for n in (20, 9, *[1] * 11):
            if dtype == torch.float64:
                monkeypatch.setenv(choice.VARIABLE, "torch")
            plenty.step(ids[:, sum(x.shape[1] for x in plenty.logits) :][:, :n], None)
        logits.append(torch.cat(plenty.logits, dim=1).double())
    assert float((logits[0] - logits[1]).abs().mean()) < 0.05 * float(logits[1].abs().mean())
    monkeypatch.setenv(choice.VARIABLE, kernels.name)
    half = on_device(tiny.build("llama", dtype=torch.bfloat16))
    run = Run(half, lambda model: SinkH2OCache(model.config, 2, 3, 4, margin))
    for i, n in enumerate((20, 9, *[1] * 11)):
        run.step(ids[:, :n] if i == 0 else ids[:, -n:], None)
    for layer in managed_layers(run.cache):
        for head in run.cache.kept_positions(layer).flatten(0, 1).tolist():
            assert head[:2] == [0, 1] and head[-3:] == [37, 38, 39] and 9 <= len(head) <= 9 + margin
