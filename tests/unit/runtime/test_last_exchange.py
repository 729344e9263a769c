"""The exchange in which a process ends: gloo's threads may let go of it while the interpreter ends, and must not be the last.

After ranks have differed there is none: their errors say enough.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from zinf_compile.errors import RankMismatchError
from zinf_compile.runtime.comm.ranks import Ranks


class Group:
    """Answers at once, as two ranks that agree do; keeps its exchanges."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.broken = False

    def allgather(self, everyone: Sequence[Sequence[torch.Tensor]], mine: Sequence[torch.Tensor]) -> Work:
        for other in everyone[0]:
            other.copy_(mine[0])
        self.works.append(Work())
        if self.broken:
            raise RuntimeError("Connection closed by peer")
        return self.works[-1]


class Work:
    def wait(self, timeout: object) -> None:
        """Be over."""


def test_only_the_last_exchange_is_kept_for_good() -> None:
    ranks: Any = Ranks(None, timeout_s=1.0, waiting=contextlib.nullcontext)
    group = Group()
    ranks._control, ranks.size = group, 2
    assert ranks.agree(["a step"], what="a step", value=0.5) == [0.5, 0.5]
    ranks.compare_at_end(7, None)
    during, last = group.works
    counts = [sys.getrefcount(work) for work in (during, last)]
    assert counts[1] == counts[0] + 1


def test_none_follows_a_difference() -> None:
    ranks: Any = Ranks(None, timeout_s=1.0, waiting=contextlib.nullcontext)
    group = Group()
    ranks._control, ranks.size, group.broken = group, 2, True
    with pytest.raises(RankMismatchError, match=r"while a step.*; the connection is closed"):
        ranks.agree(["a step"], what="a step")
    ranks.compare_at_end(7, None)
    assert len(group.works) == 1
    group.broken = False
    ranks.agree(["a step"], what="a step")  # the ranks have gone back to the same point
    ranks.compare_at_end(7, None)
    assert len(group.works) == 3
