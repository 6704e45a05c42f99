"""kernels/choice.py: which implementation serves, and what is said where Triton cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcache.kernels import choice, jit
from kvcache.kernels.choice import TORCH, TRITON, choose, describe, refusal

pytestmark = pytest.mark.fast
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF = torch.float16


@pytest.fixture(autouse=True)
def as_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton is there, nothing is forced and nothing was said yet."""
    monkeypatch.setattr(jit, "INSTALLED", True)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    choice._warn.cache_clear()
    yield
    choice._warn.cache_clear()


def test_both_have_every_operation() -> None:
    assert (TORCH.name, TRITON.name) == ("torch", "triton")
    operations = [name for name in TORCH._fields if name != "name"]
    for name in operations:
        one, other = getattr(TORCH, name), getattr(TRITON, name)
        assert callable(one) and callable(other) and one is not other
        assert other.__name__ == f"{one.__name__}_triton" == f"{name}_triton"


@pytest.mark.parametrize("setting", [None, "auto"])
def test_a_gpu_is_served_by_triton_and_nothing_else_is(
    setting: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if setting is not None:
        monkeypatch.setenv(choice.VARIABLE, setting)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for dims in ((64, 64), (128, 128), (80, 80), (8, 256), (192, 128), (12, 20), (1, 1)):
            assert choose(CUDA, dtype, dims) is TRITON
            assert choose(torch.device("cuda", 1), dtype, dims) is TRITON
            assert choose(CPU, dtype, dims) is TORCH
            assert choose(torch.device("mps"), dtype, dims) is TORCH
    assert not caplog.records


def test_forced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(choice.VARIABLE, "torch")
    assert choose(CUDA, HALF, (64, 64)) is TORCH
    monkeypatch.setattr(jit, "INSTALLED", False)
    assert choose(CUDA, torch.float64, (12, 12)) is TORCH
    monkeypatch.setattr(jit, "INSTALLED", True)
    monkeypatch.setenv(choice.VARIABLE, "triton")
    assert choose(CPU, torch.float32, (64, 64)) is TRITON
    assert choose(CUDA, HALF, (64, 64)) is TRITON
    assert not caplog.records


@pytest.mark.parametrize("wrong", ["", "Triton", "cuda", "0", "auto "])
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_an_unknown_value_is_refused(wrong: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, wrong)
    with pytest.raises(ValueError, match=r"KVCACHE_KERNELS=.*auto, triton, torch") as caught:
        choose(device, HALF, (64, 64))
    assert repr(wrong) in str(caught.value)


REFUSED: dict[str, tuple[Any, tuple[int, int], str]] = {
    "float64": (torch.float64, (64, 64), r"float64 is not one of .*float16.*bfloat16.*float32"),
    "int8": (torch.int8, (64, 64), r"int8 is not one of"),
    "too large": (HALF, (264, 264), r"of the head dimensions \(264, 264\) one is above 256"),
    "values too large": (HALF, (128, 512), r"\(128, 512\)"),
    "keys too large": (HALF, (576, 128), r"\(576, 128\)"),
}
every_refusal = pytest.mark.parametrize(("dtype", "dims", "reason"), REFUSED.values(), ids=REFUSED)


@every_refusal
def test_what_triton_cannot_serve(
    dtype: torch.dtype,
    dims: tuple[int, int],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning, however many layers; an error where Triton was asked for; nothing on a CPU."""
    assert choose(CPU, dtype, dims) is TORCH
    assert not caplog.records
    for _ in range(3):
        assert choose(CUDA, dtype, dims) is TORCH
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("kvcache", logging.WARNING)
    assert record.getMessage().startswith("attention over evicting layers runs by torch's operations on this GPU: ")
    monkeypatch.setenv(choice.VARIABLE, "triton")
    for device in (CPU, CUDA):
        with pytest.raises(ValueError, match=rf"KVCACHE_KERNELS=triton cannot be served: .*{reason}.*auto or torch"):
            choose(device, dtype, dims)
    assert len(caplog.records) == 1


def test_every_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        choose(CUDA, torch.float64, (64, 64))
        choose(CUDA, HALF, (264, 12))
    assert len(caplog.records) == 2


def test_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(jit, "INSTALLED", False)
    assert "pip install triton" in str(refusal(HALF, (64, 64)))
    assert choose(CUDA, HALF, (64, 64)) is TORCH
    assert choose(CUDA, HALF, (64, 64)) is TORCH
    (record,) = caplog.records
    assert "Triton is not installed (pip install triton)" in record.getMessage()
    monkeypatch.setenv(choice.VARIABLE, "triton")
    with pytest.raises(ValueError, match="cannot be served: Triton is not installed"):
        choose(CPU, HALF, (64, 64))


def test_what_people_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe(CUDA).startswith("Triton kernels")
    assert describe(CPU).startswith("torch operations: ")
    monkeypatch.setenv(choice.VARIABLE, "torch")
    assert describe(CUDA).startswith("torch operations (KVCACHE_KERNELS=torch): ")
    monkeypatch.setenv(choice.VARIABLE, "triton")
    assert describe(CPU).startswith("Triton kernels")
    monkeypatch.delenv(choice.VARIABLE)
    monkeypatch.setattr(jit, "INSTALLED", False)
    assert describe(CUDA).startswith("torch operations since Triton is not installed (pip install triton): ")
    assert describe(CPU).startswith("torch operations: ")


def test_without_triton_kernels_are_plain_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "INSTALLED", False)

    def kernel() -> None: ...

    assert jit.jit(do_not_specialize=["n"])(kernel) is kernel


@pytest.mark.parametrize(("n", "power"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (80, 128), (256, 256)])
def test_next_power_of_2(n: int, power: int) -> None:
    assert jit.next_power_of_2(n) == power
