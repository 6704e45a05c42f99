"""Making kept slots dense again by moving only what has to move: kept entries from behind fill the holes in front."""

from typing import NamedTuple

import torch
from torch import Tensor


class Moves(NamedTuple):
    """Copies that make every head dense: entry `source[i]` goes over entry `target[i]`.

    Both `[..., batch, kv_heads, moves]` int64; all sources are read before any target is written. A head with fewer
    moves than another repeats its first. `real` (bool, same shape) is False where a hole gets no kept entry.
    """

    source: Tensor
    target: Tensor
    real: Tensor


def plan_moves(kept: Tensor, front: int, length: int) -> Moves:
    """Plan how the kept entries come to lie in the first `length` slots.

    Args:
        kept: `[..., batch, kv_heads, entries]` bool, at most `length` of each head's entries True.
        front: entries below this already lie in the slot of their number (kept ones stay there); at most `length`.
        length: slots in use afterwards, at most `entries`.

    Returns:
        The moves, at most `min(length, entries - front)` per head.
    """
    most = min(length, kept.shape[-1] - front)
    settled = torch.nn.functional.pad(kept[..., :front], (0, length - front))
    target, holes = _first_true(~settled, most)
    source, movers = _first_true(kept[..., front:], most)
    index = torch.arange(most, device=kept.device)
    real = index < movers
    source = torch.where(real, source + front, target)
    beyond = index >= holes
    return Moves(
        torch.where(beyond, source[..., :1], source),
        torch.where(beyond, target[..., :1], target),
        torch.where(beyond, real[..., :1] | (holes == 0), real),
    )


def _first_true(mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices of the first `count` True values along the last dimension (0 where there are fewer), and how many."""
    rank = mask.cumsum(-1)
    place = torch.where(mask & (rank <= count), rank - 1, count)
    index = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)
    found = torch.zeros(*mask.shape[:-1], count + 1, dtype=torch.int64, device=mask.device)
    return found.scatter_(-1, place, index)[..., :count], rank[..., -1:]


def compact_bookkeeping(entries: Tensor, kept: Tensor, moves: Moves, front: int, length: int, empty: int) -> Tensor:
    """Apply moves to one number per entry (a score, a position); slots that hold nothing get `empty`.

    Args:
        entries: `[..., batch, kv_heads, entries]`; `kept`, `moves`, `front`, `length`: as in and from `plan_moves`.

    Returns:
        A new `[..., batch, kv_heads, length]` tensor.
    """
    settled = torch.nn.functional.pad(kept[..., :front], (0, length - front))
    moved = entries.gather(-1, moves.source).masked_fill_(~moves.real, empty)
    return entries[..., :length].masked_fill(~settled, empty).scatter_(-1, moves.target, moved)


def flat_rows(slots: Tensor, capacity: int) -> Tensor:
    """Slot numbers `[..., batch, kv_heads, n]` as rows of a `[batch * kv_heads * capacity, dim]` view of a buffer.

    Returns:
        `[..., batch * kv_heads * n]` int64.
    """
    batch, heads, _ = slots.shape[-3:]
    return (slots + torch.arange(batch * heads, device=slots.device).view(batch, heads, 1) * capacity).flatten(-3)


def move_entries(buffer: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy rows over other rows of one layer's keys or values, in place; traffic follows the number of moves.

    Args:
        buffer: `[batch, kv_heads, capacity, dim]` contiguous.
        source, target: `[moves]` int64 from `flat_rows`; all sources are read before any target is written.
    """
    rows = buffer.view(-1, buffer.shape[3])  # index_select on rows copies in wide accesses where gather does not
    rows.index_copy_(0, target, rows.index_select(0, source))


def move_chunk(buffer: Tensor, chunk: Tensor, held: int, source: Tensor, source_rows: Tensor, target: Tensor) -> None:
    """The same where entries from `held` on are not in the buffer but in a chunk of new tokens.

    Args:
        chunk: `[batch, kv_heads, tokens, dim]`, any strides: its token `i` is entry `held + i`.
        source: `[batch, kv_heads, moves]` int64 entries; `source_rows`: its `flat_rows`, used for those below `held`.
        target: `[batch * kv_heads * moves]` int64 from `flat_rows`.
    """
    batch, heads, _ = source.shape
    row = torch.arange(batch, device=buffer.device)[:, None, None]
    head = torch.arange(heads, device=buffer.device)[:, None]
    new = chunk[row, head, (source - held).clamp(min=0)].flatten(0, 2)
    rows = buffer.view(-1, buffer.shape[3])
    if held > 0:
        in_buffer = (source < held).flatten()
        new = torch.where(in_buffer[:, None], rows.index_select(0, source_rows.where(in_buffer, 0)), new)
    rows.index_copy_(0, target, new)
