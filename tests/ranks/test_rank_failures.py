"""Ranks that fall out of step: each ends within the time-out, with an error that says where and what to do; none hangs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from models import Mlp, vectors
from rank_endings import endings_of
from rank_failures import a_full_drive, breaking_in_backward, errors_of, lone_ending, ordinary_ending
from rank_traced import exchanges
from ranks import run_at_once, run_ranks
from training import BACKEND

import zinf_compile

pytestmark = pytest.mark.distributed


def differing(*ranks: str) -> str:
    """Return the pattern of an error that all ranks raise."""
    each = "; ".join(f"rank {number}, {has}" for number, has in enumerate(ranks))
    return rf"first difference: {each}\. Every rank must use the same options and run the same graphs in the same order"


def unanswered(rank: int, what: str, why: str = r"time-out 4 s \(option timeout_s\)") -> str:
    """Return the pattern of the error of a rank that was left alone."""
    return (
        rf"RankMismatchError: rank {rank} of 2 got no answer from another rank while {what}; {why}\. "
        "Usually a rank ended, took another branch of the model or ran out of batches: every rank must run the same graphs"
    )


def told(what: str, error: str) -> str:
    """Return the pattern of the error of a rank that waits for one whose own error it is told of."""
    return (
        rf"RankMismatchError: rank 0 of 2 got no answer from another rank while {what}: rank 1 stopped with {re.escape(error)}.*"
        r"\. See that error; all ranks have to go back to the same point, or start again"
    )


FORWARD = r"starting the forward of graph \d+"
FIRST = r"'all_gather group 0: first\.bias \[13\] float32'"
STARTING_FORWARD = rf"{FORWARD} \(all_gather group 0: first\.bias \[13\] float32\)"
BRANCHES = differing(rf"{FORWARD}, has '.*: even\.bias \[5\] .*'", rf"{FORWARD}, has '.*: odd\.weight .*'") + (
    r"\. Where these are of the same model, its graphs differ: a batch or a length of 1"
)
CLOSED = "the connection is closed"
SCENARIOS = {
    "other_options": ["OptionError: .*" + differing("starting, has '.*bucket=1048576.*'", "starting, .*bucket=2097152.*'")] * 2,
    "other_branch": [f"RankMismatchError: .*{BRANCHES}"] * 2,
    "other_branch_at_first": [f"RankMismatchError: .*{BRANCHES}"] * 2,
    "other_model": [
        "RankMismatchError: .*" + differing(f"{FORWARD}, has {FIRST}", rf"{FORWARD}, has '.*: first\.bias \[15\] float32'")
    ] * 2,
    "saving_while_training": [
        "RankMismatchError: .*" + differing(f"{FORWARD}, has {FIRST}", "saving the model, has 'saving the model'")
    ] * 2,
    "evaluating_on_one_rank": [
        "RankMismatchError: .*"
        + differing(rf"{FORWARD}, has {FIRST}", r"starting the backward of graph \d+, has '.*: second\.weight .*'")
        + r"\. Where these are of the same model, one rank has called it once more: an evaluation, "
    ]
    * 2,
    "clipping_on_one_rank": [
        "RankMismatchError: .*" + differing(r"norm of the gradient of first\.weight, has 'norm.*'", f"{FORWARD}, has {FIRST}")
    ] * 2,
    "unscaling_from_a_failing_drive": [
        "RankMismatchError: unscaling gradients failed on rank 1, see there; .*zero_grad",
        "(Store|OS)Error: .*Input/output error",
    ],
    "a_lookup_after_a_failed_step": [
        r"StepFailedError: a step failed on rank 1, see its error, before rows of words\.weight were looked up\. Load a ",
        "StepFailedError: a step ended in the middle",
    ],
    "refused_on_one_rank": [
        told(STARTING_FORWARD, "PartitionedParameterError: parameter first.weight changed"),
        "PartitionedParameterError: parameter first.weight changed",
    ],
    "not_compiled_on_one_rank": [
        told(r"starting the forward of graph .*", "CompilationError: Inductor can't"),
        "CompilationError: Inductor can't",
    ],
    "out_of_batches": [unanswered(0, STARTING_FORWARD), "no error"],
}  # fmt: skip
"""What each rank's error says, by function of `rank_failures`."""
SLOW_SCENARIOS = {
    "no_backward": [unanswered(0, r"starting the backward of graph \d+ \(all_gather group 0: second\.weight .*\)"), "no error"],
    "too_late": [unanswered(0, STARTING_FORWARD), unanswered(1, STARTING_FORWARD, CLOSED)],
    "broken_in_a_graph_of_one_rank": [told(r"gathering .* in forward of graph \d+", "KeyError: 'in a hook'"), "KeyError: .*"],
    "raising_in_backward": [unanswered(0, STARTING_FORWARD), "KeyError: 'in a hook'"],
    # the last: from then on the ranks count their process groups differently
    "never_calling": [unanswered(0, r"starting \(the others never called a compiled model\)"), "no error"],
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    """Run the scenarios in one start of two ranks."""
    return run_ranks(errors_of, 2, list(SCENARIOS), alone=True)


@pytest.fixture(scope="module")
def found_slowly() -> list[dict[str, str]]:
    """Run those in which a rank waits for long at the same time, in three starts."""
    apart = [["too_late"], ["raising_in_backward"], [n for n in SLOW_SCENARIOS if n not in ("too_late", "raising_in_backward")]]
    starts = run_at_once(errors_of, 2, [[names] for names in apart])
    return [{name: error for start in starts for name, error in start[rank].items()} for rank in range(2)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_out_of_step_end_with_an_error(found: list[dict[str, str]], scenario: str) -> None:
    for rank, pattern in enumerate(SCENARIOS[scenario]):
        assert re.match(pattern, found[rank][scenario]), f"rank {rank}: {found[rank][scenario]}"


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SLOW_SCENARIOS)
def test_a_rank_left_alone_ends_with_an_error(found_slowly: list[dict[str, str]], scenario: str) -> None:
    for rank, pattern in enumerate(SLOW_SCENARIOS[scenario]):
        assert re.match(pattern, found_slowly[rank][scenario]), f"rank {rank}: {found_slowly[rank][scenario]}"


@pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory
def test_a_drive_that_is_full_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    """At once, and with the model as it was: with room it trains."""
    (left, loss), (full, other) = run_ranks(a_full_drive, 2, str(tmp_path), alone=True)
    assert full == "StoreError: [Errno 28] cannot reserve space"
    assert left.startswith(
        "RankMismatchError: reserving room for parameters failed on rank 1, see there; the model is what it was"
    )
    assert loss == other


def test_a_backward_ends_where_its_first_gradient_is_lost() -> None:
    """The lane then leaves out all others: what they hold of the limit of gradients on their way is given back."""
    for error in run_ranks(breaking_in_backward, 2, alone=True):
        assert re.match(r"RankMismatchError: .*while reducing the gradients of .*Connection closed by peer", error), error


@pytest.mark.parametrize(
    ("how", "code", "error"),
    [
        pytest.param("raises", 1, "KeyError: 'bad batch'", marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param("is killed", -9, "", marks=pytest.mark.slow),
        ("has no more batches", 0, ""),
    ],
)
def test_the_others_end_when_one_rank(how: str, code: int, error: str) -> None:
    left, gone = endings_of(lone_ending, 2, how)
    assert (gone.exit_code, gone.error) == (code, error)
    assert left.exit_code == 1
    ended = differing(f"{FORWARD}, has {FIRST}", "ending, has 'ending'") + r"\. One rank's process has ended: has it run out"
    expected = {
        "raises": told(STARTING_FORWARD, error),
        "is killed": unanswered(0, STARTING_FORWARD, CLOSED),
        "has no more batches": f"RankMismatchError: .*{ended}",
    }[how]
    assert re.match(expected, left.error), left.error


@pytest.mark.parametrize("destroy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_process_that_is_done_ends_by_itself(destroy: bool) -> None:
    for ending in endings_of(ordinary_ending, 2, destroy):
        assert (ending.exit_code, ending.error) == (0, "")


def test_several_ranks_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = Mlp()
    before = model.first.weight.detach().clone()
    with pytest.raises(zinf_compile.OptionError, match=r"WORLD_SIZE is 2 .* call torch\.distributed\.init_process_group\(\)"):
        torch.compile(model, backend=BACKEND)(*vectors(0))
    assert type(model.first.weight) is torch.nn.Parameter
    assert torch.equal(model.first.weight, before)


def test_ranks_agree_while_a_graph_is_traced() -> None:
    """Without `without_python_dispatcher` in `Ranks.patiently` they stood still within a few hundred exchanges."""
    count = 2000
    own = count * (count - 1) / 2
    assert run_ranks(exchanges, 2, count) == [[own, own + count]] * 2
