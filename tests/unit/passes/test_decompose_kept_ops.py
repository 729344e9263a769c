from __future__ import annotations

from collections import Counter

import pytest
import torch
from irtext import copied, example_of, graph_of, lines_of, results, text_of
from losses import LEFT_ALONE, Head, batch
from torch import fx
from tracing import captured

from zinf_compile.backend.graph_compiler import GraphCompiler
from zinf_compile.backend.regions import decompositions
from zinf_compile.config import Config
from zinf_compile.passes.joint.decompose_kept_ops import WHOLE, decompose_kept_ops

BEFORE = """
l = tanh_backward(g, y)
return (l,)
"""
AFTER = """
mul = mul(y, y)
sub = sub(1, mul)
mul_1 = mul(g, sub)
return (mul_1,)
"""


def test_docstring_example() -> None:
    gm = graph_of(BEFORE, g=torch.empty(3), y=torch.empty(3))
    assert text_of(decompose_kept_ops(gm, table=decompositions())) == AFTER.lstrip()
    assert example_of(decompose_kept_ops) == (lines_of(BEFORE), lines_of(AFTER))


def test_without_rules_nothing_changes() -> None:
    gm = graph_of(BEFORE, g=torch.empty(3), y=torch.empty(3))
    assert text_of(decompose_kept_ops(gm, table={})) == BEFORE.lstrip()


def test_several_results_and_numbers() -> None:
    text = "n = nll_loss_forward(l, y, None, 1, -100); s = n[0]; k = n[1]; a = mul(s, k); return (a,)"
    gm = graph_of(text, l=torch.empty(4, 6), y=torch.zeros(4, dtype=torch.long))
    expected = results(copied(gm))
    torch.testing.assert_close(results(decompose_kept_ops(gm, table=decompositions())), expected)
    assert not WHOLE & {node.target for node in gm.graph.nodes}
    gm.graph.lint()


@pytest.mark.parametrize("name", ["logits returned", "one for each token", "focal", "entropy", "accuracy", "some classes"])
def test_a_loss_that_is_left_alone_is_traced_as_if_nobody_had_looked_at_it(name: str) -> None:
    graphs = [joint_for_inductor(name, chunk_loss=chunk_loss) for chunk_loss in (False, True)]
    operators = [Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_function") for gm in graphs]
    assert operators[0] == operators[1]
    numbers = [results(gm) for gm in graphs]
    torch.testing.assert_close(numbers[1], numbers[0], rtol=0, atol=0, equal_nan=True)


def joint_for_inductor(name: str, *, chunk_loss: bool) -> fx.GraphModule:
    """Return the joint graph after its passes, as Inductor is to get it."""
    found: list[fx.GraphModule] = []

    class Recorder(GraphCompiler):
        def run_joint_passes(self, joint: fx.GraphModule) -> None:
            super().run_joint_passes(joint)
            found.append(copied(joint))
            raise StopHereError

    torch.manual_seed(0)
    head, (x, targets) = Head(LEFT_ALONE[name][0], bias=True), batch()
    with pytest.raises(StopHereError):
        Recorder(Config(chunk_loss=chunk_loss)).compile(*captured(head, x.requires_grad_(), targets))
    return found[0]


class StopHereError(Exception):
    """Nothing is compiled."""
