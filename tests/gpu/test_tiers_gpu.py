"""Every placement of states on a GPU with memory of its own: the same losses and parameters, within a cap."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from models import TiedWords, loss_of, tokens
from training import BACKEND

import zinf_compile
from zinf_compile.cli.selftest_training import kernels_by_rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def train(options: dict[str, Any], *, steps: int = 5) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = TiedWords().cuda()
    model.compile(backend=BACKEND, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    losses = []
    for number in range(steps):
        for part in range(2):
            loss = loss_of(model(*(t.cuda() for t in tokens(2 * number + part)))) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, zinf_compile.full_state_dict(model), zinf_compile.stats(model)


@pytest.mark.parametrize("compute", ["fx", "inductor"])
@kernels_by_rule()
def test_every_placement_has_the_same_numbers(compute: str, tmp_path: Path) -> None:
    """The device updates, so that all arithmetic is the GPU's."""
    expected, parameters, _ = train({"compute": compute})
    for tiers in itertools.product(("device", "host", "nvme"), repeat=3):
        options: dict[str, Any] = dict(zip(("params", "grads", "optimizer"), tiers, strict=True))
        options |= {"compute": compute, "update": "device"} | ({"nvme": tmp_path} if "nvme" in tiers else {})
        losses, found, account = train(options)
        assert losses == expected, tiers
        assert all(torch.equal(found[name], value) for name, value in parameters.items()), tiers
        assert account["memory"]["device"]["peak"]["all"] <= account["caps"]["device_memory"]


def test_states_on_the_host_are_updated_there_and_never_cross(tmp_path: Path) -> None:
    expected, parameters, _ = train({"compute": "fx"})
    for tier in ("host", "nvme"):
        options: dict[str, Any] = {"compute": "fx", "optimizer": tier} | ({"nvme": tmp_path} if tier == "nvme" else {})
        losses, found, account = train(options)
        torch.testing.assert_close(losses, expected)
        for name, value in parameters.items():
            torch.testing.assert_close(found[name], value)
        shards = sum(value.nbytes for name, value in found.items() if name != "head.weight")
        assert account["links"]["host to device"]["bytes_last_step"] <= shards, "updated parameters alone"
