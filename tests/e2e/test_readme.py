"""The schedules that README and docs/ show are those that `zinf dump` prints."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import COMMANDS, README, SHOWN, TEXTS, Dump
from versions import counts_operators_as_readme, numbers_nodes_as_readme

from zinf_compile.cli.main import main

_MARKED = [pytest.param(dump, marks=counts_operators_as_readme) if "losses:" in dump.arguments else dump for dump in SHOWN]


def _name(value: object) -> str:
    return value.page.stem if isinstance(value, Dump) else value.stem if isinstance(value, Path) else ""


def test_readme_and_pages_show_schedules() -> None:
    assert [dump.page for dump in SHOWN].count(README) == 2  # a graph before and after
    assert {dump.page.stem for dump in SHOWN} == {"README", "activations", "ranks", "schedules", "tiers", "tiles"}


@pytest.fixture
def _modules_of_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let dumps find the modules that pages show: blocks of Python that begin with a file's name.

    Modules of the tests with the same names (`losses`) are out of the way meanwhile.
    """
    ours = {}
    for page in {dump.page for dump in SHOWN}:
        for name, code in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", TEXTS[page], re.DOTALL):
            (tmp_path / f"{name}.py").write_text(f"# {name}.py\n{code}")
            ours[name] = sys.modules.pop(name, None)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name, module in ours.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@numbers_nodes_as_readme
@pytest.mark.usefixtures("_modules_of_pages")
@pytest.mark.parametrize("dump", _MARKED, ids=_name)
def test_the_graph_shown_is_the_graph_dumped(dump: Dump, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(dump.arguments)) == 0
    printed = capsys.readouterr().out
    if "--diff" in dump.arguments:
        assert printed.rstrip() == dump.shown.rstrip()
    else:
        assert re.search(rf"rank 0 of \d+\n{re.escape(dump.shown)}\n", printed)


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=_name)
def test_small_dumps_of_the_tables_work(page: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    assert len(printed.strip()) == 16 if "--hash" in command else "up.weight" in printed
