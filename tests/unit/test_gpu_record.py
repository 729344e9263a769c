"""The line that a run of the GPU tests writes into the README: for a whole run that passed, and no other."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple

import pytest
from gpu_record import line, write

FILES = [Path("tests/gpu/test_one.py"), Path("tests/gpu/test_two.py")]
RUN = ("abc1234", "Some GPU")


class Report(NamedTuple):
    nodeid: str
    keywords: tuple[str, ...] = ("gpu",)


ALL = [Report("tests/gpu/test_one.py::test_a"), Report("tests/gpu/test_two.py::test_b")]
OTHER = Report("tests/unit/test_one.py::test_a", ())


def test_the_line_of_a_whole_run_that_passed() -> None:
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    reports = {"passed": [*ALL, OTHER], "skipped": [OTHER], "deselected": [OTHER]}
    assert line(reports, 0, files=FILES, run=RUN) == f"last run on a GPU: abc1234, Some GPU, {today}"


@pytest.mark.parametrize("outcome", ["failed", "error", "skipped", "xfailed", "xpassed", "deselected"])
def test_a_test_that_did_not_pass_leaves_no_line(outcome: str) -> None:
    assert line({"passed": ALL, outcome: [Report("tests/gpu/test_two.py::test_c")]}, 0, files=FILES, run=RUN) is None


def test_a_part_of_the_tests_or_a_failure_elsewhere_leaves_no_line() -> None:
    assert line({"passed": ALL[:1]}, 0, files=FILES, run=RUN) is None
    assert line({"passed": [ALL[0], Report("tests/gpu/test_two.py::test_b", ())]}, 0, files=FILES, run=RUN) is None
    assert line({"passed": ALL}, 1, files=FILES, run=RUN) is None


def test_a_later_line_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# A\n\ntext\n")
    write("last run on a GPU: one", readme)
    assert readme.read_text() == "# A\n\ntext\n\nlast run on a GPU: one\n"
    write("last run on a GPU: two", readme)
    assert readme.read_text() == "# A\n\ntext\n\nlast run on a GPU: two\n"
