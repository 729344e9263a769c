"""Records each step of an optimizer on the units that it updates, for the ranks to compare (`runtime/comm/steps_done.py`)."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.runtime.comm.fingerprint import fingerprint
from zinf_compile.runtime.comm.steps_done import StepDone
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.steps_taken import note_step
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

from .record import record_of

_IMPLEMENTATIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that select an implementation of the same rule."""

Due = Mapping[Context, tuple[tuple[str, ...], list[Unit]]]
"""Settings and updated units of a step, by context."""


def settings_of_step(optimizer: Optimizer, *, by_closure: bool) -> Due:
    """Return settings and units of a step that begins, for `note` to record after it; empty on one rank.

    `by_closure`: the gradients are computed during the step.
    """
    lines: dict[Context, list[str]] = collections.defaultdict(list)
    whole: dict[Context, list[str]] = collections.defaultdict(list)
    due: dict[Context, list[Unit]] = collections.defaultdict(list)
    for group in optimizer.param_groups:
        members: dict[Context, list[Unit]] = collections.defaultdict(list)
        for p in group["params"]:
            if not isinstance(p, ShardedParameter) or p._zinf_unit.shard_group.size == 1:
                continue
            grad, unit = p.grad, p._zinf_unit
            if grad is not None or (by_closure and p.requires_grad):
                members[unit.context].append(unit)
            if type(grad) is torch.Tensor and grad.layout is torch.strided:  # of which each rank takes its part
                whole[unit.context].append(f"the whole gradient of {unit.name}: {fingerprint(grad)}")
        described = ", ".join(f"{name}={_text(group[name])}" for name in optimizer.defaults if name in _kept(group))
        for context, units in members.items():
            lines[context].append(f"{described} for {len(units)} parameters: numbers {_ranges([u.serial for u in units])}")
            due[context] += units
    return {context: ((*lines[context], *whole[context]), units) for context, units in due.items()}


def note(optimizer: Optimizer, due: Due) -> None:
    """Record a step that is complete or deferred."""
    if not due:
        return
    record = record_of(optimizer)
    if record.steps_done is None:
        optimizer.register_load_state_dict_post_hook(_start_anew)
    record.steps_done = number = (record.steps_done or 0) + 1
    for context, (settings, units) in due.items():
        note_step(StepDone(type(optimizer).__name__, number, settings), units, context)


def _start_anew(optimizer: Optimizer) -> None:
    record_of(optimizer).steps_done = 0


def _kept(group: Mapping[str, Any]) -> set[str]:
    return set(group) - _IMPLEMENTATIONS


def _text(value: Any) -> str:
    """Return a setting as text that is equal on all ranks; a tensor by its values."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() <= 16 else f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _ranges(numbers: list[int]) -> str:
    """Return numbers as ranges: 0-3, 7."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
