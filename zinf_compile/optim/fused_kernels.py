"""Chooses fused CPU kernels for Adam and AdamW with default flags."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from zinf_compile.runtime.system.process_wide import process_wide

_CHOOSING = ("fused", "foreach", "capturable", "differentiable")
"""Settings of a group that select an implementation."""

_log = logging.getLogger("zinf_compile")
_logged: list[bool] = process_wide([])
"""Not empty once the choice was logged."""


def fused_settings(optimizer: Optimizer, group: Mapping[str, Any], members: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the settings to add to a group for one step: `fused=True` if the user left it open and the CPU updates.

    PyTorch's default on the CPU goes over the memory a dozen times, its fused kernel once; they differ in the last digits. Left
    open means `fused=None, foreach=None`, the default, of `torch.optim.Adam` and `AdamW`.
    """
    chosen = any(group.get(name) for name in _CHOOSING) or False in (group.get("fused"), group.get("foreach"))
    if type(optimizer) not in (Adam, AdamW) or chosen or not members:
        return {}
    fitting = all(p.device.type == "cpu" and p.is_floating_point() and not p.is_complex() for p in members)
    if fitting and not _logged:
        _logged.append(True)
        _log.info(
            "%s with `fused` left open is updated by PyTorch's fused kernel, here as anywhere on the CPU: bit for bit, its steps "
            "are those of fused=True, not of eager's default; foreach=False chooses that one",
            type(optimizer).__name__,
        )
    return {"fused": True} if fitting else {}
