from __future__ import annotations

import pytest
import torch
from irtext import copied, example_of, graph_of, lines_of, results, text_of, unit
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy
from tracing import traced

from zinf_compile.passes.graph.alias import derived_from
from zinf_compile.passes.graph.node_facts import parameters
from zinf_compile.passes.joint.recompute_unit_views import recompute_unit_views

BEFORE = """
t = t(w)
a = addmm(b, x, t)
"""
AFTER = """
t = t(w) [must_recompute]
a = addmm(b, x, t) [must_save]
"""


def tagged(gm: fx.GraphModule) -> str:
    """Print each operator with what the partitioner is told about it."""
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    policies = [n.meta.get("recompute") for n in nodes]
    lines = text_of(gm).splitlines()
    return "".join(f"{line} [{p.name.lower()}]\n" if p else f"{line}\n" for line, p in zip(lines, policies, strict=True))


def test_docstring_example() -> None:
    gm = graph_of(BEFORE, x=torch.empty(2, 3), w=unit(4, 3), b=unit(4))
    assert tagged(gm) == BEFORE.lstrip()
    assert tagged(recompute_unit_views(gm)) == AFTER.lstrip()
    assert example_of(recompute_unit_views) == (lines_of(BEFORE), lines_of(AFTER))


def test_parts_and_casts_are_recomputed_and_consumers_with_several_results_saved() -> None:
    text = "s = split(w, 2); p = s[0]; c = _to_copy(p, dtype=torch.bfloat16); m = aminmax(c); a = mul(x, p); d = relu(a)"
    assert tagged(recompute_unit_views(graph_of(text, x=torch.empty(2, 3), w=unit(4, 3)))).splitlines() == [
        "s = split(w, 2) [must_recompute]",
        "p = s[0] [must_recompute]",
        "c = _to_copy(p, dtype=torch.bfloat16) [must_recompute]",
        "m = aminmax(c) [must_save]",
        "a = mul(x, p) [must_save]",
        "d = relu(a)",
    ]


def test_what_a_checkpoint_marked_stays() -> None:
    gm = graph_of("a = mul(x, w)", x=torch.empty(3), w=unit(3))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    assert tagged(recompute_unit_views(gm)) == "a = mul(x, w) [prefer_recompute]\n"


def test_a_graph_without_parameters_is_unchanged() -> None:
    text = "t = t(x)\na = relu(t)\n"
    assert tagged(recompute_unit_views(graph_of(text, x=torch.empty(2, 3)))) == text


class Cast(nn.Module):
    """Uses a weight transposed, as parts and in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top, bottom = self.w.split(3)
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(torch.tanh(F.linear(x, self.w)), self.w.t())
        return y.float() @ self.w * top.sum() + (top @ bottom.t()).sum()


def test_no_form_of_a_weight_is_saved_for_the_backward() -> None:
    gm = traced(Cast(), torch.randn(5, 6))["forward"]
    saved = gm.graph.output_node().all_input_nodes
    weights = [node for node, _ in parameters(gm.graph)]
    assert derived_from(weights), "the forward uses views and casts"
    assert not derived_from(weights) & set(saved)
    assert set(weights) <= set(saved)


class Standardised(nn.Module):
    """A weight with its own mean taken off: cheap operators between the weight and the product."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(self.w, 1, keepdim=True)
        return torch.sin(x * self.scale) @ ((self.w - mean) * torch.rsqrt(variance + 1)) * self.scale


def weights_read(gm: fx.GraphModule) -> set[str]:
    """Return the parameters whose value a graph needs."""
    return {
        s.name for n, s in parameters(gm.graph) if any(u.target is not torch.ops.zinf.reduce_scatter.default for u in n.users)
    }


@pytest.mark.parametrize("rows", [1, 3000])
def test_batch_size_does_not_choose_what_the_backward_gathers(rows: int) -> None:
    assert weights_read(traced(Standardised(), torch.randn(rows, 8))["backward"]) == {"w", "scale"}


def test_numbers_stay() -> None:
    gm = traced(Cast(), torch.randn(5, 6))["joint"]
    before = results(copied(gm))
    torch.testing.assert_close(results(recompute_unit_views(gm)), before, rtol=0, atol=0)
