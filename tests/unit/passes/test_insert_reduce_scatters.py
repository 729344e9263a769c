from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from irtext import copied, example_of, lines_of, results, text_of
from torch import fx, nn
from tracing import joint_graph

from zinf_compile.passes.graph.node_facts import mark_slot, slot_of
from zinf_compile.passes.joint.insert_reduce_scatters import insert_reduce_scatters
from zinf_compile.passes.verify import verify

BEFORE = """
y = mm(w, x)
t = t(x)
dw = mm(dy, t)
return [y, dw, None]
"""
AFTER = """
y = mm(w, x)
t = t(x)
dw = mm(dy, t)
s = reduce_scatter(dw, w)
return [y, s, None]
"""


class Two(nn.Module):
    """Calls `function(w, u, x)` with its parameters."""

    def __init__(self, function: Callable[..., Any], *, frozen: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))
        self.u = nn.Parameter(torch.randn(3, 3), requires_grad=not frozen)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.w, self.u, x)


def joint_of(function: Callable[..., Any], *, frozen: bool = False, learns: bool = False) -> fx.GraphModule:
    return joint_graph(Two(function, frozen=frozen), torch.randn(3, 3, requires_grad=learns))


def reductions(gm: fx.GraphModule) -> list[str]:
    return [line.split(" = ")[1] for line in text_of(gm).splitlines() if "reduce_scatter" in line]


def test_docstring_example() -> None:
    gm = joint_of(lambda w, u, x: torch.mm(w, x))
    assert text_of(gm, primals_2="x", mm="y", tangents_1="dy", mm_1="dw") == BEFORE.lstrip()
    assert text_of(insert_reduce_scatters(gm), shard="s") == AFTER.lstrip()
    assert example_of(insert_reduce_scatters) == (lines_of(BEFORE), lines_of(AFTER))


def test_gradients_of_inputs_and_of_frozen_parameters_stay() -> None:
    gm = joint_of(lambda w, u, x: torch.mm(u, x).sin(), frozen=True, learns=True)
    before = text_of(gm)
    assert text_of(insert_reduce_scatters(gm)) == before


def test_two_parameters_with_one_gradient_have_one_reduction_each() -> None:
    gm = insert_reduce_scatters(joint_of(lambda w, u, x: (w + u) * x))
    assert sorted(reductions(gm)) == ["reduce_scatter(mul_1, u)", "reduce_scatter(mul_1, w)"]


def test_a_gradient_that_comes_in_from_outside_is_reduced_after_the_inputs() -> None:
    gm = insert_reduce_scatters(joint_of(lambda w, u, x: (w.clone(), u.clone())))
    kinds = [node.op for node in gm.graph.nodes]
    assert kinds == sorted(kinds, key=["placeholder", "call_function", "output"].index)
    assert sorted(reductions(gm)) == ["reduce_scatter(tangents_1, w)", "reduce_scatter(tangents_2, u)"]


def test_numbers_stay_and_the_joint_graph_is_legal() -> None:
    gm = joint_of(lambda w, u, x: torch.mm(torch.tanh(torch.mm(x, w.t())), u))
    before = results(copied(gm))
    verify(insert_reduce_scatters(gm), complete=False)
    torch.testing.assert_close(results(gm), before, rtol=0, atol=0)


def test_gradients_that_are_kept_whole_until_the_step() -> None:
    gm = joint_of(lambda w, u, x: torch.mm(u, torch.mm(w, x)))
    for node in gm.graph.nodes:
        if (slot := slot_of(node)) is not None:
            mark_slot(node, dataclasses.replace(slot, reduced_at_step=slot.name == "w"))
    assert reductions(insert_reduce_scatters(gm)) == ["reduce_scatter(mm_3, u)", "reduce_scatter(mm_4, w, at_step=True)"]
