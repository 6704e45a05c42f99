"""Caches as they are written on a command line."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Cache, DynamicCache

from kvcache import EvictingCache
from kvcache.evals import caches
from kvcache.evals.caches import CacheSpec, build_cache, parse_cache, register, resolve_options, split_slots
from kvcache.policies import HeavyHitters, Recency
from tests.helpers import shared_model

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("full", "full"),
        ("window:slots=512", "window 512"),
        ("streaming_llm:sinks=4,window=508", "streaming_llm 4+508"),
        ("sink_h2o:slots=25%", "sink_h2o 25%"),
        ("sink_h2o:window=252,heavy_hitters=256,positions=auto", "sink_h2o 252+256 positions=auto"),
        ("quantized:nbits=4", "quantized nbits=4"),
        ("recompute:window=512,stride=4", "recompute 512 stride=4"),
    ],
)
def test_written_form_and_label(text: str, label: str) -> None:
    spec = parse_cache(text)
    assert str(spec) == text and spec.label == label
    assert parse_cache(str(spec)) == spec


def test_values_have_types() -> None:
    spec = parse_cache(" sink_h2o:window = 8,positions=cache,slots=12.5% ")
    assert spec == CacheSpec("sink_h2o", (("window", 8), ("positions", "cache"), ("slots", "12.5%")))
    assert spec.get("window", 1) == 8 and spec.get("margin", 3) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "h2o",
            r"unknown cache 'h2o': there are full, window, streaming_llm, sink_h2o, .*snapkv, .*quantized, recompute",
        ),
        ("", "unknown cache ''"),
        ("sink_h2o:sink=4", "unknown option 'sink' .* slots, sinks, window, heavy_hitters, margin, positions"),
        ("window:sinks=4", "window has the options slots, window, margin, positions"),
        ("full:slots=4", "full has no options"),
        ("window:slots", "'slots' in 'window:slots' is not OPTION=VALUE"),
        ("window:slots=", "not OPTION=VALUE"),
        ("window:slots=4,", "not OPTION=VALUE"),
        ("window:slots=4,slots=5", "stands twice"),
        ("window:slots=0", "neither a number of slots"),
        ("window:slots=2.5", "neither a number of slots"),
        ("window:slots=0%", "neither a number of slots"),
        ("window:slots=101%", "neither a number of slots"),
        ("window:slots=nan%", "neither a number of slots"),
        ("window:slots=half", "neither a number of slots"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_cache(text)


@pytest.mark.parametrize(
    ("text", "kind", "slots"),
    [
        ("window:slots=64", Recency, (0, 64, 0)),
        ("streaming_llm:slots=64", Recency, (4, 60, 0)),
        ("sink_h2o:slots=64", HeavyHitters, (4, 28, 32)),
        ("sink_h2o:slots=50%", HeavyHitters, (4, 4, 8)),
        ("sink_h2o:slots=64,sinks=0", HeavyHitters, (0, 32, 32)),
        ("sink_h2o:slots=64,window=8", HeavyHitters, (4, 8, 52)),
        ("sink_h2o:slots=64,heavy_hitters=50", HeavyHitters, (4, 10, 50)),
        ("sink_h2o:slots=64,heavy_hitters=0", HeavyHitters, (4, 60, 0)),
        ("streaming_llm:sinks=2,window=9", Recency, (2, 9, 0)),
    ],
)
def test_builds(text: str, kind: type, slots: tuple[int, int, int]) -> None:
    cache = build_cache(parse_cache(text), shared_model("llama").config, length=32)
    assert isinstance(cache, EvictingCache) and isinstance(cache.policy, kind)
    assert (cache.budget.sinks, cache.budget.window, cache.budget.heavy_hitters) == slots
    assert cache.budget.margin == 32


def test_margin_and_positions_arrive() -> None:
    config = shared_model("llama").config
    for name in ("window", "streaming_llm", "sink_h2o"):
        cache = build_cache(parse_cache(f"{name}:slots=16,margin=3,positions=absolute"), config)
        assert isinstance(cache, EvictingCache)
        assert cache.budget.margin == 3 and cache.positions == "absolute"


def test_full_cache() -> None:
    assert type(build_cache(parse_cache("full"), shared_model("llama").config)) is DynamicCache


@pytest.mark.parametrize("slots", range(1, 40))
@pytest.mark.parametrize("name", ["window", "streaming_llm", "sink_h2o", "recompute"])
def test_every_slot_has_a_part(name: str, slots: int) -> None:
    parts = split_slots(slots, name)
    assert sum(parts.values()) == slots and min(parts.values()) >= 0 and parts["window"] >= 1


def test_refuses_slots_that_cannot_be_divided() -> None:
    config = shared_model("llama").config
    with pytest.raises(ValueError, match=r"slots=25% is a share of a length"):
        build_cache(parse_cache("sink_h2o:slots=25%"), config)
    for text in (
        "sink_h2o:slots=8,window=9",
        "streaming_llm:slots=4,sinks=4",
        "sink_h2o:slots=9,window=2,heavy_hitters=2",
    ):
        with pytest.raises(ValueError, match="cannot be divided"):
            build_cache(parse_cache(text), config)


def test_refuses_what_the_cache_refuses() -> None:
    config = shared_model("llama").config
    for text, message in (
        ("sink_h2o:margin=0", "margin=0"),
        ("sink_h2o:window=wide", "whole number"),
        ("streaming_llm:positions=relative", "relative"),
        ("quantized:backend=none", "none"),
        ("recompute:window=8", "kvcache eval ppl only"),
    ):
        with pytest.raises(ValueError, match=message):
            build_cache(parse_cache(text), config)


def test_a_new_cache_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "REGISTRY", dict(caches.REGISTRY))

    def mine(config: Any, *, window: int = 8, shiny: str = "no") -> Cache:
        return DynamicCache(config=config)

    register("mine", mine)
    spec = parse_cache("mine:slots=12,shiny=yes")
    assert resolve_options(spec) == {"shiny": "yes", "window": 12}
    assert type(build_cache(spec, shared_model("llama").config)) is DynamicCache
