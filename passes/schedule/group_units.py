"""Group transfers that are neighbours in order of use."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.passes.analysis.blocks import choose_regions
from zinf_compile.passes.graph.node_facts import reduced_at_step, set_group, slot_behind, wire_type


def group_units(gm: fx.GraphModule, *, bucket_bytes: int) -> fx.GraphModule:
    """Issue consecutive gathers, and consecutive reduce-scatters, as one, up to `bucket_bytes` of full units.

        before:  g = all_gather(w0);  v = wait(g);  a = mm(x, v);  h = all_gather(w1);  u = wait(h);  b = mm(a, u)
        after:   g = all_gather(w0, 0);  h = all_gather(w1, 0);  v = wait(g);  a = mm(x, v);  u = wait(h);  b = mm(a, u)

    Gathers move up to the first of their group, reduce-scatters down to the last. Groups follow from order, sizes and data types
    of the units alone, so ranks with other batch shapes form the same groups. Reductions at the step are the runtime's to group.
    """
    gathers = [node for node in gm.graph.nodes if node.target is ops.all_gather]
    for number, group in enumerate(_groups(gathers, bucket_bytes)):
        for earlier, node in itertools.pairwise(group):
            earlier.append(node)
        for node in group:
            set_group(node, number)
    reductions = [node for node in gm.graph.nodes if node.target is ops.reduce_scatter and not reduced_at_step(node)]
    for number, group in enumerate(_groups(reductions, bucket_bytes)):
        for node, later in zip(group[-2::-1], group[:0:-1], strict=True):
            later.prepend(node)
        for node in group:
            set_group(node, number)
    return gm


def choose_groups(units: Sequence[ParameterSlot], types: Sequence[torch.dtype], *, bucket_bytes: int) -> list[list[int]]:
    """Divide units in order of use into groups of one data type and at most `bucket_bytes`; a larger unit is alone.

    `types` are the data types in which the units move. A region's units of one type stay in one group, so that it waits for one
    transfer per type. Groups of different types may overlap: the few parameters that stay in full precision under autocast don't
    split the groups of the others.
    """
    starts = choose_regions(units, region_bytes=bucket_bytes)
    groups: list[list[int]] = []
    latest: dict[torch.dtype, list[int]] = {}
    filled: dict[torch.dtype, int] = {}
    for start, end in itertools.pairwise([*starts, len(units)]):
        for dtype in dict.fromkeys(types[start:end]):
            part = [index for index in range(start, end) if types[index] == dtype]
            size = sum(format_of(dtype).bytes(units[index].numel) for index in part)
            if dtype in latest and filled[dtype] + size <= bucket_bytes:
                latest[dtype] += part
                filled[dtype] += size
            else:
                groups.append(part)
                latest[dtype], filled[dtype] = part, size
    return groups


def _groups(nodes: list[fx.Node], bucket_bytes: int) -> list[list[fx.Node]]:
    chosen = choose_groups([slot_behind(n) for n in nodes], [wire_type(n) for n in nodes], bucket_bytes=bucket_bytes)
    return [[nodes[i] for i in group] for group in chosen]
