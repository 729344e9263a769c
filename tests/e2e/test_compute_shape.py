"""Regions follow from the model and the bucket alone: nothing that says where states lie or when they move cuts elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from irtext import copied
from marks import more
from models import CASES, tokens, vectors
from torch import fx, nn
from tracing import compiled, traced

from zinf_compile.cli.models import GPT
from zinf_compile.cli.trace import trace
from zinf_compile.ir.program import Program
from zinf_compile.ir.steps import Region
from zinf_compile.passes import Pass, graph_passes, pass_name
from zinf_compile.passes.graph.region_structure import structure
from zinf_compile.passes.lower import lower
from zinf_compile.passes.schedule.prefetch import prefetch

BUCKETS = [300, 2**14, 2**20]


def gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return GPT(layers=2, width=24, heads=2, vocabulary=37, length=16), (torch.zeros(2, 16, dtype=torch.long),) * 2


def tied() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return CASES["tied"].build(), tokens(0)


def structures(program: Program) -> list[Any]:
    """Return what a compiler sees of each region."""
    return [structure(step.fn.__self__) for step in program.steps if isinstance(step, Region)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("target", "bucket"),
    [*((tied, bucket) for bucket in BUCKETS), (gpt, BUCKETS[1]), more(gpt, BUCKETS[0]), more(gpt, BUCKETS[2])],
)
def test_world_sizes_have_equal_regions(target: Callable[[], Any], bucket: int) -> None:
    found = []
    for world_size in (1, 2, 7):
        graphs = trace(target, options={"bucket": bucket}, world_size=world_size)
        found.append({graph.kind: structures(graph.program) for graph in graphs})
    assert found[0].keys() >= {"forward", "backward"}
    assert found[0] == found[1] == found[2]


def operators_by_region(gm: fx.GraphModule, passes: Sequence[Pass]) -> list[list[str]]:
    """Return the operators of each region after the passes."""
    for step in passes:
        gm = step(gm)
    found: list[list[str]] = []

    def note(region: fx.GraphModule) -> Any:
        found.append([str(node.target) for node in region.graph.nodes if node.op == "call_function"])

    lower(gm, name="test", compile_region=note)
    return found


@pytest.mark.parametrize("bucket", [BUCKETS[1], *map(more, BUCKETS[::2])])
def test_batch_shapes_have_equal_regions(bucket: int) -> None:
    found = []
    for rows in (3, 400):
        graphs = traced(CASES["blocks"].build(), *vectors(0, rows=rows))
        found.append({k: operators_by_region(graphs[k], graph_passes(bucket_bytes=bucket)) for k in ("forward", "backward")})
    assert found[0] == found[1]


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("case", ["blocks", "tied", "checkpoint"])
def test_what_is_fetched_ahead_and_held_has_no_say(case: str, bucket: int) -> None:
    graphs = (compiled if case == "checkpoint" else traced)(CASES[case].build(), *CASES[case].batch(0, 0))
    schedules = [graph_passes(bucket_bytes=bucket), without("merge_gathers", bucket)]
    for look_ahead, limit_bytes in ((0, 0), (1, 2**9), (5, 2**30)):
        ahead = partial(prefetch, look_ahead=look_ahead, limit_bytes=limit_bytes)
        schedules.append([ahead if pass_name(p) == "prefetch" else p for p in graph_passes(bucket_bytes=bucket)])
    for kind in ("forward", "backward", "inference"):
        first, *others = (operators_by_region(copied(graphs[kind]), schedule) for schedule in schedules)
        assert all(other == first for other in others)


def without(name: str, bucket: int) -> list[Pass]:
    return [p for p in graph_passes(bucket_bytes=bucket) if pass_name(p) != name]
