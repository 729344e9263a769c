"""Pieces that are written by a thread, or before they change by who changes them: each once, with the values of before."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Hashable

import pytest
import torch

from zinf_compile.checkpoint.saved_pieces import Place, SavedPiece, SavedPieces
from zinf_compile.runtime.lanes.lanes import Done

COLUMNS, NUMEL, PIECE = ("a", "b"), 40, 7


class Owners:
    """Columns of numbers, in memory or on what stands for a drive, and what was put of them."""

    def __init__(self, count: int, seed: int) -> None:
        self.drawn = random.Random(seed)
        self.values = {(n, c): torch.randn(NUMEL) for n in range(count) for c in COLUMNS}
        self.before = {place: values.clone() for place, values in self.values.items()}
        self.found = {place: torch.full((NUMEL,), torch.nan) for place in self.values}
        self.read: list[Hashable] = []
        self.slow = self.act = lambda: None
        self.pieces = SavedPieces([piece for place in self.values for piece in self._pieces(*place)], self._put)

    def _pieces(self, number: int, column: str) -> list[SavedPiece]:
        def read(into: torch.Tensor, start: int) -> Done:
            self.read.append(number)
            into.copy_(self.values[number, column][start : start + into.numel()])
            return Done()

        found = []
        for start in range(0, NUMEL, PIECE):
            end, cut = min(start + PIECE, NUMEL), min(start + 3, NUMEL)
            places = [Place(f"{number}{column}", start, 0, cut - start), Place(f"{number}{column}", cut, cut - start, end - cut)]
            where = (
                {"read": lambda into, start=start: read(into, start)}
                if number % 2
                else {"in_memory": lambda start=start, end=end: self.values[number, column][start:end]}
            )
            found.append(SavedPiece(number, column, start, end, torch.float32, places, **where))
        return found

    def _put(self, key: str, start: int, values: torch.Tensor) -> None:
        self.act()
        place = self.found[int(key[:-1]), key[-1]]
        assert place[start : start + values.numel()].isnan().all(), "written once"
        self.slow()
        place[start : start + values.numel()] = values

    def change(self, number: int, start: int, end: int, *, given: bool) -> None:
        columns = {c: self.values[number, c][start:end].clone() for c in COLUMNS} if given else None
        self.pieces.before_change(number, start, end, columns, start)
        for column in COLUMNS:
            self.values[number, column][start:end] = 0.0

    def check(self) -> None:
        for place, values in self.before.items():
            assert torch.equal(self.found[place], values), place


def running(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@pytest.mark.parametrize("seed", range(10))
def test_values_are_those_of_before_whoever_changes_them(seed: int) -> None:
    owners = Owners(6, seed)
    owners.slow = lambda: time.sleep(owners.drawn.random() / 2000)

    def changing(drawn: random.Random) -> None:
        for _ in range(12):
            start = drawn.randrange(NUMEL)
            owners.change(drawn.randrange(6), start, drawn.randint(start, NUMEL), given=False)

    threads = [running(owners.pieces.write_rest)] + [running(lambda n=n: changing(random.Random(n))) for n in range(2)]
    for thread in threads:
        thread.join()
    owners.check()


def test_what_is_given_is_not_read() -> None:
    owners = Owners(4, 0)
    for number in range(4):
        owners.change(number, 0, NUMEL, given=True)
    owners.pieces.write_rest()
    assert owners.read == []
    owners.check()


def test_what_is_expected_is_left_until_somebody_waits() -> None:
    owners, caller = Owners(3, 0), object()
    owners.pieces.expect(caller, [1, 2])
    writing = running(owners.pieces.write_rest)
    while owners.found[0, "b"].isnan().any():
        time.sleep(0.001)
    owners.change(2, 0, NUMEL, given=True)
    assert owners.found[1, "a"].isnan().all()
    assert writing.is_alive()
    owners.pieces.hurry()
    writing.join()
    assert set(owners.read) == {1}
    owners.check()


def test_what_is_no_longer_expected_is_written() -> None:
    owners, caller = Owners(2, 0), object()
    owners.pieces.expect(caller, [0, 1])
    owners.pieces.expect(caller, [])
    owners.pieces.write_rest()
    owners.check()


def test_an_error_of_who_changes_something_is_that_of_the_save() -> None:
    owners = Owners(2, 0)

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "the drive")

    owners.act = fail
    owners.change(0, 0, NUMEL, given=False)
    owners.change(1, 0, NUMEL, given=False)
    with pytest.raises(OSError, match="the drive"):
        owners.pieces.write_rest()


def test_a_piece_whose_writing_was_interrupted_is_written_again() -> None:
    owners = Owners(2, 0)

    def interrupt() -> None:
        raise KeyboardInterrupt

    owners.act = interrupt
    with pytest.raises(KeyboardInterrupt):
        owners.change(0, 0, NUMEL, given=False)
    owners.act = lambda: None
    writing = running(owners.pieces.write_rest)
    owners.pieces.hurry()
    writing.join()
    owners.check()
