"""Collectives of the device between processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_collectives_run_in_the_order_of_their_stream(ranks: int, tmp_path: Path) -> None:
    program = Path(__file__).with_name("rank_collectives.py")
    started = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(ranks), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=280)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, "\n\n".join(outputs)
