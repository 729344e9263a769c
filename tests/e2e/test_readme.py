"""The README tells the truth."""

from __future__ import annotations

import re
import shlex

import pytest
from paths import ROOT
from versions import numbers_nodes_as_readme

from zinf_compile.cli.main import main

README = (ROOT / "README.md").read_text()


SHOWN = re.findall(r"```\n\$ zinf (dump mlp .*)\n((?:.*\n)*?)```", README)


@numbers_nodes_as_readme
@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=["in memory", "in tiles", "on a drive"])
def test_the_graph_shown_is_the_graph_dumped(command: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    assert f"rank 0 of 4\n{shown}\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", re.findall(r"`\.venv/bin/zinf (dump mlp .*?)`", README))
def test_small_dumps_of_the_table_work(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    assert "up.weight" in capsys.readouterr().out


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_to_files(link: str) -> None:
    assert (ROOT / link).is_file()


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
