"""Run a function on several real ranks: spawned processes joined by gloo."""

from __future__ import annotations

import datetime
import os
import queue
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 240
_PRELOADED = ["torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed", "torch.testing", "zinf_compile"]


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, afresh: bool = False) -> list[Any]:
    """Call `function(rank, world_size, *args)` in each of `world_size` processes; return the results in rank order.

    `function` must be importable by name from a module under tests/ (a helper module, not a test file). An exception on any
    rank is raised here with that rank's traceback. `afresh`: for what the kernel counts of a process, which of one that was
    forked are at first not even the libraries.
    """
    context = mp.get_context("spawn" if afresh else "forkserver")  # whose server has imported what takes longest
    context.set_forkserver_preload(_PRELOADED)
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder) / "rendezvous"
        workers = [
            context.Process(target=_rank_main, args=(function, rank, world_size, str(rendezvous), results, args), daemon=True)
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        outcome: dict[int, Any] = {}
        failures: list[str] = []
        try:
            for _ in workers:
                rank, error, value = results.get(timeout=TIMEOUT_S)
                outcome[rank] = value
                if error:
                    failures.append(f"rank {rank}:\n{error}")
        except queue.Empty:
            missing = sorted(set(range(world_size)) - set(outcome))
            failures.append(f"ranks {missing} gave no answer within {TIMEOUT_S} s")
        for worker in workers:
            worker.join(timeout=10)
            worker.kill()
    if failures:
        raise AssertionError("\n".join(failures))
    return [outcome[rank] for rank in range(world_size)]


def _rank_main(
    function: Callable[..., Any], rank: int, world_size: int, rendezvous: str, results: Any, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for accepted in ("The .grad attribute of a Tensor that is not a leaf", "`torch.jit.script_method` is deprecated"):
        warnings.filterwarnings("ignore", accepted)  # see pyproject.toml
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )
        results.put((rank, None, function(rank, world_size, *args)))
        dist.barrier()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    results.close()
    results.join_thread()
    os._exit(0)  # after a failure other ranks may be gone: don't wait for them in destructors
