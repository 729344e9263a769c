"""Stages of a schedule: runs of adjacent gathers, and the stages at which their units are released."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.passes.graph.node_facts import Counts, counts_all, live_bytes


def peak_ahead(sizes: Sequence[int], released: Sequence[Sequence[tuple[int, int]]], *, stages: int) -> int:
    """Return the peak of live bytes if each group of gathers starts `stages` stages early."""
    change = [0] * (len(sizes) + 1)
    for number, size in enumerate(sizes):
        change[max(0, number - stages)] += size
        for stage, freed in released[number]:
            change[stage + 1] -= freed
    return max(itertools.accumulate(change), default=0)


def stage_bytes(gathers: Sequence[fx.Node], counts: Counts) -> int:
    """Return the bytes of a stage's units that take memory."""
    return sum(live_bytes(node) for node in gathers if counts(node))


def find_stages(graph: fx.Graph, *, counts: Counts = counts_all) -> tuple[list[list[fx.Node]], list[list[tuple[int, int]]]]:
    """Return for each stage its gathers, which are adjacent, and the (stage, bytes) of their releases that count."""
    groups: list[list[fx.Node]] = []
    released: list[list[tuple[int, int]]] = []
    owner: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.target is ops.all_gather:
            if not groups or node.prev is not groups[-1][-1]:
                groups.append([])
                released.append([])
            groups[-1].append(node)
            owner[node] = len(groups) - 1
        elif node.target is ops.release and counts(node):
            owned = owner[node.args[0].args[0]]
            released[owned].append((len(groups) - 1, live_bytes(node)))
    return groups, released
