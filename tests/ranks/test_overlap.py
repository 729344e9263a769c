"""Transfers go on beside compute: from the logs that lanes keep of themselves, not from the time that a step takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import Mlp, vectors
from rank_overlap import ENOUGH, context_of, overlap_by_step
from ranks import run_ranks
from training import BACKEND

from zinf_compile.runtime.context import Context
from zinf_compile.runtime.lanes.lanes import InlineLane, ThreadLane
from zinf_compile.runtime.lanes.overlap_log import MOST_SPANS, Spans, overlapped_s, recorded


def best_share(*, serial: bool) -> float:
    """Return the share of transfer seconds beside compute, of both ranks together, in the best of a few steps.

    The best one: where another process takes a core away, one rank waits for the other, whatever the schedule.
    """
    first, second = run_ranks(overlap_by_step, 2, serial)
    assert first == second
    return max(overlapped / total for overlapped, total in first)


@pytest.mark.slow
@pytest.mark.distributed
def test_with_enough_compute_transfers_go_on_beside_it() -> None:
    assert best_share(serial=False) >= ENOUGH


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.thorough
def test_lanes_forced_serial_fail_that_test() -> None:
    assert best_share(serial=True) < ENOUGH


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)).map(lambda s: (s[0], s[0] + s[1])), max_size=8)


@given(SPANS, SPANS)
def test_seconds_are_counted_where_no_wait_is(transfers: list[tuple[int, int]], waits: list[tuple[int, int]]) -> None:
    waiting = {second for start, end in waits for second in range(start, end)}
    expected = sum(second not in waiting for start, end in transfers for second in range(start, end))
    assert overlapped_s(transfers, waits) == expected


@pytest.mark.parametrize("make", [InlineLane, lambda: ThreadLane("test")], ids=["inline", "thread"])
def test_a_lane_notes_transfers_only_while_it_is_asked_to(make: type[InlineLane]) -> None:
    lane, log = make(), Spans()
    lane.submit(lambda: None).wait()
    lane.log = log
    lane.submit(lambda: None).wait()
    with pytest.raises(ArithmeticError):
        lane.submit(divide).wait()
    lane.log = None
    assert len(log) == 2
    assert all(start <= end for start, end in log)


def divide() -> None:
    raise ArithmeticError


def test_a_log_is_bounded() -> None:
    assert Spans([(0, 1)] * (MOST_SPANS + 5)).maxlen == len(Spans([(0, 1)] * (MOST_SPANS + 5))) == MOST_SPANS


def test_one_process_moves_nothing() -> None:
    model = Mlp()
    compiled = torch.compile(model, backend=BACKEND)
    compiled(*vectors(0))
    with recorded(context_of(model)) as log:
        compiled(*vectors(0)).backward()
    assert log.transfer_s() == log.overlapped_s() == 0


def test_lanes_on_a_device_are_refused() -> None:
    context = Context(None, torch.device("cuda"), timeout_s=1)
    with pytest.raises(ValueError, match=r"transfers of cuda run on streams.*torch\.profiler"), recorded(context):
        pass
