"""The problem of a step from the graphs that run in it: `zinf plan` and the backend call it, planners solve it.

Graphs are as `region_passes` leave them: gathers just in time, transfers at the boundaries of regions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from torch import fx

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.graph.node_facts import reduced_at_step, slot_behind, wire_format, wire_type
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Allowed, Region, SavedValue, StatePiece, Unit

from .liveness import peak_of_regions
from .region_facts import bytes_of_region, kind_of, operations_of, owners_of, place_of, shape_of, type_of
from .saved_values import Saved, find_saved, saved_rows
from .step_facts import StepFacts
from .step_regions import GraphRegions, Run, find_regions

Pair = tuple[fx.Graph, fx.Graph | None]
"""A forward graph and its backward; None: it has none."""


def step_problem(pairs: Sequence[Pair], facts: StepFacts, *, micro_batches: int = 1, name: str = "") -> StepProblem:
    """Return the problem of a step that runs all forwards in order and then their backwards in reverse, `micro_batches` times.

    Nothing is run, and weights need not exist: sizes and operations follow from the graphs' fake tensors, with dynamic sizes as
    they were traced. A parameter is one unit wherever its name is the same; parameters that always move together are one.
    """
    forwards = [(number, False) for number in range(len(pairs))]
    backwards = [(number, True) for number, (_, backward) in reversed(list(enumerate(pairs))) if backward is not None]
    return problem_of_runs(pairs, [*forwards, *backwards] * micro_batches, facts, name=name)


def problem_of_runs(pairs: Sequence[Pair], order: Sequence[tuple[int, bool]], facts: StepFacts, *, name: str = "") -> StepProblem:
    """Return the problem of a step that runs graphs in this order, each the number of its pair and whether it is the backward."""
    runs = list(_runs(pairs, order))
    saved = {} if facts.only_params else {number: find_saved(*pair) for number, pair in enumerate(pairs)}
    members = unit_members(list(dict.fromkeys(run.graph for run in runs)), facts.home, apart=facts.apart)
    units = list(_units(runs, members, facts))
    return StepProblem(
        regions=tuple(region for run in runs for region in _regions(run, saved.get(run.pair, {}), facts)),
        memories=facts.memories,
        links=facts.links,
        units=tuple(units),
        saved=tuple(saved_rows(runs, saved, facts.saved_choices)),
        pieces=() if facts.only_params else tuple(_pieces(units, members, facts)),
        world_size=facts.world_size,
        allowed=_allowed(facts, units),
        name=name,
    )


def saved_values(pair: Pair) -> tuple[SavedValue, ...]:
    """Return what a forward saves for its backward, with the regions of both that read it, one graph behind the other."""
    runs = list(_runs([pair], [(0, False), (0, True)]))
    return tuple(saved_rows(runs, {0: find_saved(*pair)}, ()))


def unit_members(
    graphs: Sequence[fx.Graph],
    home: Callable[[ParameterSlot], Tier | None] = lambda slot: None,
    *,
    apart: Callable[[ParameterSlot], Hashable] = lambda slot: None,
) -> dict[str, tuple[ParameterSlot, ...]]:
    """Return the slots of each unit by its name: parameters that are used, grouped and reduced together in all graphs are one.

    Where homes are decided, they have one; and for all of a unit `apart` is the same. Parameters without elements are left out:
    nothing moves for them.
    """
    slots: dict[str, ParameterSlot] = {}
    signs: dict[str, list[object]] = defaultdict(list)
    for number, graph in enumerate(graphs):
        found = find_regions(graph)
        for stay in found.residences:
            slot = slot_behind(stay.gather)
            slots.setdefault(slot.name, slot)
            signs[slot.name].append((number, stay.due, stay.until, stay.group, wire_type(stay.gather) == slot.dtype))
        for node, region in found.reductions:
            slot = slot_behind(node)
            slots.setdefault(slot.name, slot)
            signs[slot.name].append((number, region))
    together: dict[tuple[object, ...], list[ParameterSlot]] = defaultdict(list)
    for own, slot in slots.items():
        if not slot.numel:
            continue
        together[slot.requires_grad, slot.dtype, home(slot), apart(slot), *signs[own]].append(slot)
    return {_name(found): tuple(found) for found in together.values()}


def _name(slots: Sequence[ParameterSlot]) -> str:
    return slots[0].name if len(slots) == 1 else f"{slots[0].name} .. {slots[-1].name}"


def _runs(pairs: Sequence[Pair], order: Sequence[tuple[int, bool]]) -> Iterator[Run]:
    known: dict[fx.Graph, GraphRegions] = {}
    times: Counter[tuple[int, bool]] = Counter()
    first = 0
    for number, is_backward in order:
        graph = pairs[number][is_backward]
        assert graph is not None, "what runs is there"
        if graph not in known:
            known[graph] = find_regions(graph)
        regions = known[graph]
        name = f"{'backward' if is_backward else 'forward'} {number}"
        yield Run(graph, regions, name, first, number, times[number, is_backward], is_backward)
        times[number, is_backward] += 1
        first += regions.count


def _regions(run: Run, saved: Saved, facts: StepFacts) -> Iterator[Region]:
    owners = owners_of(run.graph)
    peaks = [0] * run.regions.count
    if not facts.only_params:
        reduced = {owners[source] for node, _ in run.regions.reductions for source in node.all_input_nodes[:1]}
        without = reduced | {owner for owner in saved if owner in owners}
        peaks = peak_of_regions(run.graph, run.regions.compute, owners, without=without)
    for number, (nodes, peak) in enumerate(zip(run.regions.compute, peaks, strict=True)):
        place = f" {found}" if (found := place_of(nodes)) else ""
        given = facts.seconds(nodes)
        yield Region(
            name=f"{run.name}:{number}{place}",
            seconds=seconds_of_region(nodes, owners, facts) if given is None else given,
            workspace_bytes=peak,
            structure=_digest((run.is_backward, structure_of(nodes))),
            graph=run.name,
            micro_batch=run.micro_batch,
        )


def seconds_of_region(nodes: Sequence[fx.Node], owners: Mapping[fx.Node, fx.Node], facts: StepFacts) -> float:
    """Return the longer of a region's operations, each in its own type, and of its inputs and outputs passing memory once.

    `owners`: those of the memory of the graph's values.
    """
    moved = bytes_of_region(nodes, owners)
    return facts.launch_seconds + max(operation_seconds(nodes, facts), moved / facts.bytes_per_second)


def operation_seconds(nodes: Sequence[fx.Node], facts: StepFacts) -> float:
    """Return the seconds of some nodes' operations, each in its own type."""
    counted = ((node, operations_of(node)) for node in nodes)
    return sum(operations / facts.flops_per_second(type_of(node)) for node, operations in counted if operations)


def _units(runs: Sequence[Run], members: dict[str, tuple[ParameterSlot, ...]], facts: StepFacts) -> Iterator[Unit]:
    uses: dict[str, set[int]] = defaultdict(set)
    gathers: dict[str, fx.Node] = {}
    gradients: dict[str, set[int]] = defaultdict(set)
    at_step: set[str] = set()
    for run in runs:
        for stay in run.regions.residences:
            own = slot_behind(stay.gather).name
            uses[own].update(range(run.first + stay.due, run.first + stay.until))
            gathers.setdefault(own, stay.gather)
        for node, region in run.regions.reductions:
            gradients[slot_behind(node).name].add(run.first + region)
            if reduced_at_step(node):
                at_step.add(slot_behind(node).name)
    size, count = facts.world_size, runs[-1].first + runs[-1].regions.count if runs else 0
    for name, slots in members.items():
        if (used := uses[slots[0].name]) and facts.stays(slots[0]):
            used.update(range(min(used) if slots[0].requires_grad else 0, count))
        gather = gathers.get(slots[0].name)
        wire = slots[0].format if gather is None else wire_format(gather)
        is_gathered = gather is not None and (size > 1 or wire != slots[0].format)
        shards = [-(-slot.numel // size) for slot in slots]
        reduces = bool(gradients[slots[0].name]) and not facts.only_params
        reduced = slots[0].reduce_format
        if not (uses[slots[0].name] or reduces):
            continue
        yield Unit(
            name=name,
            stored_bytes=sum(map(slots[0].format.bytes, shards)),
            uses=tuple(sorted(uses[slots[0].name])),
            full_bytes=sum(wire.bytes(slot.numel) for slot in slots) if is_gathered or size > 1 else 0,
            wire_bytes=(size - 1) * sum(map(wire.bytes, shards)) if is_gathered else 0,
            trained=slots[0].requires_grad or facts.only_params,
            gradients=tuple(sorted(gradients[slots[0].name])) if reduces else (),
            gradient_bytes=sum(map(reduced.bytes, shards)) if reduces else 0,
            full_gradient_bytes=sum(reduced.bytes(slot.numel) for slot in slots) if reduces and size > 1 else 0,
            reduced_at_step=reduces and slots[0].name in at_step,
            reduced_bytes=(size - 1) * sum(map(reduced.bytes, shards)) if reduces else 0,
            structure=_digest((_pattern(name), [slot.shape for slot in slots], str(slots[0].dtype))),
            home=facts.home(slots[0]),
        )


def _allowed(facts: StepFacts, units: Sequence[Unit]) -> Allowed:
    """Return what is allowed: gradients that are kept whole until the step don't leave the device."""
    at_step = any(unit.reduced_at_step for unit in units)
    return dataclasses.replace(facts.allowed, grads=(Tier.DEVICE,)) if at_step else facts.allowed


def _pieces(units: Sequence[Unit], members: dict[str, tuple[ParameterSlot, ...]], facts: StepFacts) -> Iterator[StatePiece]:
    apart = sum(memory.tier.in_memory for memory in facts.memories) > 1
    host_rate = facts.host_update_bytes_per_second if apart else facts.device_update_bytes_per_second  # one processor
    for unit in units:
        if not unit.gradients:
            continue
        slot = members[unit.name][0]
        numel = sum(-(-each.numel // facts.world_size) for each in members[unit.name])
        cuts = range(0, max(1, numel), facts.piece_numel)
        for number, start in enumerate(cuts):
            count = min(facts.piece_numel, numel - start)
            states = sum(format_of(dtype).bytes(count) for dtype in facts.state_types(slot))
            values, gradient = slot.format.bytes(count), slot.reduce_format.bytes(count)
            read = 0 if facts.has_master(slot) else values
            passed = 2 * states + gradient + values + read
            yield StatePiece(
                name=unit.name if len(cuts) == 1 else f"{unit.name} #{number}",
                units=(unit.name,),
                state_bytes=states,
                read_bytes=states,
                written_bytes=states,
                value_bytes=values,
                value_read_bytes=read,
                gradient_bytes=gradient,
                host_seconds=passed / host_rate,
                device_seconds=passed / facts.device_update_bytes_per_second,
                structure=unit.structure,
            )


def structure_of(nodes: Sequence[fx.Node]) -> str:
    """Return a key that regions of the same operators, shapes and types share: they take as long."""
    return _digest([(kind_of(node), *shape_of(node)) for node in nodes])


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
