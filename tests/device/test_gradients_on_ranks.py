"""Gradients on the host of two ranks: the bits of the CPU, and nothing freed under a reduction."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_accumulated_and_clipped_ones_have_the_bits_of_the_cpu(tmp_path: Path) -> None:
    program = Path(__file__).with_name("rank_gradients.py")
    started = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), "2", str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=280)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n\n".join(outputs)
