"""What a loss in chunks needs and PyTorch has no operator for: a check of its targets, and a gradient's way to the backward.

Inductor runs operators that it doesn't know as they are.
"""

from __future__ import annotations

import torch
from torch.library import Library

from zinf_compile._torch import keeps_autograd_graph

_library = Library("zinf_compute", "FRAGMENT")
_library.define("class_targets(Tensor target, SymInt classes, SymInt ignore_index) -> Tensor")
_library.define("take_scaled(Tensor saved, Tensor factor) -> Tensor")


def _class_targets(target: torch.Tensor, classes: int, ignore_index: int) -> torch.Tensor:
    """Return the targets with 0 for ignored ones; raise `IndexError`, as eager PyTorch does, for one that is no class."""
    ignored = target == ignore_index
    kept = target.masked_fill(ignored, 0)
    if target.device.type == "cpu" and target.numel():  # elsewhere it would wait for the device, whose gather checks
        for found in (int(kept.min()), int(kept.max())):
            if not 0 <= found < classes:
                raise IndexError(
                    f"Target {found} is out of bounds: the loss has classes 0 to {classes - 1}, and ignores {ignore_index}; "
                    "look for it in the targets (labels) of this call"
                )
    return kept


def _take_scaled(saved: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return `saved * factor`, in the memory of `saved` where autograd won't run this backward again.

    A head's gradient is as large as the head: a second copy would cost what the chunks save. The schema says nothing of the
    shared memory, because who saved it has no more use for it.
    """
    if keeps_autograd_graph():
        return saved * factor
    if factor.device.type == "cpu" and factor.item() == 1:
        return saved
    return saved.mul_(factor)


_library.impl("class_targets", _class_targets, "CompositeExplicitAutograd")
_library.impl("take_scaled", _take_scaled, "CompositeExplicitAutograd")
torch.library.register_fake("zinf_compute::class_targets", lambda target, classes, ignore_index: torch.empty_like(target))
torch.library.register_fake("zinf_compute::take_scaled", lambda saved, factor: torch.empty_like(saved))

class_targets = torch.ops.zinf_compute.class_targets.default
take_scaled = torch.ops.zinf_compute.take_scaled.default
