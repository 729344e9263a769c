"""Memory that is freed goes back to the system."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
from marks import more

PROGRAM = """
import sys
from pathlib import Path

import torch

from zinf_compile.runtime.system.malloc import return_free_memory, return_large_blocks


def held():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Anonymous:")).split()[1])


if sys.argv[1] == "large":
    return_large_blocks()
if sys.argv[1] == "little":
    return_large_blocks(within=64 << 20)
numel = int(sys.argv[2])
torch.ones(numel)  # by freeing it glibc learns that such blocks come from its heap from now on
before, large, small = held(), [], []
for _ in range(8):
    large.append(torch.ones(numel))
    small.append([torch.ones(1 << 14) for _ in range(16)])  # between the large ones, so that none can join the next
del large
if sys.argv[1] == "trimmed":
    return_free_memory()
print((held() - before) // 1024)
"""


@functools.cache
def held_after(how: str, numel: int) -> int:
    """Return the MiB that a process holds more after it freed 8 blocks of `numel` floats, with 8 MiB between them in use."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, how, str(numel)], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(
    ("how", "numel"), [("large", 4 << 20), ("trimmed", 4 << 20), more("little", 1 << 19), more("trimmed", 1 << 19)]
)
def test_what_is_freed_between_blocks_in_use_goes_back(how: str, numel: int) -> None:
    freed = 8 * numel * 4 >> 20
    assert held_after("default", numel) > 8 + freed // 2
    assert held_after(how, numel) < 8 + freed // 4
