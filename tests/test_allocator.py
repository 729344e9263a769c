"""Memory that is freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path

import torch

from zinf_compile.runtime.allocator import return_free_memory, return_large_blocks


def held():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Anonymous:")).split()[1])


if sys.argv[1] == "large":
    return_large_blocks()
if sys.argv[1] == "little":
    return_large_blocks(within=64 << 20)
numel = int(sys.argv[2])
torch.ones(numel)  # by freeing it glibc learns that such blocks come from its heap from now on
before, small = held(), []
for _ in range(8):
    large = torch.ones(numel)
    small.append([torch.ones(1 << 12) for _ in range(8)])
    del large
    small.append(torch.ones(1 << 18))
if sys.argv[1] == "trimmed":
    return_free_memory()
print((held() - before) // 1024)
"""


def held_after(how: str, numel: int = 4 << 20) -> int:
    """Return the MiB that a process holds more after it freed blocks of `numel` floats, by default 16 MiB; 9 are in use."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, how, str(numel)], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_where_there_is_little_memory_smaller_blocks_go_back() -> None:
    assert held_after("default", 1 << 19) > 11
    assert held_after("little", 1 << 19) < 11


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_large_blocks_and_what_is_free_between_others_go_back() -> None:
    assert held_after("default") > 20
    assert held_after("large") < 14
    assert held_after("trimmed") < 14
