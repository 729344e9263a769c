"""Stand-ins for an optimizer: objects of its class and attributes, whose groups hold the tensors of one step or one chunk."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .fused_kernels import fused_settings
from .record import LAST, State, record_of

_OF_SCALER = ("grad_scale", "found_inf")
"""Attributes that `GradScaler.step` gives an optimizer while it calls it."""

STEP_LOCAL = ("param_groups", "state")
"""Attributes that a stand-in has of its own."""


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that a step may change for the next one."""
    return {k: v for k, v in group.items() if k not in ("params", "fused")}


def _bring_to_host(optimizer: Optimizer) -> None:
    """Bring what a scaler has computed on a device to the host; once a step, since the scaler takes it away again.

    Fused optimizers copy it to each device of parameters without waiting, and read the host's copy at once. [torch 2.13]
    """
    for name in _OF_SCALER:
        value = getattr(optimizer, name, None)
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            setattr(optimizer, name, value.cpu())


def make_stand_in(
    optimizer: Optimizer, members: Mapping[int, Sequence[torch.Tensor]], *, without_members: Callable[[dict[str, Any]], bool]
) -> tuple[Optimizer, list[dict[str, Any]]]:
    """Make a stand-in with `members` in place of parameters, by the parameters' ids: each a whole shard, or pieces of one.

    Returns it with the original of each of its groups. A group without members is kept only if `without_members(group)`.
    """
    stand_in: Optimizer = object.__new__(type(optimizer))
    stand_in.param_groups, groups = [], []
    record_of(stand_in).state = State.STAND_IN  # from now on other threads find it
    for group in optimizer.param_groups:
        present = [member for p in group["params"] for member in members.get(id(p), ())]
        if present or without_members(group):
            stand_in.param_groups.append({"params": present})
            groups.append(group)
    stand_in.state = collections.defaultdict(dict)
    refresh_stand_in(optimizer, stand_in, groups)
    return stand_in, groups


def refresh_stand_in(optimizer: Optimizer, stand_in: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give a stand-in the attributes of its optimizer, and its groups the settings of `groups`."""
    if any(member.device.type == "cpu" for theirs in stand_in.param_groups for member in theirs["params"]):
        _bring_to_host(optimizer)
    own = {name: vars(stand_in)[name] for name in STEP_LOCAL}
    stand_in.__dict__ = {**vars(optimizer), **own}
    vars(stand_in).pop(LAST, None)
    for theirs, mine in zip(stand_in.param_groups, groups, strict=True):
        members = theirs["params"]  # there at any moment: other threads read it
        settings = {**mine, **fused_settings(optimizer, mine, members), "params": members}
        for gone in [name for name in theirs if name not in settings]:
            del theirs[gone]
        theirs.update(settings)
