"""Small modules, each for one thing that graphs have, and what holds after each pass on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from irtext import copied, results
from models import CASES, IN, WORDS, Attention, MutatedBuffers, OddShapes
from torch import fx, nn
from torch.nn import functional as F

from zinf_compile.ir import ops
from zinf_compile.passes import graph_passes, joint_passes, pass_name, verify
from zinf_compile.passes.graph.node_facts import parameters
from zinf_compile.passes.lower import lower


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

NEED_DYNAMO = ["higher_order", "higher_order_of_two", "checkpoint", "mutated_buffers"]
"""Modules whose graphs have what Dynamo alone makes: higher-order operators, policies, a buffer that is assigned."""

BUCKETS = [1, 300, 2**20]
"""Bytes: every unit alone, a few together, everything together."""


def apply(gm: fx.GraphModule, passes: Any, *, complete: bool) -> None:
    """Run each pass; after each the graph is well formed, legal as far as it goes, and gives the same numbers."""
    expected, run = results(gm), _calls(gm)
    for step in passes:
        gm = step(gm)
        gm.graph.lint()
        verify(gm, complete=False)
        if (calls := _calls(gm)) == run:  # the pass left the graph alone
            continue
        found, run = results(gm), calls
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=partial("after {}: {}".format, pass_name(step)))
    if complete:
        verify(gm)


def _calls(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return all that decides what a run of the graph computes: its nodes in order, their functions, arguments and types."""
    return [(node, node.target, node.args, node.kwargs, id(node.meta.get("val"))) for node in gm.graph.nodes]


def assert_every_prefix(graphs: dict[str, fx.GraphModule], name: str) -> None:
    """Every prefix of the pipeline is legal and keeps the numbers, on all graphs of a module."""
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
