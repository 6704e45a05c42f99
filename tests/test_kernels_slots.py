"""Who leaves, and everything that moves keys and values: exact, torch's and Triton's by the same tests."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvcache.budget import LayerBudget
from kvcache.eviction import plan_eviction, positions_ahead
from kvcache.kernels.choice import Kernels
from kvcache.kernels.compact import compact_bookkeeping, flat_rows, plan_moves
from kvcache.kernels.select import eviction_order, kept_slots
from kvcache.policies import HeavyHitters, Recency, Slots
from tests.kernel_cases import (
    DEVICE,
    INF,
    NAN,
    TRITON_ONLY,
    as_models_give,
    both,
    cursor,
    leaving_order,
    normal,
    on_device,
    part_of_wider,
    random_head,
    same_bits,
)

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("poisoned_memory")]
MOVED = (torch.float32, torch.float16)  # what is only moved does not depend on the dtype, but its accesses do

STRIDES = ("contiguous", "model", "part of a fused projection", "last dimension not dense")


def laid_out(strides: str, x: Tensor) -> Tensor:
    """New keys `[batch, heads, n, dim]` as they may lie in memory."""
    if strides == "model":
        return as_models_give(x)
    if strides == "part of a fused projection":
        return part_of_wider(as_models_give(x))
    if strides == "last dimension not dense":
        return torch.stack((torch.full_like(x, NAN), x), dim=-1)[..., 1]
    return x.contiguous()


# -- who leaves --------------------------------------------------------------------------------------------------------

SCORES = (-INF, -3.5, -1.0, -1e-30, -1e-45, 0.0, 1e-45, 1e-30, 0.5, 0.75, 3.0, 3.4e38, INF)


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
    positions = on_device(
        [[random_head(chance, 12, chance.randint(0, 5), seen) for _ in range(2)] for seen in following]
    ).int()
    priority = on_device([[chance.choices(SCORES, k=12) for _ in range(2)] for _ in following]).to(dtype)
    priority = priority + 0.0  # what underflows becomes zero; negative zeros have a test of their own
    sinks = chance.choice([0, 1, 4, 40])
    window_start = on_device(following).int() - chance.choice([1, 5, 12, 40])
    order = eviction_order(priority, positions, sinks, window_start)
    check_order(order, priority, positions, sinks, window_start)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16], ids=str)
def test_eviction_order_of_integers(dtype: torch.dtype) -> None:
    """As policies rank by position; integers that float32 could not tell apart."""
    big = [2**30 - 1, 2**30 - 2, 2**24 + 1, 2**24, 2**24 - 1] if dtype != torch.int16 else [32767, 32766]
    pool = [*big, *(-number for number in big), 0, 1, -1, 7]
    chance = random.Random(0)
    for _ in range(20):
        positions = on_device([[random_head(chance, 12, 2, 30)]]).int()
        priority = on_device([[chance.choices(pool, k=12)]], dtype=dtype)
        before = priority.clone()
        order = eviction_order(priority, positions, 2, on_device([25]).int())
        check_order(order, priority, positions, 2, on_device([25]))
        assert torch.equal(priority, before)


def test_eviction_order_by_position_keeps_the_newest() -> None:
    positions = on_device([[[7, 0, -1, 3, 5, 1, 9]]], dtype=torch.int32)
    order = eviction_order(positions, positions, 1, on_device([9], dtype=torch.int32))
    assert order.argsort(-1).tolist() == [[[2, 5, 3, 4, 0, 1, 6]]]


def test_eviction_order_of_close_priorities_at_large_positions() -> None:
    """No position outweighs a priority: neighbours among float32 numbers, positions of every size."""
    chance = random.Random(5)
    pool = [0.25, torch.nextafter(torch.tensor(0.25), torch.tensor(1.0)).item(), -0.25, 0.0, 1e-45]
    places = [0, 3, 255, 256, 65_535, 65_536, 2**24, 2**24 + 1, 4_000_000, 2**30, 2**31 - 3]
    for _ in range(20):
        positions = on_device([[chance.sample(places, len(places))]]).int()
        priority = on_device([[chance.choices(pool, k=len(places))]])
        window_start = on_device([2**31 - 2]).int()
        check_order(eviction_order(priority, positions, 1, window_start), priority, positions, 1, window_start)


def test_eviction_order_at_large_positions() -> None:
    """Equal priorities millions of tokens into a stream, up to the last int32."""
    positions = on_device([[[2**31 - 2, 4_000_001, 4_000_000, 2**24 + 1, 2**24, 65_536, 0]]], dtype=torch.int32)
    priority = torch.full((1, 1, 7), 0.25, device=DEVICE)
    window_start = on_device([2**31 - 2], dtype=torch.int32)
    order = eviction_order(priority, positions, 1, window_start)
    assert order.argsort(-1).tolist() == [[[5, 2, 1, 4, 3, 6, 0]]]


def test_eviction_order_protects_from_the_boundary_on() -> None:
    """Positions 0 to 2 are sinks and 7 to 9 the window, whatever their priority; rows have windows of their own."""
    positions = torch.arange(10, dtype=torch.int32, device=DEVICE).repeat(2, 1, 1)
    priority = -torch.arange(10.0, device=DEVICE).repeat(2, 1, 1)
    order = eviction_order(priority, positions, 3, on_device([7, 9], dtype=torch.int32))
    assert order.argsort(-1).tolist() == [[[6, 5, 4, 3, 0, 1, 2, 7, 8, 9]], [[8, 7, 6, 5, 4, 3, 0, 1, 2, 9]]]


def test_eviction_order_of_several_layers_at_once() -> None:
    chance = random.Random(3)
    positions = on_device([[[random_head(chance, 9, 1, 20)] * 2] * 3] * 4).int()
    priority = normal(4, 3, 2, 9, seed=1, dtype=torch.float32)
    window_start = on_device([10, 15, 18]).int()
    order = eviction_order(priority, positions, 2, window_start)
    for layer in range(4):
        check_order(order[layer], priority[layer], positions[layer], 2, window_start)


def test_eviction_order_leaves_its_inputs_alone() -> None:
    positions = torch.arange(6, dtype=torch.int32, device=DEVICE).view(1, 1, 6)
    for priority in (
        normal(1, 1, 6, seed=1, dtype=torch.float32),
        torch.arange(6, device=DEVICE).view(1, 1, 6),
        positions,
    ):
        before = priority.clone(), positions.clone()
        eviction_order(priority, positions, 1, on_device([5]))
        assert torch.equal(priority, before[0]) and torch.equal(positions, before[1])


def test_zeros_of_both_signs_are_equal_priorities() -> None:
    """The lowest position leaves first, not the negative zero."""
    positions = on_device([[[3, 4, 5, 6]]], dtype=torch.int32)
    priority = on_device([[[0.0, -0.0, 0.0, -0.0]]])
    order = eviction_order(priority, positions, 0, on_device([9]))
    assert order.argsort(-1).tolist() == [[[0, 1, 2, 3]]]


@pytest.mark.parametrize("seed", range(12))
def test_kept_slots(seed: int) -> None:
    """Equal and unequal numbers, few and nearly all of the slots."""
    chance = random.Random(seed)
    slots = chance.choice([1, 5, 16, 65])
    batch, heads = chance.randint(1, 4), chance.randint(1, 3)
    keys = on_device([[chance.sample(range(-500, 500), slots) for _ in range(heads)] for _ in range(batch)])
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
    order = order.view(3, 2, 2, 10).to(DEVICE)
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
    kept = torch.zeros(layers, batch, heads, entries, dtype=torch.bool, device=DEVICE)
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
    numbers = torch.arange(entries, device=DEVICE).expand(case.kept.shape)
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


class Slotted(NamedTuple):
    """A layer's buffers before or after a move."""

    keys: Tensor
    values: Tensor
    score: Tensor
    positions: Tensor


def check_moves(kernels: Kernels, case: Compaction, dtype: torch.dtype, strides: str, seed: int = 0) -> None:
    """The first layer's eviction carried out: each slot holds what the bookkeeping says, bit for bit, and slots that
    are no target are untouched."""
    kept = case.kept[0]
    batch, heads, entries = kept.shape
    capacity = max(entries, case.length) + 3
    moves = plan_moves(kept, case.front, case.length)
    numbers = torch.arange(entries, dtype=torch.int32, device=DEVICE).expand(kept.shape)
    dense = compact_bookkeeping(numbers, kept, moves, case.front, case.length, empty=-1)
    assert dense.dtype == torch.int32
    contents = [
        normal(batch, heads, entries, dim, seed=seed + dim, dtype=dtype) for dim in (8 if seed % 3 else 130, 12)
    ]
    held = [x.new_full((batch, heads, capacity, x.shape[3]), NAN) for x in contents]
    for buffer, x in zip(held, contents, strict=True):
        buffer[:, :, : case.held] = x[:, :, : case.held]
    expected = [
        brute_moves(buffer, x, moves.source.tolist(), moves.target.tolist())
        for buffer, x in zip(held, contents, strict=True)
    ]
    score = torch.full((batch, heads, capacity), NAN, device=DEVICE)
    positions = torch.full((batch, heads, capacity), -9, dtype=torch.int32, device=DEVICE)
    new_score = normal(batch, heads, capacity, seed=seed, dtype=torch.float32)
    new_positions = torch.arange(batch * heads * capacity, dtype=torch.int32, device=DEVICE).view_as(positions)
    kernels.apply_moves(
        *held,
        score,
        positions,
        new_score,
        new_positions,
        moves.source,
        flat_rows(moves.source, capacity),
        flat_rows(moves.target, capacity),
        case.held,
        None if case.chunk == 0 else tuple(laid_out(strides, x[:, :, case.held :]) for x in contents),
    )
    assert all(same_bits(x, y) for x, y in zip(held, expected, strict=True))
    assert same_bits(score, new_score) and same_bits(positions, new_positions)
    for row, head in itertools.product(range(batch), range(heads)):
        for slot, entry in enumerate(dense[row, head].tolist()):
            if entry >= 0:
                assert all(
                    same_bits(x[row, head, slot], y[row, head, entry]) for x, y in zip(held, contents, strict=True)
                )


@both
@pytest.mark.parametrize("seed", COMPACTIONS)
def test_contents_follow_the_bookkeeping(kernels: Kernels, seed: int) -> None:
    check_moves(kernels, random_compaction(seed), MOVED[seed % 2], STRIDES[seed % len(STRIDES)], seed)


@both
@pytest.mark.parametrize("held", [257, 300, 230, 0])
def test_contents_of_many_slots(kernels: Kernels, held: int) -> None:
    """More than a program of Triton's takes, of moves and of bookkeeping."""
    kept = torch.zeros(1, 1, 2, 300, dtype=torch.bool, device=DEVICE)
    for head in range(2):
        kept[0, 0, head, random.Random(head + held).sample(range(300), 225)] = True
    check_moves(kernels, Compaction(kept, held, 225), torch.float32, "model")


def test_no_copies_at_once_that_could_meet() -> None:
    """What makes one launch possible: no entry that is read is written, but by itself."""
    for seed in COMPACTIONS:
        case = random_compaction(seed)
        moves = plan_moves(case.kept, case.front, case.length)
        for sources, targets in zip(
            moves.source.flatten(0, -2).tolist(), moves.target.flatten(0, -2).tolist(), strict=True
        ):
            for source, target in zip(sources, targets, strict=True):
                assert source == target or source not in targets or source >= case.held


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
    kept = on_device([[[1, 0, 0, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0, 1, 0]]]).bool()
    moves = plan_moves(kept, 4, 4)
    assert moves.source[0, 0, :2].tolist() == [5, 7]
    assert moves.target[0, 0, :2].tolist() == [1, 2]
    assert set(moves.source[0, 1].tolist()) == {6}
    assert set(moves.target[0, 1].tolist()) == {3}
    dense = compact_bookkeeping(torch.arange(8.0, device=DEVICE).expand(1, 2, 8), kept, moves, 4, 4, empty=0)
    assert dense.tolist() == [[[0, 5, 7, 3], [0, 1, 2, 6]]]


def test_bookkeeping_of_a_row_that_keeps_fewer() -> None:
    kept = on_device([[[0, 1, 0, 0, 1]], [[1, 1, 0, 1, 1]]]).bool()
    moves = plan_moves(kept, 3, 4)
    entries = on_device([[[10, 11, 12, 13, 14]], [[20, 21, 22, 23, 24]]])
    dense = compact_bookkeeping(entries, kept, moves, 3, 4, empty=-7)
    assert sorted(dense[0, 0].tolist()) == [-7, -7, 11, 14]
    assert dense[0, 0, 1] == 11
    assert sorted(dense[1, 0].tolist()) == [20, 21, 23, 24]
    assert entries.tolist() == [[[10, 11, 12, 13, 14]], [[20, 21, 22, 23, 24]]]


def test_flat_rows() -> None:
    slots = torch.randint(7, (3, 2, 4, 5), generator=torch.Generator().manual_seed(0)).to(DEVICE)
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
    positions = torch.full((2, 3, 2, entries), -1, dtype=torch.int32, device=DEVICE)
    for layer in range(2):
        for row in rows:
            for head in range(2):
                slots = chance.sample(range(entries), held[row])
                live = _held(chance, held[row], following[row], budget)
                positions[layer, row, head, slots] = on_device(live, dtype=torch.int32)
    score = on_device(chance.choices([0.0, 0.5, 0.5, 1.0, 2.0], k=positions.numel())).view(positions.shape)
    origins = positions * 10
    plan = plan_eviction(
        policy.priority(Slots(score, positions)),
        score,
        positions,
        budget,
        on_device(following).int(),
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
    ahead = positions_ahead(on_device([5, 0], dtype=torch.int32), 3)
    assert ahead.dtype == torch.int32
    assert ahead.tolist() == [[5, 6, 7], [0, 1, 2]]
    assert positions_ahead(on_device([5], dtype=torch.int32), 0).shape == (1, 0)


# -- appending ---------------------------------------------------------------------------------------------------------


def buffers(batch: int, heads: int, capacity: int, head_dim: int, v_head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Keys and values of a layer, every slot of them something else."""
    return [normal(batch, heads, capacity, dim, seed=dim + 1, dtype=dtype) for dim in (head_dim, v_head_dim)]


@both
@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (80, 20), (3, 256)])
@pytest.mark.parametrize("strides", STRIDES)
def test_append(kernels: Kernels, strides: str, head_dim: int, v_head_dim: int, dtype: torch.dtype) -> None:
    """The first, some and the last slots; all others stay as they were."""
    for batch, heads, n, start, capacity in ((1, 1, 1, 0, 1), (3, 2, 1, 4, 9), (2, 3, 5, 4, 9), (1, 2, 9, 0, 9)):
        held = buffers(batch, heads, capacity, head_dim, v_head_dim, dtype)
        new = [laid_out(strides, normal(batch, heads, n, x.shape[3], seed=n, dtype=dtype)) for x in held]
        expected = [x.clone() for x in held]
        for after, x in zip(expected, new, strict=True):
            after[:, :, start : start + n] = x
        kernels.append(*held, *new, start)
        assert all(same_bits(x, y) for x, y in zip(held, expected, strict=True))


@both
def test_append_of_many_tokens(kernels: Kernels) -> None:
    held = buffers(2, 1, 70, 16, 8, torch.float32)
    new = [laid_out("model", normal(2, 1, 65, x.shape[3], seed=3, dtype=torch.float32)) for x in held]
    kernels.append(*held, *new, 3)
    assert all(same_bits(x[:, :, 3:68], y) for x, y in zip(held, new, strict=True))


@pytest.mark.parametrize("kernels", TRITON_ONLY)
@pytest.mark.parametrize("start", [0, 1, 3])
def test_append_by_a_cursor_on_the_device(kernels: Kernels, start: int) -> None:
    one, other = buffers(2, 3, 7, 16, 24, torch.float16), buffers(2, 3, 7, 16, 24, torch.float16)
    new = [laid_out("model", normal(2, 3, 4, x.shape[3], seed=3, dtype=torch.float16)) for x in one]
    kernels.append(*one, *new, start)
    kernels.append(*other, *new, cursor(start))
    assert all(same_bits(x, y) for x, y in zip(one, other, strict=True))


# -- over a victim -----------------------------------------------------------------------------------------------------


class Overwriting(NamedTuple):
    """A full layer and what decides which slot of each head gives way."""

    positions: Tensor  # [batch, heads, capacity] int32
    priority: Tensor  # the same shape
    sinks: int
    window: int
    following: Tensor  # [batch] int32

    def victims(self) -> list[list[list[int]]]:
        """Of each head the slots that may give way: one, or any of those that hold nothing."""
        window_start = (self.following - self.window).tolist()
        return [
            [
                [slot for slot, position in enumerate(held) if position < 0]
                or leaving_order(ranked, held, self.sinks, window_start[row])[:1]
                for held, ranked in zip(*heads, strict=True)
            ]
            for row, heads in enumerate(zip(self.positions.tolist(), self.priority.tolist(), strict=True))
        ]


def check_overwriting(
    kernels: Kernels,
    case: Overwriting,
    dims: tuple[int, int] = (8, 16),
    dtype: torch.dtype = torch.float32,
    strides: str = "model",
) -> None:
    batch, heads, capacity = case.positions.shape
    before = buffers(batch, heads, capacity, *dims, dtype)
    before += [normal(batch, heads, capacity, seed=5, dtype=torch.float32), case.positions]
    keys, values, score, positions = (x.clone() for x in before)
    new = [laid_out(strides, normal(batch, heads, 1, dim, seed=dim + 9, dtype=dtype)) for dim in dims]
    decisive = case.priority.clone()
    rows = kernels.evict_and_write(
        keys, values, score, positions, *new, case.priority, case.sinks, case.window, case.following
    )
    assert rows.dtype == torch.int64 and rows.shape == (batch * heads,)
    victims = rows.view(batch, heads) - torch.arange(batch * heads, device=DEVICE).view(batch, heads) * capacity
    expected = [x.clone() for x in before]
    for row, head in itertools.product(range(batch), range(heads)):
        slot, allowed = int(victims[row, head]), case.victims()[row][head]
        assert slot in allowed, f"row {row}, head {head}: slot {slot} left instead of {allowed}"
        expected[0][row, head, slot], expected[1][row, head, slot] = new[0][row, head, 0], new[1][row, head, 0]
        expected[2][row, head, slot], expected[3][row, head, slot] = 0.0, case.following[row]
    assert all(same_bits(x, y) for x, y in zip((keys, values, score, positions), expected, strict=True))
    assert same_bits(case.priority, decisive)


def full_layer(
    chance: random.Random, shape: tuple[int, int, int], sinks: int, window: int, choices: tuple[float, ...] = ()
) -> Overwriting:
    """Positions in random order among a few more than there are slots; priorities of `choices`, or all different."""
    batch, heads, capacity = shape
    following = [capacity + chance.randint(0, 9) for _ in range(batch)]
    positions = [[random_head(chance, capacity, 0, seen) for _ in range(heads)] for seen in following]
    priority = normal(*shape, seed=chance.randint(0, 999), dtype=torch.float32)
    if choices:
        picked = [[chance.choices(choices, k=capacity) for _ in range(heads)] for _ in range(batch)]
        priority = on_device(picked, torch.float32)
    following_tensor = on_device(following, torch.int32)
    return Overwriting(on_device(positions, torch.int32), priority, sinks, window, following_tensor)


@both
@pytest.mark.parametrize("capacity", [1, 2, 63, 64, 65, 1024, 1025, 2049])
def test_overwriting(kernels: Kernels, capacity: int) -> None:
    """Priorities all different, and many that are equal; a block of Triton's has 1024 slots."""
    chance = random.Random(capacity)
    sinks, window = (0, 0) if capacity == 1 else (chance.randint(0, 3), chance.randint(0, capacity // 2))
    batch, heads = (1, 2) if capacity > 100 else (3, 2)
    for choices in ((), (0.0, 0.5), (0.25,)):
        case = full_layer(chance, (batch, heads, capacity), sinks, window, choices)
        check_overwriting(kernels, case)


@both
@pytest.mark.parametrize("seed", range(8))
def test_overwriting_by_any_priority(kernels: Kernels, seed: int) -> None:
    """Negative, denormal, infinite, and zeros of both signs."""
    chance = random.Random(seed)
    choices = (*SCORES, -0.0) if seed % 2 else (0.0, -0.0)
    check_overwriting(kernels, full_layer(chance, (3, 2, 19), chance.randint(0, 2), chance.randint(0, 6), choices))


@both
def test_overwriting_where_the_first_block_ties_with_the_second(kernels: Kernels) -> None:
    """The lowest position in the second block, in the first, and in the same lane of both."""
    for lowest, other in ((1030, 7), (7, 1030), (1024 + 7, 7), (7, 1024 + 7), (1023, 1024), (1024, 1023)):
        positions = torch.arange(1100, dtype=torch.int32, device=DEVICE) + 100
        priority = torch.ones(1100, device=DEVICE)
        positions[lowest], positions[other] = 10, 11
        priority[lowest] = priority[other] = 0.5
        following = on_device([1300], torch.int32)
        check_overwriting(kernels, Overwriting(positions.view(1, 1, -1), priority.view(1, 1, -1), 4, 5, following))


@both
def test_overwriting_at_the_boundaries_of_protection(kernels: Kernels) -> None:
    """The last sink and the first of the window have the lowest priorities, and stay; rows differ in their window."""
    for sinks, window in itertools.product((0, 1, 3), (0, 1, 4)):
        positions = torch.arange(12, dtype=torch.int32, device=DEVICE).repeat(2, 2, 1)
        priority = torch.ones(2, 2, 12, device=DEVICE)
        priority[:, 0, : sinks + 1] = -torch.arange(sinks + 1.0, device=DEVICE).flip(0) - 1  # the last sink is lower
        priority[:, 1] = -torch.arange(12.0, device=DEVICE)  # the newest is the lowest
        following = on_device([12, 14], torch.int32)
        check_overwriting(kernels, Overwriting(positions, priority, sinks, window, following))


@both
@pytest.mark.parametrize("choices", [(), (1.0,)])
def test_overwriting_where_all_are_protected(kernels: Kernels, choices: tuple[float, ...]) -> None:
    """The lowest position leaves, whatever the priorities."""
    case = full_layer(random.Random(3), (2, 2, 21), 0, 100, choices)
    check_overwriting(kernels, case)
    check_overwriting(kernels, case._replace(sinks=100, window=0))


@both
@pytest.mark.parametrize("capacity", [5, 1030])
def test_overwriting_takes_an_empty_slot_first(kernels: Kernels, capacity: int) -> None:
    """Before the lowest priority, in a slot of any block; never one of another head."""
    for slots in ([capacity - 1], [0], [2, capacity - 2]):
        case = full_layer(random.Random(4), (2, 2, capacity), 0, capacity, (-INF, 0.0))
        case.positions[1, 0, slots] = on_device([-1] if len(slots) == 1 else [-1, -3], torch.int32)
        check_overwriting(kernels, case)


@both
def test_overwriting_by_whole_numbers(kernels: Kernels) -> None:
    """As a policy ranks by position; numbers that float32 could not tell apart."""
    big = [2**30 - 1, 2**30 - 2, 2**24 + 1, 2**24, 2**24 - 1]
    pool = [*big, *(-number for number in big), 0, 1, -1, 7]
    chance = random.Random(0)
    for _ in range(6):
        case = full_layer(chance, (2, 2, 14), 1, 2)
        picked = [[chance.sample(pool, 14) for _ in range(2)] for _ in range(2)]
        check_overwriting(kernels, case._replace(priority=on_device(picked, torch.int32)))
        check_overwriting(kernels, case._replace(priority=case.positions.clone()))


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_overwriting_compares_in_float32(kernels: Kernels, dtype: torch.dtype) -> None:
    case = full_layer(random.Random(1), (2, 2, 14), 1, 2)
    ranked = (case.priority * 4).round().to(dtype) / 4  # exact in every dtype, with ties
    check_overwriting(kernels, case._replace(priority=ranked))


@both
def test_overwriting_millions_of_tokens_into_a_stream(kernels: Kernels) -> None:
    """No position outweighs a priority, up to the last int32."""
    places = [0, 3, 255, 256, 65_535, 65_536, 2**24, 2**24 + 1, 4_000_000, 2**30, 2**31 - 3]
    chance = random.Random(5)
    above = torch.nextafter(torch.tensor(0.25), torch.tensor(1.0)).item()
    for _ in range(4):
        positions = on_device([[chance.sample(places, len(places))]], torch.int32)
        priority = on_device([[chance.choices([0.25, above, -0.25, 0.0, 1e-45], k=len(places))]])
        check_overwriting(kernels, Overwriting(positions, priority, 1, 1, on_device([2**31 - 2], torch.int32)))


@both
def test_overwriting_by_a_part_of_a_larger_score(kernels: Kernels) -> None:
    """Rows of priorities lie further apart than there are slots, as live slots of a buffer do."""
    case = full_layer(random.Random(6), (3, 2, 17), 1, 4)
    wide = torch.full((3, 2, 23), -INF, device=DEVICE)
    wide[:, :, :17] = case.priority
    check_overwriting(kernels, case._replace(priority=wide[:, :, :17]))


@both
@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (80, 20), (3, 256)])
@pytest.mark.parametrize("strides", STRIDES)
def test_overwriting_by_tokens_of_any_layout(
    kernels: Kernels, strides: str, head_dim: int, v_head_dim: int, dtype: torch.dtype
) -> None:
    case = full_layer(random.Random(7), (3, 2, 9), 1, 2)
    check_overwriting(kernels, case, (head_dim, v_head_dim), dtype, strides)
