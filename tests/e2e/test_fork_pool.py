"""Jobs in forked copies: all reported once, whatever becomes of the copies."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zinf_compile.backend.fork_pool import run_forked


def writing(folder: Path, number: int) -> Callable[[], object]:
    return lambda: (folder / str(number)).write_text(str(os.getpid()))


def contents(folder: Path) -> dict[int, str]:
    return {int(path.name): path.read_text() for path in folder.iterdir()}


def children() -> set[str]:
    return set(Path("/proc/thread-self/children").read_text().split())


@pytest.mark.parametrize(("jobs", "processes"), [(0, 2), (1, 4), (7, 1), (9, 3)])
def test_every_job_runs_once_in_a_copy(jobs: int, processes: int, tmp_path: Path) -> None:
    numbers = list(run_forked([writing(tmp_path, n) for n in range(jobs)], processes=processes))
    assert sorted(numbers) == list(range(jobs))
    found = contents(tmp_path)
    assert sorted(found) == list(range(jobs))
    assert str(os.getpid()) not in found.values()


def test_a_job_is_over_when_it_is_reported(tmp_path: Path) -> None:
    jobs = [writing(tmp_path, n) for n in range(5)]
    for number in run_forked(jobs, processes=2):
        assert number in contents(tmp_path)


def test_a_failing_job_takes_no_other_with_it(tmp_path: Path) -> None:
    jobs = [lambda: 1 / 0, writing(tmp_path, 1), writing(tmp_path, 2)]
    assert sorted(run_forked(jobs, processes=1)) == [0, 1, 2]
    assert sorted(contents(tmp_path)) == [1, 2]


def waiting_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_a_copy_that_dies_ends_the_others_and_what_is_left_is_reported(tmp_path: Path) -> None:
    def die() -> None:
        waiting_for(tmp_path / "1")
        os._exit(7)

    numbers = list(run_forked([die, writing(tmp_path, 1), lambda: time.sleep(600), writing(tmp_path, 3)], processes=2))
    assert sorted(numbers) == [0, 1, 2, 3]
    assert sorted(contents(tmp_path)) == [1]


def test_a_copy_that_is_stuck_is_given_up(tmp_path: Path) -> None:
    jobs = [lambda: time.sleep(600), writing(tmp_path, 1)]
    assert list(run_forked(jobs, processes=2, timeout_s=2)) == [1, 0]


def test_where_no_copy_can_be_made_all_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    before = children()
    monkeypatch.setattr(os, "fork", refuse)
    assert list(run_forked([writing(tmp_path, n) for n in range(3)], processes=2)) == [0, 1, 2]
    assert not contents(tmp_path)
    assert children() == before


def test_in_a_daemon_which_may_have_no_children_all_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert list(run_forked([writing(tmp_path, n) for n in range(3)], processes=2)) == [0, 1, 2]


def test_where_one_copy_can_be_made_and_no_other_none_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fork, made = os.fork, []

    def refuse() -> int:
        if made:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        made.append(fork())
        return made[0]

    before = children()
    monkeypatch.setattr(os, "fork", refuse)
    assert list(run_forked([writing(tmp_path, n) for n in range(3)], processes=2)) == [0, 1, 2]
    assert len(made) == 1
    assert children() == before


def test_copies_end_when_the_process_is_killed(tmp_path: Path) -> None:
    def sleep() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)

    original = os.fork()
    if original == 0:
        list(run_forked([sleep, sleep], processes=2))
        os._exit(0)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.01)
    os.kill(original, signal.SIGKILL)
    os.waitpid(original, 0)
    for copy in tmp_path.iterdir():
        while is_running(int(copy.name)):
            time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Say whether there is such a process, and it isn't one that has ended and that nobody asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_no_copy_is_left_behind(tmp_path: Path) -> None:
    before = children()
    running = run_forked([writing(tmp_path, n) for n in range(3)] + [lambda: time.sleep(600)], processes=2)
    next(running)
    assert children() > before
    running.close()
    assert children() == before


def test_copies_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    list(run_forked([lambda: os.write(1, b"out"), lambda: os.write(2, b"err")], processes=1))
    assert capfd.readouterr() == ("", "")
