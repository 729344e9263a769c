from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.errors import StoreError
from zinf_compile.runtime.chunk_states import ChunkSpec, ChunkStates
from zinf_compile.runtime.chunks import ALIGN, chunk_end, cut_chunks


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 5))
def test_chunks_cover_every_shard_once_in_order(sizes: list[int], chunk: int) -> None:
    chunks = cut_chunks(sizes, chunk_numel=chunk * ALIGN)
    covered: dict[int, int] = {}
    for pieces in chunks:
        assert 0 < chunk_end(pieces) <= chunk * ALIGN
        end = 0
        for piece in pieces:
            assert piece.start == covered.get(piece.shard, 0)
            assert piece.start % ALIGN == piece.place % ALIGN == 0
            assert end <= piece.place < end + ALIGN
            end = piece.place + piece.end - piece.start
            covered[piece.shard] = piece.end
    assert covered == {n: size for n, size in enumerate(sizes) if size}
    order = [piece.shard for pieces in chunks for piece in pieces]
    assert order == sorted(order)


def test_a_chunk_is_as_full_as_it_can_be() -> None:
    chunks = cut_chunks([100, 300], chunk_numel=256)
    assert [[(p.shard, p.start, p.end, p.place) for p in pieces] for pieces in chunks] == [
        [(0, 0, 100, 0), (1, 0, 128, 128)],
        [(1, 128, 300, 0)],
    ]


def filled(states: ChunkStates, count: int, seed: int) -> None:
    for n in range(count):
        for i, view in enumerate(states.take(n).values()):
            view.fill_(seed + 10 * n + i)
        states.give_back(n)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=25))
def test_each_chunk_comes_back_as_it_was_left(order: list[tuple[int, bool]]) -> None:
    specs = [ChunkSpec(f"chunk {n}", 64 * (n + 1), {"a": torch.float32, "b": torch.bfloat16}) for n in range(5)]
    states = ChunkStates(["."], specs)
    values = dict.fromkeys(range(5), 0)
    filled(states, 5, 0)
    for n, write in order:
        states.prepare((n + 1) % 5)
        views = states.take(n)
        for i, view in enumerate(views.values()):
            assert view.numel() == 64 * (n + 1)
            assert bool((view == values[n] + 10 * n + i).all())
        if write:
            values[n] += 1
            for i, view in enumerate(views.values()):
                view.fill_(values[n] + 10 * n + i)
            states.give_back(n)
    states.close()


def test_memory_is_that_of_three_chunks(tmp_path: Path) -> None:
    states = ChunkStates([tmp_path], [ChunkSpec(f"c{n}", 1024, {"a": torch.float32, "b": torch.float32}) for n in range(9)])
    assert states.memory_bytes == 3 * 2 * 4096
    assert states.drive_bytes == 9 * 2 * 4096
    states.close()


def test_an_error_names_state_and_chunk_and_the_chunk_can_be_written_again(tmp_path: Path) -> None:
    states = ChunkStates([tmp_path], [ChunkSpec(f"chunk {n}", 1024, {"a": torch.float32}) for n in range(9)])
    filled(states, 9, 0)
    for n in range(6, 9):
        states.take(n)
    block = next(iter(states.store.layout.find_blocks(states.store.layout.find("a of chunk 2"), 0, 4096)))
    states.store.files[0]._open()
    with open(f"/proc/self/fd/{states.store.files[0].fd}", "r+b") as file:
        file.seek(block.offset)
        file.write(b"wrong")
    with pytest.raises(StoreError, match="a of chunk 2"):
        states.take(2)
    with pytest.raises(StoreError, match="a of chunk 2"):
        states.take(2)
    states.forget(2)
    states.take(2)["a"].fill_(5)
    states.give_back(2)
    for n in range(3, 9):
        states.take(n)
    assert bool((states.take(2)["a"] == 5).all())
    states.close()
