"""Rotary position embedding by any angle, torch's and Triton's re-rotation by the same tests."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kvcache.kernels.choice import Kernels
from kvcache.kernels.rotate import cos_sin, rotate
from kvcache.models.rope import Rope
from kvcache.positions import Rerotation, ranks
from tests.kernel_cases import (
    DEVICE,
    NAN,
    TORCH_DTYPES,
    as_models_give,
    both,
    every_dtype,
    normal,
    on_device,
    part_of_wider,
    random_head,
    same_bits,
)

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("poisoned_memory")]


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
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
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
LONG = 500_000.0 ** -(torch.arange(40) / 40)
VARIANTS = {
    "llama": (Rope(FREQUENCIES, 1.0, False), 16),
    "interleaved": (Rope(FREQUENCIES, 1.0, True), 16),
    "partial": (Rope(FREQUENCIES[:3], 1.0, False), 16),
    "interleaved_partial": (Rope(FREQUENCIES[:5], 1.0, True), 24),
    "yarn": (Rope(FREQUENCIES, 1.25, False), 16),
    "of_12": (Rope(FREQUENCIES[:6], 1.0, False), 12),
    "of_80": (Rope(LONG, 1.0, False), 80),
    "of_80_interleaved": (Rope(LONG, 1.25, True), 80),
    "half_of_80": (Rope(LONG[:20], 1.0, False), 80),
}
every_rope = pytest.mark.parametrize(("rope", "head_dim"), VARIANTS.values(), ids=VARIANTS)


def as_complex(x: Tensor, rope: Rope) -> Tensor:
    """The pairs that turn as complex numbers in float64, `[..., pairs]`, on the CPU."""
    x, pairs = x.double().cpu(), len(rope.inverse_frequencies)
    if rope.interleaved:
        return torch.complex(x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2])
    return torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs])


def from_complex(turned: Tensor, x: Tensor, rope: Rope) -> Tensor:
    """`x` in float64 on the CPU with its pairs replaced."""
    result, pairs = x.double().cpu().clone(), len(rope.inverse_frequencies)
    first = slice(0, 2 * pairs, 2) if rope.interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if rope.interleaved else slice(pairs, 2 * pairs)
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def turn(rope: Rope, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """A model's cos and sin as complex numbers, `[..., pairs]`: of fp32 angles, rounded to its dtype."""
    angles = (positions.cpu().float()[..., None] * rope.inverse_frequencies).double()
    cos, sin = ((part * rope.scaling).float().to(dtype).double() for part in (angles.cos(), angles.sin()))
    return torch.complex(cos, sin)


def as_the_model(raw: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Keys as a model rotates them, `[batch, heads, n, dim]` at `[batch, 1, n]`: one more rounding of the result."""
    turned = as_complex(raw, rope) * turn(rope, positions, raw.dtype)
    return from_complex(turned, raw, rope).to(raw.device, raw.dtype)


def at(rope: Rope, raw: Tensor, positions: Tensor) -> Tensor:
    """What a key should be at a small position: exact angles, the model's factor."""
    angles = positions.double().cpu()[..., None] * rope.inverse_frequencies.double()
    return brute_rotate(raw.cpu(), angles, rope.interleaved, rope.scaling)


def brute_rerotation(x: Tensor, old: Tensor, new: Tensor, rope: Rope) -> Tensor:
    """Divide by the model's turn at `old`, multiply by one at `new` that nothing rounds to the dtype."""
    turned = as_complex(x, rope) / turn(rope, old, x.dtype) * turn(rope, new, torch.float32)
    return from_complex(turned, x, rope)


def random_positions(limit: int, seed: int, heads: int = 1, n: int = 9) -> Tensor:
    return torch.randint(limit, (2, heads, n), generator=torch.Generator().manual_seed(seed), dtype=torch.int32).to(
        DEVICE
    )


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "") -> None:
    """One rounding of the result, and cos and sin of float32."""
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 0.0)
    assert actual.dtype == dtype and actual.shape == expected.shape
    error = (actual.double().cpu() - expected).abs()
    assert bool((error <= 4e-6 + 1.01 * rounding * expected.abs().clamp(min=1)).all()), f"{what}: {error.max():.1e}"


@both
@every_rope
@pytest.mark.parametrize("far", [100, 5_000, 4_194_304])
def test_rerotation_equals_one_direct_rotation(kernels: Kernels, rope: Rope, head_dim: int, far: int) -> None:
    """However far the model's position was: fp32 angles near 4 million are off by a quarter radian, and divide out."""
    for dtype in (torch.float32, torch.float64) if kernels.name == "torch" else (torch.float32,):
        raw = normal(2, 3, 9, head_dim, seed=1, dtype=dtype)
        old, new = far - 1 - random_positions(100, 2), random_positions(64, 3, heads=3)
        moved = Rerotation(rope)(as_the_model(raw, rope, old), old, new, kernels)
        assert moved.dtype == dtype
        expected = at(rope, raw, new)
        assert float((moved.double().cpu() - expected).abs().max()) < 2e-5  # cos and sin are float32
        torch.testing.assert_close(moved.norm(dim=-1).cpu(), expected.norm(dim=-1).to(dtype), rtol=1e-5, atol=0)


@every_rope
@every_dtype
def test_rerotation_by_the_models_own_numbers(kernels: Kernels, dtype: torch.dtype, rope: Rope, head_dim: int) -> None:
    """Far positions on both sides; every combination of one position for all heads and one for each."""
    x = normal(2, 3, 9, head_dim, seed=1, dtype=dtype)
    for heads in ((1, 1), (1, 3), (3, 1), (3, 3)):
        old, new = (random_positions(4_194_304, seed, heads=h) for seed, h in zip((2, 3), heads, strict=True))
        moved = Rerotation(rope)(x, old, new, kernels)
        assert_near(moved, brute_rerotation(x, old, new, rope), dtype, f"heads {heads}")
        assert same_bits(moved[..., 2 * len(rope.inverse_frequencies) :], x[..., 2 * len(rope.inverse_frequencies) :])


@every_rope
@every_dtype
def test_rerotation_in_half_precision_costs_a_rounding(
    kernels: Kernels, dtype: torch.dtype, rope: Rope, head_dim: int
) -> None:
    """One of the model's key, which no re-rotation can know, and one of the result; no more at any distance."""
    raw = normal(2, 3, 9, head_dim, seed=1, dtype=dtype)
    rounding = max(torch.finfo(dtype).eps / 2, 1e-6)
    for far in (100, 4_194_304):
        old, new = far - 1 - random_positions(100, 2), random_positions(64, 3)
        moved = Rerotation(rope)(as_the_model(raw, rope, old), old, new, kernels)
        assert moved.dtype == dtype
        expected = at(rope, raw, new)
        error = (moved.double().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(error.max()) < 1.6 * rounding


@both
@every_rope
def test_rerotation_to_the_same_position_changes_nothing(kernels: Kernels, rope: Rope, head_dim: int) -> None:
    x, positions = normal(2, 3, 9, head_dim, seed=1, dtype=torch.float32), random_positions(1_000_000, 2)
    torch.testing.assert_close(Rerotation(rope)(x, positions, positions, kernels), x, rtol=5e-7, atol=2e-7)


@both
def test_rerotation_of_each_head_to_its_own_position(kernels: Kernels) -> None:
    rope, head_dim = VARIANTS["llama"]
    raw, old = normal(2, 3, 9, head_dim, seed=1, dtype=torch.float32), random_positions(1000, 2, heads=3)
    new = random_positions(64, 3, heads=3)
    together = Rerotation(rope)(raw, old, new, kernels)
    for head in range(3):
        one = slice(head, head + 1)
        assert torch.equal(together[:, one], Rerotation(rope)(raw[:, one], old[:, one], new[:, one], kernels))


@both
@pytest.mark.parametrize("n", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("variant", ["interleaved_partial", "of_80"])
def test_rerotation_of_any_number_into_a_part_of_a_buffer(kernels: Kernels, n: int, variant: str) -> None:
    """As live slots are rotated: positions that are parts of wider ones, and nothing is written behind."""
    rope, head_dim = VARIANTS[variant]
    x = normal(2, 3, n + 4, head_dim, seed=1, dtype=torch.float32)
    old = random_positions(4_000_000, 2, heads=3, n=n + 4)
    new = random_positions(64, 3, heads=3, n=n + 4).long()
    buffer = x.new_full((2, 3, n + 4, head_dim), NAN)
    before = x.clone(), old.clone(), new.clone()
    out = Rerotation(rope)(x[:, :, :n], old[:, :, :n], new[:, :, :n], kernels, out=buffer[:, :, :n])
    assert out.data_ptr() == buffer.data_ptr() and out.shape == (2, 3, n, head_dim)
    assert_near(buffer[:, :, :n], brute_rerotation(x[:, :, :n], old[:, :, :n], new[:, :, :n], rope), torch.float32)
    assert bool(buffer[:, :, n:].isnan().all())
    assert all(torch.equal(one, other) for one, other in zip((x, old, new), before, strict=True))


@both
@pytest.mark.parametrize("variant", ["interleaved", "partial"])
@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)], ids=str)
def test_rerotation_takes_any_strides(kernels: Kernels, variant: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    rope, head_dim = VARIANTS[variant]
    x = normal(2, 3, 9, head_dim, seed=1, dtype=torch.float32)
    old, new = random_positions(1000, 2).to(dtypes[0]), random_positions(64, 3, heads=3).to(dtypes[1])
    expected = Rerotation(rope)(x, old, new, kernels)
    assert_near(expected, brute_rerotation(x, old, new, rope), torch.float32)
    spread = torch.stack((torch.full_like(x, NAN), x), dim=-1)[..., 1]
    every_other = torch.stack((old - 7, old), dim=-1)[..., 1]
    for same in (as_models_give(x), part_of_wider(x), spread):
        assert torch.equal(Rerotation(rope)(same, every_other, new.mT.contiguous().mT, kernels), expected)
    out = as_models_give(torch.full_like(x, NAN))
    assert torch.equal(Rerotation(rope)(x, old, new, kernels, out=out), expected)
    assert torch.equal(out, expected)


@both
def test_rerotation_by_every_other_frequency(kernels: Kernels) -> None:
    """Frequencies that are a view are read as one."""
    x, old, new = normal(2, 3, 9, 80, seed=1, dtype=torch.float32), random_positions(99, 2), random_positions(64, 3)
    rope = Rope(LONG[::2], 1.0, False)
    assert_near(Rerotation(rope)(x, old, new, kernels), brute_rerotation(x, old, new, rope), torch.float32)


@both
def test_rerotation_in_place(kernels: Kernels) -> None:
    rope, head_dim = VARIANTS["interleaved_partial"]
    x = normal(2, 3, 20, head_dim, seed=1, dtype=torch.float32)
    old, new = random_positions(99, 2, n=20), random_positions(64, 3, n=20)
    expected = Rerotation(rope)(x, old, new, kernels)
    Rerotation(rope)(x, old, new, kernels, out=x)
    assert torch.equal(x, expected)


def test_cos_sin_of_any_shape() -> None:
    positions = on_device([[[0, 3]], [[1, 7]]], torch.int32)
    cos, sin = cos_sin(positions, torch.tensor([1.0, 0.5]), 2.0)
    assert cos.shape == sin.shape == (2, 1, 2, 2)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos[0, 0, 0].tolist() == [2, 2] and sin[0, 0, 0].tolist() == [0, 0]
    expected = on_device([7.0, 3.5])
    torch.testing.assert_close(cos[1, 0, 1], 2 * expected.cos())
    torch.testing.assert_close(sin[1, 0, 1], 2 * expected.sin())


@pytest.mark.parametrize("seed", range(6))
def test_ranks(seed: int) -> None:
    chance = random.Random(seed)
    slots = chance.choice([1, 6, 17])
    heads = [[random_head(chance, slots, chance.randint(0, slots), 4_000_000) for _ in range(2)] for _ in range(3)]
    given = on_device(heads, dtype=chance.choice([torch.int32, torch.int64]))
    ranked = ranks(given)
    assert ranked.dtype == torch.int64
    for positions, actual in zip((h for row in heads for h in row), ranked.flatten(0, 1).tolist(), strict=True):
        live = sorted(position for position in positions if position >= 0)
        assert actual == [live.index(position) if position >= 0 else 0 for position in positions]


@pytest.mark.parametrize("positions", [[5, 0, 3], [0, 1, 2]])
def test_ranks_without_empty_slots_by_hand(positions: list[int]) -> None:
    assert ranks(on_device([[positions]])).tolist() == [[[2, 0, 1] if positions[0] == 5 else [0, 1, 2]]]
