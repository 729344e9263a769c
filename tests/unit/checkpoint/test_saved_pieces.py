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

    def __init__(self, count: int, seed: int, *, has_room: bool = True) -> None:
        self.drawn = random.Random(seed)
        self.values = {(n, c): torch.randn(NUMEL) for n in range(count) for c in COLUMNS}
        self.before = {place: values.clone() for place, values in self.values.items()}
        self.found = {place: torch.full((NUMEL,), torch.nan) for place in self.values}
        self.read: list[Hashable] = []
        self.slow = self.act = lambda: None
        self.pieces = SavedPieces(
            [piece for place in self.values for piece in self._pieces(*place)], self._put, has_room=has_room
        )

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


def updating(owners: Owners, numbers: list[int]) -> None:
    """What a deferred step does: it changes owners, and hands over what it has made."""
    for number in numbers:
        for start in (0, 3 * PIECE):
            end = min(start + 3 * PIECE, NUMEL)
            columns = {c: torch.randn(end - start) for c in COLUMNS}
            owners.pieces.before_change(number, start, end)  # before the update: there is nothing to write yet
            for column, values in columns.items():
                owners.values[number, column][start:end] = owners.before[number, column][start:end] = values
            owners.pieces.updated(number, start, end, columns, start)


def due(numbers: list[int]) -> list[tuple[Hashable, int, int]]:
    return [(n, start, end) for n in numbers for start, end in [(3 * PIECE, NUMEL), (0, 3 * PIECE)]]


def test_what_a_step_has_still_to_update_has_the_values_after_it() -> None:
    owners, step, numbers = Owners(6, 0), object(), [1, 2, 4]
    owners.pieces.await_updates(step, due(numbers))
    writing = running(owners.pieces.write_rest)
    owners.pieces.hurry()  # nobody writes what is not there
    while any(owners.found[n, c].isnan().any() for n in (0, 3, 5) for c in COLUMNS):
        time.sleep(0.001)
    assert all(owners.found[n, c].isnan().all() for n in numbers for c in COLUMNS)
    updating(owners, numbers)
    assert not any(owners.found[n, c].isnan().any() for n in numbers for c in COLUMNS)
    assert writing.is_alive(), "it waits for the end of the step"
    late = torch.arange(3.0)
    owners.found[9, "c"], owners.before[9, "c"] = torch.full((3,), torch.nan), late
    owners.pieces.end_step(step, [SavedPiece(9, "c", 0, 3, torch.float32, [Place("9c", 0, 0, 3)], lambda: late)])
    writing.join()
    assert set(owners.read) == {3, 5}, "what is handed over is not read"
    owners.check()


def test_what_it_has_updated_before_is_read_and_only_the_rest_comes_from_it() -> None:
    owners, step = Owners(4, 0), object()
    owners.pieces.await_updates(step, due([1])[:1])
    writing = running(owners.pieces.write_rest)
    while owners.found[1, "b"][: 3 * PIECE].isnan().any():
        time.sleep(0.001)
    assert owners.found[1, "a"][3 * PIECE :].isnan().all()
    owners.pieces.updated(1, 3 * PIECE, NUMEL, {c: owners.values[1, c][3 * PIECE :] for c in COLUMNS}, 3 * PIECE)
    owners.pieces.end_step(step, [])
    writing.join()
    owners.check()


def test_a_save_fails_with_its_step() -> None:
    owners, step = Owners(2, 0), object()
    owners.pieces.await_updates(step, due([0, 1]))
    writing_error: list[BaseException] = []

    def write() -> None:
        try:
            owners.pieces.write_rest()
        except ValueError as error:
            writing_error.append(error)

    writing = running(write)
    owners.pieces.fail(ValueError("the step"))
    writing.join()
    assert [str(error) for error in writing_error] == ["the step"]
    owners.pieces.updated(0, 0, NUMEL, dict.fromkeys(COLUMNS, torch.zeros(NUMEL)))  # too late, and no error
    owners.pieces.end_step(step, [])


def test_a_step_that_hands_over_too_little_at_once_fails_the_save() -> None:
    owners, step = Owners(1, 0), object()
    owners.pieces.await_updates(step, [(0, 0, NUMEL)])
    owners.pieces.updated(0, 1, 5, {c: torch.zeros(4) for c in COLUMNS}, 1)
    with pytest.raises(AssertionError, match="cut where updates are"):
        owners.pieces.write_rest()


def test_who_changes_elements_waits_for_nobody_who_writes_others() -> None:
    owners, begun, gate = Owners(1, 0), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert gate.wait(60)

    owners.slow = slow
    changing = running(lambda: owners.change(0, 0, PIECE, given=False))
    assert begun.wait(60)
    owners.slow = lambda: None
    owners.change(0, PIECE, NUMEL, given=False)
    assert changing.is_alive()
    gate.set()
    changing.join()
    owners.pieces.write_rest()
    owners.check()


@pytest.mark.parametrize("ends", ["room", "an error"])
def test_until_there_is_room_who_changes_what_is_saved_waits(ends: str) -> None:
    owners, step, begun = Owners(3, 0, has_room=False), object(), threading.Barrier(3)
    owners.pieces.await_updates(step, due([2]))

    def change() -> None:
        begun.wait(60)
        owners.change(0, 0, NUMEL, given=True)

    def update() -> None:
        begun.wait(60)
        updating(owners, [2])

    threads = [running(change), running(update)]
    begun.wait(60)
    owners.pieces.before_change("another", 0, NUMEL)  # what is not saved keeps nobody waiting
    owners.pieces.updated(1, 0, NUMEL, {c: owners.values[1, c] for c in COLUMNS})
    time.sleep(0.05)
    assert all(thread.is_alive() for thread in threads)
    assert all(found.isnan().all() for found in owners.found.values())
    if ends == "room":
        owners.pieces.room_made()
    else:
        owners.pieces.stop()
    for thread in threads:
        thread.join()
    owners.pieces.end_step(step, [])
    if ends == "room":
        owners.pieces.write_rest()
        owners.check()
    else:
        assert all(found.isnan().all() for found in owners.found.values())
