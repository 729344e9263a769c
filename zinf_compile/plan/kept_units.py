"""Which full units stay gathered from a forward to its backward: between ZeRO-3, where none does, and ZeRO-2, where all do.

`backend/keep_units` calls it with the room that its account of memory leaves.
"""

from __future__ import annotations

from collections.abc import Sequence


def choose_kept(sizes: Sequence[int], room: float) -> list[int]:
    """Return which units are kept, as positions in `sizes`, ascending: those that fit into `room` bytes together.

    `sizes` are in the order of the last use in the forward. The unit that is used last there is used first in the backward, and
    holds its memory for the shortest time: so they are tried from the last one on. What doesn't fit is left out, and the next one
    is tried: each byte that is kept is one that the backward doesn't gather.
    """
    kept: list[int] = []
    for position in range(len(sizes) - 1, -1, -1):
        if sizes[position] <= room:
            room -= sizes[position]
            kept.append(position)
    return kept[::-1]
