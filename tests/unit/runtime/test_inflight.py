"""A limit of what transfers of one caller hold: how long the caller waits, and for which."""

from __future__ import annotations

import pytest

from zinf_compile.runtime.memory.inflight import InflightQueue


class Transfer:
    def __init__(self, log: list[str], name: str, error: Exception | None = None) -> None:
        self._log, self._name, self._error = log, name, error

    def wait(self) -> None:
        self._log.append(self._name)
        if self._error is not None:
            raise self._error


def test_room_is_made_by_waiting_for_the_oldest_and_no_longer_than_needed() -> None:
    log: list[str] = []
    queue = InflightQueue(10)
    for name, count in (("a", 4), ("b", 6), ("c", 3), ("d", 7)):
        queue.make_room(count)
        queue.add(Transfer(log, name), count)
    assert log == ["a", "b"], "a and b fill the limit; c waits for a, and d for b"
    queue.drain()
    assert log == ["a", "b", "c", "d"]
    queue.drain()
    assert len(log) == 4


def test_one_alone_is_always_admitted() -> None:
    log: list[str] = []
    queue = InflightQueue(10)
    queue.make_room(99)
    assert not log
    queue.add(Transfer(log, "large"), 99)
    queue.make_room(1)
    assert log == ["large"]


def test_an_error_is_raised_once_and_its_room_is_free() -> None:
    log: list[str] = []
    queue = InflightQueue(1)
    queue.add(Transfer(log, "a", ValueError("first")), 1)
    with pytest.raises(ValueError, match="first"):
        queue.make_room(1)
    queue.make_room(1)
    assert log == ["a"]


def test_draining_waits_for_all_and_raises_the_first_error() -> None:
    log: list[str] = []
    queue = InflightQueue(9)
    for name, error in (("a", None), ("b", ValueError("first")), ("c", ValueError("second")), ("d", None)):
        queue.add(Transfer(log, name, error), 1)
    with pytest.raises(ValueError, match="first"):
        queue.drain()
    assert log == ["a", "b", "c", "d"]
    queue.make_room(9)
    assert len(log) == 4


def test_what_is_abandoned_is_not_waited_for() -> None:
    log: list[str] = []
    queue = InflightQueue(1)
    queue.add(Transfer(log, "a"), 1)
    queue.abandon()
    queue.make_room(1)
    queue.drain()
    assert not log
