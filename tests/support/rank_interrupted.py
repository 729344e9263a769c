"""Ctrl-C on one of several ranks during a save, as a function that `test_interrupted_saves.py` starts."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_resume import Run

import zinf_compile
from zinf_compile.checkpoint.rank_files import RankFiles


def interrupted_on_one_rank(rank: int, size: int, folder: str) -> tuple[str, list[str], bool]:
    """Interrupt the last rank as it allocates its files; return the error, what is left, and whether training went on as ever."""
    runs, error = [], ""
    for interrupts in (True, False):
        run = Run({"process_group": dist.new_group(list(range(size))), "timeout_s": 60}, rank)
        torch.manual_seed(rank)
        if interrupts:
            zinf_compile.save(folder, run.model, run.optimizers)
            really = RankFiles.allocate

            def allocate(files: RankFiles, *args: Any) -> None:
                really(files, *args)  # noqa: B023
                raise KeyboardInterrupt

            run.micro_batches(1)
            with mock.patch.object(RankFiles, "allocate", allocate if rank == size - 1 else really):
                try:
                    zinf_compile.save(folder, run.model, run.optimizers)
                except (KeyboardInterrupt, zinf_compile.CheckpointError) as raised:
                    error = f"{type(raised).__name__}: {raised}"
            dist.barrier()
            assert os.listdir(folder) == ["save-00000001"]
            run.step()
            zinf_compile.save(folder, run.model, run.optimizers, wait=True)
        else:
            run.micro_batches(1)
            run.step()
        runs.append(zinf_compile.full_state_dict(run.model))
    return error, sorted(os.listdir(folder)), all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())
