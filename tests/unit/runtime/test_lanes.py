"""Lanes: what a transfer took is given back, however it ends."""

from __future__ import annotations

import pytest

from zinf_compile.runtime.lanes.lanes import InlineLane, ThreadLane


@pytest.mark.parametrize("forgiving", [False, True])
def test_what_a_transfer_took_is_given_back_also_where_it_is_left_out(forgiving: bool) -> None:
    begun: list[int] = []
    ended: list[int] = []

    def transfer(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise KeyError(number)

    lane = ThreadLane("test", forgiving=forgiving)
    try:
        pending = [lane.submit(lambda n=n: transfer(n), ended=lambda n=n: ended.append(n)) for n in range(4)]  # type: ignore[misc]
        pending[0].wait()
        for failed in pending[1:2] if forgiving else pending[1:]:
            with pytest.raises(KeyError):
                failed.wait()
        pending[-1].wait() if forgiving else None
    finally:
        lane.close()
    assert begun == ([0, 1, 2, 3] if forgiving else [0, 1])
    assert ended == [0, 1, 2, 3]


def test_an_inline_transfer_that_fails_gives_back_what_it_took() -> None:
    ended: list[bool] = []

    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        InlineLane().submit(fail, ended=lambda: ended.append(True))
    assert ended == [True]
