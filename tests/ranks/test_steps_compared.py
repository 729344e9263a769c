"""A step that one rank takes alone, or with other settings, is an error on all ranks before anything is made of it."""

from __future__ import annotations

import re

import pytest
from rank_endings import endings_of
from rank_steps import CASES, ending_after_a_skipped_step, outcomes
from ranks import run_ranks

pytestmark = pytest.mark.distributed

ALIKE = ["alike", "loaded_again"]
SGD = r"step\(\) of SGD"
OF_ALL = r".* for 6 parameters: numbers 0-5"
DIFFERENCES = {
    "skipped_step": (f"{SGD} 2 times, the last with lr=0.1, {OF_ALL}", f"{SGD} once, the last with lr=0.1, {OF_ALL}"),
    "skipped_first_step": (r"step\(\) of no optimizer yet", f"{SGD} once, the last with lr=0.1, {OF_ALL}"),
    "other_rate": (f"{SGD} once, the last with lr=0.1, {OF_ALL}", f"{SGD} once, the last with lr=0.2, {OF_ALL}"),
    "gradient_dropped": (f"{SGD} once, the last with lr=0.1, {OF_ALL}", f"{SGD} once, .* for 5 parameters: numbers .*"),
    "whole_gradient": (
        f"{SGD} 2 times, the last with the whole gradient of first.bias: values [0-9a-f]+",
        f"{SGD} 2 times, the last with the whole gradient of first.bias: values [0-9a-f]+",
    ),
    "deferred": (f"{SGD} 3 times, .*", f"{SGD} 2 times, .*"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Run all cases in one start of two ranks."""
    return run_ranks(outcomes, 2, str(tmp_path_factory.mktemp("steps")))


@pytest.mark.parametrize("case", [name for name in CASES if name not in ALIKE])
def test_all_ranks_raise(found: list[dict[str, str]], case: str) -> None:
    here, there = DIFFERENCES.get(case, (f"{SGD} 2 times, .*", f"{SGD} once, .*"))
    for rank in range(2):
        message = found[rank][case]
        assert re.match(rf"RankMismatchError: .* has '{here}'; rank 1, .* has '{there}'\..* Load a checkpoint", message), message


@pytest.mark.parametrize("case", ALIKE)
def test_ranks_that_step_alike_go_on(found: list[dict[str, str]], case: str) -> None:
    assert [ranks[case] for ranks in found] == ["no error"] * 2


@pytest.mark.parametrize("destroy", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_the_end_of_the_processes_says_so(destroy: bool, capfd: pytest.CaptureFixture[str]) -> None:
    for ending in endings_of(ending_after_a_skipped_step, 2, destroy):
        assert ending.error == ""
    printed = capfd.readouterr().err
    assert len(re.findall(r"first difference: rank 0, ending, has 'step\(\) of SGD once,.*?no optimizer yet'", printed)) == 2, (
        printed
    )
