"""Let neighbours in use order move together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from zinf_compile import ops
from zinf_compile.program import Slot

from .facts import set_group, unit_of
from .regions import choose_regions


def group_units(gm: fx.GraphModule, *, bucket_bytes: int) -> fx.GraphModule:
    """Issue transfers that follow each other as one, up to `bucket_bytes` of full units.

        before:  g = all_gather(w0);  v = wait(g);  a = mm(x, v);  h = all_gather(w1);  u = wait(h);  b = mm(a, u)
        after:   g = all_gather(w0, 0);  h = all_gather(w1, 0);  v = wait(g);  a = mm(x, v);  u = wait(h);  b = mm(a, u)

    A gather moves up to the first of its group, a reduce-scatter down to the last of its group. Groups follow from order,
    sizes and types of the units alone, so ranks with other batch shapes form the same ones.
    """
    gathers = [node for node in gm.graph.nodes if node.target is ops.all_gather]
    for number, group in enumerate(_groups(gathers, bucket_bytes)):
        for earlier, node in itertools.pairwise(group):
            earlier.append(node)
        for node in group:
            set_group(node, number)
    reductions = [node for node in gm.graph.nodes if node.target is ops.reduce_scatter]
    for number, group in enumerate(_groups(reductions, bucket_bytes)):
        for node, later in zip(group[-2::-1], group[:0:-1], strict=True):
            later.prepend(node)
        for node in group:
            set_group(node, number)
    return gm


def choose_groups(units: Sequence[Slot], *, bucket_bytes: int) -> list[list[int]]:
    """Cut the sequence of units into runs of one data type and at most `bucket_bytes`; a larger unit is alone.

    A run ends where a region does, so that no region waits for two transfers where one would do.
    """
    starts = choose_regions(units, region_bytes=bucket_bytes)
    groups: list[list[int]] = []
    open_bytes = 0
    for start, end in itertools.pairwise([*starts, len(units)]):
        for position, part in enumerate(_by_type(units, start, end)):
            size = sum(units[index].bytes for index in part)
            fits = groups and units[groups[-1][0]].dtype == units[start].dtype and open_bytes + size <= bucket_bytes
            if position == 0 and fits:
                groups[-1] += part
                open_bytes += size
            else:
                groups.append(part)
                open_bytes = size
    return groups


def _by_type(units: Sequence[Slot], start: int, end: int) -> list[list[int]]:
    return [list(run) for _, run in itertools.groupby(range(start, end), key=lambda index: units[index].dtype)]


def _groups(nodes: list[fx.Node], bucket_bytes: int) -> list[list[fx.Node]]:
    return [[nodes[i] for i in run] for run in choose_groups([unit_of(n) for n in nodes], bucket_bytes=bucket_bytes)]
