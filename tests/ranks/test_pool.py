"""The pool of ranks that tests run on, and `zinf_compile.reset()`, by which its processes are as new for each case."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_pool import die_on, disturb, fail_on, look_around, losses, process_id, reset_alone, sleep, some_start_anew, start_anew
from ranks import Pool, run_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(timeout_s=30)
    yield pool
    pool.close()


def _gone(process: int) -> bool:
    return not os.path.exists(f"/proc/{process}")


def test_workers_stay_until_a_case_fails(pool: Pool) -> None:
    two = pool.run(process_id, 2, ())
    assert pool.run(process_id, 3, ())[:2] == two, "more are added"
    assert pool.run(process_id, 2, ()) == two
    with pytest.raises(AssertionError, match=r"rank 1:\nTraceback(?s:.*)KeyError: 'on rank 1'") as raised:
        pool.run(fail_on, 2, (1,))
    assert "in fail_on" in str(raised.value)
    assert "rank 0:" in str(raised.value), "the other one's, too, that waited for it"
    assert all(map(_gone, two))
    again = pool.run(process_id, 2, ())
    assert not set(again) & set(two)
    with pytest.raises(AssertionError, match="the process ended without an answer, exit code -9"):
        pool.run(die_on, 2, (0,))
    assert all(map(_gone, again))
    third = pool.run(process_id, 2, ())
    os.kill(third[1], 9)  # between two cases
    time.sleep(0.2)
    assert not set(pool.run(process_id, 2, ())) & set(third)


def test_a_case_that_gives_no_answer_ends_the_pool() -> None:
    pool = Pool(timeout_s=2)
    with pytest.raises(AssertionError, match=r"ranks \[0\] gave no answer within 2 s"):
        pool.run(sleep, 1, (60,))
    assert not pool.process_ids


def test_each_case_finds_the_process_as_new(pool: Pool, tmp_path: Path) -> None:
    before = pool.run(look_around, 2, ())
    pool.run(disturb, 2, (str(tmp_path),))
    assert pool.run(look_around, 2, ()) == before
    assert before[0]["contexts"] == 0
    assert before[1]["environment"]["RANK"] == "1"


def test_a_case_alone_has_its_own_processes(pool: Pool) -> None:
    kept = run_ranks(process_id, 2)
    alone = run_ranks(process_id, 2, alone=True)
    assert not set(kept) & set(alone)
    assert all(map(_gone, alone))
    assert run_ranks(process_id, 2) == kept


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_after_a_reset_ranks_train_as_new_processes_do(tier: str, tmp_path: Path) -> None:
    found = run_ranks(start_anew, 2, tier, str(tmp_path), alone=True)  # what cases before leave ends when it likes
    if tier == "nvme":
        assert found == run_ranks(losses, 2, tier, str(tmp_path), alone=True)


def test_a_rank_that_lets_go_alone_hangs_nobody() -> None:
    nothing, said = run_ranks(reset_alone, 2)
    assert nothing == ""
    assert "rank 1 of 2 got no answer from another rank while saving the model" in said


def test_some_ranks_start_anew_in_the_same_group() -> None:
    first, second, third = run_ranks(some_start_anew, 3)
    assert len(first) == 3
    assert first == [first[0]] * 3
    assert (second, third) == (first, [])
