"""Costs of regions, links and updates from records of steps. `replan` calls it."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from zinf_compile.plan.costs import LARGE_BYTES, Costs, LinkCost, link_cost
from zinf_compile.plan.problem_parts import Link
from zinf_compile.runtime.lanes.overlap_log import busy_s, joined
from zinf_compile.runtime.lanes.step_recorder import COMPUTE, ISSUE, UPDATE, StepRecord

Key = tuple[str, int]
"""A program's name, and the number of a region in it."""


def region_seconds(records: Sequence[StepRecord]) -> dict[Key, float]:
    """Return the median seconds of each region over all its runs: its compute, and what the host issues before it."""
    found: dict[Key, list[float]] = defaultdict(list)
    for record in records:
        for (run, region), seconds in run_seconds(record).items():
            found[record.graphs[run].program, region].append(seconds)
    return {key: statistics.median(each) for key, each in found.items()}


def run_seconds(record: StepRecord) -> dict[tuple[int, int], float]:
    """Return the seconds of each region in each run of a graph in a step.

    What the host does outside graphs, updates and waits belongs to the first region of the graph that follows, and at the end of
    the step to the last one.
    """
    still = joined([(wait.start, wait.end) for wait in record.waits])
    times: dict[tuple[int, int], float] = defaultdict(float)
    for span in record.spans:
        if span.run < 0:
            continue
        if span.lane == COMPUTE:
            times[span.run, span.region] += span.end - span.start
        elif span.lane == ISSUE:
            waited = sum(max(0.0, min(span.end, end) - max(span.start, start)) for start, end in still)
            times[span.run, span.region] += max(0.0, span.end - span.start - waited)
    known = joined([*still, *((span.start, span.end) for span in record.of(UPDATE))])
    before = 0.0
    for run, graph in enumerate(record.graphs):
        times[run, 0] += max(0.0, graph.start - before - busy_s(known, before, graph.start))
        before = max(before, graph.end)
    if times:
        times[max(times)] += max(0.0, record.seconds - before - busy_s(known, before, record.seconds))
    return dict(times)


def costs_of(
    seconds: Mapping[Key, float], structures: Mapping[Key, str], links: Mapping[str, LinkCost], update_seconds: float
) -> Costs:
    """Return costs by structure of regions, the median of those that share one."""
    by_structure: dict[str, list[float]] = defaultdict(list)
    for key, each in seconds.items():
        if key in structures:
            by_structure[structures[key]].append(each)
    regions = {structure: statistics.median(each) for structure, each in by_structure.items()}
    return Costs(regions=regions, links=dict(links), update_seconds=update_seconds)


def link_costs(records: Sequence[StepRecord], links: Sequence[Link]) -> dict[str, LinkCost]:
    """Return the costs of links that moved enough to tell: of each those of the record in which they are in the middle."""
    found: dict[str, LinkCost] = {}
    for link in links:
        each = [link_cost([(s.start, s.end, s.bytes) for s in record.of(link.name)], link) for record in records]
        known = [cost for cost in each if cost is not None]
        known.sort(key=lambda cost: cost.latency_seconds + LARGE_BYTES / cost.bytes_per_second)
        if known:
            found[link.name] = known[len(known) // 2]
    return found


def collective_costs(
    records: Sequence[StepRecord], links: Sequence[Link], exchange: Callable[[Sequence[float]], Sequence[Sequence[float]]]
) -> dict[str, LinkCost]:
    """Return the costs of links between ranks, equal on all: transfers there wait for the rank that comes last to each.

    How long one takes is what the rank says for which that was shortest. A link is left out of which ranks have recorded other
    numbers of transfers. `exchange` returns the values of each rank: a collective operation.
    """
    spans = {link.name: [span for record in records for span in record.of(link.name)] for link in links}
    counts = exchange([float(len(each)) for each in spans.values()])
    alike = [link for number, link in enumerate(links) if spans[link.name] and len({row[number] for row in counts}) == 1]
    if not alike:
        return {}
    mine = [span for link in alike for span in spans[link.name]]
    everyone = exchange([*(span.end - span.start for span in mine), *(float(span.bytes) for span in mine)])
    seconds = [min(each) for each in zip(*everyone, strict=True)][: len(mine)]
    moved = list(map(int, everyone[0][len(mine) :]))
    found: dict[str, LinkCost] = {}
    first = 0
    for link in alike:
        last = first + len(spans[link.name])
        ends = list(itertools.accumulate(seconds[first:last]))
        if (cost := link_cost(zip([0.0, *ends[:-1]], ends, moved[first:last], strict=True), link)) is not None:
            found[link.name] = cost
        first = last
    return found


def update_seconds(records: Sequence[StepRecord]) -> float:
    """Return the median seconds of all updates of a step, what their thread waited for left out."""
    return statistics.median(sum(s.end - s.start for s in record.of(UPDATE)) for record in records) if records else 0.0
