"""The schedules that README and docs/ show are those that `zinf dump` prints."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from pages import COMMANDS, README, SHOWN, Dump
from versions import numbers_nodes_as_readme

from zinf_compile.cli.main import main


def _name(value: object) -> str:
    return value.page.stem if isinstance(value, Dump) else value.stem if isinstance(value, Path) else ""


def test_readme_and_pages_show_schedules() -> None:
    assert [dump.page for dump in SHOWN].count(README) == 2  # a graph before and after
    assert {dump.page.stem for dump in SHOWN} == {"README", "schedules", "tiers", "tiles"}


@numbers_nodes_as_readme
@pytest.mark.parametrize("dump", SHOWN, ids=_name)
def test_the_graph_shown_is_the_graph_dumped(dump: Dump, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(dump.arguments)) == 0
    printed = capsys.readouterr().out
    if "--diff" in dump.arguments:
        assert printed.rstrip() == dump.shown.rstrip()
    else:
        assert f"rank 0 of 4\n{dump.shown}\n" in printed


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=_name)
def test_small_dumps_of_the_tables_work(page: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    assert len(printed.strip()) == 16 if "--hash" in command else "up.weight" in printed
