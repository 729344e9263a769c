"""Room to run ahead that ranks with different memory agree on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from zinf_compile.sharded.short_ranks import largest_of_ranks, least_of_ranks


def test_ranks_take_the_least_room_and_the_largest_need() -> None:
    def agree(lines: list[str], *, what: str, value: float) -> list[float]:
        assert lines == [what]
        return [value, 5.0, 9.0]

    context: Any = SimpleNamespace(ranks=SimpleNamespace(agree=agree))
    assert least_of_ranks(context, 7, what="room") == 5
    assert largest_of_ranks(context, 7, what="need") == 9
