"""How shards are cut into chunks, and which chunks keep their memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.ir.chunk_columns import Column
from zinf_compile.ir.pieces import chunk_end, cut_chunks
from zinf_compile.ir.sizes import PIECE_ALIGN as ALIGN
from zinf_compile.ir.sizes import SMALL_NUMEL
from zinf_compile.runtime.device.link import HostIsDevice
from zinf_compile.runtime.memory.arena import GatherMemory
from zinf_compile.runtime.transfer.chunk_buffers import ChunkBuffers


@given(st.lists(st.integers(0, 20 * ALIGN), max_size=20), st.integers(1, 5))
def test_chunks_cover_every_shard_once_in_order(sizes: list[int], chunk: int) -> None:
    piece_numel = chunk * ALIGN
    covered: dict[int, int] = {}
    for pieces in cut_chunks(sizes, piece_numel=piece_numel):
        assert 0 < chunk_end(pieces) <= piece_numel
        end = 0
        for piece in pieces:
            assert piece.start == covered.get(piece.shard, 0)
            assert piece.end == min(piece.start + piece_numel, sizes[piece.shard]), "where a shard is cut follows from it alone"
            assert piece.place % ALIGN == 0
            assert end <= piece.place < end + ALIGN
            end = piece.place + piece.end - piece.start
            covered[piece.shard] = piece.end
    assert covered == {n: size for n, size in enumerate(sizes) if size}


def test_pieces_share_a_chunk_and_a_large_shard_has_several() -> None:
    cut = cut_chunks([100, 5000, 12000], piece_numel=3 * ALIGN)
    assert [[(p.shard, p.start, p.end, p.place) for p in pieces] for pieces in cut] == [
        [(0, 0, 100, 0), (1, 0, 5000, ALIGN)],
        [(2, 0, 12000, 0)],
    ]
    assert [[(p.start, p.end) for p in pieces] for pieces in cut_chunks([2 * ALIGN + 1], piece_numel=ALIGN)] == [
        [(0, ALIGN)],
        [(ALIGN, 2 * ALIGN)],
        [(2 * ALIGN, 2 * ALIGN + 1)],
    ]


def test_what_comes_behind_a_large_shard_begins_a_chunk() -> None:
    """The gradient of an embedding may come last: what has its update with it would wait for that."""
    cut = cut_chunks([3 * ALIGN, ALIGN, ALIGN, 2 * ALIGN], piece_numel=2 * ALIGN)
    assert [[(p.shard, p.start) for p in pieces] for pieces in cut] == [
        [(0, 0)],
        [(0, 2 * ALIGN)],
        [(1, 0), (2, 0)],
        [(3, 0)],
    ]


def test_small_shards_are_in_the_first_chunks() -> None:
    """One gather may bring those of all layers: the forward behind a step then waits for the first chunks, not for the last."""
    sizes = [SMALL_NUMEL + 1, SMALL_NUMEL, 2 * SMALL_NUMEL, 1]
    assert [[p.shard for p in pieces] for pieces in cut_chunks(sizes, piece_numel=2 * SMALL_NUMEL)] == [[1, 3], [0], [2]]


COLUMNS = {
    "a": Column(torch.float32, host=True, device=False),
    "b": Column(torch.bfloat16, host=True, device=False),
    "c": Column(torch.float32, host=False, device=False),
}


def make_buffers(count: int) -> ChunkBuffers:
    return ChunkBuffers([(COLUMNS, ALIGN * (n + 1)) for n in range(count)], HostIsDevice(GatherMemory()), pinned=False)


def test_columns_lie_apart_and_have_room_where_they_need_it() -> None:
    buffers = make_buffers(9)
    assert (buffers.host_bytes, buffers.device_bytes) == (3 * 9 * ALIGN * 6, 0)
    buffer, new = buffers.buffer_for(4)
    assert new
    staging = buffer.staging(COLUMNS, 5 * ALIGN)
    assert staging["c"].host is staging["c"].device is staging["a"].device is None
    a, b = staging["a"].host, staging["b"].host
    assert a is not None
    assert b is not None
    assert (a.numel(), a.dtype, b.numel(), b.dtype) == (5 * ALIGN, torch.float32, 5 * ALIGN, torch.bfloat16)
    assert a.data_ptr() % 4096 == b.data_ptr() % 4096 == 0
    assert a.data_ptr() + a.nbytes <= b.data_ptr()


@given(st.lists(st.integers(0, 5), max_size=25))
def test_the_chunks_used_last_keep_their_memory(order: list[int]) -> None:
    buffers = make_buffers(6)
    recent: list[int] = []
    for number in order:
        buffer, new = buffers.buffer_for(number)
        buffer.chunk = number
        assert new == (number not in recent[-3:])
        recent = [n for n in recent if n != number] + [number]


class Fails:
    def wait(self) -> None:
        raise OSError("broken")


class Ends:
    over = False

    def wait(self) -> None:
        self.over = True


def test_what_failed_to_arrive_counts_for_nothing() -> None:
    buffers = make_buffers(2)
    buffer, _ = buffers.buffer_for(0)
    buffer.chunk = 0
    other = Ends()
    buffer.under_way = [Fails(), other]
    with pytest.raises(OSError, match="broken"):
        buffers.drain()
    assert other.over, "nothing moves any more"
    assert buffers.find(0) is None
    buffers.drain()
