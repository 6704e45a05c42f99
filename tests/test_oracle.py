"""The oracle against the plain model and against cases worked out by hand. No engine here."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests import helpers
from tests.helpers import assert_close, call, left_padded, model_of, right_padded, shared_model, tokens
from tests.oracle import LayerState, Oracle, beam_search, positions_from_mask

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("poisoned_memory")]
ORACLE_ARCHITECTURES = [name for name in helpers.tiny.ARCHITECTURES if name != "deepseek_v3"]
FULL: dict[str, Any] = {"sinks": 1, "window": 200, "heavy_hitters": 3}


def plain_logits(model: Any, ids: Tensor, mask: Tensor | None = None, **arguments: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False, **arguments).logits


def visibility_logits(model: Any, ids: Tensor, visible: list[list[int]], **arguments: Any) -> Tensor:
    """The plain model in one forward, query i seeing exactly the columns `visible[i]`."""
    n = ids.shape[1]
    mask = torch.full((n, n), torch.finfo(torch.float64).min, dtype=torch.float64)
    for query, columns in enumerate(visible):
        mask[query, columns] = 0.0
    return plain_logits(model, ids, mask.expand(ids.shape[0], 1, n, n), **arguments)


# -- a budget that nothing exceeds: the plain model -------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("architecture", ORACLE_ARCHITECTURES)
def test_full_budget_equals_the_plain_model(architecture: str, positions: str) -> None:
    model = shared_model(architecture)
    ids, mask = left_padded(tokens(2, 30), [30, 17])
    position_ids = positions_from_mask(mask)
    expected = plain_logits(model, ids, mask, position_ids=position_ids)
    oracle = Oracle(model, **FULL, positions=positions)
    bounds = [(0, 11), (11, 12), (12, 25), (25, 30)]
    logits = [oracle.forward(ids[:, a:b], mask[:, :b], position_ids[:, a:b]) for a, b in bounds]
    # The linear layers of qwen3_next compute a prefill and a decode step by different formulas in float32.
    tolerance = 1e-3 if architecture == "qwen3_next" else 1e-10
    assert_close(torch.cat(logits, dim=1)[mask.bool()], expected[mask.bool()], architecture, tolerance)
    for layer in oracle.layers:
        assert [set(map(tuple, heads)) for heads in oracle.kept(layer)] == [{tuple(range(30))}, {tuple(range(17))}]


def test_layers_without_growing_attention_are_left_to_the_model() -> None:
    names = ("mistral", "gemma2", "lfm2", "llama")
    managed = {name: sorted(Oracle(shared_model(name), **FULL).layers) for name in names}
    assert managed == {"mistral": [], "gemma2": [1, 3], "lfm2": [1, 3], "llama": [0, 1, 2]}


def test_the_model_given_is_not_touched() -> None:
    model = model_of("llama")
    ids = tokens(1, 12)
    before = plain_logits(model, ids)
    Oracle(model, sinks=1, window=2).forward(ids)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(plain_logits(model, ids), before)


# -- visibility worked out by hand ------------------------------------------------------------------------------------


def test_margin_1_one_token_at_a_time() -> None:
    """sinks 2, window 3, no heavy hitters: a query sees 5 slots and itself."""
    model, ids = shared_model("llama"), tokens(1, 12)
    visible = [list(range(i + 1)) if i < 6 else [0, 1, i - 3, i - 2, i - 1, i] for i in range(12)]
    oracle = Oracle(model, sinks=2, window=3, margin=1, policy="recency")
    logits = torch.cat([oracle.forward(ids[:, i : i + 1]) for i in range(12)], dim=1)
    assert_close(logits, visibility_logits(model, ids, visible), "margin 1", 1e-10)
    # The sixth slot is the margin: at rest it still holds the newest token's elder.
    assert oracle.kept(0) == [[[0, 1, 8, 9, 10, 11]] * 2]


def test_margin_2_one_token_at_a_time() -> None:
    """sinks 1, window 2, margin 2: slots 3, capacity 5. At 5 the next forward begins with an eviction to 3."""
    model, ids = shared_model("llama"), tokens(1, 11)
    visible = [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],  # capacity reached
        [0, 3, 4, 5],
        [0, 3, 4, 5, 6],  # again
        [0, 5, 6, 7],
        [0, 5, 6, 7, 8],
        [0, 7, 8, 9],
        [0, 7, 8, 9, 10],
    ]
    oracle = Oracle(model, sinks=1, window=2, margin=2, policy="recency")
    logits = []
    for i in range(11):
        logits.append(oracle.forward(ids[:, i : i + 1]))
        assert oracle.kept(1) == [[visible[i]] * 2]
    assert_close(torch.cat(logits, dim=1), visibility_logits(model, ids, visible), "margin 2", 1e-10)


def test_prefill_chunks_and_decode_mixed() -> None:
    """sinks 1, window 2, margin 1 (slots 3, capacity 4): forwards of 7, 1, 1, 3 and 2 tokens."""
    model, ids = shared_model("llama"), tokens(1, 14)
    visible = [list(range(i + 1)) for i in range(7)]  # the first forward sees itself, then keeps 0, 5, 6
    visible += [[0, 5, 6, 7]]  # 4 held: capacity, not above it
    visible += [[0, 6, 7, 8]]  # evicted to 0, 6, 7 before
    visible += [[0, 7, 8, *range(9, i + 1)] for i in (9, 10, 11)]  # evicted to 0, 7, 8 before, to 0, 10, 11 after
    visible += [[0, 10, 11, *range(12, i + 1)] for i in (12, 13)]
    oracle = Oracle(model, sinks=1, window=2, margin=1, policy="recency")
    bounds, held = [0, 7, 8, 9, 12, 14], [[0, 5, 6], [0, 5, 6, 7], [0, 6, 7, 8], [0, 10, 11], [0, 12, 13]]
    logits = []
    for a, b, expected in zip(bounds, bounds[1:], held, strict=False):
        logits.append(oracle.forward(ids[:, a:b]))
        assert oracle.kept(2) == [[expected] * 2]
    assert_close(torch.cat(logits, dim=1), visibility_logits(model, ids, visible), "mixed", 1e-10)


def test_per_layer_budgets() -> None:
    model, ids = shared_model("llama"), tokens(1, 20)
    oracle = Oracle(model, sinks=[1, 2, 0], window=[3, 4, 9], heavy_hitters=0, margin=[1, 1, 4], policy="recency")
    oracle.forward(ids)
    assert oracle.kept(0) == [[[0, 17, 18, 19]] * 2]
    assert oracle.kept(1) == [[[0, 1, 16, 17, 18, 19]] * 2]
    assert oracle.kept(2) == [[list(range(11, 20))] * 2]


# -- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gemma3"])
def test_mass_equals_the_column_sums_of_the_models_own_attention(architecture: str) -> None:
    model = model_of(architecture, attn_implementation="eager")
    ids = tokens(2, 14)
    with torch.no_grad():
        attentions = model(ids, output_attentions=True, use_cache=False).attentions
    oracle = Oracle(model, **FULL)
    oracle.forward(ids[:, :9])
    oracle.forward(ids[:, 9:])
    for layer, state in oracle.layers.items():
        mass = attentions[layer].double().sum(2).reshape(2, 2, 2, 14).sum(2)  # [batch, kv_heads, T]
        assert state.score is not None
        assert_close(state.score, mass, f"layer {layer}", 1e-5)


def evictable(positions: list[int], scores: list[float], policy: str, budget: tuple[int, int, int, int]) -> list[int]:
    """What one head keeps of hand-made positions and scores."""
    layer = LayerState(*budget)
    layer.alive = torch.tensor([[[p >= 0 for p in positions]]])
    layer.score = torch.tensor([[scores]], dtype=torch.float64)
    fake = SimpleNamespace(position=torch.tensor([positions]), seen=torch.tensor([max(positions) + 1]))
    fake.policy, fake.closest = policy, math.inf
    Oracle._evict_head(fake, layer, 0, 0)  # pyright: ignore[reportArgumentType]
    return torch.tensor(positions)[layer.alive[0, 0]].tolist()


def test_heavy_hitters_keep_the_highest_scores() -> None:
    keeps = evictable([0, 1, 2, 3, 4, 5, 6], [0.0, 5.0, 1.0, 7.0, 6.0, 0.0, 0.0], "heavy_hitters", (1, 2, 2, 1))
    assert keeps == [0, 3, 4, 5, 6]


def test_ties_lose_the_lowest_position_first() -> None:
    keeps = evictable([0, 1, 2, 3, 4, 5, 6], [0.0, 2.0, 2.0, 2.0, 2.0, 0.0, 0.0], "heavy_hitters", (1, 2, 2, 1))
    assert keeps == [0, 3, 4, 5, 6]


def test_padding_is_never_kept_and_never_counted() -> None:
    keeps = evictable([-1, -1, 0, 1, 2, 3, 4], [9.0, 9.0, 0.0, 3.0, 1.0, 0.0, 0.0], "heavy_hitters", (1, 2, 1, 1))
    assert keeps == [0, 1, 3, 4]


def test_recency_keeps_the_highest_positions() -> None:
    keeps = evictable([0, 1, 2, 3, 4, 5, 6], [9.0, 5.0, 1.0, 7.0, 6.0, 0.0, 0.0], "recency", (2, 1, 2, 1))
    assert keeps == [0, 1, 4, 5, 6]


def test_kv_heads_choose_on_their_own() -> None:
    oracle = Oracle(shared_model("llama"), sinks=1, window=2, heavy_hitters=4)
    oracle.forward(tokens(2, 40))
    assert any(heads[0] != heads[1] for layer in oracle.layers for heads in oracle.kept(layer))
    assert any(oracle.kept(layer)[0] != oracle.kept(layer)[1] for layer in oracle.layers)
    assert 0 < oracle.closest < math.inf


# -- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [left_padded, right_padded])
@pytest.mark.parametrize("positions", ["absolute", "cache"])
def test_a_padded_row_is_the_row_alone(positions: str, pad: Any) -> None:
    model, lengths = shared_model("llama"), [25, 9, 4]
    budget: dict[str, Any] = {"sinks": 1, "window": 3, "heavy_hitters": 3, "margin": 2, "positions": positions}
    ids, mask = pad(tokens(3, 25), lengths)
    more = tokens(3, 10, seed=1)
    together = Oracle(model, **budget)
    full = torch.cat([mask, torch.ones(3, 10, dtype=torch.long)], dim=-1)
    position_ids = positions_from_mask(full)
    first = together.forward(ids, mask, position_ids[:, :25])
    rest = [together.forward(more[:, i : i + 1], full[:, : 26 + i], position_ids[:, 25 + i, None]) for i in range(10)]
    for row, length in enumerate(lengths):
        alone = Oracle(model, **budget)
        own = ids[row][mask[row].bool()][None]
        assert own.shape[1] == length
        assert_close(first[row][mask[row].bool()][None], alone.forward(own), "prefill", 1e-10)
        for i in range(10):
            assert_close(rest[i][row, None], alone.forward(more[row, None, i : i + 1]), f"step {i}", 1e-10)
        for layer in alone.layers:
            assert together.kept(layer)[row] == alone.kept(layer)[0]


# -- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["absolute", "cache"])
def test_positions_equal_a_fresh_encoding_of_what_is_kept(positions: str) -> None:
    """In a model of one layer keys depend on nothing but their token: what a query sees can be encoded from scratch,
    at the kept tokens' places or at their ranks."""
    model, ids = model_of("llama", num_hidden_layers=1), tokens(1, 30)
    oracle = Oracle(model, sinks=2, window=4, margin=1, policy="recency", positions=positions)
    oracle.forward(ids[:, :20])
    for i in range(20, 30):
        held = oracle.kept(0)[0][0]
        held = held if len(held) < 7 else [0, 1, *held[-4:]]
        logits = oracle.forward(ids[:, i : i + 1])
        places = torch.tensor([[*held, i]])
        position_ids = places if positions == "absolute" else torch.arange(places.shape[1])[None]
        # An explicit mask: position ids with gaps alone would read as several packed sequences.
        causal = [list(range(j + 1)) for j in range(places.shape[1])]
        fresh = visibility_logits(model, ids[:, places[0]], causal, position_ids=position_ids)
        assert_close(logits, fresh[:, -1:], f"token {i}", 1e-10)


def test_auto_switches_when_a_position_would_reach_the_trained_length() -> None:
    model, ids = model_of("llama", max_position_embeddings=16), tokens(1, 18)
    budget: dict[str, Any] = {"sinks": 1, "window": 4, "margin": 1, "policy": "recency"}
    auto, absolute = Oracle(model, **budget, positions="auto"), Oracle(model, **budget, positions="absolute")
    for i in range(16):
        assert_close(auto.forward(ids[:, i, None]), absolute.forward(ids[:, i, None]), f"token {i}", 0.0)
        assert not auto.in_cache
    ranks = absolute.clone()
    ranks.in_cache = True
    logits = auto.forward(ids[:, 16:17])
    assert auto.in_cache
    assert_close(logits, ranks.forward(ids[:, 16:17]), "token 16", 0.0)
    assert float((logits - absolute.forward(ids[:, 16:17])).abs().max()) > 1e-3


def test_auto_counts_a_rows_own_tokens() -> None:
    model = model_of("llama", max_position_embeddings=16)
    ids, mask = left_padded(tokens(2, 20), [9, 12])
    oracle = Oracle(model, sinks=1, window=4, positions="auto")
    oracle.forward(ids, mask, positions_from_mask(mask))
    assert not oracle.in_cache


def test_ranks_hold_at_any_distance() -> None:
    """Once ranks rule, nothing depends on the position the model believes in."""
    model, ids = shared_model("llama"), tokens(1, 24)
    budget: dict[str, Any] = {"sinks": 1, "window": 4, "margin": 2, "policy": "recency", "positions": "cache"}
    near, far = Oracle(model, **budget), Oracle(model, **budget)
    for i in range(24):
        a = near.forward(ids[:, i, None], position_ids=torch.tensor([[i]]))
        b = far.forward(ids[:, i, None], position_ids=torch.tensor([[i + 400]]))
        assert_close(a, b, f"token {i}", 1e-12)


# -- rows and beams ---------------------------------------------------------------------------------------------------


def test_rows_move_with_everything_they_have() -> None:
    model, ids = shared_model("llama"), tokens(3, 20)
    oracle = Oracle(model, sinks=1, window=3, heavy_hitters=3)
    oracle.forward(ids)
    rows = torch.tensor([2, 0, 0, 1])
    moved = oracle.clone()
    moved.reorder(rows)
    new = tokens(3, 1, seed=5)
    assert_close(moved.forward(new[rows]), oracle.forward(new)[rows], "moved", 1e-12)
    assert moved.kept(1) == [oracle.kept(1)[row] for row in rows.tolist()]
    moved_scores = torch.tensor(moved.scores(1))  # capacity is reached in every row, so the lists are rectangular
    assert_close(moved_scores, torch.tensor(oracle.scores(1))[rows], "scores", 1e-12)


def test_a_clone_is_independent() -> None:
    oracle = Oracle(shared_model("llama"), sinks=1, window=3, heavy_hitters=3)
    oracle.forward(tokens(1, 20))
    before = (oracle.kept(0), oracle.scores(0))
    oracle.clone().forward(tokens(1, 9, seed=2))
    assert (oracle.kept(0), oracle.scores(0)) == before


@pytest.mark.parametrize("beams", [1, 3])
def test_beam_search_equals_transformers_when_nothing_is_evicted(beams: int) -> None:
    model = shared_model("llama")
    ids, mask = left_padded(tokens(2, 9), [9, 6])
    options = {"num_beams": beams, "num_return_sequences": beams, "attention_mask": mask}
    expected = helpers.generate(model, DynamicCache(config=model.config), ids, 7, **options)
    found = beam_search(Oracle(model, **FULL), ids, 7, beams, mask)
    assert found.reshape(2 * beams, -1).tolist() == expected.tolist()
    if beams == 1:
        assert Oracle(model, **FULL).generate_greedy(ids, 7, mask).tolist() == expected.tolist()


# -- the comparisons themselves ----------------------------------------------------------------------------------------


def test_assert_close_can_fail() -> None:
    x = torch.zeros(2, 3)
    assert_close(x, x + 9e-6, "within")
    for wrong in (x + 2e-5, x.clone().fill_(math.nan), x[:1], x.clone().fill_(math.inf)):
        with pytest.raises(AssertionError):
            assert_close(wrong, x, "wrong")


class FakeCache:
    """Answers as a cache would: one layer, one row, two heads."""

    def __init__(self, positions: list[list[int]], scores: list[list[float]], layers: tuple[int, ...] = (0,)) -> None:
        self.positions, self.values, self.layers = torch.tensor([positions]), torch.tensor([scores]), layers

    def stats(self) -> Any:
        return SimpleNamespace(layers=[SimpleNamespace(layer=i, managed=True) for i in self.layers])

    def kept_positions(self, layer: int) -> Tensor:
        return self.positions

    def scores(self, layer: int) -> Tensor:
        return self.values


FAKE_ORACLE = SimpleNamespace(
    layers={0: None}, closest=1.0, kept=lambda _: [[[0, 5], [0, 7]]], scores=lambda _: [[[1.0, 2.0], [3.0, 40.0]]]
)


def test_same_kept_accepts_padding_and_rounding() -> None:
    fake = FakeCache([[-1, 0, 5], [-1, 0, 7]], [[9.0, 1.00001, 2.0], [9.0, 3.0, 40.0001]])
    helpers.assert_same_kept(fake, FAKE_ORACLE, "fake")


@pytest.mark.parametrize(
    "fake",
    [
        FakeCache([[0, 4], [0, 7]], [[1.0, 2.0], [3.0, 40.0]]),
        FakeCache([[5, 0], [0, 7]], [[2.0, 1.0], [3.0, 40.0]]),
        FakeCache([[0, 5], [-1, 0]], [[1.0, 2.0], [0.0, 3.0]]),
        FakeCache([[0, 5], [0, 7]], [[1.0, 2.0], [3.0, 41.0]]),
        FakeCache([[0, 5], [0, 7]], [[1.0, 2.0], [3.0, 40.0]], layers=(0, 1)),
    ],
    ids=["position", "order", "count", "score", "layers"],
)
def test_same_kept_can_fail(fake: FakeCache) -> None:
    with pytest.raises(AssertionError):
        helpers.assert_same_kept(fake, FAKE_ORACLE, "fake")


def test_memory_is_poisoned() -> None:
    assert bool(torch.empty(3).isnan().all())


def test_storage_bytes_sees_through_views() -> None:
    base = torch.zeros(100, dtype=torch.float32)
    inner = SimpleNamespace(view=base[:3], again=[base[5:6]], model=torch.nn.Linear(3, 3))
    assert helpers.storage_bytes({"a": inner, "b": torch.zeros(2, dtype=torch.int64)}) == 400 + 16


def test_call_writes_into_the_cache_given() -> None:
    cache = DynamicCache()
    call(shared_model("llama"), cache, tokens(1, 4))
    assert cache.get_seq_length() == 4
