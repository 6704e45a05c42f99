"""Memory at its highest: torch's own count on CUDA devices, elsewhere the resident size of this process."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_SAMPLE_SECONDS = 0.002
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_STATM = Path("/proc/self/statm")


class Meter:
    """Growth of memory since the meter was made.

    Args:
        devices: where the measured tensors live. CUDA devices among them are counted, all together; without any,
            the process is.

    Raises:
        ValueError: neither a CUDA device nor a system that tells a process' resident size.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self.cuda = tuple(sorted({device for device in devices if device.type == "cuda"}, key=str))
        self.start = 0
        gc.collect()  # caches that went before
        release()
        self.start = self.now()

    @property
    def what(self) -> str:
        """What is counted, in words."""
        return "torch's allocations on the device" if self.cuda else "resident size of the process"

    def now(self) -> int:
        """Growth at this moment, in bytes; negative where memory became free."""
        held = sum(torch.cuda.memory_allocated(device) for device in self.cuda) if self.cuda else _resident()
        return held - self.start

    @contextmanager
    def peak(self) -> Iterator[list[int]]:
        """Appends the largest growth within, in bytes and at least 0, when the block ends.

        A process is sampled every 2 ms. Over several CUDA devices it is the sum of their peaks, which need not have
        come at the same time.
        """
        release()
        result: list[int] = []
        watch = _cuda_peak(self.cuda) if self.cuda else _process_peak()
        with watch as peaks:
            yield result
        result.append(max(0, peaks[0] - self.start))

    def synchronize(self) -> None:
        """Wait for the devices, so that a clock read now is right."""
        for device in self.cuda:
            torch.cuda.synchronize(device)


def release() -> None:
    """Give freed memory back to the system, so that the next growth is seen (on the CPU: glibc only)."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Within, large blocks go back to the system as soon as they are freed (glibc only; elsewhere nothing changes).

    Otherwise glibc keeps some tens of megabytes for the next allocation, now more and now less, and the peaks of equal
    runs differ by a third. The price is page faults, so times within are a little longer than they could be.
    """
    _keep_freed(_PROMPT)
    try:
        yield
    finally:
        _keep_freed(_USUAL)


# What glibc keeps: blocks below the first size, and free memory at the end of the heap below the second. It moves the
# first up to 32 MiB by itself, until it is set by hand.
_PROMPT = (1 << 20, 1 << 20)
_USUAL = (32 << 20, 64 << 20)


def _keep_freed(sizes: tuple[int, int]) -> None:
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, size in zip((_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD), sizes, strict=True):
            mallopt(parameter, size)


@contextmanager
def _cuda_peak(devices: tuple[torch.device, ...]) -> Iterator[list[int]]:
    result: list[int] = []
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield result
    finally:
        result.append(sum(torch.cuda.max_memory_allocated(device) for device in devices))


@contextmanager
def _process_peak() -> Iterator[list[int]]:
    result: list[int] = []
    peak, done = _resident(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_SAMPLE_SECONDS):
            peak = max(peak, _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield result
    finally:
        done.set()
        watcher.join()
        result.append(max(peak, _resident()))


def _resident() -> int:
    """Bytes of this process that are in memory.

    Raises:
        ValueError: the system does not tell.
    """
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError as error:
        raise ValueError(
            f"the memory of a process is read from {_STATM}, which this system does not have: measure on Linux, or "
            "with --device cuda"
        ) from error
    return pages * os.sysconf("SC_PAGE_SIZE")
