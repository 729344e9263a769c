"""Folding of a summary: lines that repeat from block to block of a model are printed once. `summary` calls it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.|$|\[)")
"""A block's number in a name: `3` in `h.3.qkv.weight`."""

_LEAST = 2
"""Repetitions of a block's lines from which on they are folded into one line."""

_LONGEST = 2000
"""Lines of the longest block that is folded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A line of a summary."""

    text: str
    key: tuple[object, ...]
    """Equal for the same line of equal blocks."""
    names: tuple[str, ...] = ()
    """Dotted names of the parameters or modules of the line. They contain the block's number."""


def fold(entries: Sequence[Entry]) -> list[str]:
    """Return the lines; of repetitions whose block numbers rise or fall by one, the first is printed and the others counted.

    before:  [wait(h.0.w), region of h.0, wait(h.1.w), region of h.1, wait(h.2.w), region of h.2]
    after:   [wait(h.0.w), region of h.0, "h.1 … h.2 as h.0: 4 lines"]
    """
    patterns = [(entry.key, tuple(_NUMBER.sub("#", name) for name in entry.names)) for entry in entries]
    ids = {pattern: number for number, pattern in enumerate(dict.fromkeys(patterns))}
    kinds = [ids[pattern] for pattern in patterns]
    numbers = [tuple(tuple(map(int, _NUMBER.findall(name))) for name in entry.names) for entry in entries]
    lines: list[str] = []
    at = 0
    while at < len(entries):
        length, times, place = _longest_repetition(kinds, numbers, at)
        lines += [entry.text for entry in entries[at : at + max(1, length)]]
        if times:
            lines.append(_folded_line(entries[at : at + length], numbers[at : at + length], place, times))
        at += max(1, length) * (1 + times) if length else 1
    return lines


Numbers = Sequence[tuple[tuple[int, ...], ...]]


def _longest_repetition(kinds: Sequence[int], numbers: Numbers, at: int) -> tuple[int, int, tuple[int, int]]:
    """Return the repetition at `at` that folds most lines: its length, its count, and the block number's (index, step)."""
    best = (0, 0, (0, 0))
    for length in _distances(kinds, at):
        alike = kinds[at : at + length] == kinds[at + length : at + 2 * length]
        place = _counting(numbers, at, length) if alike else None
        if place is None:
            continue
        times = 0
        while _follows(kinds, numbers, at + times * length, length, place):
            times += 1
        if times >= _LEAST and length * times > best[0] * best[1]:
            best = (length, times, place)
    return best


def _distances(kinds: Sequence[int], at: int) -> Iterator[int]:
    for other in range(at + 1, min(len(kinds), at + _LONGEST)):
        if kinds[other] == kinds[at]:
            yield other - at


def _counting(numbers: Numbers, at: int, length: int) -> tuple[int, int] | None:
    """Return (index, step) of the number that differs between two neighbouring repetitions; None unless it is the only one."""
    for one, other in zip(numbers[at : at + length], numbers[at + length : at + 2 * length], strict=False):
        for here, there in zip(one, other, strict=True):
            steps = [(place, b - a) for place, (a, b) in enumerate(zip(here, there, strict=True)) if a != b]
            if steps:
                return steps[0] if len(steps) == 1 and abs(steps[0][1]) == 1 else None
    return None


def _follows(kinds: Sequence[int], numbers: Numbers, at: int, length: int, place: tuple[int, int]) -> bool:
    """Return whether the lines at `at` repeat right after, with the next block's number."""
    index, step = place
    if at + 2 * length > len(kinds):
        return False
    for here in range(at, at + length):
        if kinds[here] != kinds[here + length]:
            return False
        for mine, theirs in zip(numbers[here], numbers[here + length], strict=True):
            if theirs != tuple(n + step if i == index else n for i, n in enumerate(mine)):
                return False
    return True


def _folded_line(entries: Sequence[Entry], numbers: Numbers, place: tuple[int, int], times: int) -> str:
    """Return the line for the folded blocks, named after the block that the first repetition computes."""
    index, step = place
    computed = [i for i, entry in enumerate(entries) if entry.key[0] == "region" and entry.names and numbers[i][0]]
    example = (computed or [i for i, entry in enumerate(entries) if entry.names and numbers[i][0]])[0]
    name, first = entries[example].names[0], numbers[example][0][index]
    found = list(_NUMBER.finditer(name))[index]

    def block(number: int) -> str:
        return f"{name[: found.start()]}{number}"

    last = block(first + step * times)
    others = last if times == 1 else f"{block(first + step)} … {last}"
    return f"# {others} as {block(first)}: {len(entries) * times:,} lines"
