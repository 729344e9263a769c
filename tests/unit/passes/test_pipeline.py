"""The passes one after the other, on graphs that AOTAutograd made of small modules."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from irtext import copied, graph_of, text_of, unit
from models import IN
from pipeline import BUCKETS, MODULES, NEED_DYNAMO, Parameters, apply, assert_every_prefix
from torch import fx
from tracing import traced

from zinf_compile.cli.models import GPT
from zinf_compile.ir.steps import Gather
from zinf_compile.passes import graph_passes, joint_passes, pass_name, run_passes, verify
from zinf_compile.passes.analysis.memory_needs import measure_needs
from zinf_compile.passes.lower import collective_sequence, lower


@pytest.mark.parametrize("name", [name for name in MODULES if name not in NEED_DYNAMO])
def test_every_prefix_of_the_pipeline_is_legal_and_keeps_the_numbers(name: str) -> None:
    module, inputs = MODULES[name]()
    assert_every_prefix(traced(module, *inputs), name)


def test_narrower_gathers_move_no_border_of_a_region() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        graphs = traced(GPT(layers=2, width=20, heads=2, vocabulary=67, length=17), *[torch.randint(67, (2, 17))] * 2)
    for kind in ("forward", "backward"):
        for bucket_bytes in (2**11, 2**14, 2**20):
            cuts = []
            for left_out in ("narrow_gathers", ""):
                gm = copied(graphs[kind])
                for step in graph_passes(bucket_bytes=bucket_bytes):  # merge_gathers drops waits as bytes allow, no border
                    gm = gm if pass_name(step) in (left_out, "merge_gathers") else step(gm)
                steps = lower(gm, name=kind).steps
                cuts.append([type(step).__name__ for step in steps if not isinstance(step, Gather)])
            assert any(step.dtype == torch.bfloat16 for step in steps if isinstance(step, Gather))
            assert cuts[0] == cuts[1]


def test_passes_leave_a_graph_without_parameters_alone() -> None:
    gm = traced(Parameters(lambda a, b, x: x * b), torch.randn(3, IN))["forward"]
    for node in gm.graph.nodes:
        node.meta.pop("zinf_slot", None)
    before = text_of(gm)
    for step in (*joint_passes(), *graph_passes(bucket_bytes=300)):
        step(gm)
    assert text_of(gm) == before


WAYS = [(), ("nvme", "device"), ("host", "device"), ("nvme", "host", "device")]


@pytest.mark.parametrize("name", ["tied", "autocast", "odd_shapes"])
def test_where_parameters_live_changes_no_number_no_collective_and_no_region(name: str) -> None:
    module, inputs = MODULES[name]()
    graphs = traced(module, *inputs)
    del graphs["joint"]
    for kind, graph in graphs.items():
        for bucket_bytes in BUCKETS:
            found = set()
            for way in WAYS:
                gm = copied(graph)
                apply(gm, graph_passes(bucket_bytes=bucket_bytes, params=way, grads=way[::-1]), complete=True)
                regions: list[str] = []
                lower(gm, name=kind, compile_region=lambda region, regions=regions: regions.append(text_of(region)))
                found.add((collective_sequence(gm.graph), tuple(regions)))
            assert len(found) == 1


@settings(max_examples=50)  # each in four ways
@given(st.lists(st.integers(0, 6), min_size=1, max_size=14), st.lists(st.sampled_from([4, 8, 16, 40]), min_size=7, max_size=7))
def test_units_used_in_any_order_are_gathered_alike_wherever_they_live(uses: list[int], columns: list[int]) -> None:
    lines = [f"a{i} = mm(x, w{index})" for i, index in enumerate(uses)]
    lines.append(f"return ({''.join(f'a{i}, ' for i in range(len(uses)))})")
    inputs = {"x": torch.empty(4, 4), **{f"w{i}": unit(4, size) for i, size in enumerate(columns)}}
    sequences = set()
    for way in WAYS:
        gm = graph_of("\n".join(lines), **inputs)
        run_passes(gm, graph_passes(bucket_bytes=64, params=way), verify_each=True)
        sequences.add(collective_sequence(gm.graph))
    assert len(sequences) == 1


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=12),
    st.lists(st.sampled_from([4, 8, 16, 40]), min_size=7, max_size=7),
    st.sampled_from(WAYS[1:]),
    st.integers(0, 300),
)
def test_what_a_plan_allows_is_never_exceeded(
    uses: list[tuple[int, bool]], columns: list[int], way: tuple[str, ...], spare: int
) -> None:
    lines = [
        f"c{i} = _to_copy(w{index}, dtype=torch.bfloat16); a{i} = mm(y, c{i})" if narrow else f"a{i} = mm(x, w{index})"
        for i, (index, narrow) in enumerate(uses)
    ]
    lines.append(f"return ({''.join(f'a{i}, ' for i in range(len(uses)))})")
    inputs = {f"w{i}": unit(4, size) for i, size in enumerate(columns)}
    gm = graph_of("\n".join(lines), x=torch.empty(4, 4), y=torch.empty(4, 4, dtype=torch.bfloat16), **inputs)
    allowed = []

    def limits(graph: fx.Graph) -> tuple[int, int]:
        needs = measure_needs(graph)
        allowed.append(math.ceil(needs.gathered * needs.widening) + spare)
        return int(allowed[-1] / needs.widening), allowed[-1]

    run_passes(gm, graph_passes(bucket_bytes=64, params=way, limits=limits))
    assert len(allowed) == 1, "both kinds of transfers are planned at once"
    verify(gm, limit_bytes=allowed[0])
