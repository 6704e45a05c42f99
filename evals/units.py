"""Sizes in bytes, read and written with their units."""

from __future__ import annotations

import re

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `80GiB` (binary, 1,024 each) or `80GB` (decimal, 1,000 each).

    Raises:
        ValueError: no such size; a number alone is none, since GB and GiB differ by 7 %.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a size: a number and a unit, such as 80GiB (2^30 bytes) or 80GB (10^9 bytes)"
        )
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size == 0:
        raise ValueError(f"{text!r} is no memory at all: give a size such as 80GiB")
    return size


def show_bytes(count: float) -> str:
    """Three digits and a binary unit: `1.41 GiB`."""
    size, unit = float(count), "B"
    for following in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 999.5:
            break
        size, unit = size / 1024, following
    decimals = 0 if unit == "B" or abs(size) >= 99.95 else 1 if abs(size) >= 9.995 else 2
    return f"{size:.{decimals}f} {unit}"
