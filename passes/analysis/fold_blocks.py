"""Write what repeats from block to block of a model once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.|$|\[)")
"""A block's number in a name: `3` in `h.3.qkv.weight`."""

_LEAST = 2
"""Repetitions of a block's lines that are worth a line that stands for them."""

_LONGEST = 2000
"""Lines of one block; what repeats in longer stretches is written out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A line of a summary."""

    text: str
    key: tuple[object, ...]
    """Equal for lines that say the same of equal blocks."""
    names: tuple[str, ...] = ()
    """What the line is about, as dotted names in which a block's number counts it."""


def fold(entries: Sequence[Entry]) -> list[str]:
    """Return the lines, what repeats with block numbers that rise or fall by one left away but for the first time.

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
            lines.append(_said(entries[at : at + length], numbers[at : at + length], place, times))
        at += max(1, length) * (1 + times) if length else 1
    return lines


Numbers = Sequence[tuple[tuple[int, ...], ...]]


def _longest_repetition(kinds: Sequence[int], numbers: Numbers, at: int) -> tuple[int, int, tuple[int, int]]:
    """Return how long what repeats from `at` is, how often it does, and (place of the number that counts, its step)."""
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
    """Return which number of the names in a stretch counts the blocks, and its step; None where none does."""
    for one, other in zip(numbers[at : at + length], numbers[at + length : at + 2 * length], strict=False):
        for here, there in zip(one, other, strict=True):
            steps = [(place, b - a) for place, (a, b) in enumerate(zip(here, there, strict=True)) if a != b]
            if steps:
                return steps[0] if len(steps) == 1 and abs(steps[0][1]) == 1 else None
    return None


def _follows(kinds: Sequence[int], numbers: Numbers, at: int, length: int, place: tuple[int, int]) -> bool:
    """Say whether the stretch after the one at `at` is the same for the next block."""
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


def _said(entries: Sequence[Entry], numbers: Numbers, place: tuple[int, int], times: int) -> str:
    """Say which blocks are left away, by the name of the one that is computed there."""
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
