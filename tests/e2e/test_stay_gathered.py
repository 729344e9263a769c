"""One process with parameters on a drive that stay in memory until the step: the same bits, and fewer reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import TiedWords
from torch import nn
from training import BACKEND, adamw

import zinf_compile


def trained(drive: Path, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], nn.Module, int]:
    """Train with three micro-batches in each step, an evaluation and a change among them; return what the last step read, too."""
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    model = TiedWords()
    optimizer = adamw(model.parameters())
    call = torch.compile(
        model, backend=BACKEND, options={"compute": "fx", "params": "nvme", "nvme": str(drive), "bucket": "4KiB", **options}
    )
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(3):
        for number in range(3):
            loss = call(torch.randint(23, (2, 7), generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
            if step == 1 and number == 1:
                with torch.no_grad():
                    losses.append(call(torch.randint(23, (2, 7), generator=generator)).mean().item())
                    next(model.parameters()).mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    read = zinf_compile.stats(model)["links"]["nvme to host"]["bytes_last_step"]
    return losses, zinf_compile.full_state_dict(model), model, int(read)


@pytest.mark.parametrize("optimizer", ["device", "nvme"])
def test_a_step_reads_each_parameter_once(optimizer: str, drive: Path) -> None:
    losses, state, _, released = trained(drive, optimizer=optimizer)
    staying_losses, staying_state, model, read = trained(drive, optimizer=optimizer, reshard_after_backward=False)
    assert losses == staying_losses
    assert all(torch.equal(value, staying_state[name]) for name, value in state.items())
    assert read < released
    assert zinf_compile.stats(model)["memory"]["device"]["now"]["gathered"] == 0, "the step let go of all"
