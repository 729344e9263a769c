"""Perform the steps of saved values: swaps and waits, values that are dropped or copied, and states of random generators."""

from __future__ import annotations

import torch

from zinf_compile.ir.random_states import set_state_of, state_of
from zinf_compile.ir.value_steps import CopyValue, DropValue, RandomState, SetRandomState, SwapValuesIn, SwapValuesOut, WaitValue
from zinf_compile.runtime.transfer import swap_values
from zinf_compile.runtime.transfer.dropped_value import DroppedValue
from zinf_compile.runtime.transfer.swap_values import LeavingValues, ReturningValues

from .run import Run


def perform_swap_values_out(step: SwapValuesOut, run: Run) -> None:
    values = [run.registers[register] for register in step.values]
    if isinstance(values[0], LeavingValues):
        run.registers[step.out] = swap_values.swap_on(values[0], step.dst, run.context, run.space)
    else:
        run.registers[step.out] = swap_values.swap_out(values, step.dst, run.context, run.space, run.program.name)


def perform_swap_values_in(step: SwapValuesIn, run: Run) -> None:
    values = [run.registers[register] for register in step.values]
    if isinstance(values[0], ReturningValues):
        run.registers[step.out] = swap_values.swap_further(values[0], run.context)
    else:
        run.registers[step.out] = swap_values.swap_in(values, step.dst, run.context)


def perform_wait_value(step: WaitValue, run: Run) -> None:
    handle: LeavingValues | ReturningValues = run.registers[step.handle]
    with run.context.lanes.waiting(), run.context.lanes.meter.waiting():
        handle.wait()
    run.registers[step.out] = handle.value(step.number)


def perform_drop(step: DropValue, run: Run) -> None:
    """Put a stand-in into the place of a value."""
    run.registers[step.out] = DroppedValue.of(run.registers[step.value], f"value {step.value} of {run.program.name}")


def perform_copy(step: CopyValue, run: Run) -> None:
    """Copy a value, in its layout."""
    value = run.registers[step.value]
    with torch.inference_mode(False), torch.no_grad():
        run.registers[step.out] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device).copy_(
            value
        )


def perform_random_state(step: RandomState, run: Run) -> None:
    """Record a generator's state."""
    run.registers[step.out] = state_of(step.device)


def perform_set_random_state(step: SetRandomState, run: Run) -> None:
    """Set a generator's state; the first of two keeps the state that the second, or an error, puts back."""
    before = run.registers[step.out] = state_of(step.device)
    if run.random.pop(step.device, None) is None:
        run.random[step.device] = before
    set_state_of(step.device, run.registers[step.state])
