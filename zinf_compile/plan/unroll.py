"""A plan, repeated for some steps, as tasks on lanes: what each waits for, and how long it takes by itself. `simulate` runs them.

Lanes are those of the problem's links, `compute`, and `update` for updates beside compute. A lane runs one task at a time: of
those whose reasons to wait, in `after`, are gone, the one that was issued first. Compute and collectives keep to the order of
issue, and have the task before as a reason. So the tasks are a graph without cycles.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

import networkx as nx

from zinf_compile.ir.tiers import Tier

from .occupancy import bytes_of
from .plan import Fetch, Gather, Kind, Plan, Reduction, Store, Update
from .problem import StepProblem
from .problem_parts import Link
from .update_traffic import UpdateTraffic, update_traffic

COMPUTE, UPDATE = "compute", "update"
"""Lanes beside those of links."""


@dataclasses.dataclass(frozen=True, slots=True)
class Handed:
    """A part of a shard that an update makes, and hands to who has asked for it by then."""

    update: int
    """The task that makes it."""
    written: int
    """The task behind which it is where the shard lives."""
    part: float


@dataclasses.dataclass(slots=True)
class Task:
    """A region, an update, a transfer, or a boundary at which compute waits."""

    name: str
    lane: str
    step: int
    seconds: float
    """By itself."""
    bytes: int = 0
    link: Link | None = None
    after: list[int] = dataclasses.field(default_factory=list)
    handed: tuple[Handed, ...] = ()
    """Of a fetch from a drive: what need not be moved where the update is not over yet when `issued` is."""
    issued: int = -1


class Unrolled:
    """The tasks of a plan that is repeated `steps` times, beginning with nothing fetched ahead.

    Of a fetch that updates may hand a shard to, `after` has the updates: whether it is also behind their writes is seen when it
    is issued. What the device updates between regions is handed to no fetch that was issued before, and counts as read.
    """

    def __init__(self, problem: StepProblem, plan: Plan, steps: int) -> None:
        self.tasks: list[Task] = []
        self.begins: list[int] = []
        """The task at which each step begins, and last the one at which the last step has ended."""
        self.issued: dict[int, int] = {}
        """By boundary, counted from the first step on: the task from which on what starts there may run."""
        self.freed: dict[int, int] = {}
        """By boundary: the task behind which what is due there has left its memory."""
        self._problem, self._plan, self._steps = problem, plan, steps
        self._lane_end: dict[str, int] = {}
        self._rows: dict[int, list[tuple[int, Gather | Reduction | Fetch | Store]]] = defaultdict(list)
        self._updates: dict[int, list[tuple[int, Update]]] = defaultdict(list)
        self._frees: dict[int, list[int]] = defaultdict(list)
        self._arrivals: dict[int, list[int]] = defaultdict(list)
        self._new_values: dict[int, list[int]] = defaultdict(list)
        self._on_compute: dict[int, list[tuple[int, Update, UpdateTraffic, list[int], list[int]]]] = defaultdict(list)
        self._fetched: dict[tuple[Kind, str, str], list[tuple[int, int, int]]] = defaultdict(list)
        self._left: dict[tuple[Kind, str, str, int], list[int]] = defaultdict(list)
        self._reduced: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._valued: dict[str, list[Handed]] = defaultdict(list)
        self._chains: list[list[int]] = []
        self._place()
        for boundary in range(steps * problem.count + 1):
            self._boundary(boundary)

    def graph(self) -> nx.DiGraph:
        """Return the tasks as a graph: nodes are numbers with name, lane, step and seconds; edges lead from `after`."""
        found: nx.DiGraph = nx.DiGraph()
        for number, task in enumerate(self.tasks):
            found.add_node(number, name=task.name, lane=task.lane, step=task.step, seconds=task.seconds, bytes=task.bytes)
        found.add_edges_from((before, number) for number, task in enumerate(self.tasks) for before in task.after)
        return found

    def _place(self) -> None:
        """Put each row under the boundaries at which it is issued."""
        shared, local, count = self._plan.shared, self._plan.local, self._problem.count
        rows: list[Gather | Reduction | Fetch | Store] = [*shared.reductions, *local.stores, *local.fetches, *shared.gathers]
        for step in range(self._steps + 1):
            for row in rows:
                self._rows[max(0, step * count + row.start)].append((step, row))
            for update in local.updates:
                self._updates[step * count + update.start].append((step, update))

    def _add(self, task: Task, after: Iterable[int]) -> int:
        """Add a task; on compute, and between ranks, behind the lane's last one."""
        number = len(self.tasks)
        task.after = list(after)
        if task.lane == COMPUTE or (task.link is not None and None in (task.link.source, task.link.destination)):
            if task.lane in self._lane_end:
                task.after.append(self._lane_end[task.lane])
            self._lane_end[task.lane] = number
        task.after = sorted(set(task.after))
        self.tasks.append(task)
        return number

    def _boundary(self, boundary: int) -> None:
        problem, count = self._problem, self._problem.count
        step, region = divmod(boundary, count)
        ended = step == self._steps
        freed = self._add(Task(f"boundary {region}", COMPUTE, step, 0.0), self._frees.pop(boundary, ()))
        self.freed[boundary] = freed
        rows = sorted(self._rows.get(boundary, ()), key=lambda item: item[0])
        for row_step, row in rows:
            if isinstance(row, Reduction | Store):
                self._issue(row_step, row, freed)
        for waiting in self._on_compute.pop(boundary, ()):
            self._run_update(*waiting)
        for update_step, update in self._updates.get(boundary, ()):
            self._issue_update(update_step, update, freed)
        waits = [*self._new_values.pop(boundary, ()), *self._frees.pop(boundary, ())]
        self.issued[boundary] = issued = self._add(Task(f"issue {region}", COMPUTE, step, 0.0), waits)
        for row_step, row in rows:
            if isinstance(row, Fetch | Gather):
                self._issue(row_step, row, issued)
        if region == 0:
            self.begins.append(issued)
        if ended:
            return
        arrived = self._arrivals.pop(boundary, [])
        for remake in self._plan.shared.remakes:
            if remake.before == region:
                for number in remake.regions:
                    again = problem.regions[number]
                    self._add(Task(f"{again.name} again", COMPUTE, step, again.seconds), arrived)
        now = problem.regions[region]
        self._add(Task(now.name or f"region {region}", COMPUTE, step, now.seconds), arrived)

    def _issue(self, step: int, row: Gather | Reduction | Fetch | Store, issued: int) -> None:
        problem, at = self._problem, step * self._problem.count
        device, start = problem.device, step * self._problem.count + row.start
        if isinstance(row, Gather):
            unit = problem.unit[row.unit]
            source = self._shard(step, row.unit, str(device), start)
            if problem.world_size == 1:  # a cast, part of the region
                self._arrivals[at + row.due] += source
                return
            number = self._transfer(f"gather {row.unit}", problem.link(None, device), unit.wire_bytes, step, [issued, *source])
            self._arrivals[at + row.due].append(number)
        elif isinstance(row, Reduction):
            link = problem.link(device, None)
            number = self._transfer(f"reduce {row.unit}", link, problem.unit[row.unit].reduced_bytes, step, [issued])
            self._reduced[row.unit, step].append(number)
            self._frees[at + row.due].append(number)
        elif isinstance(row, Fetch):
            link, count = problem.link(row.source, row.to), bytes_of(problem, row)
            name, after = f"fetch {row.kind} {row.name}", self._source(step, row, start)
            handed = () if row.source.in_memory or row.kind is not Kind.PARAM else tuple(self._valued[row.name])
            after = [each.update for each in handed] or after
            number = self._transfer(name, link, count, step, [issued, *after])
            self.tasks[number].handed, self.tasks[number].issued = handed, issued
            self._arrivals[at + row.due].append(number)
            self._fetched[row.kind, row.name, row.to].append((start, at + row.until, number))
        else:
            link, count = problem.link(row.source, row.to), bytes_of(problem, row)
            table = self._left[row.kind, row.name, row.to, step]
            if row.kind is Kind.GRAD and table and not row.to.in_memory:
                count *= 2
            before = self._left.get((row.kind, row.name, row.source, step), [])
            if row.kind is Kind.GRAD and row.source == device:
                before = self._reduced.get((row.name, step), [])
            number = self._transfer(
                f"store {row.kind} {row.name}", link, count, step, [issued, *before[len(table) : len(table) + 1]]
            )
            table.append(number)
            self._frees[at + row.due].append(number)

    def _transfer(self, name: str, link: Link, count: int, step: int, after: Iterable[int]) -> int:
        return self._add(Task(name, link.on_lane, step, link.seconds(count), count, link), after)

    def _source(self, step: int, row: Fetch, start: int) -> list[int]:
        if row.kind is Kind.PARAM:
            return self._shard(step, row.name, row.source, start)
        return self._covering(row.kind, row.name, row.source, start) or self._left.get((row.kind, row.name, row.source, step), [])

    def _covering(self, kind: Kind, name: str, tier: str, start: int) -> list[int]:
        found = [number for begin, end, number in self._fetched[kind, name, tier] if begin <= start < end]
        return found[-1:]

    def _shard(self, step: int, name: str, tier: str, start: int) -> list[int]:
        """Return what has to have run before a shard is on a tier."""
        return self._covering(Kind.PARAM, name, tier, start) or [each.written for each in self._valued[name]]

    def _issue_update(self, step: int, update: Update, freed: int) -> None:
        problem, plan = self._problem, self._plan
        piece = problem.piece[update.piece]
        traffic = update_traffic(problem, plan.local.homes, piece, update.on)
        after = [freed]
        for name in piece.units:
            home = plan.local.homes.grads[name]
            gone = (
                self._left.get((Kind.GRAD, name, home, step), [])
                if home != problem.device
                else self._reduced.get((name, step), [])
            )
            after += gone
        limit = plan.local.update_buffers
        chain: list[int] = []
        if limit and traffic.buffers:
            if len(self._chains) >= limit:
                after += self._chains[-limit]  # a chain on the device has run by now: `verify`
            self._chains.append(chain)
        arrived: dict[Tier | None, list[int]] = {}
        for link, moved in traffic.reads:
            passed = arrived.pop(link.source, after)
            arrived.setdefault(link.destination, []).append(self._transfer(f"read {piece.name}", link, moved, step, passed))
        after = [number for numbers in arrived.values() for number in numbers] or after
        due = step * problem.count + update.due
        if traffic.takes_compute and update.due > update.start:
            self._on_compute[due].append((step, update, traffic, after, chain))
        else:
            self._run_update(step, update, traffic, after, chain)

    def _run_update(self, step: int, update: Update, traffic: UpdateTraffic, after: list[int], chain: list[int]) -> None:
        problem, piece = self._problem, self._problem.piece[update.piece]
        lane = COMPUTE if traffic.takes_compute else UPDATE
        number = self._add(Task(f"update {piece.name}", lane, step, traffic.seconds), after)
        last = in_memory = written = number  # where compute reads values of a drive, a fetch has waited for them
        for link, moved in traffic.writes:
            last = self._transfer(f"write {piece.name}", link, moved, step, [last])
            if link in traffic.values_written:
                written = last
                in_memory = last if link.destination is not None and link.destination.in_memory else in_memory
        chain.append(last)
        at = step * problem.count
        self._new_values[at + update.due].append(in_memory)
        self._new_values[at + self._plan.local.updates_done].append(last)
        for name in piece.units:
            table = self._valued[name]
            if table and self.tasks[table[0].update].step != step:
                table.clear()
            table.append(Handed(number, written, problem.updated_part[name, piece.name]))
