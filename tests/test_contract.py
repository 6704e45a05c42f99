"""The contract: every cache on every architecture, against the oracle and against DynamicCache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvcache import Budget, EvictingCache, SinkH2OCache
from kvcache.errors import UnsupportedModelError
from kvcache.policies import HeavyHitters, Recency
from tests import helpers
from tests.contract import KINDS, MODELS, NAMED, PLENTY, SINKS, SLOTS, Kind, model_named
from tests.helpers import assert_close, assert_same_kept, call, generate, left_padded, right_padded, tokens
from tests.oracle import Oracle, positions_from_mask

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("poisoned_memory")]
LENGTHS = (1, SINKS - 1, SLOTS - 1, SLOTS, SLOTS + 1, 10 * SLOTS)
MARGINS = (1, 3, 16)
fast_on_llama = [pytest.param(name, marks=pytest.mark.fast) if name == "llama" else name for name in MODELS]
every_model = pytest.mark.parametrize("name", fast_on_llama)
every_cache = pytest.mark.parametrize("kind", [KINDS[name] for name in NAMED], ids=NAMED)


def decode(pair: helpers.Pair, batch: int, steps: int, what: str, seed: int = 9) -> None:
    """Feeds fixed random tokens one by one: unlike greedy ones they do not settle into a loop."""
    ids = tokens(batch, steps, seed)
    for i in range(steps):
        pair.step(ids[:, i : i + 1], what=what)


# -- a budget of at least the length: DynamicCache ---------------------------------------------------------------------


@every_model
@every_cache
def test_enough_budget_equals_dynamic_cache(name: str, kind: Kind) -> None:
    model = model_named(name)
    ids, mask = left_padded(tokens(2, 24), [24, 15])
    options = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    expected = generate(model, DynamicCache(config=model.config), ids, 20, **options)
    cache = kind.cache(model, kind.budget(4, window=PLENTY))
    actual = generate(model, cache, ids, 20, **options)
    assert actual.sequences.tolist() == expected.sequences.tolist()
    for step, (mine, theirs) in enumerate(zip(actual.logits, expected.logits, strict=True)):
        assert_close(mine, theirs, f"step {step}")
    assert cache.get_seq_length() == 43
    for layer in helpers.managed_layers(cache):
        for row, length in zip(helpers.kept(cache, layer), (43, 34), strict=True):
            assert row == [list(range(length))] * len(row)


# -- a small budget: the oracle ----------------------------------------------------------------------------------------


@every_model
@every_cache
@pytest.mark.parametrize("margin", MARGINS)
def test_small_budget_equals_the_oracle(name: str, kind: Kind, margin: int) -> None:
    """Every prompt length around the budget, then enough single tokens for the margin to fill up at least once."""
    model = model_named(name)
    every_length = name == "llama" or margin < 16  # the others are let off a part, for their time
    for length in LENGTHS if every_length else (SLOTS, 10 * SLOTS):
        pair = kind.pair(model, kind.budget(margin))
        pair.step(tokens(1, length, seed=length), what=f"prompt {length}")
        decode(pair, 1, margin + 2 if length >= SLOTS - 1 or name == "llama" else 2, f"prompt {length}")


@pytest.mark.fast
@every_cache
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_attention_implementation(kind: Kind, implementation: str, dtype: torch.dtype) -> None:
    model = helpers.model_of("llama", attn_implementation=implementation, dtype=dtype)
    budget = kind.budget(3)
    cache, oracle = kind.cache(model, budget), kind.oracle(model.double() if dtype == torch.float64 else model, budget)
    ids = tokens(2, 60)
    for a, b in [(0, 40), (40, 41), (41, 44), *((i, i + 1) for i in range(44, 60))]:
        with torch.no_grad():
            logits = call(model, cache, ids[:, a:b]).logits
        assert logits.dtype == dtype
        assert_close(
            logits, oracle.forward(ids[:, a:b]), f"tokens {a} to {b}", 1e-5 if dtype == torch.float64 else 1e-3
        )
        assert_same_kept(cache, oracle, f"tokens {a} to {b}", scored=False)


def test_long_decode_evicts_many_times() -> None:
    for kind in KINDS.values():
        pair = kind.pair(model_named("llama"), kind.budget(4))
        decode(pair, 2, 50, "long")


@pytest.mark.fast
def test_greedy_generate_equals_the_oracle() -> None:
    """Through `generate` itself, padded, at a budget that evicts; and nothing but the cache is passed."""
    for name in ("llama", "gemma2"):
        model = model_named(name)
        ids, mask = left_padded(tokens(3, 30), [30, 21, 8])
        for kind in (KINDS[key] for key in NAMED):
            budget = kind.budget(2)
            cache, oracle = kind.cache(model, budget), kind.oracle(model, budget)
            sequences = generate(model, cache, ids, 25, attention_mask=mask)
            assert sequences.tolist() == oracle.generate_greedy(ids, 25, mask).tolist()
            assert_same_kept(cache, oracle, f"{name} after generate", kind.policy == "heavy_hitters")


@pytest.mark.fast
@pytest.mark.parametrize("margin", [1, 3])
def test_ties_lose_the_lowest_position_first(margin: int) -> None:
    """Logits so large that every query gives all its mass to one key: most slots have exactly 0, others 1, 2 ..."""
    model: Any = helpers.model_of("llama")
    for layer in model.get_decoder().layers:
        layer.self_attn.q_proj.weight.data.mul_(1e7)
    pair = KINDS["evicting"].pair(model, KINDS["evicting"].budget(margin))
    pair.step(*left_padded(tokens(2, 40), [40, 26]), what="prompt")
    assert pair.oracle.closest == 0.0, "no tie had to be decided"
    decode(pair, 2, 12, "ties")


# -- padding -----------------------------------------------------------------------------------------------------------


@every_model
@every_cache
def test_left_padding_equals_the_oracle(name: str, kind: Kind) -> None:
    model = model_named(name)
    for margin in (1, 4):
        pair = kind.pair(model, kind.budget(margin))
        pair.step(*left_padded(tokens(3, 26), [26, 11, 2]), what="padded prompt")
        decode(pair, 3, 12, f"margin {margin}")


@every_model
@every_cache
def test_a_left_padded_row_equals_the_row_alone(name: str, kind: Kind) -> None:
    """The engine against itself, nothing else: tokens, kept positions and logits."""
    model, lengths = model_named(name), [26, 11, 2]
    ids, mask = left_padded(tokens(3, 26), lengths)
    options = {"output_logits": True, "return_dict_in_generate": True}
    budget = kind.budget(2)
    cache = kind.cache(model, budget)
    together = generate(model, cache, ids, 14, attention_mask=mask, **options)
    for row, length in enumerate(lengths):
        own = kind.cache(model, budget)
        alone = generate(model, own, ids[row : row + 1, 26 - length :], 14, **options)
        assert together.sequences[row, 26:].tolist() == alone.sequences[0, length:].tolist()
        for step, (batched, single) in enumerate(zip(together.logits, alone.logits, strict=True)):
            # The linear layers compute padded prompts in float32, with DynamicCache too.
            tolerance = 1e-4 if name == "qwen3_next" else helpers.TOLERANCE
            assert_close(batched[row], single[0], f"row {row}, step {step}", tolerance)
        for layer in helpers.managed_layers(cache):
            assert helpers.kept(cache, layer)[row] == helpers.kept(own, layer)[0], f"row {row}, layer {layer}"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
@every_cache
def test_right_padded_prefill_then_more(name: str, kind: Kind) -> None:
    """Padding in the middle of a row: behind a short prompt, later with real tokens after it."""
    model = model_named(name)
    for margin in (1, 5):
        pair = kind.pair(model, kind.budget(margin))
        pair.step(*right_padded(tokens(3, 26), [26, 11, 2]), what="right-padded prompt")
        decode(pair, 3, 3, "after")
        pair.step(*right_padded(tokens(3, 7, seed=3), [2, 7, 4]), what="right-padded chunk")
        decode(pair, 3, 8, "after")


@pytest.mark.fast
@every_cache
def test_rows_that_are_padding_throughout_a_forward(kind: Kind) -> None:
    """A row may get nothing at all from a forward, at the start and later, also from one of a single token."""
    pair = kind.pair(model_named("llama"), kind.budget(2))
    pair.step(*left_padded(tokens(3, 12), [12, 5, 1]), what="prompt")
    for i, lengths in enumerate([[1, 0, 1], [0, 1, 1], [3, 0, 2], [1, 1, 0], [9, 1, 0], [1, 1, 1], [1, 1, 1]]):
        pair.step(*left_padded(tokens(3, max(lengths), seed=i), lengths), what=f"forward {lengths}")


@pytest.mark.fast
@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("policy", [HeavyHitters(), Recency()], ids=["heavy_hitters", "recency"])
def test_slots_that_no_token_was_ever_written_to(policy: Any, positions: Any) -> None:
    """Rows that hold fewer tokens than others leave slots empty between forwards: nothing may read them."""
    model = model_named("llama")
    sizes: dict[str, Any] = {"sinks": 0, "window": 3, "heavy_hitters": 0, "margin": 2}
    cache = EvictingCache(config=model.config, policy=policy, budget=Budget(**sizes), positions=positions)
    name = "recency" if isinstance(policy, Recency) else "heavy_hitters"
    pair = helpers.Pair(model, cache, Oracle(model, **sizes, policy=name, positions=positions), name != "recency")
    for i, lengths in enumerate([[3, 0], [1, 3], [0, 4], [1, 1], [0, 1], [6, 2], [1, 1], [1, 1]]):
        pair.step(*left_padded(tokens(2, max(lengths), seed=i), lengths), what=f"forward {lengths}")


@pytest.mark.fast
@every_cache
def test_position_ids_that_count_columns(kind: Kind) -> None:
    """A plain forward with a mask and no position ids: transformers then counts padding too. RoPE is relative, so
    the result is the same, in the engine as in the oracle."""
    model, budget = model_named("llama"), kind.budget(2)
    cache, oracle = kind.cache(model, budget), kind.oracle(model, budget)
    ids, mask = left_padded(tokens(2, 30), [30, 13])
    bounds = [(0, 20), (20, 21), (21, 22), (22, 28), (28, 29), (29, 30)]
    for a, b in bounds:
        with torch.no_grad():
            logits = call(model, cache, ids[:, a:b], attention_mask=mask[:, :b]).logits
        expected = oracle.forward(ids[:, a:b], mask[:, :b])
        real = mask[:, a:b].bool()
        assert_close(logits[real], expected[real], f"columns {a} to {b}")
        assert_same_kept(cache, oracle, f"columns {a} to {b}", kind.policy == "heavy_hitters")


# -- several forwards --------------------------------------------------------------------------------------------------


@every_model
@every_cache
def test_own_loop_of_chunks(name: str, kind: Kind) -> None:
    """Chunks shorter and longer than the budget, a last one of one token, several tokens in the middle of decoding."""
    model = model_named(name)
    for margin in (1, 5):
        pair = kind.pair(model, kind.budget(margin))
        for i, n in enumerate([7, 12, 1, 25, 3, 1, 1, 4, 1, 2, 16, 1]):
            pair.step(tokens(2, n, seed=i), what=f"margin {margin}, chunk {i}")


@pytest.mark.fast
@every_cache
def test_chunks_of_a_left_padded_prompt(kind: Kind) -> None:
    """The first chunk of the last row is nothing but padding."""
    pair = kind.pair(model_named("llama"), kind.budget(2))
    ids, mask = left_padded(tokens(3, 36), [36, 20, 5])
    for a in range(0, 36, 9):
        pair.step(ids[:, a : a + 9], mask[:, a : a + 9], what=f"chunk at {a}")
    decode(pair, 3, 6, "after")


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("chunk", [1, 5, 13, 100])
@every_cache
def test_generate_with_prefill_chunk_size(name: str, kind: Kind, chunk: int) -> None:
    model, budget = model_named(name), kind.budget(3)
    ids, mask = left_padded(tokens(2, 31), [31, 18])
    cache, oracle = kind.cache(model, budget), kind.oracle(model, budget)
    actual = generate(model, cache, ids, 10, attention_mask=mask, prefill_chunk_size=chunk)
    position_ids = positions_from_mask(mask)
    logits = torch.empty(0)
    for a in range(0, 31, chunk):
        b = min(31, a + chunk)
        logits = oracle.forward(ids[:, a:b], mask[:, :b], position_ids[:, a:b])
    assert actual.tolist() == _continue_greedy(oracle, ids, mask, logits, 10).tolist()
    assert_same_kept(cache, oracle, "after generate", kind.policy == "heavy_hitters")


def _continue_greedy(oracle: Oracle, ids: Tensor, mask: Tensor, logits: Tensor, new_tokens: int) -> Tensor:
    feed = logits[:, -1].argmax(-1, keepdim=True)
    ids = torch.cat([ids, feed], dim=-1)
    for _ in range(new_tokens - 1):
        mask = torch.cat([mask, torch.ones_like(feed)], dim=-1)
        feed = oracle.forward(feed, mask, positions_from_mask(mask)[:, -1:])[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, feed], dim=-1)
    return ids


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@every_cache
def test_several_turns(name: str, kind: Kind) -> None:
    """`generate` again with the same cache and the longer ids. The last token of a turn is fed by the next one."""
    model, budget = model_named(name), kind.budget(3)
    cache, oracle = kind.cache(model, budget), kind.oracle(model, budget)
    ids, mask = left_padded(tokens(2, 17), [17, 9])
    seen = 0
    for turn, (new_ids, new_tokens) in enumerate([(0, 6), (12, 5), (1, 9), (30, 4)]):
        ids = torch.cat([ids, tokens(2, new_ids, seed=turn)], dim=-1)
        mask = torch.cat([mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=torch.long)], dim=-1)
        logits = oracle.forward(ids[:, seen:], mask, positions_from_mask(mask)[:, seen:])
        expected = _continue_greedy(oracle, ids, mask, logits, new_tokens)
        ids = generate(model, cache, ids, new_tokens, attention_mask=mask)
        assert ids.tolist() == expected.tolist(), f"turn {turn}"
        assert_same_kept(cache, oracle, f"turn {turn}", kind.policy == "heavy_hitters")
        seen = ids.shape[1] - 1
        assert cache.get_seq_length() == seen


# -- budgets per layer -------------------------------------------------------------------------------------------------

PER_LAYER: dict[str, Any] = {"sinks": [1, 3, 0], "window": [2, 5, 9], "heavy_hitters": [4, 0, 2], "margin": [1, 6, 3]}


@pytest.mark.fast
@pytest.mark.parametrize("policy", [HeavyHitters(), Recency()], ids=["heavy_hitters", "recency"])
@pytest.mark.parametrize("positions", ["absolute", "cache"])
def test_per_layer_budgets(policy: Any, positions: Any) -> None:
    model = model_named("llama")
    cache = EvictingCache(config=model.config, policy=policy, budget=Budget(**PER_LAYER), positions=positions)
    name = "recency" if isinstance(policy, Recency) else "heavy_hitters"
    oracle = Oracle(model, **PER_LAYER, policy=name, positions=positions)
    pair = helpers.Pair(model, cache, oracle, scored=name == "heavy_hitters")
    pair.step(*left_padded(tokens(3, 24), [24, 13, 4]), what="prompt")
    decode(pair, 3, 9, "decode")
    pair.step(*left_padded(tokens(3, 8, seed=2), [8, 3, 5]), what="chunk")
    decode(pair, 3, 9, "decode")


def test_per_layer_budgets_of_a_hybrid_count_every_layer() -> None:
    """One entry per decoder layer; those of the sliding layers are not used."""
    model = model_named("gemma2")
    budget: dict[str, Any] = {
        "sinks": 2,
        "window": [1, 3, 1, 6],
        "heavy_hitters": [50, 2, 50, 5],
        "margin": [1, 2, 1, 4],
    }
    cache = EvictingCache(config=model.config, policy=HeavyHitters(), budget=Budget(**budget), positions="absolute")
    pair = helpers.Pair(model, cache, Oracle(model, **budget))
    pair.step(tokens(2, 30), what="prompt")
    decode(pair, 2, 10, "decode")


# -- architectures at the edge -----------------------------------------------------------------------------------------


def refusal(make: Callable[[], Any]) -> str | None:
    """The message with which the architecture is refused, None where it is not."""
    try:
        make()
    except UnsupportedModelError as error:
        return str(error)
    return None


def h2o(model: Any, window: int = 4) -> SinkH2OCache:
    return SinkH2OCache(config=model.config, sinks=1, window=window, heavy_hitters=2)


def test_a_model_of_sliding_layers_only_is_refused_or_left_alone() -> None:
    model, ids = helpers.model_of("mistral"), tokens(1, 40)
    expected = generate(model, DynamicCache(config=model.config), ids, 10).tolist()
    message = refusal(lambda: h2o(model))
    if message is None:
        assert generate(model, h2o(model), ids, 10).tolist() == expected
    else:
        assert "sliding" in message


@pytest.mark.fast
def test_deepseek_is_refused_or_right() -> None:
    """MLA keeps latents in the cache and expands them before attention."""
    model, ids = helpers.model_of("deepseek_v3"), tokens(1, 20)
    before = generate(model, DynamicCache(config=model.config), ids, 8).tolist()
    message = refusal(lambda: generate(model, h2o(model, PLENTY), ids, 8))
    if message is None:
        assert generate(model, h2o(model, PLENTY), ids, 8).tolist() == before
    else:
        assert "deepseek" in message or "latent" in message
    assert generate(model, DynamicCache(config=model.config), ids, 8).tolist() == before


@pytest.mark.fast
@pytest.mark.parametrize("name", helpers.tiny.REFUSED)
def test_refused_architectures(name: str) -> None:
    """At construction or first use, and the model works as before."""
    model: Any = helpers.model_of(name, dtype=torch.float32, attn_implementation=None)
    ids = tokens(1, 12)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    before = model.generate(input_ids=ids, **options).tolist()
    message = refusal(lambda: generate(model, h2o(model), ids, 4))
    assert message is not None
    assert name in message.lower() or (name == "t5" and "encoder" in message)
    assert model.generate(input_ids=ids, **options).tolist() == before
