"""Cases for the pool of ranks itself, and for `zinf_compile.reset()` on several ranks."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from resetting import assert_nothing_more_than, placed, possessions, train

import zinf_compile
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.init import parallel_random
from zinf_compile.runtime.context import all_contexts


def process_id(rank: int, size: int) -> int:
    """Return the process that a rank is."""
    return os.getpid()


def fail_on(rank: int, size: int, failing: int) -> None:
    """Raise on one rank, for which the others wait."""
    if rank == failing:
        raise KeyError(f"on rank {rank}")
    dist.barrier()


def die_on(rank: int, size: int, dying: int) -> None:
    """End one rank's process."""
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(rank: int, size: int, seconds: float) -> None:
    """Give no answer for a while."""
    time.sleep(seconds)


def disturb(rank: int, size: int, folder: str) -> None:
    """Change what a process is like, and leave it so."""
    os.environ["ZINF_OF_A_CASE"] = "1"
    os.environ.pop("PATH", None)
    os.chdir(folder)
    warnings.simplefilter("ignore")
    logging.getLogger("zinf_compile").addHandler(logging.NullHandler())
    logging.getLogger("zinf_compile").setLevel(logging.DEBUG)
    torch.manual_seed(1234)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch._dynamo.config.recompile_limit = 2
    parallel_random._LEAST_NUMEL = 96
    train(placed("nvme", folder), steps=1)


def look_around(rank: int, size: int) -> dict[str, Any]:
    """Return all that `disturb` changes."""
    log = logging.getLogger("zinf_compile")
    return {
        "environment": {name: os.environ.get(name) for name in ("ZINF_OF_A_CASE", "PATH", "RANK", "WORLD_SIZE")},
        "folder": os.getcwd(),
        "warnings": [filter[0] for filter in warnings.filters],
        "log": (len(log.handlers), log.level),
        "random": torch.rand(1).item(),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "limit": torch._dynamo.config.recompile_limit,
        "least": parallel_random._LEAST_NUMEL,
        "contexts": len(all_contexts()),
        "groups": len(torch.distributed.distributed_c10d._world.pg_map),
    }


def losses(rank: int, size: int, tier: str, folder: str) -> list[float]:
    """Train in a process as it is."""
    return train(placed(tier, folder))[2]


def start_anew(rank: int, size: int, tier: str, folder: str) -> list[float]:
    """Train, let go, and train again: nothing of the first is left, and the second is as the first."""
    options = placed(tier, folder)
    train(options)
    zinf_compile.reset()
    dist.barrier()
    before, groups = possessions(), len(dist.distributed_c10d._world.pg_map)
    model, _, first = train(options)
    ledgers = [ledger for context in all_contexts() for ledger in (context.memory.ledger, context.memory.host_ledger)]
    assert possessions()[1] >= before[1] + 2, "lanes of gathers and reductions"
    assert len(dist.distributed_c10d._world.pg_map) == groups + 3
    dist.barrier()  # reset doesn't wait for what other ranks still read
    zinf_compile.reset()
    assert_nothing_more_than(before)
    assert len(dist.distributed_c10d._world.pg_map) == groups
    assert [ledger.total()[0] for ledger in ledgers] == [0] * len(ledgers)
    again = train({**options, "bucket": "1MiB", "timeout_s": 30})[2]  # options of before are forgotten, too
    assert again == first
    for read in (lambda: model.inner.weight + 1, lambda: zinf_compile.full_state_dict(model)):
        with pytest.raises(PartitionedParameterError, match=r"partitioned before zinf_compile.reset\(\)"):
            read()
    return again


def reset_alone(rank: int, size: int) -> str:
    """One rank lets go while the other is elsewhere; that is told, in time, and both start anew."""
    model, _, _ = train({"compute": "fx", "timeout_s": 3})
    said = ""
    if rank == 0:
        zinf_compile.reset()
    else:
        try:
            zinf_compile.full_state_dict(model)
        except zinf_compile.RankMismatchError as error:
            said = str(error)
        zinf_compile.reset()
    dist.barrier()
    train({"compute": "fx"})
    return said


def some_start_anew(rank: int, size: int) -> list[list[float]]:
    """Ranks 0 and 1 of more let go and train again, several times, in the same group."""
    group = dist.new_group([0, 1])
    found = []
    for _ in range(3 if rank < 2 else 0):
        found.append(train({"compute": "fx", "timeout_s": 10, "process_group": group})[2])
        dist.barrier(group)
        zinf_compile.reset()
    dist.barrier()
    return found
