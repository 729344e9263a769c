"""Start each gather ahead of its use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import fx

from zinf_compile.passes.analysis.gather_stages import find_stages, stage_bytes
from zinf_compile.passes.graph.node_facts import Counts, counts_all


def prefetch(
    gm: fx.GraphModule, *, look_ahead: int, limit_bytes: int | Callable[[fx.Graph], int], counts: Counts = counts_all
) -> fx.GraphModule:
    """Start the gathers of a group while up to `look_ahead` earlier groups are in use.

        before:  g = all_gather(w0, 0);  v = wait(g);  a = mm(x, v);  release(v)
                 h = all_gather(w1, 1);  u = wait(h);  b = mm(a, u)
        after:   g = all_gather(w0, 0);  h = all_gather(w1, 1);  v = wait(g);  a = mm(x, v);  release(v)
                 u = wait(h);  b = mm(a, u)

    The first group starts with the graph. A later one starts early only as far as bytes gathered and not yet released stay within
    `limit_bytes`, a number or a function of the graph; `counts` says which units take memory. The order of gathers never changes.
    Adjacent groups (a block's, in two data types) start together and count as one.
    """
    groups, released = find_stages(gm.graph, counts=counts)
    anchors = [group[-1].next for group in groups]  # the first operator of each stage's compute
    sizes = [stage_bytes(group, counts) for group in groups]
    most = limit_bytes if isinstance(limit_bytes, int) else limit_bytes(gm.graph)
    chosen = choose_stages(sizes, released, look_ahead=look_ahead, limit_bytes=most)
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    if groups and groups[0][0] is not first:
        for node in groups[0]:
            first.prepend(node)
    for number, stage in enumerate(chosen):
        if stage < number:
            for node in groups[number]:
                anchors[stage].prepend(node)
    return gm


def choose_stages(
    sizes: Sequence[int],
    released: Sequence[Sequence[tuple[int, int]]],
    *,
    look_ahead: int,
    limit_bytes: int,
    due: Sequence[int] | None = None,
) -> list[int]:
    """Decide at which stage each group starts; stage k lasts from group k's first use to group k+1's.

    `sizes[k]` are the bytes of group k, `released[k]` its (stage, bytes) releases, `due[k]` the stage that needs it (default: k).
    A group starts at `due[k]` or earlier, never before the group in front of it, and no early start makes the live bytes of a
    stage exceed the limit.
    """
    due = range(len(sizes)) if due is None else due
    change = [0] * (len(sizes) + 1)
    for number, size in enumerate(sizes):  # just in time: live from the due stage to the release
        change[due[number]] += size
        for stage, freed in released[number]:
            change[stage + 1] -= freed
    live = list(itertools.accumulate(change))
    chosen: list[int] = []
    for number, size in enumerate(sizes):
        stage = due[number]
        earliest = max(stage - look_ahead, chosen[-1] if chosen else 0, 0)
        while stage > earliest and live[stage - 1] + size <= limit_bytes:
            stage -= 1
            live[stage] += size
        chosen.append(stage)
    return chosen
