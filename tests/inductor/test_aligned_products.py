"""Models whose products are padded, as they are on a GPU: on the CPU, where nothing has to be aligned, by saying that it has."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import BACKEND, whole_gradient

import zinf_compile
from zinf_compile import passes
from zinf_compile.cli.models import GPT

pytestmark = pytest.mark.slow

WIDTH, WORDS = 48, 101


class Head(nn.Module):
    """A last layer with a bias, whose results the caller gets as well; batched products, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.mixed = nn.Parameter(torch.randn(3, WIDTH, 19) / WIDTH)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.linear(self.embed(tokens), self.embed.weight).tanh() @ self.embed.weight
        y = torch.bmm(x.flatten(0, 1).expand(3, -1, -1), self.mixed).square().mean()
        logits = self.out(x)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) + y
        return loss, logits[:, -1]


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Say that the CPU wants aligned rows; return the padded products."""
    found: list[str] = []
    align = partial(passes.align_products, devices=("cpu",), worth=0)

    def align_products(gm: Any) -> Any:
        before = {node.name for node in gm.graph.nodes}
        align(gm)
        found.extend(
            node.name
            for node in gm.graph.nodes
            if node.target is torch.ops.aten.constant_pad_nd.default and node.name not in before
        )
        return gm

    monkeypatch.setattr(passes, "align_products", align_products)
    return found


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("kind", ["gpt", "head"])
def test_training_is_near_the_same_without(kind: str, activations: str, padded: list[str]) -> None:
    torch.manual_seed(0)
    eager = GPT(layers=2, width=WIDTH, heads=3, vocabulary=WORDS, length=17) if kind == "gpt" else Head()
    model = copy.deepcopy(eager)
    options = {"compute": "inductor", "on_refusal": "error", "activations": activations}
    compiled = torch.compile(model, backend=BACKEND, options=options)
    for step in range(2):
        tokens, targets = torch.randint(WORDS, (2, 3, 17), generator=torch.Generator().manual_seed(step))
        losses = []
        for call in (eager, compiled):
            with torch.autocast("cpu", torch.bfloat16):
                found = call(tokens, targets)
            loss = found if isinstance(found, torch.Tensor) else found[0]
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=2**-7)
        for one, other in zip(eager.parameters(), model.parameters(), strict=True):
            assert one.grad is not None
            got = whole_gradient(other)
            assert (got - one.grad).norm() <= 2**-5 * one.grad.norm()  # bf16 has 8 bits, and sums of it some more
            one.grad = other.grad = None
    assert padded
    zinf_compile.reset()
