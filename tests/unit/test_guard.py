"""What tests/unit may not do is refused where it is tried."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

TRIES: dict[str, Callable[[], Any]] = {
    "torch.compile": lambda: torch.compile(torch.nn.Identity()),
    "os.fork": os.fork,
    "os.posix_spawn": lambda: os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {}),
    "os.system": lambda: os.system("true"),
    "subprocess.Popen": lambda: subprocess.run(["true"], check=False),
    "multiprocessing": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
}


@pytest.mark.parametrize("what", TRIES)
def test_no_unit_test_compiles_or_starts_a_process(what: str) -> None:
    with pytest.raises(AssertionError, match=f"{what}.* in tests/unit: .*move"):
        TRIES[what]()
