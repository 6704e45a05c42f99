"""Attention and its by-products, torch's and Triton's by the same tests, against one query at a time in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvcache.kernels import prefill_attention as prefill_module
from kvcache.kernels.choice import TORCH, TRITON, Kernels
from kvcache.kernels.column_sums import column_sums, column_sums_triton
from kvcache.kernels.decode_attention import MOST_ROWS, decode_attention_triton
from kvcache.kernels.flash import flash, flash_triton, merge
from tests.kernel_cases import (
    DEVICE,
    INF,
    NAN,
    TORCH_DTYPES,
    TRITON_DTYPES,
    TRITON_ONLY,
    as_models_give,
    both,
    buffered,
    cursor,
    every_dtype,
    mostly,
    name,
    needs_triton,
    normal,
    on_device,
    part_of_wider,
    same_bits,
)

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("poisoned_memory")]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 4e-2, torch.float16: 6e-3}
"""Absolute for outputs, and relative to at least 1 for mass. Half precision rounds the logits."""
SCORE_TOLERANCE = {**TOLERANCE, torch.float64: 5e-7}
"""The same where mass is added to a float32 score."""


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
    def query_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scaling(self) -> float:
        """Not the one that attention would take by itself."""
        return 0.8 * self.head_dim**-0.5

    def query(self, seed: int = 1) -> Tensor:
        # twice the spread: attention far from uniform, so that a wrong key shows
        shape = (self.batch, self.query_heads, self.n, self.head_dim)
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
    query, keys, values = (x.double().cpu() for x in (query, keys, values))
    valid, voters = (None if x is None else x.cpu() for x in (valid, voters))
    batch, heads, n, _ = query.shape
    kv_heads, total = keys.shape[1:3]
    output = torch.full((batch, n, heads, values.shape[3]), NAN, dtype=torch.float64)
    mass = torch.zeros(batch, kv_heads, total, dtype=torch.float64)
    for row, head, i in itertools.product(range(batch), range(heads), range(n)):
        kv_head = head // (heads // kv_heads)
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
        mass[row, kv_head, seen] += probabilities * (1.0 if voters is None else float(voters[row, i]))
    return output, mass


def assert_output(output: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    output = output.cpu()
    assert output.dtype == dtype
    assert output.shape == expected.shape
    assert bool(output.isfinite().all()), "rows that see no key must be finite"
    worst = float((output.double() - expected)[expected.isfinite()].abs().max())
    assert worst <= TOLERANCE[dtype], f"output differs by {worst:.1e}"


def assert_mass(mass: Tensor, expected: Tensor, tolerance: float) -> None:
    assert mass.shape == expected.shape
    difference = (mass.cpu().double() - expected).abs() / expected.abs().clamp(min=1)
    worst = float(difference.max())
    assert worst <= tolerance, f"mass differs by {worst:.1e}"  # so does NaN


def assert_attention(actual: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    (output, mass), (expected_output, expected_mass) = actual, expected
    assert_output(output, expected_output, dtype)
    assert mass is not None
    assert mass.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_mass(mass, expected_mass, TOLERANCE[dtype])


SHAPES = [
    Case(batch=1, kv_heads=1, group=1, head_dim=16, v_head_dim=16),
    Case(batch=3, kv_heads=2, group=3, head_dim=64, v_head_dim=16),
    Case(batch=1, kv_heads=3, group=7, head_dim=80, v_head_dim=64),
    Case(batch=3, kv_heads=1, group=8, head_dim=16, v_head_dim=80),
]
OTHER = [
    Case(batch=2, kv_heads=2, group=2, head_dim=12, v_head_dim=20),
    Case(batch=1, kv_heads=2, group=1, head_dim=1, v_head_dim=2),
    Case(batch=1, kv_heads=2, group=1, head_dim=96, v_head_dim=96),
    Case(batch=1, kv_heads=1, group=3, head_dim=128, v_head_dim=256),
    Case(batch=1, kv_heads=1, group=2, head_dim=256, v_head_dim=128),
]


def shape_name(value: object) -> str | None:
    if not isinstance(value, Case):
        return name(value)
    return f"b{value.batch}h{value.kv_heads}g{value.group}d{value.head_dim}v{value.v_head_dim}"


# -- decode ------------------------------------------------------------------------------------------------------------


class Decoded(NamedTuple):
    """What a decode gave, and what it should have: `mass` was added to `before` in the first slots of `score`."""

    output: Tensor
    score: Tensor
    before: Tensor
    expected_output: Tensor
    expected_mass: Tensor

    @property
    def mass(self) -> Tensor:
        slots = self.expected_mass.shape[2]
        return (self.score[:, :, :slots].double() - self.before[:, :, :slots].double()).cpu()

    def check(self, dtype: torch.dtype) -> None:
        assert_output(self.output, self.expected_output, dtype)
        self.check_mass(dtype)

    def check_mass(self, dtype: torch.dtype) -> None:
        slots = self.expected_mass.shape[2]
        assert self.score.dtype == torch.float32
        assert_mass(self.mass, self.expected_mass, SCORE_TOLERANCE[dtype])
        assert same_bits(self.score[:, :, slots:], self.before[:, :, slots:]), "slots behind are not ours"


SPARE = 5


def positions_of(valid: Tensor) -> Tensor:
    """`[batch, kv_heads, capacity]` int32: negative where a slot holds nothing; not so behind the live ones."""
    slots = valid.shape[2]
    numbers = torch.arange(slots, device=DEVICE, dtype=torch.int32)
    positions = torch.full((*valid.shape[:2], slots + SPARE), 7, dtype=torch.int32, device=DEVICE)
    positions[:, :, :slots] = torch.where(valid, numbers * 3, -1 - numbers)
    return positions


def run_decode(
    kernels: Kernels,
    case: Case,
    *,
    seed: int = 0,
    before: Tensor | None = None,
    slots: int | Tensor | None = None,
    query: Tensor | None = None,
    **options: Any,
) -> Decoded:
    """A decode over `case.total` slots, NaN in the slots behind them; the score is 0 before if nothing else is said."""
    query = case.query(seed + 1) if query is None else query
    keys, values = case.keys(seed + 2), case.values(seed + 3)
    if before is None:
        before = torch.zeros(case.batch, case.kv_heads, case.total + SPARE, device=DEVICE)
        before[:, :, case.total :] = NAN
    score, valid = before.clone(), options.pop("valid", None)
    output = kernels.decode_attention(
        query,
        buffered(keys, SPARE),
        buffered(values, SPARE),
        case.total if slots is None else slots,
        case.scaling,
        positions=None if valid is None else positions_of(valid),
        score=score,
        **options,
    )
    expected = brute_attention(query, keys, values, case.scaling, valid=valid, **options)
    return Decoded(output, score, before, *expected)


@every_dtype
@pytest.mark.parametrize("slots", [1, 63, 64, 65, 257])
@pytest.mark.parametrize("case", SHAPES, ids=shape_name)
def test_decode(kernels: Kernels, case: Case, slots: int, dtype: torch.dtype) -> None:
    decoded = run_decode(kernels, case._replace(held=(slots - 1,), dtype=dtype), seed=slots)
    decoded.check(dtype)
    assert float(decoded.mass.sum()) == pytest.approx(case.batch * case.query_heads, rel=1e-5)


@every_dtype
@pytest.mark.parametrize("case", OTHER, ids=shape_name)
def test_decode_of_other_head_dimensions(kernels: Kernels, case: Case, dtype: torch.dtype) -> None:
    run_decode(kernels, case._replace(held=(99,), dtype=dtype)).check(dtype)


@every_dtype
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_decode_options(kernels: Kernels, softcap: float | None, sinks: bool, masked: bool, dtype: torch.dtype) -> None:
    case = Case(batch=3, kv_heads=2, group=3, head_dim=16, v_head_dim=24, held=(64,), dtype=dtype)
    valid = mostly(3, 2, 65, seed=4) if masked else None
    sink_logits = normal(6, seed=5) if sinks else None
    decoded = run_decode(kernels, case, valid=valid, softcap=softcap, sink_logits=sink_logits)
    decoded.check(dtype)
    if valid is not None:
        assert bool((decoded.mass[~valid.cpu()] == 0).all())


@every_dtype
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "group"), [(2, 1), (2, 3), (5, 7), (16, 1), (16, 8)])
def test_decode_of_several_tokens(kernels: Kernels, n: int, group: int, masked: bool, dtype: torch.dtype) -> None:
    """Each sees itself and what is before it; the newest are the last slots."""
    case = Case(batch=2, kv_heads=2, group=group, head_dim=16, v_head_dim=24, n=n, dtype=dtype)
    for held in (0, 70):
        this = case._replace(held=(held,))
        options: dict[str, Any] = {}
        if masked:
            valid = mostly(2, 2, this.total, seed=held)
            valid[:, :, 0] = True
            options = {
                "valid": valid,
                "voters": mostly(2, n, seed=6),
                "sink_logits": normal(this.query_heads, seed=7),
                "softcap": 2.0,
            }
        run_decode(kernels, this, seed=held, **options).check(dtype)


@both
def test_decode_without_a_later_token(kernels: Kernels) -> None:
    """What a token sees does not depend on those behind it."""
    case = Case(held=(30,), n=4)
    query, keys, values = case.query(), case.keys(), case.values()
    together = kernels.decode_attention(query, keys, values, 34, 0.25)
    for i in range(4):
        slots = 31 + i
        score = torch.zeros(2, 2, 34, device=DEVICE)
        alone = kernels.decode_attention(query[:, :, i : i + 1], keys, values, slots, 0.25, score=score)
        torch.testing.assert_close(alone[:, 0], together[:, i], rtol=0, atol=2e-6)
        assert bool((score[:, :, slots:] == 0).all())


@both
@pytest.mark.parametrize("n", [1, 3])
def test_decode_adds_to_the_score(kernels: Kernels, n: int) -> None:
    case = Case(batch=3, held=(70,), n=n)
    before = 3 * normal(3, 2, case.total + SPARE, seed=9, dtype=torch.float32)
    valid = mostly(3, 2, case.total, seed=4)
    decoded = run_decode(kernels, case, before=before, valid=valid)
    decoded.check(torch.float32)
    assert same_bits(decoded.score[:, :, : case.total][~valid], before[:, :, : case.total][~valid])


@both
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("contiguous", [True, False])
def test_decode_voters(kernels: Kernels, n: int, contiguous: bool) -> None:
    """Those of a chunk are columns of the mask over all that was seen."""
    case = Case(batch=3, held=(40,), n=n)
    voters = on_device([[row != 1 or i == 2 for i in range(n)] for row in range(3)])
    decoded = run_decode(kernels, case, voters=voters if contiguous else part_of_wider(voters))
    decoded.check(torch.float32)
    if n == 1:
        assert bool((decoded.mass[1] == 0).all())


def weights_of(batch: int, n: int, seed: int) -> Tensor:
    """`[batch, n]` fp32, how much queries count: some not at all, some more than once."""
    return 2 * normal(batch, n, seed=seed, dtype=torch.float32).abs() * mostly(batch, n, seed=seed + 1)


@both
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("group", [1, 3])
def test_decode_voters_that_count_more_or_less(kernels: Kernels, n: int, group: int) -> None:
    case = Case(batch=3, group=group, held=(40,), n=n)
    sink_logits = normal(case.query_heads, seed=5)
    run_decode(kernels, case, voters=weights_of(3, n, seed=n), sink_logits=sink_logits).check(torch.float32)


@pytest.mark.parametrize("sinks", [False, True])
@every_dtype
def test_decode_of_a_row_that_sees_nothing(kernels: Kernels, dtype: torch.dtype, sinks: bool) -> None:
    """It stays finite, and the other rows and heads are as if it were not there."""
    case = Case(held=(8,), dtype=dtype)
    valid = mostly(2, 2, 9, seed=4)
    valid[0, 1] = False
    decoded = run_decode(kernels, case, valid=valid, sink_logits=normal(6, seed=5) if sinks else None)
    assert bool(decoded.mass.isfinite().all())
    if kernels is TORCH and not sinks:
        decoded.score[0, 1, :9] = 0.0  # torch's softmax spreads over what is hidden
    decoded.check(dtype)


@both
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("sinks", [False, True])
def test_decode_of_padding_that_sees_nothing(kernels: Kernels, n: int, sinks: bool) -> None:
    """A row of padding does not vote: whatever its output, its slots get no mass."""
    case = Case(batch=3, held=(70,), n=n)
    valid = torch.ones(3, 2, case.total, dtype=torch.bool, device=DEVICE)
    valid[1] = False
    voters = on_device([[True] * n, [False] * n, [True] * n])
    sink_logits = normal(6, seed=5) if sinks else None
    decoded = run_decode(kernels, case, valid=valid, voters=voters, sink_logits=sink_logits)
    decoded.check(torch.float32)
    assert bool((decoded.mass[1] == 0).all())


@both
def test_decode_takes_any_strides_of_the_query(kernels: Kernels) -> None:
    case = Case(held=(20,))
    query = case.query()
    spread = torch.stack((query, torch.full_like(query, NAN)), dim=-1)[..., 0]  # not even dense in the last dimension
    for same in (query.contiguous(), as_models_give(query), part_of_wider(query), spread):
        run_decode(kernels, case, query=same).check(torch.float32)
    case = case._replace(n=3)
    for same in (case.query().contiguous(), case.query(), part_of_wider(case.query())):
        run_decode(kernels, case, query=same).check(torch.float32)


@both
def test_decode_reads_a_buffer_that_starts_inside_a_storage(kernels: Kernels) -> None:
    case = Case(held=(6,))
    keys, values = case.keys(), case.values()
    both_layers = torch.stack((torch.full_like(keys, NAN), keys))
    output = kernels.decode_attention(case.query(), both_layers[1], values, 7, 0.25)
    assert_output(output, brute_attention(case.query(), keys, values, 0.25)[0], torch.float32)


@both
def test_the_order_of_slots_means_nothing(kernels: Kernels) -> None:
    case = Case(held=(132,))
    query, keys, values = case.query(), case.keys(), case.values()
    order = torch.randperm(133, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    one, other = torch.zeros(2, 2, 2, 133, device=DEVICE).unbind(0)
    output = kernels.decode_attention(query, keys, values, 133, 0.25, score=one)
    moved = keys[:, :, order].contiguous(), values[:, :, order].contiguous()
    torch.testing.assert_close(kernels.decode_attention(query, *moved, 133, 0.25, score=other), output)
    torch.testing.assert_close(other, one[..., order])


@both
@pytest.mark.parametrize("with_mass", [False, True])
def test_inputs_stay_as_they_were_and_mass_only_where_asked(kernels: Kernels, with_mass: bool) -> None:
    case = Case(held=(20,), n=3)
    query, keys, values = case.query(), case.keys(), case.values()
    valid, voters, sink_logits = mostly(2, 2, 23, seed=4), mostly(2, 3, seed=5), normal(6, seed=6, dtype=torch.float32)
    positions = torch.where(valid, 4, -1).int()
    inputs = (query, keys, values, valid, voters, sink_logits, positions)
    before = [x.clone() for x in inputs]
    options: dict[str, Any] = {"voters": voters, "softcap": 2.0, "sink_logits": sink_logits}
    _, mass = kernels.prefill_attention(query, [(keys, values)], 0.25, valid=valid, with_mass=with_mass, **options)
    assert (mass is not None) == with_mass
    score = torch.zeros(2, 2, 23, device=DEVICE) if with_mass else None
    observed = kernels.decode_attention(query, keys, values, 23, 0.25, positions=positions, score=score, **options)
    silent = kernels.decode_attention(query, keys, values, 23, 0.25, positions=positions, **options)
    torch.testing.assert_close(observed, silent)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("kernels", TRITON_ONLY)
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("slots", [5, 63, 64, 65, 257, 300])
def test_decode_by_a_cursor_on_the_device(kernels: Kernels, n: int, slots: int) -> None:
    """The launches cover the capacity, the number of slots is read on the device."""
    case = Case(batch=1, kv_heads=1, group=3, head_dim=16, v_head_dim=24, n=n, held=(slots - n,))
    capacity = 320
    keys, values, query = case.keys(), case.values(), case.query()
    valid = mostly(1, 1, slots, seed=slots)
    valid[:, :, 0] = True
    positions = torch.zeros(1, 1, capacity, dtype=torch.int32, device=DEVICE)
    positions[:, :, :slots] = torch.where(valid, 2, -1)
    score = torch.full((1, 1, capacity), NAN, device=DEVICE)
    score[:, :, :slots] = 0
    wide = [buffered(x, capacity - slots) for x in (keys, values)]
    output = kernels.decode_attention(query, *wide, cursor(slots), case.scaling, positions=positions, score=score)
    expected = brute_attention(query, keys, values, case.scaling, valid=valid)
    assert_output(output, expected[0], torch.float32)
    assert_mass(score[:, :, :slots], expected[1], TOLERANCE[torch.float32])
    assert bool(score[:, :, slots:].isnan().all())


@pytest.mark.parametrize("kernels", TRITON_ONLY)
def test_decode_of_more_rows_than_a_tile_has_is_refused(kernels: Kernels) -> None:
    case = Case(group=9, n=16)
    assert case.group * case.n > MOST_ROWS
    with pytest.raises(AssertionError):
        run_decode(kernels, case)


@pytest.mark.parametrize("kernels", TRITON_ONLY)
def test_decode_refuses_what_its_addresses_cannot_reach(kernels: Kernels) -> None:
    case = Case(held=(6,))
    query, keys, values = case.query(), case.keys(), case.values()
    with pytest.raises(AssertionError):
        decode_attention_triton(query, as_models_give(keys), values, 7, 0.25)
    with pytest.raises(AssertionError):
        decode_attention_triton(query, keys, values.half(), 7, 0.25)
    with pytest.raises(AssertionError):
        decode_attention_triton(query, keys, values, 7, 0.25, score=torch.zeros(2, 2, 9, device=DEVICE)[:, :, :7])


# -- flash, column sums and merging ------------------------------------------------------------------------------------


class Pieces(NamedTuple):
    """Attention with its log-sum-exp, and the column sums that go with it."""

    flash: Any
    column_sums: Any


PIECES_OF_TORCH, PIECES_OF_TRITON = Pieces(flash, column_sums), Pieces(flash_triton, column_sums_triton)
both_pieces = pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(PIECES_OF_TORCH, id="torch"),
        pytest.param(PIECES_OF_TRITON, id="triton", marks=needs_triton),
    ],
)
every_piece_dtype = pytest.mark.parametrize(
    ("pieces", "dtype"),
    [
        *(pytest.param(PIECES_OF_TORCH, dtype, id=f"torch-{name(dtype)}") for dtype in TORCH_DTYPES),
        *(
            pytest.param(PIECES_OF_TRITON, dtype, id=f"triton-{name(dtype)}", marks=needs_triton)
            for dtype in TRITON_DTYPES
        ),
    ],
)


class Square(NamedTuple):
    """Queries over keys with an offset: query `i` sees the keys up to `i + offset`."""

    n: int
    length: int
    offset: int
    batch: int = 2
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    dtype: torch.dtype = torch.float32

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Query, keys and values; strides as the engine has them, NaN around them."""
        shape = (self.batch, self.kv_heads, self.length)
        query = 2 * normal(self.batch, self.kv_heads * self.group, self.n, self.head_dim, seed=seed + 1)
        keys = normal(*shape, self.head_dim, seed=seed + 2, dtype=self.dtype)
        values = normal(*shape, self.v_head_dim, seed=seed + 3, dtype=self.dtype)
        return as_models_give(query.to(self.dtype)), buffered(keys)[:, :, : self.length], as_models_give(values)


def brute_logits(
    query: Tensor, keys: Tensor, scaling: float, offset: int, valid: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """`[batch, query_heads, n, length]` float64, -inf where a query does not see a key."""
    group = query.shape[1] // keys.shape[1]
    query, keys = query.double().cpu(), keys.double().cpu().repeat_interleave(group, 1)
    logits = query @ keys.mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    for i in range(query.shape[2]):
        logits[:, :, i, max(0, i + offset + 1) :] = -INF
    if valid is not None:
        heads = valid.cpu().expand(-1, keys.shape[1] // group, -1).repeat_interleave(group, 1)
        logits = logits.masked_fill(~heads[:, :, None], -INF)
    return logits


def check_flash(pieces: Pieces, square: Square, seed: int = 0, **options: Any) -> None:
    query, keys, values = square.inputs(seed)
    scaling, group = 0.8 * square.head_dim**-0.5, square.group
    output, lse = pieces.flash(query, keys, values, scaling, square.offset, **options)
    logits = brute_logits(query, keys, scaling, square.offset, **options)
    expected_lse = logits.logsumexp(-1)
    weights = (logits - expected_lse[..., None]).exp().nan_to_num(0.0)  # 0 where a query sees nothing
    expected = (weights @ values.double().cpu().repeat_interleave(group, 1)).transpose(1, 2)
    assert_output(output, expected, square.dtype)
    assert lse.dtype == (torch.float64 if square.dtype == torch.float64 else torch.float32)
    assert lse.shape == expected_lse.shape
    nothing = expected_lse == -INF
    assert bool((lse.cpu()[nothing] == -INF).all())
    assert bool((output.cpu().transpose(1, 2)[nothing] == 0).all())
    tolerance = {torch.float64: 1e-12, torch.float32: 5e-6}.get(square.dtype, 2e-3)  # logits themselves are not rounded
    torch.testing.assert_close(lse.cpu().double()[~nothing], expected_lse[~nothing], rtol=0, atol=tolerance)


SQUARES = [
    Square(1, 1, 0),
    Square(37, 37, 0, kv_heads=2, v_head_dim=24),
    Square(64, 64, 0, batch=1),
    Square(65, 65, 0, batch=3, group=1),
    Square(130, 130, 0, batch=1, kv_heads=2, group=1),
    Square(1, 63, 62, kv_heads=2, group=3),  # every key is earlier
    Square(37, 20, 19),
    Square(65, 20, 20),
    Square(3, 257, 300, batch=1),
    Square(37, 64, 10, batch=1, group=3),  # in between: the last keys are seen by none
    Square(65, 130, 65, batch=1),
    Square(130, 70, 3, batch=1, v_head_dim=8),
    Square(5, 64, 0, batch=1),
    Square(64, 64, 64, batch=1),
    Square(70, 40, -30, batch=1),  # the first queries see nothing
    Square(65, 65, -65, batch=1),  # none does
]


def square_name(value: object) -> str | None:
    return f"{value.n}over{value.length}from{value.offset}" if isinstance(value, Square) else name(value)


@every_piece_dtype
@pytest.mark.parametrize("square", SQUARES, ids=square_name)
def test_flash(pieces: Pieces, square: Square, dtype: torch.dtype) -> None:
    check_flash(pieces, square._replace(dtype=dtype), seed=square.n)


@both_pieces
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"),
    [(64, 64), (80, 80), (96, 64), (128, 128), (256, 256), (64, 256), (256, 8), (12, 12), (12, 20), (2, 1)],
)
def test_flash_of_head_dimensions(pieces: Pieces, head_dim: int, v_head_dim: int) -> None:
    square = Square(34, 70, 36, batch=1, group=1, head_dim=head_dim, v_head_dim=v_head_dim)
    dtypes = (torch.float32, torch.float16) if pieces is PIECES_OF_TRITON else TORCH_DTYPES
    for dtype in dtypes:
        check_flash(pieces, square._replace(dtype=dtype))


@both_pieces
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("padding", [None, "of all heads", "per head"])
@pytest.mark.parametrize("square", [SQUARES[1], SQUARES[6], SQUARES[9], SQUARES[11]], ids=square_name)
def test_flash_options(pieces: Pieces, softcap: float | None, padding: str | None, square: Square) -> None:
    square = square._replace(kv_heads=2, group=2)
    valid = None
    if padding is not None:
        valid = mostly(square.batch, 1 if padding == "of all heads" else 2, square.length, seed=4)
        valid[0, :, : square.length // 2] = False  # left padding: its own queries see nothing
    check_flash(pieces, square, valid=valid, softcap=softcap)


@both_pieces
def test_flash_where_nothing_is_valid(pieces: Pieces) -> None:
    valid = torch.ones(2, 2, 70, dtype=torch.bool, device=DEVICE)
    valid[1, 0] = False
    check_flash(pieces, Square(70, 70, 0, kv_heads=2, group=1), valid=valid)


def brute_sums(logits: Tensor, lse: Tensor, kv_heads: int, first: int) -> Tensor:
    """`[batch, kv_heads, length]` float64 from `brute_logits`: over the queries from `first` on and each group."""
    probabilities = (logits - lse.double().cpu()[..., None]).exp()[:, :, first:]
    return probabilities.sum(2).unflatten(1, (kv_heads, -1)).sum(2)


def check_column_sums(pieces: Pieces, square: Square, first: int = 0, seed: int = 0, **options: Any) -> None:
    query, keys, _ = square.inputs(seed)
    scaling = 0.8 * square.head_dim**-0.5
    logits = brute_logits(query, keys, scaling, square.offset, **options)
    # The queries see other keys elsewhere, some of them a lot, some nothing of these; some do not count.
    elsewhere = 2 * normal(*logits.shape[:3], seed=seed + 4).cpu()
    lse = torch.logaddexp(logits.logsumexp(-1), elsewhere)
    lse[normal(*lse.shape, seed=seed + 5).cpu() > 1] = INF
    lse = lse.to(DEVICE, torch.float64 if square.dtype == torch.float64 else torch.float32)
    mass = pieces.column_sums(query, keys, lse, scaling, square.offset, first=first, **options)
    assert mass.dtype == lse.dtype
    assert_mass(mass, brute_sums(logits, lse, square.kv_heads, first), {torch.float64: 1e-12}.get(square.dtype, 5e-6))
    unseen = (logits[:, :, first:] == -INF).all(2).unflatten(1, (square.kv_heads, -1)).all(2)
    assert bool((mass.cpu()[unseen] == 0).all())


@every_piece_dtype
@pytest.mark.parametrize("square", SQUARES, ids=square_name)
def test_column_sums(pieces: Pieces, square: Square, dtype: torch.dtype) -> None:
    square = square._replace(dtype=dtype)
    for first in sorted({0, square.n // 2, square.n - 1}):
        check_column_sums(pieces, square, first, seed=square.n)


@both_pieces
@pytest.mark.parametrize("head_dim", [1, 12, 64, 80, 96, 128, 256])
def test_column_sums_of_head_dimensions(pieces: Pieces, head_dim: int) -> None:
    square = Square(140, 70, 3, batch=1, head_dim=head_dim)
    check_column_sums(pieces, square)
    check_column_sums(pieces, square._replace(dtype=torch.float16), first=100)


@both_pieces
@pytest.mark.parametrize("first", [0, 31, 32, 33, 127, 128, 129, 136, 137])
def test_column_sums_of_the_last_queries(pieces: Pieces, first: int) -> None:
    """An observation window, which may be empty."""
    check_column_sums(pieces, Square(137, 150, 13, batch=1), first)


@both_pieces
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("padding", [None, "of all heads", "per head"])
@pytest.mark.parametrize("square", [SQUARES[1], SQUARES[6], SQUARES[9], SQUARES[11]], ids=square_name)
def test_column_sums_options(pieces: Pieces, softcap: float | None, padding: str | None, square: Square) -> None:
    square = square._replace(kv_heads=2, group=3)
    valid = None
    if padding is not None:
        valid = mostly(square.batch, 1 if padding == "of all heads" else 2, square.length, seed=4)
        valid[0, :, : square.length // 2] = False
    check_column_sums(pieces, square, square.n // 3, valid=valid, softcap=softcap)


@both_pieces
def test_queries_that_do_not_count_add_nothing(pieces: Pieces) -> None:
    query, keys, _ = Square(20, 20, 0).inputs()
    lse = torch.full((2, 2, 20), INF, device=DEVICE)
    assert bool((pieces.column_sums(query, keys, lse, 0.25, 0) == 0).all())


@both_pieces
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_merged_pieces_are_the_whole(pieces: Pieces, softcap: float | None) -> None:
    """Keys held in two buffers and the queries' own, cut into two; padding hides one of the four from a row."""
    n, cuts = 37, (20, 45, 11, 26)
    square = Square(n, sum(cuts), sum(cuts) - n, kv_heads=2, group=1, v_head_dim=24)
    query, keys, values = square.inputs()
    valid = mostly(2, 2, sum(cuts), seed=4)
    valid[1, :, :20] = False
    whole, whole_lse = pieces.flash(query, keys, values, 0.25, square.offset, valid=valid, softcap=softcap)
    parts, sums, start = [], [], 0
    for length in cuts:
        here = slice(start, start + length)
        offset = square.offset - start
        given: dict[str, Any] = {"valid": valid[:, :, here], "softcap": softcap}
        parts.append(pieces.flash(query, keys[:, :, here], values[:, :, here], 0.25, offset, **given))
        sums.append(pieces.column_sums(query, keys[:, :, here], whole_lse, 0.25, offset, **given))
        start += length
    output, lse = merge(parts)
    assert output.dtype == whole.dtype and lse.dtype == whole_lse.dtype
    torch.testing.assert_close(output, whole, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=3e-6)
    together = pieces.column_sums(query, keys, whole_lse, 0.25, square.offset, valid=valid, softcap=softcap)
    torch.testing.assert_close(torch.cat(sums, -1), together, rtol=0, atol=1e-5)


def test_merging_parts_that_see_nothing() -> None:
    one = torch.ones(1, 3, 1, 2), on_device([[[0.5, -INF, -INF]]]).cpu()
    two = torch.full((1, 3, 1, 2), 3.0), on_device([[[0.5, 1.0, -INF]]]).cpu()
    output, lse = merge([one, two])
    assert output[0, :, 0, 0].tolist() == pytest.approx([2.0, 3.0, 0.0])
    assert lse[0, 0].tolist() == pytest.approx([0.5 + math.log(2), 1.0, -INF])
    assert merge([one]) == one


# -- prefill -----------------------------------------------------------------------------------------------------------


def run_prefill(kernels: Kernels, case: Case, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    query, keys, values = case.query(seed + 1), case.keys(seed + 2), case.values(seed + 3)
    scaling = case.scaling
    actual = kernels.prefill_attention(query, case.sources(keys, values), scaling, **options)
    return actual, brute_attention(query, keys, values, scaling, **options)


BLOCKS = (1, 6000, 1 << 20)
"""Logits of one block: every block of the fewest rows, some blocks for some heads, all in one."""
blocks = pytest.mark.parametrize(
    ("kernels", "block"),
    [
        *(pytest.param(TORCH, block, id=f"torch-{block}") for block in BLOCKS),
        pytest.param(TRITON, 0, id="triton", marks=needs_triton),  # its tiles have the size they have
    ],
)


def cut_into_blocks(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 rows at the smallest, of 32 or more otherwise."""
    monkeypatch.setattr(prefill_module, "BLOCK_ELEMENTS", elements)
    monkeypatch.setattr(prefill_module, "MIN_ROWS", 8 if elements <= 1 else 32)


SMALL = [
    Case(batch=1, kv_heads=1, group=1, head_dim=16, v_head_dim=16),
    Case(batch=2, kv_heads=1, group=2, head_dim=64, v_head_dim=16),
    Case(batch=1, kv_heads=2, group=2, head_dim=80, v_head_dim=64),
]
"""Few heads: the interpreter takes a while for each."""
PREFILL_CASES = [
    *(
        pytest.param(TORCH, SHAPES[(n + len(held)) % len(SHAPES)]._replace(held=held, n=n), block)
        for n, held, block in itertools.product([1, 2, 31, 33, 100], [(), (1,), (63,), (40, 25)], BLOCKS)
    ),
    *(
        pytest.param(TRITON, SMALL[(n + len(held)) % len(SMALL)]._replace(held=held, n=n), 0, marks=needs_triton)
        for n, held in itertools.product([1, 2, 37, 65, 130], [(), (1,), (63,), (40, 25)])
    ),
]


def prefill_name(value: object) -> str | None:
    if isinstance(value, Kernels):
        return value.name
    if not isinstance(value, Case):
        return name(value)
    return f"{shape_name(value)}-{value.n}behind{sum(value.held)}-{name(value.dtype)}"


@pytest.mark.parametrize(("kernels", "case", "block"), PREFILL_CASES, ids=prefill_name)
def test_prefill(kernels: Kernels, case: Case, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into_blocks(block, monkeypatch)
    for dtype in (torch.float32, torch.float64) if kernels is TORCH else (torch.float32,):
        actual, expected = run_prefill(kernels, case._replace(dtype=dtype), seed=case.n)
        assert_attention(actual, expected, dtype)
        assert float(expected[1].sum()) == pytest.approx(case.batch * case.query_heads * case.n)


@pytest.mark.parametrize(
    ("kernels", "case"),
    [
        *(pytest.param(TORCH, case._replace(dtype=dtype)) for case in SHAPES for dtype in TORCH_DTYPES),
        *(
            pytest.param(TRITON, case._replace(dtype=dtype), marks=needs_triton)
            for case in SMALL
            for dtype in TRITON_DTYPES
        ),
    ],
    ids=prefill_name,
)
def test_prefill_dtypes(kernels: Kernels, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into_blocks(1, monkeypatch)
    actual, expected = run_prefill(kernels, case._replace(held=(31,), n=35))
    assert_attention(actual, expected, case.dtype)
    # Logits may be rounded, but probabilities and their sums are of full precision.
    assert float(actual[1].sum()) == pytest.approx(case.batch * case.query_heads * 35, rel=1e-5)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5])
def test_prefill_in_uneven_blocks_of_heads(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five KV heads, so many of them at once."""
    case = Case(batch=2, kv_heads=5, group=2, held=(7,), n=20, dtype=torch.float64)
    cut_into_blocks(heads * case.group * 20 * case.total, monkeypatch)
    options: dict[str, Any] = {"sink_logits": normal(10, seed=5), "valid": mostly(2, 5, case.total, seed=6)}
    actual, expected = run_prefill(TORCH, case, **options)
    assert_attention(actual, expected, torch.float64)


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"sinks": True}, {"padding": True}], ids=str)
@pytest.mark.parametrize("held", [(), (9,)], ids=str)
@pytest.mark.parametrize(
    ("kernels", "case"),
    [
        *(pytest.param(TORCH, case) for case in SHAPES),
        *(pytest.param(TRITON, case, marks=needs_triton) for case in SMALL),
    ],
    ids=prefill_name,
)
def test_prefill_without_mass(kernels: Kernels, case: Case, held: tuple[int, ...], options: dict[str, Any]) -> None:
    """Where nothing is observed, torch's own attention may do the work: the same output."""
    known = TORCH_DTYPES if kernels is TORCH else TRITON_DTYPES
    numbers = {torch.float64: 3, torch.float32: 33, torch.bfloat16: 34, torch.float16: 35}
    for n, dtype in ((numbers[dtype], dtype) for dtype in known):
        this = case._replace(held=held, n=n, dtype=dtype)
        given: dict[str, Any] = {"softcap": options.get("softcap")}
        if "sinks" in options:
            given["sink_logits"] = normal(case.query_heads, seed=5)
        if "padding" in options:
            given["valid"] = torch.arange(this.total, device=DEVICE).expand(case.batch, 1, -1) >= 2
        query, keys, values = this.query(), this.keys(), this.values()
        expected = brute_attention(query, keys, values, case.scaling, **given)[0]
        sources = this.sources(keys, values)
        output, mass = kernels.prefill_attention(query, sources, case.scaling, with_mass=False, **given)
        assert mass is None
        assert_output(output, expected, dtype)


@both
@pytest.mark.parametrize("with_mass", [False, True])
@pytest.mark.parametrize("cuts", [[5, 7], [0, 12], [1, 0, 11], [20, 12], [25, 7], [8, 9, 4, 11], [32]], ids=str)
def test_prefill_of_sources_cut_anywhere(kernels: Kernels, cuts: list[int], with_mass: bool) -> None:
    """Sources are read as if concatenated, also where a cut goes through the new tokens or none is at their start."""
    dtype = torch.float64 if kernels is TORCH else torch.float32
    case = Case(held=(sum(cuts) - 12,), n=12, dtype=dtype)
    query, keys, values = case.query(), case.keys(), case.values()
    expected = brute_attention(query, keys, values, 0.25)
    sources = list(zip(keys.split(cuts, dim=2), values.split(cuts, dim=2), strict=True))
    output, mass = kernels.prefill_attention(query, sources, 0.25, with_mass=with_mass)
    assert_output(output, expected[0], dtype)
    if mass is not None:
        assert_attention((output, mass), expected, dtype)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("padding", [None, "of all heads", "per head"])
@blocks
def test_prefill_options(
    kernels: Kernels,
    softcap: float | None,
    sinks: bool,
    padding: str | None,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_into_blocks(block, monkeypatch)
    dtype = torch.float64 if kernels is TORCH else torch.float32
    group = 2 if kernels is TORCH else 1
    case = Case(batch=2, kv_heads=3, group=group, head_dim=16, v_head_dim=24, held=(17,), n=70, dtype=dtype)
    options: dict[str, Any] = {"softcap": softcap, "sink_logits": normal(3 * group, seed=5) if sinks else None}
    if padding is not None:
        options["valid"] = mostly(2, 1 if padding == "of all heads" else 3, case.total, seed=6)
        options["voters"] = part_of_wider(mostly(2, case.n, seed=7))
    actual, expected = run_prefill(kernels, case, **options)
    assert_attention(actual, expected, dtype)
    if padding is not None:
        assert bool((actual[1][~options["valid"].expand(-1, 3, -1)] == 0).all())


@blocks
def test_prefill_voters_that_count_more_or_less(kernels: Kernels, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights; also where a query sees nothing."""
    cut_into_blocks(block, monkeypatch)
    for dtype in (torch.float32, torch.float64) if kernels is TORCH else (torch.float32,):
        case = Case(batch=2, kv_heads=1, group=2, held=(17,), n=70, dtype=dtype)
        valid = torch.arange(case.total, device=DEVICE).expand(2, 1, -1) >= on_device([[[0]], [[20]]])
        voters = weights_of(2, 70, seed=8)
        voters[1, :3] = 0
        actual, expected = run_prefill(kernels, case, valid=valid, voters=voters)
        assert_attention(actual, expected, dtype)


@pytest.mark.parametrize("sinks", [False, True])
@blocks
def test_prefill_of_rows_that_see_nothing(
    kernels: Kernels, sinks: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left padding: its queries see no valid key. They stay finite and count for nothing."""
    cut_into_blocks(block, monkeypatch)
    for dtype in TORCH_DTYPES if kernels is TORCH else TRITON_DTYPES:
        case = Case(group=1, held=(), n=70, dtype=dtype)
        real = torch.arange(70, device=DEVICE)[None] >= on_device([[40], [3]])
        options: dict[str, Any] = {"sink_logits": normal(2, seed=5) if sinks else None}
        actual, expected = run_prefill(kernels, case, valid=real[:, None], voters=real, **options)
        assert int(expected[0].isnan().sum()) == 43 * 2 * 16
        assert_attention(actual, expected, dtype)
        if kernels is TRITON:
            assert bool((actual[0].cpu()[expected[0].isnan()] == 0).all())


@both
def test_decode_and_prefill_of_one_token_agree(kernels: Kernels) -> None:
    case = Case(held=(40,))
    run_decode(kernels, case).check(torch.float32)
    prefilled, expected = run_prefill(kernels, case)
    assert_attention(prefilled, expected, torch.float32)
