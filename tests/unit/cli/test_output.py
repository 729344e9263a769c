"""Where a command prints: to a full drive, to a reader that has gone, or nowhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from torch import nn

import zinf_compile
from zinf_compile.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a folder with a checkpoint."""
    return str(zinf_compile.save(tmp_path, nn.Linear(2, 2)))


def test_an_output_that_cannot_be_written_is_named(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115
    assert main(["inspect", folder]) == 2
    said = "zinf: the output is not written (No space left on device); accepted: a standard output that can be\n"
    assert capsys.readouterr().err == said
    assert sys.stdout.closed, "the end of the process flushes nothing"


def test_a_reader_that_has_gone_is_no_error(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    assert main(["inspect", folder]) == 0
    assert capsys.readouterr().err == ""
    assert sys.stdout.closed


def test_without_a_standard_output_nothing_is_printed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after `>&-`
    assert main(["inspect", folder]) == 0
