"""kernels/ and what is made of them, each function against a plain oracle in float64 or in Python's own lists."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvcache.budget import LayerBudget
from kvcache.eviction import plan_eviction, positions_ahead
from kvcache.kernels import prefill_attention as prefill_module
from kvcache.kernels.compact import compact_bookkeeping, flat_rows, move_chunk, move_entries, plan_moves
from kvcache.kernels.decode_attention import decode_attention
from kvcache.kernels.prefill_attention import prefill_attention
from kvcache.kernels.rotate import rotate
from kvcache.kernels.select import eviction_order, kept_slots
from kvcache.models.rope import Rope
from kvcache.policies import HeavyHitters, Recency, Slots
from kvcache.positions import Rerotation, ranks

pytestmark = pytest.mark.fast
NAN, INF = math.nan, math.inf
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 4e-2, torch.float16: 6e-3}
"""Absolute for outputs, and relative to at least 1 for mass. Half precision rounds the logits."""
DTYPES = tuple(TOLERANCE)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def as_models_give(x: Tensor) -> Tensor:
    """The same `[batch, heads, n, dim]` with the strides of a transposed `[batch, n, heads, dim]`."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# -- attention ---------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Inputs of an attention, on the model's side; `held` keys lie in a buffer, those of the queries behind them."""

    batch: int = 2
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    v_head_dim: int = 16
    held: tuple[int, ...] = (63,)
    n: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def total(self) -> int:
        return sum(self.held) + self.n

    @property
    def scaling(self) -> float:
        """Not the one that attention would take by itself."""
        return 0.8 * self.head_dim**-0.5

    def query(self, seed: int = 1) -> Tensor:
        # twice the spread: attention far from uniform, so that a wrong key shows
        shape = (self.batch, self.kv_heads * self.group, self.n, self.head_dim)
        return as_models_give((2 * normal(*shape, seed=seed)).to(self.dtype))

    def keys(self, seed: int = 2) -> Tensor:
        return normal(self.batch, self.kv_heads, self.total, self.head_dim, seed=seed, dtype=self.dtype)

    def values(self, seed: int = 3) -> Tensor:
        return normal(self.batch, self.kv_heads, self.total, self.v_head_dim, seed=seed, dtype=self.dtype)

    def sources(self, keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cut into what the buffers hold, with NaN in the slots behind, and the new tokens with a model's strides."""
        cut = [part.split([*self.held, self.n], dim=2) for part in (keys, values)]
        held = [(buffered(k), buffered(v)) for k, v in zip(cut[0][:-1], cut[1][:-1], strict=True)]
        held = [(k[:, :, :length], v[:, :, :length]) for (k, v), length in zip(held, self.held, strict=True)]
        return [*held, (as_models_give(cut[0][-1]), as_models_give(cut[1][-1]))]


def buffered(x: Tensor, spare: int = 5) -> Tensor:
    """A buffer of a layer: `[batch, kv_heads, slots + spare, dim]`, NaN in the spare slots."""
    buffer = x.new_full((*x.shape[:2], x.shape[2] + spare, x.shape[3]), NAN)
    buffer[:, :, : x.shape[2]] = x
    return buffer


def brute_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    valid: Tensor | None = None,
    voters: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One query of one head at a time, in float64: `(output, mass)`; NaN in the output where a query sees no key."""
    query, keys, values = query.double(), keys.double(), values.double()
    batch, heads, n, _ = query.shape
    kv_heads, total = keys.shape[1:3]
    output = torch.full((batch, n, heads, values.shape[3]), NAN, dtype=torch.float64)
    mass = torch.zeros(batch, kv_heads, total, dtype=torch.float64)
    for row in range(batch):
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            for i in range(n):
                seen = torch.arange(total - n + i + 1)
                if valid is not None:
                    seen = seen[valid[row, min(kv_head, valid.shape[1] - 1), : len(seen)]]
                if len(seen) == 0:
                    continue
                logits = keys[row, kv_head, seen] @ query[row, head, i] * scaling
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                weights = torch.exp(logits)
                sink = 0.0 if sink_logits is None else math.exp(float(sink_logits[head]))
                probabilities = weights / (weights.sum() + sink)
                output[row, i, head] = probabilities @ values[row, kv_head, seen]
                if voters is None or bool(voters[row, i]):
                    mass[row, kv_head, seen] += probabilities
    return output, mass


def assert_output(output: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert output.dtype == dtype
    assert output.shape == expected.shape
    assert bool(output.isfinite().all()), "rows that see no key must be finite"
    worst = float((output.double() - expected)[expected.isfinite()].abs().max())
    assert worst <= TOLERANCE[dtype], f"output differs by {worst:.1e}"


def assert_attention(actual: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    (output, mass), (expected_output, expected_mass) = actual, expected
    assert_output(output, expected_output, dtype)
    assert mass is not None
    assert mass.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert mass.shape == expected_mass.shape
    difference = (mass.double() - expected_mass).abs() / expected_mass.clamp(min=1)
    assert float(difference.max()) <= TOLERANCE[dtype], f"mass differs by {float(difference.max()):.1e}"


def mostly(*shape: int, seed: int) -> Tensor:
    """Random bool, True in four of five."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.8


SHAPES = [
    Case(batch=1, kv_heads=1, group=1, head_dim=16, v_head_dim=16),
    Case(batch=3, kv_heads=2, group=3, head_dim=64, v_head_dim=16),
    Case(batch=1, kv_heads=3, group=7, head_dim=80, v_head_dim=64),
    Case(batch=3, kv_heads=1, group=8, head_dim=16, v_head_dim=80),
]


def shape_name(value: object) -> str:
    if not isinstance(value, Case):
        return str(value)
    return f"b{value.batch}h{value.kv_heads}g{value.group}d{value.head_dim}v{value.v_head_dim}"


def run_decode(case: Case, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """`(actual, expected)` of a decode over `case.total` slots, NaN in the slots behind them."""
    query, keys, values = case.query(seed + 1), case.keys(seed + 2), case.values(seed + 3)
    scaling = case.scaling
    actual = decode_attention(query, buffered(keys), buffered(values), case.total, scaling, **options)
    return actual, brute_attention(query, keys, values, scaling, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [1, 63, 64, 65, 257])
@pytest.mark.parametrize("case", SHAPES, ids=shape_name)
def test_decode(case: Case, slots: int, dtype: torch.dtype) -> None:
    actual, expected = run_decode(case._replace(held=(slots - 1,), dtype=dtype))
    assert_attention(actual, expected, dtype)
    assert float(actual[1].sum()) == pytest.approx(case.batch * case.kv_heads * case.group, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_decode_options(softcap: float | None, sinks: bool, masked: bool, dtype: torch.dtype) -> None:
    case = Case(batch=3, kv_heads=2, group=3, head_dim=16, v_head_dim=24, held=(64,), dtype=dtype)
    valid = mostly(3, 2, 65, seed=4) if masked else None
    sink_logits = normal(6, seed=5) if sinks else None
    actual, expected = run_decode(case, valid=valid, softcap=softcap, sink_logits=sink_logits)
    assert_attention(actual, expected, dtype)
    if valid is not None:
        assert bool((actual[1][~valid] == 0).all())


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_of_a_row_that_sees_nothing(dtype: torch.dtype, sinks: bool) -> None:
    """It stays finite, and the other rows and heads are as if it were not there."""
    case = Case(held=(8,), dtype=dtype)
    valid = mostly(2, 2, 9, seed=4)
    valid[0, 1] = False
    actual, expected = run_decode(case, valid=valid, sink_logits=normal(6, seed=5) if sinks else None)
    assert bool(actual[1].isfinite().all())
    actual[1][0, 1] = 0.0
    assert_attention(actual, expected, dtype)


def test_decode_takes_any_strides_of_the_query() -> None:
    case = Case(held=(20,))
    query, keys, values = case.query(), case.keys(), case.values()
    wide = torch.full((*query.shape[:3], 40), NAN)
    wide[..., 3:19] = query
    expected = brute_attention(query, keys, values, 0.25)
    for same in (query.contiguous(), as_models_give(query), wide[..., 3:19]):
        assert_attention(decode_attention(same, keys, values, 21, 0.25), expected, torch.float32)


def test_decode_reads_a_buffer_that_starts_inside_a_storage() -> None:
    case = Case(held=(6,))
    keys, values = case.keys(), case.values()
    both = torch.stack((torch.full_like(keys, NAN), keys))
    actual = decode_attention(case.query(), both[1], values, 7, 0.25)
    assert_attention(actual, brute_attention(case.query(), keys, values, 0.25), torch.float32)


def test_the_order_of_slots_means_nothing() -> None:
    case = Case(held=(32,), dtype=torch.float64)
    query, keys, values, valid = case.query(), case.keys(), case.values(), mostly(2, 2, 33, seed=4)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(5))
    output, mass = decode_attention(query, keys, values, 33, 0.25, valid=valid)
    other, other_mass = decode_attention(
        query, keys[:, :, order].contiguous(), values[:, :, order].contiguous(), 33, 0.25, valid=valid[..., order]
    )
    assert mass is not None and other_mass is not None
    torch.testing.assert_close(other, output)
    torch.testing.assert_close(other_mass, mass[..., order])


@pytest.mark.parametrize("with_mass", [False, True])
def test_inputs_stay_as_they_were_and_mass_only_where_asked(with_mass: bool) -> None:
    case = Case(held=(20,), n=3)
    query, keys, values = case.query(), case.keys(), case.values()
    valid, voters, sink_logits = mostly(2, 2, 23, seed=4), mostly(2, 3, seed=5), normal(6, seed=6, dtype=torch.float32)
    inputs = (query, keys, values, valid, voters, sink_logits)
    before = [x.clone() for x in inputs]
    _, mass = prefill_attention(
        query,
        [(keys, values)],
        0.25,
        valid=valid,
        voters=voters,
        softcap=2.0,
        sink_logits=sink_logits,
        with_mass=with_mass,
    )
    _, of_one = decode_attention(
        query[:, :, :1],
        keys,
        values,
        23,
        0.25,
        valid=valid,
        softcap=2.0,
        sink_logits=sink_logits,
        with_mass=with_mass,
    )
    assert (mass is not None) == (of_one is not None) == with_mass
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def run_prefill(case: Case, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    query, keys, values = case.query(seed + 1), case.keys(seed + 2), case.values(seed + 3)
    scaling = case.scaling
    actual = prefill_attention(query, case.sources(keys, values), scaling, **options)
    return actual, brute_attention(query, keys, values, scaling, **options)


BLOCKS = (1, 6000, 1 << 20)
"""Logits of one block: every block of the fewest rows, some blocks for some heads, all in one."""


def cut_into_blocks(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 rows at the smallest, of 32 or more otherwise."""
    monkeypatch.setattr(prefill_module, "BLOCK_ELEMENTS", elements)
    monkeypatch.setattr(prefill_module, "MIN_ROWS", 8 if elements == 1 else 32)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("n", [1, 2, 31, 33, 100])
@pytest.mark.parametrize("held", [(), (1,), (63,), (40, 25)], ids=str)
def test_prefill(held: tuple[int, ...], n: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into_blocks(block, monkeypatch)
    case = SHAPES[(n + len(held)) % len(SHAPES)]._replace(held=held, n=n)
    for dtype in (torch.float32, torch.float64):
        actual, expected = run_prefill(case._replace(dtype=dtype))
        assert_attention(actual, expected, dtype)
    assert float(expected[1].sum()) == pytest.approx(case.batch * case.kv_heads * case.group * n)


@pytest.mark.parametrize("case", SHAPES, ids=shape_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_dtypes(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into_blocks(1, monkeypatch)
    actual, expected = run_prefill(case._replace(held=(31,), n=35, dtype=dtype))
    assert_attention(actual, expected, dtype)
    # Logits may be rounded, but probabilities and their sums are of full precision.
    assert float(actual[1].sum()) == pytest.approx(case.batch * case.kv_heads * case.group * 35, rel=1e-5)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5])
def test_prefill_in_uneven_blocks_of_heads(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five KV heads, so many of them at once."""
    case = Case(batch=2, kv_heads=5, group=2, held=(7,), n=20, dtype=torch.float64)
    cut_into_blocks(heads * case.group * 20 * case.total, monkeypatch)
    options: dict[str, Any] = {"sink_logits": normal(10, seed=5), "valid": mostly(2, 5, case.total, seed=6)}
    actual, expected = run_prefill(case, **options)
    assert_attention(actual, expected, torch.float64)


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"sinks": True}, {"padding": True}], ids=str)
@pytest.mark.parametrize("held", [(), (9,)], ids=str)
@pytest.mark.parametrize("case", SHAPES, ids=shape_name)
def test_prefill_without_mass(case: Case, held: tuple[int, ...], options: dict[str, Any]) -> None:
    """Where nothing is observed, torch's own attention may do the work: the same output."""
    scaling = case.scaling
    for n, dtype in ((3, torch.float64), (33, torch.float32), (34, torch.bfloat16)):
        this = case._replace(held=held, n=n, dtype=dtype)
        given: dict[str, Any] = {"softcap": options.get("softcap")}
        if "sinks" in options:
            given["sink_logits"] = normal(case.kv_heads * case.group, seed=5)
        if "padding" in options:
            given["valid"] = torch.arange(this.total).expand(case.batch, 1, -1) >= 2
        query, keys, values = this.query(), this.keys(), this.values()
        expected = brute_attention(query, keys, values, scaling, **given)[0]
        output, mass = prefill_attention(query, this.sources(keys, values), scaling, with_mass=False, **given)
        assert mass is None
        assert_output(output, expected, dtype)


@pytest.mark.parametrize("with_mass", [False, True])
def test_prefill_of_new_tokens_in_several_sources(with_mass: bool) -> None:
    """Sources are read as if concatenated, wherever they are cut."""
    case = Case(held=(), n=12, dtype=torch.float64)
    query, keys, values = case.query(), case.keys(), case.values()
    expected = brute_attention(query, keys, values, 0.25)
    for cuts in ([5, 7], [0, 12], [1, 0, 11]):
        sources = list(zip(keys.split(cuts, dim=2), values.split(cuts, dim=2), strict=True))
        output, mass = prefill_attention(query, sources, 0.25, with_mass=with_mass)
        assert_output(output, expected[0], torch.float64)
        if mass is not None:
            assert_attention((output, mass), expected, torch.float64)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("padding", [None, "of all heads", "per head"])
def test_prefill_options(
    softcap: float | None, sinks: bool, padding: str | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into_blocks(block, monkeypatch)
    case = Case(batch=2, kv_heads=3, group=2, head_dim=16, v_head_dim=24, held=(17,), n=70, dtype=torch.float64)
    options: dict[str, Any] = {"softcap": softcap, "sink_logits": normal(6, seed=5) if sinks else None}
    if padding is not None:
        options["valid"] = mostly(2, 1 if padding == "of all heads" else 3, case.total, seed=6)
        options["voters"] = mostly(2, case.n, seed=7)
    actual, expected = run_prefill(case, **options)
    assert_attention(actual, expected, torch.float64)
    if padding is not None:
        assert bool((actual[1][~options["valid"].expand(-1, 3, -1)] == 0).all())


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_of_rows_that_see_nothing(
    dtype: torch.dtype, sinks: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left padding: its queries see no valid key. They stay finite and count for nothing."""
    cut_into_blocks(block, monkeypatch)
    case = Case(held=(), n=70, dtype=dtype)
    real = torch.arange(70)[None] >= torch.tensor([[40], [3]])
    options: dict[str, Any] = {"sink_logits": normal(6, seed=5) if sinks else None}
    actual, expected = run_prefill(case, valid=real[:, None], voters=real, **options)
    assert int(expected[0].isnan().sum()) == 43 * 6 * 16
    assert_attention(actual, expected, dtype)


def test_decode_and_prefill_of_one_token_agree() -> None:
    case = Case(held=(40,), dtype=torch.float64)
    decoded, expected = run_decode(case)
    prefilled, _ = run_prefill(case)
    assert_attention(decoded, expected, torch.float64)
    assert_attention(prefilled, expected, torch.float64)


# -- who leaves --------------------------------------------------------------------------------------------------------

SCORES = (-INF, -3.5, -1.0, -1e-30, -1e-45, 0.0, 1e-45, 1e-30, 0.5, 0.75, 3.0, 3.4e38, INF)


def leaving_order(priority: Sequence[float], positions: Sequence[int], sinks: int, window_start: int) -> list[int]:
    """Indices of the slots that hold something, who leaves first first."""
    live = [slot for slot, position in enumerate(positions) if position >= 0]

    def rank(slot: int) -> tuple[bool, float, int]:
        position = positions[slot]
        protected = position < sinks or position >= window_start
        return protected, 0.0 if protected else priority[slot], position

    return sorted(live, key=rank)


def random_head(chance: random.Random, slots: int, dead: int, following: int) -> list[int]:
    """Positions of a head in random order, `dead` of its slots empty."""
    positions = [*chance.sample(range(following), slots - dead), *[-1] * dead]
    chance.shuffle(positions)
    return positions


def check_order(order: Tensor, priority: Tensor, positions: Tensor, sinks: int, window_start: Tensor) -> None:
    """Every head of `order` `[batch, kv_heads, slots]` against Python's sort of tuples."""
    assert order.dtype == torch.int64 and order.shape == positions.shape
    for row in range(order.shape[0]):
        for head in range(order.shape[1]):
            keys, held = order[row, head].tolist(), positions[row, head].tolist()
            ranked = priority[row, head].tolist()
            expected = leaving_order(ranked, held, sinks, int(window_start[row]))
            live = sorted((slot for slot in range(len(held)) if held[slot] >= 0), key=keys.__getitem__)
            assert live == expected
            assert len({keys[slot] for slot in live}) == len(live), "keys must be unique"
            dead = [keys[slot] for slot in range(len(held)) if held[slot] < 0]
            assert all(key < keys[slot] for key in dead for slot in live), "what holds nothing leaves first"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_eviction_order(seed: int, dtype: torch.dtype) -> None:
    """Negative, denormal, infinite and many equal priorities; empty slots; nothing or everything protected."""
    chance = random.Random(seed)
    following = [chance.randint(12, 30) for _ in range(3)]
    positions = torch.tensor(
        [[random_head(chance, 12, chance.randint(0, 5), seen) for _ in range(2)] for seen in following]
    ).int()
    priority = torch.tensor([[chance.choices(SCORES, k=12) for _ in range(2)] for _ in following]).to(dtype)
    priority = priority + 0.0  # what underflows becomes zero; negative zeros have a test of their own
    sinks = chance.choice([0, 1, 4, 40])
    window_start = torch.tensor(following).int() - chance.choice([1, 5, 12, 40])
    order = eviction_order(priority, positions, sinks, window_start)
    check_order(order, priority, positions, sinks, window_start)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16], ids=str)
def test_eviction_order_of_integers(dtype: torch.dtype) -> None:
    """As policies rank by position; integers that float32 could not tell apart."""
    big = [2**30 - 1, 2**30 - 2, 2**24 + 1, 2**24, 2**24 - 1] if dtype != torch.int16 else [32767, 32766]
    pool = [*big, *(-number for number in big), 0, 1, -1, 7]
    chance = random.Random(0)
    for _ in range(20):
        positions = torch.tensor([[random_head(chance, 12, 2, 30)]]).int()
        priority = torch.tensor([[chance.choices(pool, k=12)]], dtype=dtype)
        before = priority.clone()
        order = eviction_order(priority, positions, 2, torch.tensor([25]).int())
        check_order(order, priority, positions, 2, torch.tensor([25]))
        assert torch.equal(priority, before)


def test_eviction_order_by_position_keeps_the_newest() -> None:
    positions = torch.tensor([[[7, 0, -1, 3, 5, 1, 9]]], dtype=torch.int32)
    order = eviction_order(positions, positions, 1, torch.tensor([9], dtype=torch.int32))
    assert order.argsort(-1).tolist() == [[[2, 5, 3, 4, 0, 1, 6]]]


def test_eviction_order_of_close_priorities_at_large_positions() -> None:
    """No position outweighs a priority: neighbours among float32 numbers, positions of every size."""
    chance = random.Random(5)
    pool = [0.25, torch.nextafter(torch.tensor(0.25), torch.tensor(1.0)).item(), -0.25, 0.0, 1e-45]
    places = [0, 3, 255, 256, 65_535, 65_536, 2**24, 2**24 + 1, 4_000_000, 2**30, 2**31 - 3]
    for _ in range(20):
        positions = torch.tensor([[chance.sample(places, len(places))]]).int()
        priority = torch.tensor([[chance.choices(pool, k=len(places))]])
        window_start = torch.tensor([2**31 - 2]).int()
        check_order(eviction_order(priority, positions, 1, window_start), priority, positions, 1, window_start)


def test_eviction_order_at_large_positions() -> None:
    """Equal priorities millions of tokens into a stream, up to the last int32."""
    positions = torch.tensor([[[2**31 - 2, 4_000_001, 4_000_000, 2**24 + 1, 2**24, 65_536, 0]]], dtype=torch.int32)
    priority = torch.full((1, 1, 7), 0.25)
    window_start = torch.tensor([2**31 - 2], dtype=torch.int32)
    order = eviction_order(priority, positions, 1, window_start)
    assert order.argsort(-1).tolist() == [[[5, 2, 1, 4, 3, 6, 0]]]


def test_eviction_order_protects_from_the_boundary_on() -> None:
    """Positions 0 to 2 are sinks and 7 to 9 the window, whatever their priority; rows have windows of their own."""
    positions = torch.arange(10, dtype=torch.int32).repeat(2, 1, 1)
    priority = -torch.arange(10.0).repeat(2, 1, 1)
    order = eviction_order(priority, positions, 3, torch.tensor([7, 9], dtype=torch.int32))
    assert order.argsort(-1).tolist() == [[[6, 5, 4, 3, 0, 1, 2, 7, 8, 9]], [[8, 7, 6, 5, 4, 3, 0, 1, 2, 9]]]


def test_eviction_order_of_several_layers_at_once() -> None:
    chance = random.Random(3)
    positions = torch.tensor([[[random_head(chance, 9, 1, 20)] * 2] * 3] * 4).int()
    priority = normal(4, 3, 2, 9, seed=1, dtype=torch.float32)
    window_start = torch.tensor([10, 15, 18]).int()
    order = eviction_order(priority, positions, 2, window_start)
    for layer in range(4):
        check_order(order[layer], priority[layer], positions[layer], 2, window_start)


def test_eviction_order_leaves_its_inputs_alone() -> None:
    positions = torch.arange(6, dtype=torch.int32).view(1, 1, 6)
    for priority in (torch.rand(1, 1, 6), torch.arange(6).view(1, 1, 6), positions):
        before = priority.clone(), positions.clone()
        eviction_order(priority, positions, 1, torch.tensor([5]))
        assert torch.equal(priority, before[0]) and torch.equal(positions, before[1])


def test_zeros_of_both_signs_are_equal_priorities() -> None:
    """The lowest position leaves first, not the negative zero."""
    positions = torch.tensor([[[3, 4, 5, 6]]], dtype=torch.int32)
    priority = torch.tensor([[[0.0, -0.0, 0.0, -0.0]]])
    order = eviction_order(priority, positions, 0, torch.tensor([9]))
    assert order.argsort(-1).tolist() == [[[0, 1, 2, 3]]]


@pytest.mark.parametrize("seed", range(12))
def test_kept_slots(seed: int) -> None:
    """Equal and unequal numbers, few and nearly all of the slots."""
    chance = random.Random(seed)
    slots = chance.choice([1, 5, 16, 65])
    batch, heads = chance.randint(1, 4), chance.randint(1, 3)
    keys = torch.tensor([[chance.sample(range(-500, 500), slots) for _ in range(heads)] for _ in range(batch)])
    order = keys << 33
    same = chance.randint(1, slots)
    for keep in ([same] * batch, [slots] * batch, [chance.randint(0, slots) for _ in range(batch)], [0] * batch):
        kept = kept_slots(order, keep)
        assert kept.dtype == torch.bool and kept.shape == order.shape
        for row in range(batch):
            for head in range(heads):
                numbers = order[row, head].tolist()
                last = sorted(range(slots), key=numbers.__getitem__)[slots - keep[row] :]
                assert kept[row, head].nonzero().flatten().tolist() == sorted(last), f"{keep[row]} of {slots}"


@pytest.mark.parametrize("keep", [[3, 3], [1, 4]])
def test_kept_slots_of_several_layers_at_once(keep: list[int]) -> None:
    order = torch.stack([torch.randperm(10, generator=torch.Generator().manual_seed(i)) for i in range(12)])
    order = order.view(3, 2, 2, 10)
    kept = kept_slots(order, keep)
    for layer in range(3):
        assert torch.equal(kept[layer], kept_slots(order[layer], keep))


# -- making dense ------------------------------------------------------------------------------------------------------


class Compaction(NamedTuple):
    """Entries of `[layers, batch, heads]`: those below `held` in slots of their number, the others in a chunk."""

    kept: Tensor  # [layers, batch, heads, entries] bool
    held: int
    length: int

    @property
    def front(self) -> int:
        return min(self.held, self.length)

    @property
    def chunk(self) -> int:
        return self.kept.shape[-1] - self.held


def random_compaction(seed: int) -> Compaction:
    """Rows keep different numbers, the longest of them exactly `length`; heads keep different entries."""
    chance = random.Random(seed)
    layers, batch, heads = chance.randint(1, 3), chance.randint(1, 3), chance.randint(1, 3)
    entries = chance.choice([1, 2, 7, 16, 33])
    length = chance.choice([1, entries, chance.randint(1, entries)])
    held = chance.choice([0, entries, length, chance.randint(0, entries)])
    counts = [length, *(chance.choice([length, chance.randint(0, length)]) for _ in range(batch - 1))]
    chance.shuffle(counts)
    kept = torch.zeros(layers, batch, heads, entries, dtype=torch.bool)
    for layer in range(layers):
        for row, count in enumerate(counts):
            for head in range(heads):
                kept[layer, row, head, chance.sample(range(entries), count)] = True
    return Compaction(kept, held, length)


COMPACTIONS = range(60)


def test_the_random_compactions_cover_every_relation() -> None:
    cases = [random_compaction(seed) for seed in COMPACTIONS]
    assert {(case.held > case.length) - (case.held < case.length) for case in cases} == {-1, 0, 1}
    assert any(case.held == 0 for case in cases) and any(case.chunk == 0 for case in cases)
    assert any(case.held > 0 and case.chunk > 0 for case in cases)
    assert any(len(set(case.kept.sum(-1).flatten().tolist())) > 1 for case in cases)


@pytest.mark.parametrize("seed", COMPACTIONS)
def test_moves_make_the_kept_entries_dense(seed: int) -> None:
    case = random_compaction(seed)
    entries = case.kept.shape[-1]
    moves = plan_moves(case.kept, case.front, case.length)
    assert moves.source.shape == moves.target.shape == moves.real.shape
    assert moves.source.shape[-1] <= min(case.length, entries - case.front)
    numbers = torch.arange(entries).expand(case.kept.shape)
    dense = compact_bookkeeping(numbers, case.kept, moves, case.front, case.length, empty=-1)
    assert dense.shape == (*case.kept.shape[:-1], case.length)
    heads = zip(*(part.flatten(0, -2).tolist() for part in (case.kept, dense, *moves)), strict=True)
    for kept, now, source, target, real in heads:
        survivors = [entry for entry in range(entries) if kept[entry]]
        assert sorted(entry for entry in now if entry >= 0) == survivors
        assert all(now[entry] == entry for entry in survivors if entry < case.front), "a settled entry moved"
        copies = {t: s for s, t in zip(source, target, strict=True)}
        assert all(copies[t] == s for s, t in zip(source, target, strict=True)), "two sources for one target"
        assert set(target) <= set(range(case.length))
        moved = {s for s, t, is_real in zip(source, target, real, strict=True) if is_real and s != t}
        moved |= {s for s, t, is_real in zip(source, target, real, strict=True) if is_real and s >= case.front}
        assert moved == {entry for entry in survivors if entry >= case.front}, "only what lies behind moves"


@pytest.mark.parametrize("seed", COMPACTIONS)
def test_contents_follow_the_bookkeeping(seed: int) -> None:
    """Keys of layer 0 through `move_entries` or `move_chunk`: each slot holds what the bookkeeping says, bit for bit,
    and slots that are no target are untouched."""
    case = random_compaction(seed)
    kept = case.kept[0]
    batch, heads, entries = kept.shape
    capacity, dim = max(entries, case.length) + 3, 5
    moves = plan_moves(kept, case.front, case.length)
    numbers = torch.arange(entries, dtype=torch.int32).expand(kept.shape)
    dense = compact_bookkeeping(numbers, kept, moves, case.front, case.length, empty=-1)
    assert dense.dtype == torch.int32
    contents = normal(batch, heads, entries, dim, seed=seed, dtype=torch.bfloat16)
    buffer = contents.new_full((batch, heads, capacity, dim), NAN)
    buffer[:, :, : case.held] = contents[:, :, : case.held]
    expected = brute_moves(buffer, contents, moves.source.tolist(), moves.target.tolist())
    sources, targets = flat_rows(moves.source, capacity), flat_rows(moves.target, capacity)
    if case.chunk == 0:
        move_entries(buffer, sources, targets)
    else:
        chunk = as_models_give(contents[:, :, case.held :])
        move_chunk(buffer, chunk, case.held, moves.source, sources, targets)
    assert torch.equal(buffer.view(torch.int16), expected.view(torch.int16))
    for row in range(batch):
        for head in range(heads):
            for slot, entry in enumerate(dense[row, head].tolist()):
                if entry >= 0:
                    assert torch.equal(buffer[row, head, slot], contents[row, head, entry])


def brute_moves(buffer: Tensor, contents: Tensor, source: list[Any], target: list[Any]) -> Tensor:
    """The buffer after the moves, one at a time: all sources are in `contents`, read before anything is written."""
    after = buffer.clone()
    for row, heads in enumerate(zip(source, target, strict=True)):
        for head, moves in enumerate(zip(*heads, strict=True)):
            for s, t in zip(*moves, strict=True):
                after[row, head, t] = contents[row, head, s]
    return after


def test_moves_by_hand() -> None:
    """Six held and two new entries, four stay: the holes 1 and 2 take 5 and 7; the other head moves one, twice."""
    kept = torch.tensor([[[1, 0, 0, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0, 1, 0]]]).bool()
    moves = plan_moves(kept, 4, 4)
    assert moves.source[0, 0, :2].tolist() == [5, 7]
    assert moves.target[0, 0, :2].tolist() == [1, 2]
    assert set(moves.source[0, 1].tolist()) == {6}
    assert set(moves.target[0, 1].tolist()) == {3}
    dense = compact_bookkeeping(torch.arange(8.0).expand(1, 2, 8), kept, moves, 4, 4, empty=0)
    assert dense.tolist() == [[[0, 5, 7, 3], [0, 1, 2, 6]]]


def test_bookkeeping_of_a_row_that_keeps_fewer() -> None:
    kept = torch.tensor([[[0, 1, 0, 0, 1]], [[1, 1, 0, 1, 1]]]).bool()
    moves = plan_moves(kept, 3, 4)
    entries = torch.tensor([[[10, 11, 12, 13, 14]], [[20, 21, 22, 23, 24]]])
    dense = compact_bookkeeping(entries, kept, moves, 3, 4, empty=-7)
    assert sorted(dense[0, 0].tolist()) == [-7, -7, 11, 14]
    assert dense[0, 0, 1] == 11
    assert sorted(dense[1, 0].tolist()) == [20, 21, 23, 24]
    assert entries.tolist() == [[[10, 11, 12, 13, 14]], [[20, 21, 22, 23, 24]]]


def test_flat_rows() -> None:
    slots = torch.randint(7, (3, 2, 4, 5), generator=torch.Generator().manual_seed(0))
    rows = flat_rows(slots, 7)
    assert rows.shape == (3, 40)
    expected = [
        [(row * 4 + head) * 7 + slot for row in range(2) for head in range(4) for slot in layer[row][head]]
        for layer in slots.tolist()
    ]
    assert rows.tolist() == expected


@pytest.mark.parametrize("policy", [HeavyHitters(), Recency()], ids=["heavy_hitters", "recency"])
@pytest.mark.parametrize("seed", range(12))
def test_plan_eviction(seed: int, policy: Any) -> None:
    """Everything above together, for two layers at once: who stays, with what score, and the slots for the next."""
    chance = random.Random(seed)
    budget = LayerBudget(chance.randint(0, 3), chance.randint(1, 4), chance.randint(0, 4), chance.randint(1, 3))
    following = [budget.slots + 9, budget.slots + 4, budget.slots + 1]
    entries, rows = budget.slots + 6, range(3)
    keep = [budget.slots, budget.slots, chance.randint(1, budget.slots)]
    held = [entries, budget.slots + 3, keep[2]]  # the last row keeps all it has
    positions = torch.full((2, 3, 2, entries), -1, dtype=torch.int32)
    for layer in range(2):
        for row in rows:
            for head in range(2):
                slots = chance.sample(range(entries), held[row])
                live = _held(chance, held[row], following[row], budget)
                positions[layer, row, head, slots] = torch.tensor(live, dtype=torch.int32)
    score = torch.tensor(chance.choices([0.0, 0.5, 0.5, 1.0, 2.0], k=positions.numel())).view(positions.shape)
    origins = positions * 10
    plan = plan_eviction(
        policy.priority(Slots(score, positions)),
        score,
        positions,
        budget,
        torch.tensor(following).int(),
        keep,
        entries - 2,
        origins=origins,
    )
    assert plan.score.shape == plan.positions.shape == (2, 3, 2, budget.capacity)
    for layer, one in enumerate(plan.by_layer()):
        assert one.origins is not None
        for row in rows:
            for head in range(2):
                before = (score[layer, row, head].tolist(), positions[layer, row, head].tolist())
                expected = _survivors(*before, policy, budget, following[row], keep[row])
                after = (one.positions, one.score, one.origins)
                now = list(zip(*(part[row, head].tolist() for part in after), strict=True))
                live = [slot for slot in now[: max(keep)] if slot[0] >= 0]
                assert sorted(live) == [(p, s, 10 * p) for p, s in expected]
                assert all(slot[1] == 0 for slot in now[: max(keep)] if slot[0] < 0)
                free = range(following[row], following[row] + budget.capacity - max(keep))
                assert [slot[:2] for slot in now[max(keep) :]] == [(p, 0.0) for p in free]


def _held(chance: random.Random, count: int, following: int, budget: LayerBudget) -> list[int]:
    """`count` positions as a layer can hold them: first the protected ones."""
    protected = {p for p in range(following) if p < budget.sinks or p >= following - budget.window}
    others = [p for p in range(following) if p not in protected]
    chosen = sorted(protected)[:count]
    return [*chosen, *chance.sample(others, count - len(chosen))]


def _survivors(
    score: list[float], positions: list[int], policy: object, budget: LayerBudget, following: int, keep: int
) -> list[tuple[int, float]]:
    """`(position, score)` of what stays, ascending."""
    priority = score if isinstance(policy, HeavyHitters) else [float(position) for position in positions]
    order = leaving_order(priority, positions, budget.sinks, following - budget.window)
    return sorted((positions[slot], score[slot]) for slot in order[len(order) - keep :])


def test_positions_ahead() -> None:
    ahead = positions_ahead(torch.tensor([5, 0], dtype=torch.int32), 3)
    assert ahead.dtype == torch.int32
    assert ahead.tolist() == [[5, 6, 7], [0, 1, 2]]
    assert positions_ahead(torch.tensor([5], dtype=torch.int32), 0).shape == (1, 0)


# -- rotation ----------------------------------------------------------------------------------------------------------


def brute_rotate(x: Tensor, angles: Tensor, interleaved: bool, scaling: float = 1.0) -> Tensor:
    """Multiplication with complex numbers in float64; `angles` `[..., pairs]`."""
    pairs = angles.shape[-1]
    result = x.double().clone()
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    turned = torch.complex(result[..., first], result[..., second]) * torch.polar(torch.ones_like(angles), angles)
    result[..., first], result[..., second] = turned.real * scaling, turned.imag * scaling
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "pairs"), [(16, 8), (80, 40), (64, 8), (6, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate(head_dim: int, pairs: int, interleaved: bool, dtype: torch.dtype) -> None:
    x = as_models_give(normal(2, 3, 7, head_dim, seed=1, dtype=dtype))
    angles = 10 * normal(2, 1, 7, pairs, seed=2)
    before = x.clone()
    compute = torch.promote_types(dtype, torch.float32)
    rotated = rotate(x, angles.cos().to(compute), angles.sin().to(compute), interleaved)
    assert rotated.dtype == dtype and rotated.shape == x.shape
    assert torch.equal(x, before)
    expected = brute_rotate(x, angles, interleaved)
    rounding = {torch.float64: 1e-14, torch.float32: 3e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    bound = rounding * expected.abs().clamp(min=1)  # one rounding, of a result of fp32 or float64 arithmetic
    assert bool(((rotated.double() - expected).abs() <= bound).all())
    assert torch.equal(rotated[..., 2 * pairs :], x[..., 2 * pairs :])
    if dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))


def test_rotate_by_a_quarter_turn() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0])
    cos, sin = torch.zeros(2), torch.ones(2)
    assert rotate(x, cos, sin, interleaved=False).tolist() == [-3, -4, 1, 2, 9]
    assert rotate(x, cos, sin, interleaved=True).tolist() == [-2, 1, -4, 3, 9]


FREQUENCIES = 10_000.0 ** -(torch.arange(8) / 8)
VARIANTS = {
    "llama": (Rope(FREQUENCIES, 1.0, False), 16),
    "interleaved": (Rope(FREQUENCIES, 1.0, True), 16),
    "partial": (Rope(FREQUENCIES[:3], 1.0, False), 16),
    "yarn": (Rope(FREQUENCIES, 1.25, False), 16),
}
every_rope = pytest.mark.parametrize(("rope", "head_dim"), VARIANTS.values(), ids=VARIANTS)


def as_the_model(raw: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Keys as a model rotates them, `[batch, heads, n, dim]` at `[batch, 1, n]`: by the cos and sin of fp32 angles,
    rounded to the model's dtype, then one more rounding of the result."""
    angles = (positions.float()[..., None] * rope.inverse_frequencies).double()
    cos, sin = ((part * rope.scaling).to(raw.dtype).double() for part in (angles.cos(), angles.sin()))
    pairs, rotated = cos.shape[-1], raw.double().clone()
    first = slice(0, 2 * pairs, 2) if rope.interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if rope.interleaved else slice(pairs, 2 * pairs)
    one, two = raw.double()[..., first], raw.double()[..., second]
    rotated[..., first], rotated[..., second] = one * cos - two * sin, two * cos + one * sin
    return rotated.to(raw.dtype)


def at(rope: Rope, raw: Tensor, positions: Tensor) -> Tensor:
    """What a key should be at a small position: exact angles, the model's factor."""
    angles = positions.double()[..., None] * rope.inverse_frequencies.double()
    return brute_rotate(raw, angles, rope.interleaved, rope.scaling)


def random_positions(limit: int, seed: int, heads: int = 1) -> Tensor:
    return torch.randint(limit, (2, heads, 9), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@every_rope
@pytest.mark.parametrize("far", [100, 5_000, 4_194_304])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rerotation_equals_one_direct_rotation(rope: Rope, head_dim: int, far: int, dtype: torch.dtype) -> None:
    """However far the model's position was: fp32 angles near 4 million are off by a quarter radian, and divide out."""
    raw = normal(2, 3, 9, head_dim, seed=1, dtype=dtype)
    old, new = far - 1 - random_positions(100, 2), random_positions(64, 3, heads=3)
    moved = Rerotation(rope)(as_the_model(raw, rope, old), old, new)
    assert moved.dtype == dtype
    expected = at(rope, raw, new)
    assert float((moved.double() - expected).abs().max()) < 2e-5  # cos and sin are float32
    torch.testing.assert_close(moved.norm(dim=-1), expected.norm(dim=-1).to(dtype), rtol=1e-5, atol=0)


@every_rope
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rerotation_in_half_precision_costs_a_rounding(rope: Rope, head_dim: int, dtype: torch.dtype) -> None:
    """One of the model's key, which no re-rotation can know, and one of the result; no more at any distance."""
    raw = normal(2, 3, 9, head_dim, seed=1, dtype=dtype)
    rounding = torch.finfo(dtype).eps / 2
    for far in (100, 4_194_304):
        old, new = far - 1 - random_positions(100, 2), random_positions(64, 3)
        moved = Rerotation(rope)(as_the_model(raw, rope, old), old, new)
        assert moved.dtype == dtype
        expected = at(rope, raw, new)
        error = (moved.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(error.max()) < 1.6 * rounding


@every_rope
def test_rerotation_to_the_same_position_changes_nothing(rope: Rope, head_dim: int) -> None:
    x, positions = normal(2, 3, 9, head_dim, seed=1, dtype=torch.float32), random_positions(1_000_000, 2)
    torch.testing.assert_close(Rerotation(rope)(x, positions, positions), x, rtol=2e-7, atol=1e-7)


def test_rerotation_of_each_head_to_its_own_position() -> None:
    rope, head_dim = VARIANTS["llama"]
    raw, old = normal(2, 3, 9, head_dim, seed=1, dtype=torch.float32), random_positions(1000, 2, heads=3)
    new = random_positions(64, 3, heads=3)
    together = Rerotation(rope)(raw, old, new)
    for head in range(3):
        one = slice(head, head + 1)
        assert torch.equal(together[:, one], Rerotation(rope)(raw[:, one], old[:, one], new[:, one]))


@pytest.mark.parametrize("seed", range(6))
def test_ranks(seed: int) -> None:
    chance = random.Random(seed)
    slots = chance.choice([1, 6, 17])
    heads = [[random_head(chance, slots, chance.randint(0, slots), 4_000_000) for _ in range(2)] for _ in range(3)]
    given = torch.tensor(heads, dtype=chance.choice([torch.int32, torch.int64]))
    ranked = ranks(given)
    assert ranked.dtype == torch.int64
    for positions, actual in zip((h for row in heads for h in row), ranked.flatten(0, 1).tolist(), strict=True):
        live = sorted(position for position in positions if position >= 0)
        assert actual == [live.index(position) if position >= 0 else 0 for position in positions]


@pytest.mark.parametrize("positions", [[5, 0, 3], [0, 1, 2]])
def test_ranks_without_empty_slots_by_hand(positions: list[int]) -> None:
    assert ranks(torch.tensor([[positions]])).tolist() == [[[2, 0, 1] if positions[0] == 5 else [0, 1, 2]]]
