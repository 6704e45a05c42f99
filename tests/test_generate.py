"""All that `generate` and its callers do with a cache: beams, sampling, rows, copies, modes, threads, other caches."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from kvcache import SinkH2OCache
from tests import helpers
from tests.contract import KINDS, NAMED, PLENTY, Kind, model_named
from tests.helpers import assert_close, assert_same_kept, call, generate, left_padded, tokens
from tests.oracle import Oracle, beam_search, positions_from_mask

pytestmark = pytest.mark.usefixtures("poisoned_memory")
every_cache = pytest.mark.parametrize("kind", [KINDS[name] for name in NAMED], ids=NAMED)


def h2o(model: Any, margin: int = 2) -> SinkH2OCache:
    return SinkH2OCache(config=model.config, sinks=1, window=3, heavy_hitters=3, margin=margin)


def state_of(cache: Any) -> tuple[Any, ...]:
    """All that is visible from outside."""
    layers = helpers.managed_layers(cache)
    held = [(cache.kept_positions(i).tolist(), cache.scores(i).tolist()) for i in layers]
    return cache.get_seq_length(), cache.stats(), held


# -- beams, several sequences, sampling --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@every_cache
def test_beams_equal_a_brute_force_beam_over_the_oracle(name: str, kind: Kind) -> None:
    model = model_named(name)
    ids, mask = left_padded(tokens(2, 18), [18, 11])
    for margin in (1, 4):
        budget = kind.budget(margin)
        cache = kind.cache(model, budget)
        options = {"num_beams": 3, "num_return_sequences": 3, "attention_mask": mask}
        actual = generate(model, cache, ids, 9, **options)
        expected = beam_search(kind.oracle(model, budget), ids, 9, 3, mask)
        assert actual.tolist() == expected.reshape(6, -1).tolist()


@pytest.mark.fast
def test_beams_differ_from_greedy_and_from_the_full_cache() -> None:
    """Else the test above would not see a cache that ignores the reordering, or never evicts."""
    model, ids = model_named("llama"), tokens(2, 18)
    beams = generate(model, h2o(model), ids, 9, num_beams=3).tolist()
    assert beams != generate(model, h2o(model), ids, 9).tolist()
    assert beams != generate(model, DynamicCache(config=model.config), ids, 9, num_beams=3).tolist()


def sample(oracle: Oracle, ids: Tensor, new_tokens: int, seed: int) -> Tensor:
    """What `generate(do_sample=True, top_k=0)` draws after `torch.manual_seed(seed)`."""
    torch.manual_seed(seed)
    feed = ids
    for _ in range(new_tokens):
        probabilities = oracle.forward(feed)[:, -1].float().softmax(-1)
        feed = torch.multinomial(probabilities, num_samples=1)
        ids = torch.cat([ids, feed], dim=-1)
    return ids


@pytest.mark.fast
@every_cache
def test_sampling_with_a_seed(kind: Kind) -> None:
    model, ids = model_named("llama"), tokens(2, 20)
    options = {"do_sample": True, "top_k": 0}
    budget = kind.budget(2)
    torch.manual_seed(5)
    actual = generate(model, kind.cache(model, budget), ids, 15, **options)
    assert actual.tolist() == sample(kind.oracle(model, budget), ids, 15, 5).tolist()
    torch.manual_seed(5)
    full = generate(model, DynamicCache(config=model.config), ids, 15, **options)
    assert full.tolist() != actual.tolist()
    torch.manual_seed(5)
    plenty = generate(model, kind.cache(model, kind.budget(2, window=PLENTY)), ids, 15, **options)
    assert plenty.tolist() == full.tolist()


@pytest.mark.fast
@every_cache
def test_num_return_sequences(kind: Kind) -> None:
    model, ids = model_named("llama"), tokens(2, 20)
    budget = kind.budget(2)
    options = {"do_sample": True, "top_k": 0, "num_return_sequences": 3}
    torch.manual_seed(7)
    actual = generate(model, kind.cache(model, budget), ids, 12, **options)
    expected = sample(kind.oracle(model, budget), ids.repeat_interleave(3, 0), 12, 7)
    assert actual.tolist() == expected.tolist()


@pytest.mark.fast
@every_cache
def test_a_prefilled_cache_repeated_for_several_sequences(kind: Kind) -> None:
    model, ids, budget = model_named("llama"), tokens(2, 20), kind.budget(2)
    pair = kind.pair(model, budget)
    pair.step(ids[:, :15])
    pair.cache.batch_repeat_interleave(3)
    pair.oracle.repeat(3)
    torch.manual_seed(3)
    options = {"do_sample": True, "top_k": 0, "num_return_sequences": 3}
    actual = generate(model, pair.cache, ids, 10, **options)
    torch.manual_seed(3)
    oracle, ids = pair.oracle, ids.repeat_interleave(3, 0)
    feed = ids[:, 15:]
    for _ in range(10):
        feed = torch.multinomial(oracle.forward(feed)[:, -1].float().softmax(-1), num_samples=1)
        ids = torch.cat([ids, feed], dim=-1)
    assert actual.tolist() == ids.tolist()


@pytest.mark.fast
@pytest.mark.parametrize("argument", ["past_key_values", "cache"])
def test_both_names_of_the_argument(argument: str) -> None:
    """`past_key_values` everywhere, `cache` since 5.24."""
    if argument == "cache" != helpers.CACHE_ARGUMENT:
        pytest.skip("this version of transformers does not know `cache`")
    model, ids = model_named("llama"), tokens(1, 20)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        actual = model.generate(input_ids=ids, **{argument: h2o(model)}, **options)  # pyright: ignore
    assert actual.tolist() == generate(model, h2o(model), ids, 9).tolist()


@pytest.mark.fast
def test_returned_dictionary_holds_the_cache_itself() -> None:
    model, ids = model_named("llama"), tokens(1, 20)
    cache = h2o(model)
    out = generate(model, cache, ids, 4, return_dict_in_generate=True)
    assert out[helpers.CACHE_ARGUMENT] is cache


# -- rows --------------------------------------------------------------------------------------------------------------


def reorder(cache: Any, rows: Tensor) -> None:
    cache.reorder_cache(rows)


def select(cache: Any, rows: Tensor) -> None:
    cache.batch_select_indices(rows)


@pytest.mark.fast
@every_cache
@pytest.mark.parametrize("operation", [reorder, select])
@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 1], [0], [2, 0], [0, 2, 1, 1]])
def test_rows_take_everything_along(kind: Kind, operation: Callable[[Any, Tensor], None], rows: list[int]) -> None:
    """Fewer rows and more rows than before, rows of different length, in the middle of a margin and after it."""
    pair = kind.pair(model_named("llama"), kind.budget(3))
    pair.step(*left_padded(tokens(3, 14), [14, 9, 2]))
    index = torch.tensor(rows)
    for seed in range(2):
        operation(pair.cache, index)
        pair.rows(index)
        for i in range(5):
            pair.step(tokens(len(rows), 1, seed=10 * seed + i), what=f"after {rows}")
        index = torch.arange(len(rows)).flip(0)


@pytest.mark.fast
@every_cache
def test_repeated_rows(kind: Kind) -> None:
    pair = kind.pair(model_named("llama"), kind.budget(3))
    pair.step(*left_padded(tokens(2, 14), [14, 5]))
    pair.cache.batch_repeat_interleave(2)
    pair.rows(torch.tensor([0, 0, 1, 1]))
    for i in range(9):
        pair.step(tokens(4, 1, seed=i), what="repeated")


@pytest.mark.fast
@pytest.mark.parametrize("name", ["gemma2", "lfm2"])
def test_rows_of_a_hybrid_take_their_native_layers_along(name: str) -> None:
    pair = KINDS["sink_h2o"].pair(model_named(name), KINDS["sink_h2o"].budget(2))
    pair.step(tokens(3, 20))
    index = torch.tensor([2, 0, 0])
    pair.cache.reorder_cache(index)
    pair.oracle.position, pair.oracle.seen = pair.oracle.position[index], pair.oracle.seen[index]
    for layer in pair.oracle.layers.values():
        layer.take_rows(index)
    pair.oracle.cache.reorder_cache(index)
    for i in range(6):
        pair.step(tokens(3, 1, seed=i), what=name)


@pytest.mark.fast
def test_row_operations_on_an_empty_cache_do_nothing() -> None:
    """transformers calls them before the first forward, too."""
    model = model_named("llama")
    cache: Any = h2o(model)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.reset()
    expected = generate(model, h2o(model), tokens(2, 20), 8)
    assert generate(model, cache, tokens(2, 20), 8).tolist() == expected.tolist()


# -- reset, copies -----------------------------------------------------------------------------------------------------


@pytest.mark.fast
@every_cache
def test_reset_makes_a_fresh_cache(kind: Kind) -> None:
    """With another batch size, another padding and another length than before."""
    model, budget = model_named("llama"), kind.budget(2)
    cache = kind.cache(model, budget)
    generate(model, cache, tokens(3, 25), 9)
    for batch, length in [(1, 30), (4, 3), (2, 12)]:
        cache.reset()
        assert cache.get_seq_length() == 0
        ids, mask = left_padded(tokens(batch, length, seed=1), [length] + [2] * (batch - 1))
        fresh = kind.cache(model, budget)
        expected = generate(model, fresh, ids, 12, attention_mask=mask)
        assert generate(model, cache, ids, 12, attention_mask=mask).tolist() == expected.tolist()
        assert state_of(cache) == state_of(fresh)


@pytest.mark.fast
@every_cache
def test_a_deepcopy_is_equal_and_independent(kind: Kind) -> None:
    model = model_named("llama")
    pair = kind.pair(model, kind.budget(2))
    pair.step(*left_padded(tokens(2, 20), [20, 6]))
    twin = copy.deepcopy(pair.cache)
    assert state_of(twin) == state_of(pair.cache)
    storages = [{t.untyped_storage().data_ptr() for t in helpers.tensors_of(c)} for c in (twin, pair.cache)]
    assert not (storages[0] & storages[1]) - {0}
    other = helpers.Pair(model, twin, pair.oracle.clone(), pair.scored)
    other.mask = pair.mask
    for i in range(7):
        pair.step(tokens(2, 1, seed=i), what="original")
        other.step(tokens(2, 2, seed=50 + i), what="copy")


@pytest.mark.fast
@every_cache
def test_pickling_is_refused_or_right(kind: Kind) -> None:
    model = model_named("llama")
    cache = kind.cache(model, kind.budget(2))
    with torch.no_grad():
        call(model, cache, tokens(2, 20))
    try:
        data = pickle.dumps(cache)
    except (TypeError, ValueError, pickle.PicklingError) as error:
        assert len(str(error)) > 20, "a refusal says why"  # noqa: PT017
        return
    twin = pickle.loads(data)
    assert state_of(twin) == state_of(cache)
    assert generate(model, twin, tokens(2, 26), 9).tolist() == generate(model, cache, tokens(2, 26), 9).tolist()


# -- callers' modes ----------------------------------------------------------------------------------------------------

MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "grad": torch.enable_grad,
}


@pytest.mark.fast
@pytest.mark.parametrize("order", list(itertools.permutations(MODES)), ids="-".join)
@every_cache
def test_callers_modes_in_any_order(kind: Kind, order: tuple[str, ...]) -> None:
    """Prefill in one mode, evictions in every other one, and copies, rows and a reset in between."""
    model, budget = model_named("llama"), kind.budget(1)
    cache, oracle = kind.cache(model, budget), kind.oracle(model, budget)
    ids = tokens(2, 46)
    a = 0
    for mode, n in [(order[0], 20), *((mode, n) for mode in order * 2 for n in (1, 3))]:
        with MODES[mode]():
            logits = call(model, cache, ids[:, a : a + n]).logits
        assert_close(logits.detach().clone(), oracle.forward(ids[:, a : a + n]), f"{mode} at {a}")
        a += n
        assert not any(t.requires_grad for t in helpers.tensors_of(cache)), f"{mode} left a graph behind"
    assert_same_kept(cache, oracle, "at the end", kind.policy == "heavy_hitters")
    for mode in order:
        with MODES[mode]():
            cache.reorder_cache(torch.tensor([1, 0]))
            cache = copy.deepcopy(cache)
    cache.reset()
    expected = generate(model, kind.cache(model, budget), ids, 5)
    assert generate(model, cache, ids, 5).tolist() == expected.tolist()


# -- several caches, several threads -----------------------------------------------------------------------------------


@pytest.mark.fast
def test_two_caches_interleaved_on_one_model() -> None:
    model = model_named("llama")
    pairs = [KINDS[name].pair(model, KINDS[name].budget(margin)) for name, margin in zip(KINDS, (1, 2, 5), strict=True)]
    for i, n in enumerate([15, 1, 1, 4, 1, 1, 1, 1]):
        for row, pair in enumerate(pairs):
            pair.step(tokens(1 + row, n, seed=10 * i + row), what=f"cache {row}, forward {i}")


@pytest.mark.fast
def test_two_models_of_one_config_object() -> None:
    """The second model has the same config object: routing follows the config, tokens must not mix."""
    first: Any = helpers.model_of("llama")
    second = type(first)(first.config).to(torch.float64).eval()
    pairs = [KINDS["sink_h2o"].pair(model, KINDS["sink_h2o"].budget(2)) for model in (first, second)]
    for i, n in enumerate([15, 1, 1, 1, 1]):
        for pair in pairs:
            pair.step(tokens(1, n, seed=i))


@pytest.mark.fast
def test_a_deepcopied_model_works_with_a_cache_of_its_own_config() -> None:
    model = helpers.model_of("llama")
    ids = tokens(1, 20)
    expected = generate(model, h2o(model), ids, 8)
    twin = copy.deepcopy(model)
    assert generate(twin, h2o(twin), ids, 8).tolist() == expected.tolist()
    del model
    assert generate(twin, h2o(twin), ids, 8).tolist() == expected.tolist()


def test_four_threads_with_a_cache_each() -> None:
    model = model_named("llama")
    jobs = []
    for i in range(4):
        kind = KINDS[NAMED[i % 2]]
        budget = kind.budget(1 + i)
        ids = tokens(1 + i % 2, 12 + 7 * i, seed=i)
        expected = kind.oracle(model, budget).generate_greedy(ids, 25).tolist()
        jobs.append((kind.cache(model, budget), ids, expected))
    results: dict[int, Any] = {}
    start = threading.Barrier(4)

    def work(index: int) -> None:
        cache, ids, _ = jobs[index]
        start.wait()
        try:
            for _ in range(3):
                results[index] = generate(model, cache, ids, 25).tolist()
                if results[index] != jobs[index][2]:
                    return
                cache.reset()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (_, _, expected) in enumerate(jobs):
        assert results[i] == expected, f"thread {i}"


# -- other caches on a routed model ------------------------------------------------------------------------------------


def with_other_caches(model: Any, static: bool) -> dict[str, Any]:
    """What a model answers without the engine, in every way that transformers offers."""
    ids, mask = left_padded(tokens(2, 20), [20, 9])
    position_ids = positions_from_mask(mask)
    found: dict[str, Any] = {}
    with torch.no_grad():
        found["no cache"] = model(ids, use_cache=False).logits
        found["no cache, padded"] = model(ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        halves = []
        for a, b in [(0, 12), (12, 13), (13, 20)]:
            arguments = {"attention_mask": mask[:, :b], "position_ids": position_ids[:, a:b]}
            halves.append(call(model, cache, ids[:, a:b], **arguments).logits)
        found["dynamic, chunks"] = torch.cat(halves, dim=1)
    options = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    caches: dict[str, Callable[[], Any]] = {"dynamic": lambda: DynamicCache(config=model.config)}
    if static:
        caches["static"] = lambda: StaticCache(config=model.config, max_cache_len=40)
    for name, make in caches.items():
        for more in ({}, {"num_beams": 2}, {"prefill_chunk_size": 7}):
            if name == "static" and "num_beams" in more:
                continue
            out = generate(model, make(), ids, 6, disable_compile=True, **options, **more)
            found[f"{name} {more}"] = torch.stack(out.logits)
            found[f"{name} {more} tokens"] = out.sequences
    return found


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gpt_oss", "lfm2"])
def test_other_caches_on_a_routed_model_are_unchanged(name: str, implementation: str) -> None:
    """Bit by bit, before the model was ever routed, while a cache is in use, and after it is gone."""
    if name == "gpt_oss" and implementation == "sdpa":
        pytest.skip("sdpa knows no sink logits")
    model = helpers.model_of(name, dtype=torch.float32, attn_implementation=implementation)
    static = name != "lfm2"  # has no static cache for its convolutions
    before = with_other_caches(model, static)
    cache = h2o(model)
    generate(model, cache, tokens(1, 20), 6)
    during = with_other_caches(model, static)
    generate(model, cache, tokens(1, 40), 6)
    del cache
    after = with_other_caches(model, static)
    for what, expected in before.items():
        real = ~expected.isnan()
        for found in (during[what], after[what]):
            assert torch.equal(found.isnan(), ~real), what
            assert torch.equal(found[real], expected[real]), what


@pytest.mark.fast
def test_nothing_of_the_engine_is_saved_with_the_model(tmp_path: Any) -> None:
    model = helpers.model_of("llama")
    generate(model, h2o(model), tokens(1, 20), 4)
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "kvcache" not in text.lower()
    assert "evict" not in text.lower()
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    expected = generate(model, h2o(model), tokens(1, 20), 8)
    assert generate(loaded, h2o(loaded), tokens(1, 20), 8).tolist() == expected.tolist()
