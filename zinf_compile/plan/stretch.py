"""Makes the problem of a deep model from that of a shallow one: its middle block again and again.

Tracing takes as long as the model has blocks; blocks of one structure take the same again. `zinf plan` traces few blocks of its
deepest built-in models, and of others where `--blocks` says so, and stretches the problem to the depth that they have.

Note: where copies go
    A block has `forward` regions and `backward` ones. What a block has at region r of the forward its next one has at
    r + forward, and what it has at region q of the backward the next one has at q - backward. This holds for all things that are
    made or used first in one period of the forward, wherever the period begins.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from zinf_compile.errors import PlanError

from .problem import StepProblem
from .problem_parts import Region, SavedValue, StatePiece, Unit


@dataclasses.dataclass(frozen=True, slots=True)
class _Period:
    """The block that is copied, and by how much."""

    first: int
    """Its first region in the forward."""
    forward: int
    back: int
    """Its first region in the backward."""
    backward: int
    border: int
    """The first region of the backward."""
    more: int

    def of(self, region: int) -> int:
        """Return where a thing belongs that is made or first used in a region: before (-1), in (0) or behind (1) the block.

        What only the backward has counts as before.
        """
        return -1 if region < self.first or region >= self.border else 0 if region < self.first + self.forward else 1

    def moved(self, regions: Iterable[int], place: int, copy: int) -> tuple[int, ...]:
        """Return the regions of copy `copy` of a thing; things outside of the block have one copy, 0."""
        found: set[int] = set()
        own = set(regions)
        shared = place < 0 and any(r in own and r + self.forward in own for r in range(self.first, self.first + self.forward))
        for region in own:
            if shared:
                found.update(self._all(region))
            elif region < self.border:
                behind = place > 0 or region >= self.first + self.forward * (2 + place)
                found.add(region + self.forward * (self.more if behind else copy))
            else:
                near = place <= 0 and not (place < 0 and region < self.back - 2 * self.backward)
                found.add(region + self.more * self.forward + (self.backward * (self.more - copy) if near else 0))
        return tuple(sorted(found))

    def _all(self, region: int) -> Iterator[int]:
        """Yield where a thing that all blocks use is used."""
        before = self.more * self.forward
        if region < self.border:
            copies = range(self.more + 1) if self.of(region) == 0 else (self.more if self.of(region) > 0 else 0,)
            yield from (region + copy * self.forward for copy in copies)
        elif region < self.back:
            yield region + before
        elif region < self.back + self.backward:
            yield from (region + before + copy * self.backward for copy in range(self.more + 1))
        else:
            yield region + before + self.more * self.backward


def stretch(problem: StepProblem, blocks: str, count: int) -> StepProblem:
    """Return the problem with `count` blocks in all; new ones are copies of the middle one. `blocks`: the name of their list.

    One micro-batch of one graph, forward and backward. Raises `PlanError` where blocks differ or are more.
    """
    number = _numbered(blocks)
    if not (there := count_blocks(problem, blocks)):
        known = _lists(problem)
        accepted = f"one of {', '.join(known)}" if known else "a list of blocks, of which this model has none"
        raise PlanError(f"no parameter is in a list {blocks!r}; accepted: {accepted}")
    if len(lists := _lists(problem, blocks)) > 1:
        raise PlanError(f"{blocks!r} is the end of {' and '.join(lists)}; accepted: one list, such as {lists[0]!r}")
    if count < there:
        raise PlanError(f"the model has {there} blocks in {blocks}, more than {count}; accepted: {there} or more")
    if not (more := count - there):
        return problem
    period = _find(problem, number, more)
    middle = max(int(n) for unit in problem.units if not period.of(_first(unit)) for n in number.findall(unit.name)[:1])

    def renamed(name: str, place: int, copy: int) -> str:
        by = copy if place == 0 else more if place > 0 else 0
        return number.sub(lambda found: f"{blocks}.{int(found[1]) + by}", name)

    units: list[Unit] = []
    pieces: list[StatePiece] = []
    for unit in problem.units:
        place = period.of(_first(unit))
        for copy in range(more + 1 if place == 0 else 1):
            new = dataclasses.replace(
                unit,
                name=renamed(unit.name, place, copy),
                uses=period.moved(unit.uses, place, copy),
                gradients=period.moved(unit.gradients, place, copy),
            )
            units.append(new)
            pieces += (
                dataclasses.replace(piece, name=new.name + piece.name.removeprefix(unit.name), units=(new.name,))
                for piece in problem.pieces_of[unit.name]
            )
    return dataclasses.replace(
        problem,
        regions=_regions(problem.regions, period),
        units=tuple(units),
        pieces=tuple(pieces),
        saved=tuple(_saved(problem.saved, period)),
        name=f"{problem.name}, {blocks}.{middle} {more} times more",
    )


def count_blocks(problem: StepProblem, blocks: str) -> int:
    """Return how many blocks the list of this name has."""
    return len({found for unit in problem.units for found in _numbered(blocks).findall(unit.name)[:1]})


def _numbered(blocks: str) -> re.Pattern[str]:
    return re.compile(rf"\b{re.escape(blocks)}\.(\d+)\b")


def _lists(problem: StepProblem, blocks: str | None = None) -> list[str]:
    """Return the lists whose names end so; None: all of them."""
    last = r"[A-Za-z_]\w*" if blocks is None else re.escape(blocks)
    whole = re.compile(rf"(?<![\w.])((?:\w+\.)*{last})\.\d+\b")
    return sorted({found for unit in problem.units for found in whole.findall(unit.name)})


def _first(unit: Unit) -> int:
    return min((*unit.uses, *unit.gradients))


def _find(problem: StepProblem, number: re.Pattern[str], more: int) -> _Period:
    """Return the period, read off the units of the three blocks in the middle."""
    graphs = list(dict.fromkeys(region.graph for region in problem.regions))
    border = next((n for n, region in enumerate(problem.regions) if region.graph != problem.regions[0].graph), problem.count)
    if any(region.micro_batch for region in problem.regions):
        raise PlanError("a step of several micro-batches is not stretched; accepted: one of them, or the whole model traced")
    if len(graphs) != 2 or any(v.remade_by for v in problem.saved):
        raise PlanError(
            f"a step of {len(graphs)} graphs, or one that makes saved values again, is not stretched; accepted: one forward and "
            "its backward, or the whole model traced"
        )
    spans: dict[int, tuple[int, int]] = {}
    for unit in problem.units:
        if found := number.findall(unit.name):
            block = int(found[0])
            first, last = spans.get(block, (problem.count, 0))
            spans[block] = (min(first, _first(unit)), max(last, *unit.uses, *unit.gradients))
    middle = (len(spans) - 1) // 2
    if len(spans) < 5 or set(spans) != set(range(len(spans))):
        raise PlanError(f"blocks {sorted(spans)} are too few to see a period; accepted: 5 or more")
    one, two, three = (spans[middle + step] for step in (-1, 0, 1))
    forward, backward = three[0] - two[0], two[1] - three[1]
    if min(forward, backward) < 0:
        raise PlanError(
            "the blocks in the middle are not all trained, or are used in another order than they are numbered; trace the whole "
            "model"
        )
    if not forward or not backward:
        least = min(_bytes(problem, number, middle + step) for step in (-1, 0, 1))
        raise PlanError(
            "several blocks are gathered at once, in one region: a bucket is larger than they are; accepted: a bucket of at most "
            f"a block's {least:,} bytes, as by --options '{{\"bucket\": {least}}}', or the whole model traced"
        )
    period = _Period(two[0], forward, two[1] - backward + 1, backward, border, more)
    signs = [(region.structure, region.seconds, region.workspace_bytes) for region in problem.regions]
    if (
        two[0] - one[0] != forward
        or one[1] - two[1] != backward
        or any(
            signs[two[0] : three[0]] != signs[two[0] + ahead : three[0] + ahead]
            or signs[period.back : two[1] + 1] != signs[period.back - behind : two[1] + 1 - behind]
            or _units(problem, two[0], period) != _units(problem, two[0] + ahead, period, forward=-ahead, backward=behind)
            for ahead, behind in ((-forward, -backward), (forward, backward))
        )
    ):
        raise PlanError("the blocks in the middle differ, or share what only some of them use; trace the whole model")
    return period


def _bytes(problem: StepProblem, number: re.Pattern[str], block: int) -> int:
    """Return the bytes of a block's parameters, as they are gathered or, where they aren't, stored."""
    own = [unit for unit in problem.units if number.findall(unit.name)[:1] == [str(block)]]
    return sum(unit.full_bytes or unit.stored_bytes for unit in own)


def _units(problem: StepProblem, first: int, period: _Period, *, forward: int = 0, backward: int = 0) -> Counter[object]:
    """Return all but the names of the units of the block that begins at region `first`, with their uses moved."""

    def moved(regions: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(region + (forward if region < period.border else backward) for region in regions)

    own = (unit for unit in problem.units if first <= _first(unit) < first + period.forward)
    return Counter(dataclasses.replace(u, name="", uses=moved(u.uses), gradients=moved(u.gradients)) for u in own)


def _regions(regions: Sequence[Region], period: _Period) -> tuple[Region, ...]:
    ahead, behind = period.first + period.forward, period.back
    one, other = regions[period.first : ahead], regions[behind : behind + period.backward]
    found = list(regions[:ahead])
    for copy in range(1, period.more + 1):
        found += (dataclasses.replace(region, name=f"{region.name} +{copy}") for region in one)
    found += regions[ahead:behind]
    for copy in range(period.more, 0, -1):
        found += (dataclasses.replace(region, name=f"{region.name} +{copy}") for region in other)
    return (*found, *regions[behind:])


def _saved(values: Iterable[SavedValue], period: _Period) -> Iterator[SavedValue]:
    for value in values:
        place = period.of(value.made_in)
        for copy in range(period.more + 1 if place == 0 else 1):
            (made,) = period.moved((value.made_in,), place, copy)
            used = period.moved(value.used_in, place, copy)
            yield dataclasses.replace(value, name=f"{value.name} +{copy}" if copy else value.name, made_in=made, used_in=used)
