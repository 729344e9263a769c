"""What counts as a fallback to eager PyTorch is noticed."""

from __future__ import annotations

import pytest
import torch
from models import CASES, Case, Mlp, vectors
from torch import nn

from .train import train_without_fallback


@torch.compiler.disable
def shrink(parameter: nn.Parameter) -> torch.Tensor:
    """Return what eager code computes from a parameter."""
    return parameter.square().mean()


class Shrinking(Mlp):
    """Uses a parameter in its graph and in eager code."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) + shrink(self.first.weight)


class ByTheBatch(Mlp):
    """Has another graph for each batch."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: str) -> torch.Tensor:
        return super().forward(x, y) * (2.0 if number == "0" else 3.0)


def test_a_parameter_left_to_eager_code() -> None:
    with pytest.raises(AssertionError, match="left to eager PyTorch"):
        train_without_fallback(CASES["breaks_between_blocks"], fullgraph=False)


def test_eager_code_that_computes_with_a_partitioned_parameter() -> None:
    with pytest.raises(AssertionError, match=r"eager code computes with first\.weight"):
        train_without_fallback(Case(Shrinking, vectors), fullgraph=False)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_the_recompile_limit(fullgraph: bool) -> None:
    case = Case(ByTheBatch, lambda step, rank=0: (*vectors(step), str(step)))
    train_without_fallback(case, fullgraph=fullgraph)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        train_without_fallback(case, fullgraph=fullgraph)


def test_no_graph_at_all() -> None:
    with pytest.raises(AssertionError, match="left to eager PyTorch"), torch.compiler.set_stance("force_eager"):
        train_without_fallback(CASES["mlp"])
