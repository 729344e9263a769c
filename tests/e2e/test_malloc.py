"""Memory that is freed goes back to the system."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from marks import more

PROGRAM = """
import json
import os
import sys
from pathlib import Path

import torch

from zinf_compile.runtime.system.malloc import return_free_memory, return_large_blocks


def held():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Anonymous:")).split()[1])


def measure(how, numel):
    if how == "large":
        return_large_blocks()
    if how == "little":
        return_large_blocks(within=64 << 20)
    torch.ones(numel)  # by freeing it glibc learns that such blocks come from its heap from now on
    before, large, small = held(), [], []
    for _ in range(8):
        large.append(torch.ones(numel))
        small.append([torch.ones(1 << 14) for _ in range(16)])  # between the large ones, so that none can join the next
    del large
    if how == "trimmed":
        return_free_memory()
    return (held() - before) // 1024


for case in json.loads(sys.argv[1]):
    child = os.fork()  # whose allocator has seen what an import does, and no other case
    if not child:
        print(*case, measure(*case), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""

CASES = [("large", 4 << 20), ("trimmed", 4 << 20), ("little", 1 << 19), ("trimmed", 1 << 19)]


@pytest.fixture(scope="module")
def held_after() -> dict[tuple[str, int], int]:
    """Return the MiB that a process holds more after it freed 8 blocks of some floats, with 8 MiB between them in use."""
    cases = sorted({*CASES, *(("default", numel) for _, numel in CASES)})
    run = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(cases)], capture_output=True, text=True, check=True)
    return {(how, int(numel)): int(held) for how, numel, held in map(str.split, run.stdout.splitlines())}


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(("how", "numel"), [*CASES[:2], *(more(*case) for case in CASES[2:])])
def test_what_is_freed_between_blocks_in_use_goes_back(held_after: dict[tuple[str, int], int], how: str, numel: int) -> None:
    freed = 8 * numel * 4 >> 20
    assert held_after["default", numel] > 8 + freed // 2
    assert held_after[how, numel] < 8 + freed // 4
