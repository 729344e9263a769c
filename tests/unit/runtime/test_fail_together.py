"""What fails on one rank is an error on all: there its own, on the others the one that was asked for."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from zinf_compile.errors import RankMismatchError
from zinf_compile.runtime.comm.ranks import Ranks


class _Second(Ranks):
    """Rank 1 of two; rank 0 fails where `first_fails`, and then says "no space"."""

    def __init__(self, *, first_fails: bool) -> None:
        super().__init__(None, timeout_s=1.0, waiting=contextlib.nullcontext)
        self.rank, self.size, self.first_fails = 1, 2, first_fails
        self.asked: list[float] = []

    def agree(self, lines: Any, *, value: float = 0.0, **_: Any) -> list[float]:
        self.asked.append(value)
        return [float(self.first_fails), value]

    def share(self, value: Any, *, what: str, source: int = 0) -> Any:
        return "no space" if source == 0 else value


@pytest.mark.parametrize(
    ("elsewhere", "expected", "text"),
    [
        (None, RankMismatchError, "saving failed on rank 0, see there"),
        (ValueError("nothing was saved"), ValueError, "nothing was saved"),
        (lambda told: OSError(f"saving failed: {told}"), OSError, "saving failed: named on rank 0: no space"),
    ],
)
def test_another_rank_fails(elsewhere: Any, expected: type[Exception], text: str) -> None:
    ranks = _Second(first_fails=True)
    with pytest.raises(expected, match=text), ranks.fail_together("saving", elsewhere=elsewhere):
        pass
    assert ranks.asked == [0.0]


@pytest.mark.parametrize("first_fails", [False, True])
@pytest.mark.parametrize("elsewhere", [None, ValueError("nothing was saved"), OSError])
@pytest.mark.parametrize("raised", [KeyError("mine"), KeyboardInterrupt("mine")])
def test_this_rank_fails(raised: BaseException, elsewhere: Any, first_fails: bool) -> None:
    ranks = _Second(first_fails=first_fails)
    with pytest.raises(type(raised), match="mine"), ranks.fail_together("saving", elsewhere=elsewhere):
        raise raised
    assert ranks.asked == [1.0]


def test_none_fails() -> None:
    ranks = _Second(first_fails=False)
    with ranks.fail_together("saving"), ranks.fail_together("saving", elsewhere=OSError):
        pass
    assert ranks.asked == [0.0, 0.0]
