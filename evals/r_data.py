"""Reads character vectors out of an R package's lazy-load database, without R.

Such a database is two files: `.rdx`, a compressed index from names to places, and `.rdb`, one compressed block at each
place. Both hold R's binary (XDR) serialisation, described in "R Internals", section 1.8; only the kinds of object that
an index and a character vector are made of are read.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NIL, _ENVIRONMENT, _REFERENCE = 254, 253, 255
_SYMBOL, _PAIRLIST, _STRING, _LOGICALS, _INTEGERS, _STRINGS, _LIST = 1, 2, 9, 10, 13, 16, 19
_HAS_ATTRIBUTES, _HAS_TAG = 0x200, 0x400
_MISSING = -1  # the length of NA


def read_character_vectors(database: Path) -> dict[str, list[str]]:
    """Every character vector in the lazy-load database `database`.rdx and `database`.rdb, by name.

    Raises:
        ValueError: a file that is no such database, or an object of another kind in it.
        OSError: a missing file.
    """
    index, blocks = database.with_suffix(".rdx"), database.with_suffix(".rdb")
    try:
        places = _read(gzip.decompress(index.read_bytes()))["variables"]
        data = blocks.read_bytes()
        return {name: _read(_block(data, *place)) for name, place in places.items()}
    except (gzip.BadGzipFile, zlib.error, struct.error, EOFError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{index} and {blocks.name} are no R lazy-load database: {error!r}") from error


def _block(data: bytes, offset: int, size: int) -> bytes:
    """A block is its length after decompression, 4 bytes, and then zlib's stream."""
    return zlib.decompress(data[offset + 4 : offset + size])


def _read(data: bytes) -> Any:
    if data[:2] != b"X\n":
        raise ValueError(f"not R's binary serialisation: it starts with {data[:8]!r}")
    version, _, _ = struct.unpack_from(">iii", data, 2)
    stream = _Stream(data, 14)
    if version == 3:  # names its encoding
        stream.take(stream.number())
    return stream.item()


@dataclass
class _Stream:
    """Objects one after the other; symbols are numbered as they come, for later references."""

    data: bytes
    at: int
    symbols: list[Any] = field(default_factory=list)

    def take(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self.data):
            raise EOFError("the data ends within an object")
        return self.data[self.at - size : self.at]

    def number(self) -> int:
        return struct.unpack(">i", self.take(4))[0]

    def item(self) -> Any:
        """A vector as a list, a list with names as a dict, a symbol or string as str, NULL as None."""
        flags = self.number()
        kind = flags & 0xFF
        if kind in (_NIL, _ENVIRONMENT):
            return None
        if kind == _REFERENCE:
            return self.symbols[((flags >> 8) or self.number()) - 1]
        if kind == _SYMBOL:
            self.symbols.append(self.item())
            return self.symbols[-1]
        if kind == _STRING:
            size = self.number()
            return None if size == _MISSING else self.take(size).decode()
        if kind == _PAIRLIST:
            return self._pairs(flags)
        return self._vector(kind, flags)

    def _vector(self, kind: int, flags: int) -> Any:
        size = self.number()
        if kind in (_INTEGERS, _LOGICALS):
            items: list[Any] = list(struct.unpack(f">{size}i", self.take(4 * size)))
        elif kind in (_STRINGS, _LIST):
            items = [self.item() for _ in range(size)]
        else:
            raise ValueError(f"an R object of type {kind} is neither a list nor a character vector")
        attributes = self.item() if flags & _HAS_ATTRIBUTES else {}
        return dict(zip(attributes["names"], items, strict=True)) if "names" in attributes else items

    def _pairs(self, flags: int) -> dict[str, Any]:
        """A pair list, such as attributes are; entries without a tag are of no use here."""
        pairs: dict[str, Any] = {}
        while flags & 0xFF == _PAIRLIST:
            if flags & _HAS_ATTRIBUTES:
                self.item()
            tag = self.item() if flags & _HAS_TAG else None
            value = self.item()
            if tag is not None:
                pairs[tag] = value
            flags = self.number()
        return pairs
