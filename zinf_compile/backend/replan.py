"""Plans made anew from measured costs, between two steps: `GraphCompiler` says which graphs, each step's end says when.

Note: planning again
    Some of the first steps are recorded, and one in `AGAIN` later on. Ranks exchange the maxima of what regions, links and
    updates took; rank 0 plans by these; the new plans are taken where they bring the simulated seconds down by more than `GAIN`,
    by all ranks or by none. Graphs are lowered again from regions that are compiled already: only transfers start elsewhere.
    On one rank a forward is planned together with the backward that follows it (`replan_pairs`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections import Counter
from collections.abc import Sequence

import torch

from zinf_compile.errors import ZinfError
from zinf_compile.plan.both_graphs import CODE_BETWEEN
from zinf_compile.plan.costs import Costs, LinkCost
from zinf_compile.plan.hold_back import within_room
from zinf_compile.plan.plan import Plan
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Link
from zinf_compile.plan.shards_between import shards_between
from zinf_compile.plan.simulate import step_seconds
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.lanes.step_recorder import StepRecord
from zinf_compile.runtime.system.process_wide import process_wide

from .kept_graphs import KeptGraph, Then, side_of
from .measured_costs import collective_costs, costs_of, link_costs, region_seconds, update_seconds
from .replan_pairs import Change, change_of, pair_change, pairs_of

FIRST, MEASURED, AGAIN = 2, 3, 200
"""Steps before the first one that is recorded; steps that are recorded then; steps until that is done again."""
GAIN = 0.03
"""Of the simulated seconds: less is not worth another plan."""
SLOWER = 4.0
"""Times that a link is slower than was assumed, to be worth a warning."""

_log = logging.getLogger("zinf_compile")

Row = tuple[KeptGraph, Then]
"""A graph, and what it becomes."""


class Replanner:
    """Measures steps of one rank, and plans its graphs again."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._graphs: list[weakref.ref[KeptGraph]] = []
        self._alone: weakref.WeakSet[KeptGraph] = weakref.WeakSet()
        """Those that this rank has compiled by itself: they follow the others of their key."""
        self.costs = Costs()
        self._records: list[StepRecord] = []
        self._steps = 0
        self.changes: list[str] = []
        """What was said of each time that plans were made again."""
        context.step_ended.append(self._step_ended)

    def add(self, kept: KeptGraph) -> None:
        """Plan a graph again when costs are known. All ranks add the same graphs in the same order, but those of one alone."""
        if kept.together:
            self._graphs.append(weakref.ref(kept))
        else:
            self._alone.add(kept)

    def _step_ended(self) -> None:
        self._steps += 1
        place = self._steps - FIRST if self._steps < FIRST + AGAIN else (self._steps - FIRST) % AGAIN
        if place == MEASURED:
            self._plan_again()
            self._records = []
        elif 0 <= place < MEASURED:
            self._context.record_next_step().then.append(self._records.append)

    def _plan_again(self) -> None:
        context, graphs = self._context, self._living()
        if not graphs:
            return
        measured = self._measure(graphs)
        if measured is None:
            return
        seconds, links, updates = measured
        structures = {(kept.name, n): key for kept in graphs for n, key in enumerate(kept.structures)}
        by_key = {(kept.name, n): each for kept, row in zip(graphs, seconds, strict=True) for n, each in enumerate(row) if each}
        self._tell_of_links(graphs, links)
        self.costs = costs_of(by_key, structures, links, updates)
        problems = [self.costs.of_regions(kept.problem, row) for kept, row in zip(graphs, seconds, strict=True)]
        for kept in graphs:
            kept.planner.costs = self.costs
        changes = self._changes(graphs, problems) if context.rank == 0 else None
        self._take(graphs, self._shared(graphs, problems, changes))

    def _living(self) -> list[KeptGraph]:
        """Return the graphs that every rank still has."""
        mine = [reference() for reference in self._graphs]
        if not mine:
            return []
        alive = torch.tensor([float(kept is not None and kept.live is not None) for kept in mine], dtype=torch.float64)
        everywhere = self._context.ranks.exchange(alive, what="planned graphs").amin(0).tolist()
        return [kept for kept, there in zip(mine, everywhere, strict=True) if there and kept is not None]

    def _measure(self, graphs: Sequence[KeptGraph]) -> tuple[list[list[float]], dict[str, LinkCost], float] | None:
        """Return seconds of the regions of each graph, costs of links, seconds of updates: the maxima of all ranks.

        Of links between ranks, what transfers took without the wait for the other ranks.
        """
        by_region = region_seconds(self._records)
        links = _links(graphs)
        mine = link_costs(self._records, links)
        values = [by_region.get((kept.name, n), 0.0) for kept in graphs for n in range(kept.problem.count)]
        if not any(values) and self._context.size == 1:
            return None
        for link in links:
            cost = mine.get(link.name)
            values += [0.0, 0.0] if cost is None else [1 / cost.bytes_per_second, cost.latency_seconds]
        values.append(update_seconds(self._records))
        most = self._context.ranks.exchange(torch.tensor(values, dtype=torch.float64), what="measured costs").amax(0).tolist()
        rows, at = [], 0
        for kept in graphs:
            rows.append(most[at : at + kept.problem.count])
            at += kept.problem.count
        known = {}
        for number, link in enumerate(links):
            pace, latency = most[at + 2 * number : at + 2 * number + 2]
            if pace:
                known[link.name] = LinkCost(1 / pace, latency)
        between = [link for link in links if None in (link.source, link.destination)]
        if between:
            known |= collective_costs(self._records, between, self._exchanged)
        return rows, known, most[-1]

    def _exchanged(self, values: Sequence[float]) -> list[list[float]]:
        found: list[list[float]] = self._context.ranks.exchange(
            torch.tensor(values, dtype=torch.float64), what="measured costs of collectives"
        ).tolist()
        return found

    def _changes(self, graphs: Sequence[KeptGraph], problems: Sequence[StepProblem]) -> list[Change]:
        """Return what to plan otherwise, where that gains enough; on rank 0."""
        by_name = {kept.name: problem for kept, problem in zip(graphs, problems, strict=True)}
        found: list[Change] = []
        for together in pairs_of(graphs, self._records):
            own = [by_name[kept.name] for kept in together]
            pair = pair_change(together, own) if len(together) > 1 else None
            found += map(change_of, together, own) if pair is None else [pair]
        runs = Counter(run.program for record in self._records for run in record.graphs)
        before = math.fsum(change.before * runs[change.graphs[0].name] for change in found)
        after = math.fsum(change.after * runs[change.graphs[0].name] for change in found)
        if after >= before * (1 - GAIN):
            _log.info("costs were measured after %d steps; no plan gains more than %.0f %%", self._steps, 100 * GAIN)
            return []
        return [change for change in found if any(change.then)]

    def _shared(
        self, graphs: Sequence[KeptGraph], problems: Sequence[StepProblem], changes: Sequence[Change] | None
    ) -> list[Change]:
        """Return the changes of rank 0, on several ranks each of one graph; `changes`: on rank 0 itself."""
        ranks = self._context.ranks
        if ranks.size == 1:
            return list(changes or ())
        plans = {change.graphs[0]: change.then[0] for change in changes or ()}
        mine = [then and then.plan for then in map(plans.get, graphs)] if changes is not None else None
        found: list[Plan | None] = ranks.share(mine, what="sharing plans made again")
        ranks.agree([plan.digest() if plan else "" for plan in found], what="comparing plans made again")
        return [
            Change((kept,), (Then(problem, plan, kept.members),), step_seconds(problem, kept.plan), step_seconds(problem, plan))
            for kept, problem, plan in zip(graphs, problems, found, strict=True)
            if plan is not None
        ]

    def _with_shards(self, graphs: Sequence[KeptGraph], rows: Sequence[Row]) -> list[Row]:
        """Return the rows with the shards that each backward on several ranks finds then, also where only its forward changes."""
        found = dict(rows)
        forwards = {kept.number: kept for kept in graphs if not kept.is_backward}
        for kept in graphs:
            if kept.is_backward and kept.planner.leaves_shards and (forward := forwards.get(kept.number)) is not None:
                own = found.get(kept) or Then(kept.problem, kept.plan, kept.members, kept.handed)
                before = found.get(forward) or forward
                sides = (side_of(each.problem, each.plan, each.members) for each in (before, own))
                handed = shards_between(*sides, between=CODE_BETWEEN * forward.results)
                if kept in found or handed != own.handed:
                    found[kept] = dataclasses.replace(own, handed=handed)
        return list(found.items())

    def _take(self, graphs: Sequence[KeptGraph], changes: Sequence[Change]) -> None:
        """Act the new plans out from the next step on, on all ranks or on none."""
        ranks, problem_of_any = self._context.ranks, ""
        if not changes:
            return
        rows = [(kept, then) for change in changes for kept, then in zip(change.graphs, change.then, strict=True) if then]
        by_key = {kept.key: then for kept, then in rows}
        alone = [kept for kept in self._alone if kept.key in by_key and kept.live is not None]
        programs = []
        try:
            for kept in alone:
                plan = within_room(kept.problem, by_key[kept.key].plan)
                rows.append((kept, Then(kept.problem, plan, kept.members)))
            rows = self._with_shards([*graphs, *alone], rows)
            programs = [(kept, then, kept.lower(then)) for kept, then in rows]
        except ZinfError as error:
            problem_of_any = str(error)
        if told := ranks.problem_of_any(problem_of_any, what="lowering plans made again"):
            _log.warning("plans stay as they are: %s", told)
            return
        lines = [f"{each.name} {each.before:.3g} s to {each.after:.3g} s ({each.rows} rows differ)" for each in changes]
        for kept, then, program in programs:
            kept.take(then, program)
        text = f"planned again after step {self._steps}, by measured costs: simulated {', '.join(lines)}"
        self.changes.append(text)
        if self._context.rank == 0:
            _log.info("%s", text)

    def _tell_of_links(self, graphs: Sequence[KeptGraph], links: dict[str, LinkCost]) -> None:
        for link in _links(graphs):
            now, before = links.get(link.name), self.costs.link(link).bytes_per_second
            if now is None or self._context.rank:
                continue
            slower = before / now.bytes_per_second
            text = f"{link.name} moves {now.bytes_per_second / 1e9:.3g} GB/s, where plans assumed {before / 1e9:.3g} GB/s"
            if slower >= SLOWER and None not in (link.source, link.destination):
                self.changes.append(text)
                _log.warning("%s: it is %.0f times slower; plans are made again, homes are not (option machine)", text, slower)
            elif not math.isclose(slower, 1.0, rel_tol=0.2):
                _log.info("%s", text)


def _links(graphs: Sequence[KeptGraph]) -> list[Link]:
    """Return the links that steps of these graphs use, in one order on all ranks, at the rates that were assumed."""
    found: dict[str, Link] = {}
    for kept in graphs:
        for link in kept.planner.assumed_links():
            found.setdefault(link.name, link)
    return list(found.values())


_replanners: weakref.WeakKeyDictionary[Context, Replanner] = process_wide(weakref.WeakKeyDictionary())


def replanner_of(context: Context) -> Replanner:
    """Return what plans the graphs of these ranks again; made at the first call."""
    found = _replanners.get(context)
    if found is None:
        found = _replanners[context] = Replanner(context)
    return found
