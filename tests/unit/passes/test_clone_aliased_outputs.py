from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from irtext import example_of, lines_of, results, text_of
from torch import fx, nn
from tracing import captured as functions_called

from zinf_compile.passes.joint.clone_aliased_outputs import clone_aliased_outputs

BEFORE = """
y = relu(x)
v = detach(w)
return (y, v)
"""
AFTER = """
y = relu(x)
v = detach(w)
c = clone(v)
return (y, c)
"""


class Owner(nn.Module):
    """Calls `function(w, x)` with its parameter."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.w, x)


def captured(function: Callable[..., Any]) -> tuple[fx.GraphModule, set[fx.Node]]:
    """Return the graph of torch functions that `function(w, x)` calls, and its parameter."""
    gm, _ = functions_called(Owner(function), torch.randn(4, 4))
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = node.meta["example_value"]
    return gm, {node for node in gm.graph.nodes if node.op == "placeholder" and node.name == "w"}


def test_docstring_example() -> None:
    gm, parameters = captured(lambda w, x: (torch.relu(x), w.detach()))
    assert text_of(gm, detach="v", relu="y") == BEFORE.lstrip()
    assert text_of(clone_aliased_outputs(gm, parameters), clone="c") == AFTER.lstrip()
    assert example_of(clone_aliased_outputs) == (lines_of(BEFORE), lines_of(AFTER))


def returned(function: Callable[..., Any]) -> str:
    gm, parameters = captured(function)
    before = results(gm)
    clone_aliased_outputs(gm, parameters)
    torch.testing.assert_close(results(gm), before, rtol=0, atol=0)
    return text_of(gm).splitlines()[-1]


def test_parts_and_views_of_views_are_cloned() -> None:
    assert returned(lambda w, x: w.t()[0].view(2, 2)) == "return (clone,)"
    assert returned(lambda w, x: (*w.split(2), x.sum())) == "return (clone, clone_1, sum_1)"


def test_one_value_returned_twice_is_cloned_once() -> None:
    gm, parameters = captured(lambda w, x: (w[:2], x.sum()))
    output = gm.graph.output_node()
    output.args = ((output.args[0][0], output.args[0]),)
    assert text_of(clone_aliased_outputs(gm, parameters)).endswith("return (clone, (clone, sum_1))\n")


def test_a_parameter_that_is_an_output_is_cloned() -> None:
    gm, parameters = captured(lambda w, x: (w + x).sum())
    gm.graph.output_node().args = (tuple(parameters),)
    assert text_of(clone_aliased_outputs(gm, parameters)).endswith("clone = clone(w)\nreturn (clone,)\n")


def test_copies_casts_and_views_of_activations_stay() -> None:
    gm, parameters = captured(lambda w, x: (w.clone(), w.double(), (x @ w).t(), x.t(), w.sum()))
    before = text_of(gm)
    assert text_of(clone_aliased_outputs(gm, parameters)) == before
    assert "clone_1" not in before
