"""What every cache must do on every architecture: the matrix. A new cache or architecture adds a line here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from kvcache import Budget, EvictingCache, SinkH2OCache, StreamingLLMCache
from kvcache.policies import HeavyHitters
from tests import helpers
from tests.oracle import Oracle

SINKS, WINDOW, HEAVY = 3, 3, 3
SLOTS = SINKS + WINDOW + HEAVY
PLENTY = 300
"""A budget that no test here fills."""


@dataclass(frozen=True)
class Kind:
    """A named cache, and the same in the oracle's words. `make(config, budget, positions)` builds the cache."""

    policy: str
    positions: str
    make: Callable[[Any, dict[str, Any], str], Any]

    def budget(self, margin: int, sinks: int = SINKS, window: int = WINDOW, heavy: int = HEAVY) -> dict[str, Any]:
        """The same number of slots for every kind: with recency, the window takes the heavy hitters' share."""
        if self.policy == "recency":
            return {"sinks": sinks, "window": window + heavy, "margin": margin}
        return {"sinks": sinks, "window": window, "heavy_hitters": heavy, "margin": margin}

    def cache(self, model: PreTrainedModel, budget: dict[str, Any]) -> Any:
        return self.make(model.config, budget, self.positions_on(model))

    def oracle(self, model: PreTrainedModel, budget: dict[str, Any]) -> Oracle:
        return Oracle(model, **budget, policy=self.policy, positions=self.positions_on(model))

    def pair(self, model: PreTrainedModel, budget: dict[str, Any]) -> helpers.Pair:
        scored = self.policy == "heavy_hitters"  # recency observes no mass
        return helpers.Pair(model, self.cache(model, budget), self.oracle(model, budget), scored)

    def positions_on(self, model: PreTrainedModel) -> str:
        """Learned positions cannot be re-rotated."""
        return "absolute" if model.config.model_type == "gpt2" else self.positions


def _evicting(config: Any, budget: dict[str, Any], positions: Any) -> Any:
    return EvictingCache(config=config, policy=HeavyHitters(), budget=Budget(**budget), positions=positions)


def _named(cls: Any, config: Any, budget: dict[str, Any], positions: str) -> Any:
    return cls(config=config, **budget, positions=positions)


KINDS = {
    "sink_h2o": Kind("heavy_hitters", "auto", functools.partial(_named, SinkH2OCache)),
    "streaming_llm": Kind("recency", "cache", functools.partial(_named, StreamingLLMCache)),
    "evicting": Kind("heavy_hitters", "absolute", _evicting),
}
NAMED = ("sink_h2o", "streaming_llm")

# Mistral once as it is (every layer slides: nothing to manage) and once with full attention.
MODELS: dict[str, dict[str, Any]] = {name: {} for name in helpers.tiny.ARCHITECTURES if name != "deepseek_v3"}
del MODELS["mistral"]
MODELS["mistral_full"] = {"sliding_window": None}
# Not the usual scale of one over the square root of the head's dimension.
MODELS["gemma2"] = MODELS["gemma3"] = {"query_pre_attn_scalar": 20}
MODELS["gpt2"] = {"scale_attn_by_inverse_layer_idx": True}


@functools.cache
def model_named(name: str) -> PreTrainedModel:
    """The model of a line of `MODELS`, built once per process."""
    return helpers.model_of(name.removesuffix("_full"), **MODELS[name])
