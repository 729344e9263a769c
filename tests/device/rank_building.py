"""Models built inside `partitioned()` for the device, on ranks whose device has no collectives for tensors of the host."""

from __future__ import annotations

from typing import Any

import torch
from late.process_group import host_refused
from late_training import Stack

import zinf_compile


def built(rank: int, size: int, options: dict[str, Any]) -> bool:
    """Return whether values that the block reads, and those of the model that comes of it, are as built whole."""
    torch.manual_seed(0)
    whole = Stack(2)
    total = sum(float(p.detach().sum()) for p in whole.parameters())
    zinf_compile.reset()
    torch.manual_seed(0)
    with host_refused():
        with zinf_compile.partitioned(device="late", **options):
            model = Stack(2)
            read = sum(float(p.detach().sum()) for p in model.parameters())
        values = zinf_compile.full_state_dict(model)
    torch.accelerator.synchronize()
    equal = all(torch.equal(values[name].cpu(), value) for name, value in whole.state_dict().items()) if rank == 0 else True
    zinf_compile.reset()
    return read == total and equal


def refuses(rank: int, size: int) -> bool:
    """Return whether the device's group refuses a tensor of the host."""
    with host_refused():
        try:
            torch.distributed.all_reduce(torch.ones(1))
        except ValueError:
            return True
    return False
