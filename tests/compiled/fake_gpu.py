"""A GPU that compiles and launches nothing: the launchers' own arguments, specialised and compiled for a real target.

Triton asks its driver for the target, hands the compiled kernel over and calls a launcher. This driver records the
kernel instead, so that host code runs on meta tensors exactly as it would on a GPU, up to the launch.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
"""Bytes of shared memory that a program may use on a target; Triton does not refuse more when compiling."""
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Launch:
    """A kernel as it was launched. grid: programs along three axes. arguments: all of them, by name."""

    name: str
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    kernel: Any


class FakeDriver:
    """Stands in for Triton's driver of one target; `launches` collects what was launched."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.launches: list[Launch] = []
        self.utils = SimpleNamespace(
            load_binary=lambda *args: (None, None, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
        )

    def get_current_device(self) -> str:
        return f"{self.target.backend}:{self.target.arch}"  # Triton keeps compiled kernels per device

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
            arguments = rest[3:]  # after the launch's metadata and two hooks
            named = dict(zip(source.fn.arg_names, arguments, strict=True))
            self.launches.append(Launch(source.fn.__name__, (x, y, z), named, kernels[-1]))

        kernels = [self._compiling]
        return launch

    _compiling: Any = None


@contextmanager
def fake_gpu(target: str) -> Iterator[list[Launch]]:
    """Within, Triton's launches compile for `target` (a name of `TARGETS`) and are recorded in the list."""
    driver: Any = FakeDriver(TARGETS[target])
    compiled: Any = triton.compiler.CompiledKernel
    initialise = compiled._init_handles

    def remember(kernel: Any) -> None:
        driver._compiling = kernel
        initialise(kernel)

    before = triton.runtime.driver._active
    compiled._init_handles = remember
    triton.runtime.driver.set_active(driver)
    try:
        yield driver.launches
    finally:
        triton.runtime.driver._active = before
        compiled._init_handles = initialise


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes. registers: of a thread. spilled: bytes of a thread's stack and local memory.
    shared: bytes of a program. wide: 16-byte loads from global memory. tensor_core: matrix instructions, by name."""

    registers: int
    spilled: int
    shared: int
    wide: int
    tensor_core: tuple[str, ...]


def resources(kernel: Any, folder: Path) -> Resources:
    """Look into a kernel's machine code (NVIDIA only), with the tools in Triton's wheel."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = _tool("cuobjdump", "-res-usage", cubin)
    code = _tool("nvdisasm", "-c", cubin)
    number = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    wide = len(re.findall(r"\b(?:LDG\.E(?:\.\w+)*\.128|LDGSTS\.E(?:\.\w+)*\.128|UTMALDG|UBLKCP)", code))
    matrix = tuple(sorted(set(re.findall(r"\b(HMMA|HGMMA|UTCHMMA|UTCQMMA|DMMA)\b", code))))
    return Resources(number["REG"], number["STACK"] + number["LOCAL"] + spills, kernel.metadata.shared, wide, matrix)


def _tool(name: str, *arguments: object) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    result = subprocess.run([str(tool), *map(str, arguments)], capture_output=True, text=True, check=True)
    return result.stdout


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory, aligned as an allocation is."""
    return torch.empty(*shape, dtype=dtype, device="meta")
