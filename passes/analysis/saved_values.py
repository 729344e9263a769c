"""Values that travel from a forward to its backward: their memory, where they are made, and the regions that read them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from zinf_compile.ir.op_spec import SCHEDULE_OPS
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.passes.graph.node_facts import leaving, slot_of
from zinf_compile.plan.problem_parts import SavedValue

from .region_facts import bytes_of_value, owners_of
from .saved_memories import returned
from .step_regions import Run

Saved = Mapping[fx.Node, tuple[fx.Node, ...]]
"""By the operator of the forward that makes the memory: placeholders of the backward that are it, or views of it."""


def find_saved(forward: fx.Graph, backward: fx.Graph | None) -> Saved:
    """Return what the forward makes and the backward reads. AOTAutograd names it alike in both."""
    if backward is None:
        return {}
    owners, found = owners_of(forward), defaultdict[fx.Node, list[fx.Node]](list)
    output = next(node for node in reversed(forward.nodes) if node.op == "output")
    made = {node.name: owners[node] for node in output.all_input_nodes}
    for node in backward.nodes:
        if node.op != "placeholder" or slot_of(node) is not None or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        owner = made.get(node.name)
        if owner is not None and owner.op == "call_function" and owner.target not in SCHEDULE_OPS:
            found[owner].append(node)
    return {owner: tuple(nodes) for owner, nodes in found.items()}


def moved_values(forward: fx.GraphModule, run: str) -> dict[str, SavedMemory]:
    """Return the saved memory that leaves the device behind a run of a forward, by the names of its values' rows."""
    owners, outputs = owners_of(forward.graph), list(returned(forward.graph))
    return {_name(owners[outputs[memory.outputs[0]]], run): memory for memory in leaving(forward)}


def _name(owner: fx.Node, run: str) -> str:
    return f"{owner.name} of {run}"


def saved_rows(runs: Sequence[Run], saved: Mapping[int, Saved], choices: tuple[str, ...]) -> Iterator[SavedValue]:
    """Yield the rows of all micro-batches: each memory once, whatever number of views of it is saved."""
    backwards = {(run.pair, run.micro_batch): run for run in runs if run.is_backward}
    reads = {run.graph: _readers(run) for run in runs}
    several = len({run.micro_batch for run in runs}) > 1
    for run in runs:
        backward = backwards.get((run.pair, run.micro_batch))
        if run.is_backward or backward is None:
            continue
        region_of = {node: number for number, nodes in enumerate(run.regions.compute) for node in nodes}
        for owner, placeholders in saved.get(run.pair, {}).items():
            made_in = region_of[owner]
            used = {run.first + region for region in reads[run.graph].get(owner, ()) if region > made_in}
            used.update(backward.first + region for node in placeholders for region in reads[backward.graph].get(node, ()))
            yield SavedValue(
                name=_name(owner, run.name) + (f", micro-batch {run.micro_batch}" if several else ""),
                bytes=bytes_of_value(owner.meta.get("val")),
                made_in=run.first + made_in,
                used_in=tuple(sorted(used)),
                choices=choices,
            )


def _readers(run: Run) -> dict[fx.Node, set[int]]:
    """Return for each memory of a graph the regions that read it."""
    owners, found = owners_of(run.graph), defaultdict[fx.Node, set[int]](set)
    for number, nodes in enumerate(run.regions.compute):
        for node in nodes:
            for source in node.all_input_nodes:
                found[owners[source]].add(number)
    return found
