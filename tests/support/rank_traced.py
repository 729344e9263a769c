"""What ranks exchange while AOTAutograd traces, as a function that `test_rank_failures.py` starts."""

from __future__ import annotations

import contextlib

import torch.distributed as dist
from torch._dispatch.python import enable_python_dispatcher

from zinf_compile.runtime.comm.ranks import Ranks


def exchanges(rank: int, size: int, count: int) -> list[float]:
    """Agree `count` times under what a compiler's passes run under; return the sum of what each rank gave."""
    ranks = Ranks(dist.group.WORLD, timeout_s=20, waiting=contextlib.nullcontext)
    sums = [0.0] * size
    with enable_python_dispatcher():
        for number in range(count):
            given = ranks.agree([str(number)], what="exchanging", value=float(rank + number))
            sums = [total + value for total, value in zip(sums, given, strict=True)]
    return sums
