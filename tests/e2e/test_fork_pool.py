"""Jobs in forked copies: all reported once, whatever becomes of the copies."""

from __future__ import annotations

import os
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


def test_jobs_of_copies_that_died_are_reported_last(tmp_path: Path) -> None:
    jobs = [lambda: os._exit(7), writing(tmp_path, 1), lambda: os._exit(7), writing(tmp_path, 3)]
    numbers = list(run_forked(jobs, processes=2))
    assert sorted(numbers) == [0, 1, 2, 3]
    assert sorted(contents(tmp_path)) == [1]


def test_a_copy_that_is_stuck_is_given_up(tmp_path: Path) -> None:
    jobs = [lambda: time.sleep(600), writing(tmp_path, 1)]
    assert list(run_forked(jobs, processes=2, patience_s=0.5)) == [1, 0]


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
