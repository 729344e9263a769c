"""Which chunks of a step one call of the optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CALL_NUMEL = 16 << 20
"""Elements that a call updates at most, and about that where they lie ready: what it costs beside arithmetic is little by then.
The next forward waits for one call, so a step has more of them than one."""


def group_calls(due: Sequence[int], numel_of: Callable[[int], int], is_ready: Callable[[int], bool]) -> list[list[int]]:
    """Group chunks, by number and in order, into calls.

    Those that nothing has to be loaded for, and that follow each other, are updated together, up to `CALL_NUMEL` elements. All
    others are alone, and so are the first one and the last one, of which the caller's own step updates one.
    """
    calls: list[list[int]] = []
    room = 0
    for place, number in enumerate(due):
        numel = numel_of(number)
        joins = place not in (0, len(due) - 1) and is_ready(number)
        if not joins or numel > room:
            calls.append([])
            room = CALL_NUMEL if joins else 0
        calls[-1].append(number)
        room -= numel
    return calls
