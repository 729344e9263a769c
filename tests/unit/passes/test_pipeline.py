"""The passes one after the other, on graphs that AOTAutograd made of small modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from irtext import copied, graph_of, results, text_of, traced, unit
from models import CASES, IN, WORDS, Attention, MutatedBuffers, OddShapes
from torch import fx, nn
from torch.nn import functional as F

from zinf_compile.cli.models import GPT
from zinf_compile.ir import ops
from zinf_compile.ir.steps import Gather
from zinf_compile.passes import graph_passes, joint_passes, pass_name, run_passes, verify
from zinf_compile.passes.analysis.memory_needs import measure_needs
from zinf_compile.passes.graph.node_facts import parameters
from zinf_compile.passes.lower import collective_sequence, lower


class Parameters(nn.Module):
    """Calls `function(a, b, x)` with two parameters, [6, 7] and [7]."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, IN)), nn.Parameter(torch.randn(IN))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.a, self.b, x)


def branch(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Use a parameter inside a higher-order operator, and after it."""
    return torch.cond(x.sum() > 0, lambda x, b: (x * b,), lambda x, b: (x - b,), (x, b))[0] @ a.t()


def branch_of_two(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return what a higher-order operator made of two parameters: it may share the memory of both."""
    return torch.cond(x.sum() > 0, lambda x, a, b: (x * a[0] + b,), lambda x, a, b: (x - a[1] * b,), (x, a, b))[0]


def standardised(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(a, 1, keepdim=True)
    return x @ ((a - mean) * torch.rsqrt(variance + 1)).t()


def half(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(torch.tanh(F.linear(x, a)), a.t(), b)


def half_of_the_rows(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Use as many rows and columns of a parameter as there are inputs, in half precision."""
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, a[: x.shape[0]]).sum() + F.linear(x[:, : x.shape[0]], a[:, : x.shape[0]]).sum()


FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "parts": lambda a, b, x: sum(torch.tanh(x * row) for row in a.unbind()) + a.split(4)[1].sum(),
    "expanded": lambda a, b, x: torch.tanh(x * b.expand(3, IN)).cumsum(0) * b.unsqueeze(0).expand(3, -1),
    "autocast": half,
    "autocast_of_rows": half_of_the_rows,
    "returned": lambda a, b, x: (x @ a.t(), a, a.t(), a[:2].detach(), b),
    "cast_returned": lambda a, b, x: (x @ a.t(), a.to(torch.bfloat16), b.double()),
    "shape_only": lambda a, b, x: x * b * a.shape[0] + torch.zeros_like(a).sum(),
    "one_gradient_for_two": lambda a, b, x: (a + b) * x[0],
    "gradient_from_outside": lambda a, b, x: (a.clone(), b.clone()),
    "written_over": lambda a, b, x: x.clone().mul_(b).add_(a[0]),
    "standardised": standardised,
    "positions": lambda a, b, x: x + a[: x.shape[0]] * b,
    "higher_order": branch,
    "higher_order_of_two": branch_of_two,
    "unused": lambda a, b, x: x * b,
}

MODULES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    **{name: lambda f=f: (Parameters(f), (torch.randn(3, IN),)) for name, f in FUNCTIONS.items()},
    **{name: lambda case=CASES[name]: (case.build(), case.batch(0, 0)) for name in ("mlp", "tied", "lora", "used_twice")},
    "checkpoint": lambda: (CASES["checkpoint"].build(), CASES["checkpoint"].batch(0, 0)),
    "attention": lambda: (Attention(), (torch.randint(WORDS, (2, 5)),)),
    "mutated_buffers": lambda: (MutatedBuffers(), CASES["mutated_buffers"].batch(0, 0)),
    "odd_shapes": lambda: (OddShapes(), CASES["odd_shapes"].batch(0, 0)),
}  # fmt: skip

BUCKETS = [1, 300, 2**20]
"""Bytes: every unit alone, a few together, everything together."""


def apply(gm: fx.GraphModule, passes: Any, *, complete: bool) -> None:
    """Run each pass; after each the graph is well formed, legal as far as it goes, and gives the same numbers."""
    expected = results(copied(gm))
    for step in passes:
        gm = step(gm)
        gm.graph.lint()
        verify(gm, complete=False)
        found = results(copied(gm))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=partial("after {}: {}".format, pass_name(step)))
    if complete:
        verify(gm)


@pytest.mark.parametrize("name", MODULES)
def test_every_prefix_of_the_pipeline_is_legal_and_keeps_the_numbers(name: str) -> None:
    module, inputs = MODULES[name]()
    graphs = traced(module, *inputs)
    apply(graphs.pop("joint"), joint_passes(), complete=False)
    assert set(graphs) == {"forward", "backward", "inference"}
    for bucket_bytes in BUCKETS:
        for graph in graphs.values():
            gm = copied(graph)
            apply(gm, graph_passes(bucket_bytes=bucket_bytes), complete=True)
            lower(gm, name=name)
            assert_transfers(gm)


def assert_transfers(gm: fx.GraphModule) -> None:
    """Every parameter that is read is gathered, and each gather is released once."""
    targets = [node.target for node in gm.graph.nodes]
    assert targets.count(ops.all_gather) == targets.count(ops.release) == targets.count(ops.wait)
    gathered = {node.args[0] for node in gm.graph.nodes if node.target is ops.all_gather}
    assert gathered <= {node for node, _ in parameters(gm.graph)}


@pytest.mark.parametrize("name", ["positions", "mlp", "autocast", "autocast_of_rows"])
def test_dynamic_shapes_go_the_same_way(name: str) -> None:
    module, inputs = MODULES[name]()
    graphs = traced(module, *inputs, dynamic=True)
    assert any(isinstance(node.meta["val"], torch.SymInt) for node in graphs["forward"].graph.find_nodes(op="placeholder"))
    apply(graphs.pop("joint"), joint_passes(), complete=False)
    for graph in graphs.values():
        apply(graph, graph_passes(bucket_bytes=300), complete=True)


@pytest.mark.parametrize("name", ["mlp", "autocast", "autocast_of_rows", "standardised", "checkpoint"])
def test_ranks_with_other_batch_sizes_or_dynamic_shapes_move_the_same(name: str) -> None:
    sequences = set()
    for rows, dynamic in ((3, False), (4000, False), (3, True)):
        torch.compiler.reset()
        module, inputs = MODULES[name]()
        graphs = traced(module, *(torch.randn(rows, t.shape[1]) for t in inputs), dynamic=dynamic)
        parts = []
        for kind in ("forward", "backward", "inference"):
            for step in graph_passes(bucket_bytes=300):
                step(graphs[kind])
            parts.append(collective_sequence(graphs[kind].graph))
        sequences.add(tuple(parts))
    assert len(sequences) == 1


def test_narrower_gathers_move_no_border_of_a_region() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        graphs = traced(GPT(layers=3, width=20, heads=2, vocabulary=67, length=17), *[torch.randint(67, (2, 17))] * 2)
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
