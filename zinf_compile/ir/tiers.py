"""Where the user wants the states of a model to live."""

from __future__ import annotations

import dataclasses

import torch

TIERS = ("device", "host", "nvme")
"""From near to far. Where the device is host memory, "device" and "host" are the same."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """A tier for each kind of state."""

    params: str = "device"
    grads: str = "device"
    optimizer: str = "device"
    nvme: tuple[str, ...] = ()
    """Folders on drives; states are striped over several."""
    master: torch.dtype | None = None
    """The precision in which 16-bit parameters are updated, in a copy kept with the optimizer's states; None: their own."""
    reduce_dtype: torch.dtype | None = None
    """The type of gradients between ranks and until the step; None: the master copy's, or else the parameter's own."""
    update: str | None = None
    """Where parameters are updated, "host" or "device"; None: where the optimizer's states live."""

    tile: int | None = None
    """Parameters of more bytes are cut into tiles of at most as many; None: none is."""

    @property
    def update_on_device(self) -> bool:
        """Whether the device updates parameters; where it is host memory that is the same."""
        return self.update == "device" if self.update else self.optimizer == "device"

    def master_of(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the type of the copy in which a parameter of type `dtype` is updated; None where it is updated itself."""
        return self.master if dtype in (torch.bfloat16, torch.float16) else None

    def reduce_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which gradients of a parameter of type `dtype` are reduced over ranks, added up and kept."""
        if not dtype.is_floating_point:
            return dtype
        return self.reduce_dtype or self.master_of(dtype) or dtype

    def of_parameter(self, *, dim: int, numel: int) -> Placement:
        """Return where the states of one parameter live: one without dimensions, or without elements, stays on the device.

        The former is updated, and its gradient reduced, in the types that are said here.
        """
        if dim and numel:
            return self
        return dataclasses.replace(ON_DEVICE, master=self.master, reduce_dtype=self.reduce_dtype) if numel else ON_DEVICE

    def streams_values(self, *, unified: bool) -> bool:
        """Say whether parameters and gradients have to be brought to where they are updated."""
        away = ("nvme",) if unified else ("nvme", "host")
        return self.params in away or self.grads in away or not (unified or self.update_on_device)

    def streams(self, *, unified: bool) -> bool:
        """Say whether anything has to be brought there, or back."""
        away = ("nvme",) if unified else ("nvme", "host")
        return self.streams_values(unified=unified) or self.optimizer in away


ON_DEVICE = Placement()
"""All on the device."""


def way_in(tier: str, *, unified: bool) -> tuple[str, ...]:
    """Return the tiers that a shard passes on its way to the device; none where it is there. `unified`: it is host memory."""
    ways = {"nvme": ("nvme", "device") if unified else ("nvme", "host", "device"), "host": () if unified else ("host", "device")}
    return ways.get(tier, ())


def step_buffers(tier: str, *, unified: bool, update_on_device: bool) -> tuple[bool, bool]:
    """Say whether pieces that live on a tier need memory on the host, and on the device, while a step updates them."""
    host = tier == "nvme" or (not unified and tier == "device" and not update_on_device)
    return host, not unified and tier != "device" and update_on_device
