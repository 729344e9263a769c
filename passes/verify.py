"""Rules of a legal schedule. `run_passes` and the backend check them; imports nothing from the passes that make schedules."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from zinf_compile.errors import IllegalGraphError
from zinf_compile.ir import ops
from zinf_compile.ir.formats import is_narrower
from zinf_compile.ir.op_spec import LONE_GROUP, SCHEDULE_OPS, SPECS, moves_values
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.graph.alias import METADATA_OPS, alias_closure, sharing, written_inputs
from zinf_compile.passes.graph.node_facts import (
    Counts,
    argument_of,
    counts_all,
    gather_started_by,
    group_of,
    hop_of,
    is_collective,
    live_bytes,
    parameters,
    positions,
    slot_of,
    values_behind,
    wire_type,
)
from zinf_compile.passes.graph.remade import is_dropped, runs_again


def verify(gm: fx.GraphModule, *, complete: bool = True, limit_bytes: int | None = None) -> fx.GraphModule:
    """Raise `IllegalGraphError` naming every broken rule; return `gm` unchanged otherwise.

    - Compute reads gathered units, never hollow parameters.
    - A gather's handle has one user, a wait.
    - A unit is released once, and no operator reads it after its release.
    - No output of the graph shares a gathered unit's memory, but for units that are kept for the backward.
    - A reduced gradient is an output of the graph, directly or through swap_outs.
    - The hops of a swap are contiguous: to the device for shards, from the device for gradients.
    - Saved values leave a forward from the device, not changed any more, and only as stand-ins; a backward reads them after the
      last hop to the device.
    - What stands for a value that was dropped is read by nothing. A generator's state that is set for compute to run again is set
      back behind it, before it is set another time.
    - Members of a group are adjacent. Those of a collective have one data type.
    - A gather converts a unit to a narrower data type only.
    - Bytes gathered and not yet released stay within `limit_bytes`.

    With `complete=False`, for a graph between two passes, units may still be hollow or unreleased.
    """
    place = positions(gm.graph)
    broken: list[str] = []
    for node in gm.graph.nodes:
        if node.target is ops.all_gather:
            _check_gather(node, broken)
        elif node.target is ops.wait:
            _check_unit(node, place, broken, complete)
        elif node.target is ops.release and _target_of(node.args[0]) is not ops.wait:
            broken.append(f"{node.name} releases {node.args[0]}, which is not the result of a wait")
        elif node.target is ops.gather_rows and slot_of(node.args[0]) is None:
            broken.append(f"{node.name} looks rows up in {node.args[0]}, which is not a parameter")
        elif node.target is ops.reduce_scatter:
            _check_reduction(node, broken)
        elif node.target is ops.swap_in:
            _check_swap_in(node, broken)
        elif node.target is ops.swap_out:
            _check_swap_out(node, broken)
        elif moves_values(node.target):
            _check_values(node, place, broken)
        elif node.target is ops.drop_value:
            _check_unchanged(node.args[0], node, place, broken)
            _check_leaves_graph(node, broken)
        elif node.target is ops.copy_value:
            _check_leaves_graph(node, broken)
        elif node.target is ops.keep_for_backward and all(user.op != "output" for user in node.users):
            broken.append(f"{node.name} is kept for the backward, and doesn't leave the graph")
        elif node.op == "placeholder" and is_dropped(node) and complete:
            broken += [f"{user.name} reads {node.name}, which the forward has dropped" for user in node.users]
    _check_random_states(gm.graph, broken)
    _check_groups(gm.graph, broken)
    if complete:
        _check_hollow(gm.graph, broken)
    if limit_bytes is not None and not broken:
        peak, where = peak_gathered_bytes(gm.graph)
        if peak > limit_bytes:
            broken.append(f"{peak} bytes are gathered at {where}, more than the {limit_bytes} allowed")
    if broken:
        raise IllegalGraphError("illegal schedule (a defect of zinf-compile, please report it):\n  " + "\n  ".join(broken))
    return gm


def peak_gathered_bytes(graph: fx.Graph, *, counts: Counts = counts_all) -> tuple[int, str]:
    """Return the largest number of bytes gathered, and the node reaching it.

    A unit counts from the start of its gather to its release. A unit that is swapped in counts from the hop that ends on the
    device. `counts` takes an operator of a unit and says whether the unit counts at all.
    """
    return peak_of(gathered_changes(graph), counts)


def gathered_changes(graph: fx.Graph) -> list[tuple[fx.Node, int]]:
    """Return the operators with which units begin to take memory, and let go of it, and by how many bytes."""
    found = []
    for node in graph.nodes:
        if gather_started_by(node) is not None:
            found.append((node, live_bytes(node)))
        elif node.target is ops.release:
            found.append((node, -live_bytes(node)))
    return found


def peak_of(changes: Iterable[tuple[fx.Node, int]], counts: Counts) -> tuple[int, str]:
    """Return the largest sum of such changes of the units that count, and the node reaching it."""
    live = peak = 0
    where = ""
    for node, change in changes:
        if counts(node):
            live += change
            if live > peak:
                peak, where = live, node.name
    return peak, where


def _target_of(node: object) -> object:
    return node.target if isinstance(node, fx.Node) else None


def _check_gather(node: fx.Node, broken: list[str]) -> None:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    dtype = node.kwargs.get("dtype")
    if source.target is ops.swap_in and hop_of(source)[1] != Tier.DEVICE:
        broken.append(f"{node.name} gathers {source.name}, which is on {hop_of(source)[1]}, not on the device")
    while source.target is ops.swap_in:
        source = source.args[0]  # type: ignore[assignment]
    slot = slot_of(source)
    if slot is None:
        broken.append(f"{node.name} gathers {source.name}, which is not a parameter")
    elif isinstance(dtype, torch.dtype) and not (dtype.is_floating_point and is_narrower(dtype, slot.dtype)):
        broken.append(f"{node.name} gathers {slot.name} in {dtype}, which is no narrower form of its {slot.dtype}")
    waits = [user for user in node.users if user.target is ops.wait]
    if len(waits) != 1 or len(node.users) != 1:
        users = ", ".join(user.name for user in node.users) or "nothing"
        broken.append(f"the handle {node.name} must be used by one wait alone, found: {users}")


def _check_reduction(node: fx.Node, broken: list[str]) -> None:
    slot = slot_of(node.args[1])  # type: ignore[arg-type]
    if slot is None:
        broken.append(f"{node.name} reduces onto {node.args[1]}, which is not a parameter")
    elif wire_type(node) != slot.reduce_dtype:
        broken.append(f"{node.name} reduces a gradient of {slot.name} in {wire_type(node)}, not in {slot.reduce_dtype}")
    _check_leaves(node, Tier.DEVICE, broken)


def _check_leaves(node: fx.Node, tier: str, broken: list[str]) -> None:
    """Check that a reduced gradient on `tier` is read by swap_outs from that tier and the output alone."""
    for user in node.users:
        if user.target is ops.swap_out and hop_of(user)[0] != tier:
            broken.append(f"{user.name} moves {node.name} from {hop_of(user)[0]}, but it is on {tier}")
        elif user.op != "output" and user.target is not ops.swap_out:
            broken.append(f"{user.name} reads {node.name}, a reduced gradient, which may only leave the graph")
    if len(node.users) > 1 and any(user.target is ops.swap_out for user in node.users):
        broken.append(f"{node.name} is swapped out and used besides")


def _check_swap_in(node: fx.Node, broken: list[str]) -> None:
    source, (src, dst) = node.args[0], hop_of(node)
    assert isinstance(source, fx.Node)
    if Tier(src).distance <= Tier(dst).distance:
        broken.append(f"{node.name} moves from {src} to {dst}, which is no nearer to the device")
    if source.target is ops.swap_in:
        if hop_of(source)[1] != src:
            broken.append(f"{node.name} moves {source.name} from {src}, but it is on {hop_of(source)[1]}")
    elif slot_of(source) is None:
        broken.append(f"{node.name} swaps {source.name} in, which is not a parameter")
    if len(node.users) != 1 or next(iter(node.users)).target not in (ops.swap_in, ops.all_gather):
        users = ", ".join(user.name for user in node.users) or "nothing"
        broken.append(f"the handle {node.name} must be used by one swap_in or all_gather alone, found: {users}")


def _check_swap_out(node: fx.Node, broken: list[str]) -> None:
    src, dst = hop_of(node)
    if Tier(src).distance >= Tier(dst).distance:
        broken.append(f"{node.name} moves from {src} to {dst}, which is no further from the device")
    if _target_of(node.args[0]) not in (ops.reduce_scatter, ops.swap_out):
        broken.append(f"{node.name} swaps {node.args[0]} out, which is not a reduced gradient")
    _check_leaves(node, dst, broken)


def _check_values(node: fx.Node, place: dict[fx.Node, int], broken: list[str]) -> None:
    """Check an operator that moves saved values, or waits for one."""
    handle = node.args[0]
    before = handle.target if isinstance(handle, fx.Node) else None
    if node.target is ops.wait_value:
        if not isinstance(handle, fx.Node) or before not in _VALUE_SWAPS:
            broken.append(f"{node.name} waits for {handle}, which no swap of values started")
        elif before is ops.swap_values_out and any(user.op != "output" for user in node.users):
            broken.append(f"{node.name} is a stand-in for a saved value, which may only leave the graph")
        elif before is ops.swap_values_in and hop_of(handle)[1] != Tier.DEVICE:
            broken.append(f"{node.name} is read on {hop_of(handle)[1]}, not on the device")
        return
    src, dst = hop_of(node)
    outwards = node.target is ops.swap_values_out
    if (Tier(src).distance >= Tier(dst).distance) == outwards:
        broken.append(
            f"{node.name} moves from {src} to {dst}, which is no {'further from' if outwards else 'nearer to'} the device"
        )
    if isinstance(handle, fx.Node):
        if before is not node.target or hop_of(handle)[1] != src:
            broken.append(f"{node.name} moves {handle.name} on from {src}, where no hop before brought it")
    elif outwards and src != Tier.DEVICE:
        broken.append(f"{node.name} moves values from {src}, but they are made on the device")
    for value in values_behind(node):
        if outwards:
            _check_unchanged(value, node, place, broken)
        elif value.op != "placeholder" or slot_of(value) is not None:
            broken.append(f"{node.name} brings {value.name} back, which is not a saved value")
    others = [user.name for user in node.users if user.target not in (ops.wait_value, node.target)]
    if others or not node.users:
        broken.append(
            f"the handle {node.name} must be used by swaps and waits of values, found: {', '.join(others) or 'nothing'}"
        )


def _check_leaves_graph(node: fx.Node, broken: list[str]) -> None:
    broken += [f"{user.name} reads {node.name}, which may only leave the graph" for user in node.users if user.op != "output"]


def _check_random_states(graph: fx.Graph, broken: list[str]) -> None:
    """Check that each state that is set is followed by the one before it, and that compute in between is what runs again."""
    before: dict[object, fx.Node] = {}
    for node in graph.nodes:
        if node.target is ops.set_random_state:
            first = before.pop(node.args[1], None)
            if first is None:
                before[node.args[1]] = node
            elif node.args[0] is not first:
                broken.append(f"{node.name} sets another state than {first.name}, which was the one before")
        elif before and node.op == "call_function" and node.target not in SCHEDULE_OPS and not runs_again(node):
            broken.append(f"{node.name} runs while the state of a random generator is that of the forward")
    broken += [f"{node.name} sets a state, and nothing sets back the one before" for node in before.values()]


def _check_unchanged(value: fx.Node, leaving: fx.Node, place: dict[fx.Node, int], broken: list[str]) -> None:
    if value.op != "call_function" or value.target is ops.wait:
        broken.append(f"{leaving.name} moves {value.name} away, which is not a value that compute has made")
        return
    for shared in sharing(value):
        for user in shared.users:
            if shared in written_inputs(user) and place[user] > place[leaving]:
                broken.append(f"{user.name} writes to {shared.name} after {leaving.name} began to move it")


_VALUE_SWAPS = (ops.swap_values_out, ops.swap_values_in)


def _check_unit(full: fx.Node, place: dict[fx.Node, int], broken: list[str], complete: bool) -> None:
    if _target_of(full.args[0]) is not ops.all_gather:
        broken.append(f"{full.name} waits for {full.args[0]}, which no all_gather started")
        return
    releases = [user for user in full.users if user.target is ops.release]
    shared = alias_closure(full)
    if len(releases) > 1:
        broken.append(f"{full.name} is released {len(releases)} times")
    if complete and not releases:
        broken.append(f"{full.name} is never released")
    for node in sorted(shared, key=place.__getitem__):
        for user in node.users:
            if user.op == "output" and releases:
                broken.append(f"{node.name} shares memory with {full.name} and leaves the graph")
            elif releases and user.target is not ops.release and place[user] > place[releases[0]]:
                broken.append(f"{user.name} uses {node.name} after {releases[0].name} released its memory")


def _check_groups(graph: fx.Graph, broken: list[str]) -> None:
    closed: set[tuple[object, int]] = set()
    latest: dict[object, fx.Node] = {}
    for node in graph.nodes:
        if group_of(node) == LONE_GROUP:
            continue
        kind, group = (node.target, argument_of(node, "src"), argument_of(node, "dst")), group_of(node)
        previous = latest.get(kind)
        if previous is not None and group_of(previous) == group:
            if previous is not node.prev:
                broken.append(f"{node.name} isn't adjacent to the others of its group {group}")
            if is_collective(node) and wire_type(previous) != wire_type(node):
                broken.append(f"{node.name} is of {wire_type(node)}, others of its group {group} aren't")
        elif (kind, group) in closed:
            broken.append(f"{node.name} belongs to group {group}, which was already issued")
        closed.add((kind, group))
        latest[kind] = node


def _check_hollow(graph: fx.Graph, broken: list[str]) -> None:
    for unit, slot in parameters(graph):
        for user in unit.users:
            spec = SPECS.get(user.target)
            named = (
                spec is not None and spec.step is not None and [a for a in user.args if a is unit] == [argument_of(user, "unit")]
            )
            if user.op == "output" or named or user.target in METADATA_OPS:
                continue
            broken.append(f"{user.name} reads the hollow parameter {slot.name}")
