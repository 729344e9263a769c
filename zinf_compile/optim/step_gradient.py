"""Snapshot of a gradient at `optimizer.step()`: what a deferred step applies, whatever becomes of `parameter.grad`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from zinf_compile._torch import no_torch_function, storage_owners
from zinf_compile.errors import StepFailedError, StoreError
from zinf_compile.ir.sizes import Sides
from zinf_compile.sharded.gradient import ShardedGradient
from zinf_compile.sharded.parameter import ShardedParameter

from .shard_state import local_gradient


class StepGradient:
    """Snapshot of one parameter's gradient for a step."""

    def __init__(self, parameter: ShardedParameter, grad: torch.Tensor, pieces: int) -> None:
        self._is_own = isinstance(grad, ShardedGradient)
        offloaded = grad.offloaded if isinstance(grad, ShardedGradient) else None
        self._local = local_gradient(parameter) if offloaded is None else None
        self._parameter = parameter
        self.offloaded = offloaded
        """The offloaded gradient; None if it is on the device."""
        self.changes = offloaded.noted() if offloaded is not None and offloaded.backing.resident is None else None
        """Function to apply to each piece after it was read: pending scalings. None for gradients in memory."""
        self.pieces_left = pieces
        """Pieces not applied yet."""
        self._arriving = None if offloaded is None else offloaded.under_way
        if offloaded is not None:
            offloaded.norms = ()  # behind a step nobody asks for them
        self.order = 0 if offloaded is None or self._arriving is None else offloaded.order
        """0: it was there at the snapshot; else what is less for one that arrives earlier."""

    def wait_arrived(self) -> None:
        """Return when it is where the step reads it. Any thread may call."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    @property
    def may_wait(self) -> bool:
        """Whether it may be applied after `step()`: nobody changes it unseen meanwhile.

        Changes of `parameter.grad` wait for the step, or are noted for a gradient on a drive and don't reach this one. What has
        its memory otherwise must not exist: on a single rank views of a gradient share it.
        """
        if self.offloaded is not None:
            return True
        shard, unit = self.local(), self._parameter._zinf_unit
        return self._is_own and (unit.shard_group.size > 1 or storage_owners(shard) == 1 + (shard._base is not None))

    @property
    def is_on_host(self) -> bool:
        """Whether all of it is in host memory beside a device."""
        return self.offloaded is not None and self.offloaded.backing.resident is not None

    @property
    def bytes(self) -> Sides:
        """Bytes in memory, unless `parameter.grad` holds them as well."""
        grad = self._parameter.grad
        if self.offloaded is None:
            local = self.local()
            shared = isinstance(grad, ShardedGradient) and grad.shares(local)
            return Sides(0 if shared else local.nbytes, 0)
        resident = self.offloaded.backing.resident
        shared = isinstance(grad, ShardedGradient) and grad.offloaded is self.offloaded
        return Sides(0, 0 if resident is None or shared else resident.nbytes)

    def local(self) -> torch.Tensor:
        """Return the shard of a gradient on the device."""
        assert self._local is not None, "the parameter had a gradient at the snapshot, on the device"
        return self._local


def mark_applied(optimizer: Optimizer) -> None:
    """Note, after a step, that it has applied the gradients as they are."""
    with no_torch_function():
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    for grad in grads:
        if grad is not None:
            grad._zinf_applied = grad._version


def is_applied(grad: torch.Tensor) -> bool:
    """Say whether a step has applied a gradient, to which nothing was added since."""
    version: int | None = getattr(grad, "_zinf_applied", None)
    return version == grad._version


def check_gradients(parameters: Iterable[ShardedParameter], *, may_arrive: bool = False) -> None:
    """Wait for all gradients to reach their tier; raise before any update if a transfer failed.

    `may_arrive`: those that are copied to host memory on one rank, or changed there, may still be on their way.
    """
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, ShardedGradient) and grad.offloaded is not None:
            if may_arrive and grad.offloaded.under_way is not None:
                continue
            try:
                grad.offloaded.wait_written()
            except StoreError as error:
                raise StepFailedError(
                    f"the gradient of {parameter._zinf_unit.name} was lost: nothing is updated yet, parameters and states "
                    f"are as before this step. Cause: {error}"
                ) from error
