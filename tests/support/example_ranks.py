"""Run an example as a launcher would: one process a rank, which finds its place in the environment."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from forking import end_as_a_program, start_forked

TIMEOUT_S = 240


def run_on_ranks(program: Path, arguments: Sequence[str], ranks: int, folder: Path) -> str:
    """Run it in `folder`; return what rank 0 says. Raises `AssertionError`, with what it said, where a rank fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = [folder / f"rank {rank}" for rank in range(ranks)]
    processes = [start_forked(_main, program, arguments, rank, ranks, port, folder, said[rank]) for rank in range(ranks)]
    for process in processes:
        process.join(TIMEOUT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()  # where it hangs
    texts = [file.read_text() for file in said]
    assert codes == [0] * ranks, f"exit codes {codes}\n" + "\n".join(texts)
    return texts[0]


def _main(program: Path, arguments: Sequence[str], rank: int, ranks: int, port: int, folder: Path, said: Path) -> NoReturn:
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
    torch._inductor.config.compile_threads = 1  # read from the environment before
    sys.argv = [str(program), *arguments]
    try:
        runpy.run_path(str(program), run_name="__main__")
    except BaseException as error:
        end_as_a_program(error)
    end_as_a_program()
