"""Making kept slots dense again by moving only what has to move: kept entries from behind fill the holes in front."""

from typing import NamedTuple

import torch
from torch import Tensor

from kvcache.kernels.jit import LAUNCH, jit, launcher, next_power_of_2, tl


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


def apply_moves(
    keys: Tensor,
    values: Tensor,
    score: Tensor,
    positions: Tensor,
    new_score: Tensor,
    new_positions: Tensor,
    source: Tensor,
    source_rows: Tensor,
    target_rows: Tensor,
    held: int,
    chunk: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Carry out a planned eviction in one layer, in place.

    Args:
        keys, values: `[batch, kv_heads, capacity, (v_)head_dim]` contiguous; traffic follows the number of moves.
        score, positions: `[batch, kv_heads, capacity]` fp32 and int32, overwritten by `new_score`, `new_positions`.
        source: `[batch, kv_heads, moves]` int64, entries to copy; no entry that is read is written, but by itself.
        source_rows, target_rows: `[batch * kv_heads * moves]` int64 from `flat_rows`: where they lie, and go to.
        held: entries from here on are not in the buffers but in the chunk.
        chunk: new keys and values `[batch, kv_heads, n, (v_)head_dim]`, any strides: token `i` is entry `held + i`.
    """
    for index, buffer in enumerate((keys, values)):
        if chunk is None:
            move_entries(buffer, source_rows, target_rows)
        else:
            move_chunk(buffer, chunk[index], held, source, source_rows, target_rows)
    score.copy_(new_score)
    positions.copy_(new_positions)


# ---- Triton


BOOKKEEPING_BLOCK = 256  # slots of one program that copies scores and positions
WARPS = 4  # of a program; each thread copies 16 bytes of a key at a time


@launcher
def apply_moves_triton(
    keys: Tensor,
    values: Tensor,
    score: Tensor,
    positions: Tensor,
    new_score: Tensor,
    new_positions: Tensor,
    source: Tensor,
    source_rows: Tensor,
    target_rows: Tensor,
    held: int,
    chunk: tuple[Tensor, Tensor] | None = None,
) -> None:
    """The same in one launch: some programs copy entries, the others bookkeeping."""
    batch, heads, capacity, head_dim = keys.shape
    moves = source.shape[2]
    assert all(x.is_contiguous() for x in (keys, values, score, positions, new_score, new_positions))
    source = source.contiguous()
    new_keys, new_values = (keys, values) if chunk is None else chunk
    new_keys, new_values = (x if x.stride(3) == 1 else x.contiguous() for x in (new_keys, new_values))
    at_once = max(1, 16 * 32 * WARPS // (next_power_of_2(head_dim) * keys.element_size()))
    move_blocks = -(-moves // at_once)
    _moves_kernel[(batch * heads, move_blocks + -(-capacity // BOOKKEEPING_BLOCK))](
        keys,
        values,
        score,
        positions,
        new_score,
        new_positions,
        source,
        target_rows,
        new_keys,
        new_values,
        capacity,
        moves,
        move_blocks,
        held,
        *new_keys.stride()[:3],
        *new_values.stride()[:3],
        KV_HEADS=heads,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=values.shape[3],
        MOVES=at_once,
        BLOCK=BOOKKEEPING_BLOCK,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_V=next_power_of_2(values.shape[3]),
        HAS_CHUNK=chunk is not None,
        **LAUNCH,
        num_warps=WARPS,
    )


@jit(do_not_specialize=["moves", "move_blocks", "held"])
def _moves_kernel(
    keys,
    values,
    score,
    positions,
    new_score,
    new_positions,
    source,  # [heads, moves] int64
    target_rows,  # the same
    new_keys,  # [batch, KV_HEADS, n, HEAD_DIM], strides
    new_values,
    capacity,
    moves,
    move_blocks,
    held,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    MOVES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block < move_blocks:
        move = block * MOVES + tl.arange(0, MOVES)
        real = move < moves
        entry = tl.load(source + head * moves + move, mask=real, other=0)
        to = tl.load(target_rows + head * moves + move, mask=real, other=0)
        d = tl.arange(0, BLOCK_D)
        v = tl.arange(0, BLOCK_V)
        inside = (d < HEAD_DIM)[None, :]
        inside_v = (v < V_HEAD_DIM)[None, :]
        in_buffer = real
        if HAS_CHUNK:
            in_buffer = real & (entry < held)
        row = head * capacity + entry
        key = tl.load(keys + row[:, None] * HEAD_DIM + d[None, :], mask=in_buffer[:, None] & inside, other=0.0)
        value = tl.load(values + row[:, None] * V_HEAD_DIM + v[None, :], mask=in_buffer[:, None] & inside_v, other=0.0)
        if HAS_CHUNK:
            in_chunk = (real & (entry >= held))[:, None]
            batch = head // KV_HEADS
            token = entry - held
            new_key = new_keys + batch * kb + (head % KV_HEADS) * kh + token[:, None] * kn + d[None, :]
            new_value = new_values + batch * vb + (head % KV_HEADS) * vh + token[:, None] * vn + v[None, :]
            key = tl.where(in_chunk, tl.load(new_key, mask=in_chunk & inside, other=0.0), key)
            value = tl.where(in_chunk, tl.load(new_value, mask=in_chunk & inside_v, other=0.0), value)
        tl.store(keys + to[:, None] * HEAD_DIM + d[None, :], key, mask=real[:, None] & inside)
        tl.store(values + to[:, None] * V_HEAD_DIM + v[None, :], value, mask=real[:, None] & inside_v)
    else:
        slot = (block - move_blocks) * BLOCK + tl.arange(0, BLOCK)
        live = slot < capacity
        at = head * capacity + slot
        tl.store(score + at, tl.load(new_score + at, mask=live), mask=live)
        tl.store(positions + at, tl.load(new_positions + at, mask=live), mask=live)
