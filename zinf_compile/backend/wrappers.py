"""Refusal of models in data-parallel wrappers: this backend itself partitions the model and averages its gradients."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from zinf_compile._frames import callers
from zinf_compile.errors import UnsupportedModelError


def reject_wrappers() -> None:
    """Raise `UnsupportedModelError` if a frame on the stack has a data-parallel wrapper as its `self`."""
    for caller in callers():
        for wrapper in (DistributedDataParallel, FullyShardedDataParallel, FSDPModule):
            if isinstance(caller, wrapper):
                raise wrapped_in(wrapper)


def wrapped_in(wrapper: type[Any]) -> UnsupportedModelError:
    """Return the error."""
    return UnsupportedModelError(
        f"the model is wrapped in {wrapper.__name__}; this backend itself partitions the model and averages its gradients: "
        "compile the bare model without DDP, FSDP and fully_shard. accelerate and transformers' Trainer wrap models on "
        "several ranks: compile the model before they prepare it, and call zinf_compile.hf.adopt(trainer) or "
        "zinf_compile.hf.adopt(accelerator) right after making theirs. Lightning's strategies wrap it, too: use one process there"
    )
