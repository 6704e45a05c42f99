"""Absolute positions, ranks in the cache, and the switch between them, against the oracle that encodes anew."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvcache import Budget, EvictingCache, SinkH2OCache, StreamingLLMCache
from kvcache.errors import UnsupportedModelError
from kvcache.policies import HeavyHitters, Recency
from tests import helpers
from tests.helpers import left_padded, right_padded, tokens
from tests.oracle import Oracle

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SIZES: dict[str, Any] = {"sinks": 2, "window": 4, "heavy_hitters": 3, "margin": 3}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def longrope(trained: int) -> dict[str, Any]:
    """Phi-3's scaling: other frequencies once a sequence is longer than `trained`."""
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "original_max_position_embeddings": trained}
    return {
        "max_position_embeddings": trained,
        "original_max_position_embeddings": trained,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **factors},
    }


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "partial": ("gpt_neox", {}),
    "two_ropes": ("gemma3", {}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "llama3": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "phi3": ("phi3", {}),
    "gpt_oss": ("gpt_oss", {}),
    "qwen3": ("qwen3", {}),
    "olmo2": ("olmo2", {}),
    "lfm2": ("lfm2", {}),
}


def pair_of(model: PreTrainedModel, positions: Any, policy: str = "heavy_hitters", **sizes: Any) -> helpers.Pair:
    sizes = {**SIZES, **sizes}
    chosen = HeavyHitters() if policy == "heavy_hitters" else Recency()
    cache = EvictingCache(config=model.config, policy=chosen, budget=Budget(**sizes), positions=positions)
    oracle = Oracle(model, **sizes, policy=policy, positions=positions)
    return helpers.Pair(model, cache, oracle, scored=policy == "heavy_hitters")


def feed(pair: helpers.Pair, lengths: list[int], batch: int = 2, seed: int = 0) -> None:
    for i, n in enumerate(lengths):
        pair.step(tokens(batch, n, seed=seed + i), what=f"forward {i}")


@pytest.mark.fast
@pytest.mark.parametrize("policy", ["heavy_hitters", "recency"])
@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_oracle_that_encodes_anew(variant: str, positions: str, policy: str) -> None:
    architecture, overrides = VARIANTS[variant]
    pair = pair_of(helpers.model_of(architecture, **overrides), positions, policy)
    pair.step(*left_padded(tokens(2, 21), [21, 8]), what="padded prompt")
    feed(pair, [1, 1, 1, 1, 9, 1, 1, 1, 1, 1], seed=1)
    assert pair.cache.stats().positions == positions


def test_ranks_and_absolute_positions_differ() -> None:
    """Else the tests above would prove nothing."""
    logits = {}
    for positions in ("absolute", "cache"):
        pair = pair_of(helpers.shared_model("llama"), positions, "recency")
        pair.step(tokens(1, 30))
        logits[positions] = pair.step(tokens(1, 1, seed=1))
    assert float((logits["absolute"] - logits["cache"]).abs().max()) > 1e-2


@pytest.mark.fast
def test_ranks_of_right_padded_rows_and_idle_rows() -> None:
    pair = pair_of(helpers.shared_model("llama"), "cache")
    pair.step(*right_padded(tokens(3, 17), [17, 3, 8]), what="prompt")
    for i, lengths in enumerate([[1, 1, 0], [4, 1, 2], [0, 1, 1], [1, 1, 1], [1, 1, 1]]):
        pair.step(*right_padded(tokens(3, max(lengths), seed=i), lengths), what=f"{lengths}")


@pytest.mark.fast
def test_ranks_when_the_model_counts_columns() -> None:
    """Without position ids the model rotates at columns, padding included: a row's tokens before and after padding
    are further apart than their positions say. Ranks do not care."""
    model = helpers.shared_model("llama")
    pair = pair_of(model, "cache")
    full, real = right_padded(tokens(2, 17), [17, 5])
    chunks = [(full, real), *((tokens(2, n, seed=n), torch.ones(2, n, dtype=torch.long)) for n in (1, 4, 1))]
    mask = torch.empty(2, 0, dtype=torch.long)
    for i, (ids, new) in enumerate(chunks):
        mask = torch.cat([mask, new], dim=-1)
        expected = pair.oracle.forward(ids, mask)
        with torch.no_grad():
            actual = helpers.call(model, pair.cache, ids, attention_mask=mask).logits
        helpers.assert_close(actual[new.bool()], expected[new.bool()], f"forward {i}")
        helpers.assert_same_kept(pair.cache, pair.oracle, f"forward {i}")


@pytest.mark.fast
def test_ranks_far_behind_the_trained_length() -> None:
    """The engine undoes the rotation that the model did, however far: position ids that start at 3,000,000, where
    float32 angles are far from the true ones. The oracle rotates at ranks only and never sees those angles."""
    model = helpers.shared_model("llama")
    pair = pair_of(model, "cache")
    seen = 0
    for i, n in enumerate([20, 1, 1, 1, 1, 6, 1, 1]):
        ids = tokens(1, n, seed=i)
        position_ids = torch.arange(seen, seen + n)[None]
        expected = pair.oracle.forward(ids)
        with torch.no_grad():
            actual = helpers.call(model, pair.cache, ids, position_ids=position_ids + 3_000_000).logits
        helpers.assert_close(actual, expected, f"forward {i}")
        seen += n


@pytest.mark.fast
def test_re_rotation_does_not_add_up_in_bfloat16() -> None:
    """At margin 1 every eviction moves the whole window by one rank, 100 times for each key. Rotated from the
    original each time, the error stays that of one rotation; rotated on and on it would become tenfold."""
    overrides: dict[str, Any] = {"num_hidden_layers": 1, "attn_implementation": "eager"}
    coarse = helpers.model_of("llama", dtype=torch.bfloat16, **overrides)
    exact = copy.deepcopy(coarse).double()
    sizes: dict[str, Any] = {"sinks": 1, "window": 100, "margin": 1}
    cache = StreamingLLMCache(config=coarse.config, **sizes)
    oracle = Oracle(exact, **sizes, policy="recency", positions="cache")
    errors = []
    for i, n in enumerate([101, *[1] * 200]):
        ids = tokens(1, n, seed=i)
        with torch.no_grad():
            actual = helpers.call(coarse, cache, ids).logits
        errors.append(float((actual.double() - oracle.forward(ids))[:, -1].abs().mean()))
    early, late = sum(errors[1:21]) / 20, sum(errors[-20:]) / 20
    assert late < 1.5 * early, f"mean error of a logit: {early:.4f} at first, {late:.4f} after 200 evictions"


# -- auto --------------------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize(
    "lengths", [[20, *[1] * 20], [7, *[5] * 6], [60], [31, 1, 1, 1], [32, 1, 1], [33, 1], [40, 1, 9]]
)
def test_auto_equals_the_oracle_at_the_switch(lengths: list[int]) -> None:
    """Trained for 32 tokens: by single tokens, in chunks, at once, and at each side of the edge."""
    pair = pair_of(helpers.model_of("llama", max_position_embeddings=32), "auto")
    seen = 0
    for i, n in enumerate(lengths):
        seen += n
        pair.step(tokens(2, n, seed=i), what=f"forward {i}")
        assert pair.cache.stats().positions == ("cache" if seen > 32 else "absolute"), f"{seen} seen"


@pytest.mark.fast
def test_auto_switches_all_rows_with_the_longest() -> None:
    pair = pair_of(helpers.model_of("llama", max_position_embeddings=32), "auto")
    pair.step(*left_padded(tokens(3, 30), [30, 12, 2]), what="prompt")
    feed(pair, [1] * 8, batch=3, seed=1)
    assert pair.cache.stats().positions == "cache"


@pytest.mark.fast
def test_auto_counts_tokens_and_not_columns() -> None:
    """More columns than the model was trained for, but no row with more tokens: positions stay absolute."""
    pair = pair_of(helpers.model_of("llama", max_position_embeddings=32), "auto")
    pair.step(*left_padded(tokens(2, 40), [20, 31]), what="prompt")
    assert pair.cache.stats().positions == "absolute"
    feed(pair, [1, 1, 1], seed=1)
    assert pair.cache.stats().positions == "cache"


@pytest.mark.parametrize("policy", ["heavy_hitters", "recency"])
def test_auto_in_generate_says_once_that_it_switched(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    model = helpers.model_of("llama", max_position_embeddings=32)
    pair = pair_of(model, "auto", policy)
    ids, mask = left_padded(tokens(2, 24), [24, 19])
    logging.getLogger("kvcache").propagate = True
    with caplog.at_level(logging.INFO, logger="kvcache"):
        sequences = helpers.generate(model, pair.cache, ids, 30, attention_mask=mask)
    assert sequences.tolist() == pair.oracle.generate_greedy(ids, 30, mask).tolist()
    assert pair.cache.stats().positions == "cache"
    said = [record.getMessage() for record in caplog.records if "32" in record.getMessage()]
    assert len(said) == 1, said


@pytest.mark.fast
def test_auto_starts_anew_after_reset() -> None:
    model = helpers.model_of("llama", max_position_embeddings=32)
    pair = pair_of(model, "auto")
    feed(pair, [40, 1])
    pair.cache.reset()
    again = helpers.Pair(model, pair.cache, Oracle(model, **SIZES, positions="auto"))
    feed(again, [20, 1, 1])
    assert pair.cache.stats().positions == "absolute"


@pytest.mark.fast
def test_auto_refuses_where_ranks_are_impossible_and_changes_nothing() -> None:
    """Within the trained length all is well; the forward that would leave it is refused before anything happens."""
    model = helpers.model_of("phi3", **longrope(32))
    pair = pair_of(model, "auto")
    pair.oracle.positions = "absolute"
    feed(pair, [30, 1])
    for n in (2, 5):
        with pytest.raises(UnsupportedModelError, match=r"(?s)32.*longrope"), torch.no_grad():
            helpers.call(model, pair.cache, tokens(2, n))
    feed(pair, [1], seed=7)


# -- defaults and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_defaults() -> None:
    config = helpers.shared_model("llama").config
    assert StreamingLLMCache(config=config, sinks=1, window=4).stats().positions == "cache"
    assert SinkH2OCache(config=config, sinks=1, window=4, heavy_hitters=2).stats().positions in ("auto", "absolute")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "learned": ("gpt2", {}, "gpt2"),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC}, "dynamic"),
    "longrope": ("phi3", longrope(128), "longrope"),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", REFUSED)
def test_positions_cache_is_refused_where_nothing_can_be_re_rotated(case: str) -> None:
    architecture, overrides, word = REFUSED[case]
    model = helpers.model_of(architecture, **overrides)
    for make in (
        lambda: SinkH2OCache(config=model.config, sinks=1, window=4, heavy_hitters=2, positions="cache"),
        lambda: StreamingLLMCache(config=model.config, sinks=1, window=4),
    ):
        with pytest.raises(UnsupportedModelError, match=word) as caught:
            make()
        assert "absolute" in str(caught.value), "the message must name the way out"
    pair = pair_of(model, "absolute")  # which works
    feed(pair, [20, 1, 1])


@pytest.mark.fast
def test_an_unknown_mode_names_the_options() -> None:
    config = helpers.shared_model("llama").config
    with pytest.raises(ValueError, match="relative") as caught:
        SinkH2OCache(config=config, sinks=1, window=4, heavy_hitters=2, positions="relative")  # pyright: ignore
    for option in ("absolute", "cache", "auto"):
        assert option in str(caught.value)
