"""Memory that is freed goes back to the system where it is short; where there is room, it stays for the next step."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from marks import more

PROGRAM = """
import ctypes
import json
import os
import sys
from pathlib import Path

import torch

from zinf_compile.runtime.system.malloc import keep_free_memory, return_free_memory, return_large_blocks


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


def measure_at_end(how):
    libc = ctypes.CDLL(None)  # torch's tensors are small blocks, too, some of which would stay at the end of the heap
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    libc.free(libc.malloc(4 << 20))
    if how == "kept":
        keep_free_memory(96 << 20, room=1 << 30)
    if how == "no room":
        keep_free_memory(96 << 20, room=32 << 20)
    if how == "room taken":
        keep_free_memory(96 << 20, room=1 << 30)
        keep_free_memory(96 << 20, room=0)
    if how == "short before":
        return_large_blocks(within=64 << 20)
        keep_free_memory(96 << 20, room=1 << 30)
    if how == "short later":
        keep_free_memory(96 << 20, room=1 << 30)
        return_large_blocks(within=64 << 20)
    before, blocks = held(), [libc.malloc(4 << 20) for _ in range(24)]
    for block in blocks:
        ctypes.memset(block, 1, 4 << 20)
    for block in blocks:
        libc.free(block)
    return (held() - before) // 1024


for case in json.loads(sys.argv[1]):
    child = os.fork()  # whose allocator has seen what an import does, and no other case
    if not child:
        print(*case, measure(*case) if len(case) == 2 else measure_at_end(*case), sep="|", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""

AT_END = ["default", "kept", "no room", "room taken", "short before", "short later"]
CASES = [("large", 4 << 20), ("trimmed", 4 << 20), ("little", 1 << 19), ("trimmed", 1 << 19)]


@pytest.fixture(scope="module")
def held_after() -> dict[tuple[str, ...], int]:
    """Return the MiB that a process holds more after it freed 8 blocks of some floats, with 8 MiB between them in use.

    Of a word alone: after it freed 96 MiB at the end of the heap.
    """
    cases = [*CASES, *dict.fromkeys(("default", numel) for _, numel in CASES), *((how,) for how in AT_END)]
    run = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(cases)], capture_output=True, text=True, check=True)
    rows = [line.split("|") for line in run.stdout.splitlines()]
    return {tuple(case): int(held) for *case, held in rows}


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(("how", "numel"), [*CASES[:2], *(more(*case) for case in CASES[2:])])
def test_what_is_freed_between_blocks_in_use_goes_back(held_after: dict[tuple[str, ...], int], how: str, numel: int) -> None:
    freed = 8 * numel * 4 >> 20
    assert held_after["default", str(numel)] > 8 + freed // 2
    assert held_after[how, str(numel)] < 8 + freed // 4


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize("how", AT_END)
def test_what_a_step_frees_stays_for_the_next_one_only_where_there_is_room(
    held_after: dict[tuple[str, ...], int], how: str
) -> None:
    if how == "kept":
        assert held_after[(how,)] > 80
    else:
        assert held_after[(how,)] < 72
