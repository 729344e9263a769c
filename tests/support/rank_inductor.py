"""compute="inductor" on one of several ranks, near the mean of eager's gradients over the ranks."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence

import torch
import torch.distributed as dist
from models import CASES, loss_of
from near import assert_gradients_near, assert_near
from torch import nn

import zinf_compile

NAMES = ["mlp", "tied", "mutated_buffers", "checkpoint", "odd_shapes"]


def compare_on_a_rank(rank: int, size: int, names: Sequence[str]) -> dict[str, str]:
    """Return each case's traceback, empty if it passed."""
    found = {}
    for name in names:
        torch.compiler.reset()
        try:
            _compare(name, rank, size)
            found[name] = ""
        except AssertionError:
            found[name] = traceback.format_exc()
        dist.barrier()
    return found


def _compare(name: str, rank: int, size: int) -> None:
    case = CASES[name]
    torch.manual_seed(7)
    model = case.build()
    eager = [copy.deepcopy(model) for _ in range(size)]
    options = {"bucket": 512, "process_group": dist.new_group(list(range(size))), "timeout_s": 100}
    compiled = torch.compile(model, backend="zero_infinity", options=options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, *eager)]
    for step in range(2):
        losses = []
        for source, called in ((rank, compiled), *enumerate(eager)):
            torch.manual_seed(1000 * step + source)
            losses.append(loss_of(called(*case.batch(step, source))))
            losses[-1].backward()
        assert_near(f"loss of step {step}", losses[0], losses[1 + rank])
        assert_gradients_near(model, _take_mean(eager), f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with zinf_compile.gathered(model):
            for (key, expected), found in zip(eager[rank].named_parameters(), model.parameters(), strict=True):
                assert_near(f"{key} after step {step}", found, expected)
        for (key, expected), found in zip(eager[rank].named_buffers(), model.buffers(), strict=True):
            assert_near(f"{key} after step {step}", found, expected)


def _take_mean(copies: Sequence[nn.Module]) -> dict[str, torch.Tensor | None]:
    """Give all copies the mean of their gradients, and return it by name."""
    means: dict[str, torch.Tensor | None] = {}
    for name, _ in copies[0].named_parameters():
        means[name] = torch.stack([m.get_parameter(name).grad for m in copies]).mean(0)  # type: ignore[misc]
        for m in copies:
            m.get_parameter(name).grad = means[name].clone()  # type: ignore[union-attr]
    return means
