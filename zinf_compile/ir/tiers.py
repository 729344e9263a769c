"""The tiers that memory and drives form, how a shard gets from one to another, and where the user wants states to live."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from .compute_shape import PIECE_NUMEL
from .sizes import Sides


class Tier(str):
    """A kind of memory or drive: one of a closed set of rows, found by its word with `Tier("nvme")`.

    A tier is its word wherever it is printed, in a graph as in JSON. Not an `enum.Enum`: FX would print that as code of its own,
    and a tier can be added by a row (`Tier.add`).
    """

    __slots__ = ("distance", "in_folders", "in_memory")

    DEVICE: ClassVar[Tier]
    HOST: ClassVar[Tier]
    NVME: ClassVar[Tier]

    distance: int
    """From the device: a schedule brings shards to tiers that are nearer."""
    in_memory: bool
    """Whether tensors can lie there; else shards are read to host memory, and written from there."""
    in_folders: bool
    """Whether the user has to name folders for it."""

    def __new__(cls, word: str) -> Tier:
        """Return the tier of that name; raises `ValueError` where none has it."""
        if word not in _ROWS:
            raise ValueError(f"{word!r} is no tier; accepted: {', '.join(map(repr, _ROWS))}")
        return _ROWS[word]

    @classmethod
    def add(cls, word: str, *, distance: int, in_memory: bool, in_folders: bool = False) -> Tier:
        """Add a row. What isn't in memory needs a store, too: see `runtime.storage.open_store`."""
        tier = _ROWS[word] = str.__new__(cls, word)
        tier.distance, tier.in_memory, tier.in_folders = distance, in_memory, in_folders
        return tier

    @classmethod
    def remove(cls, tier: Tier) -> None:
        """Take a row out that was added."""
        del _ROWS[tier]

    def __reduce__(self) -> tuple[type[Tier], tuple[str]]:
        """Let copies be the same row."""
        return Tier, (str(self),)


_ROWS: dict[str, Tier] = {}

Tier.DEVICE = Tier.add("device", distance=0, in_memory=True)
Tier.HOST = Tier.add("host", distance=1, in_memory=True)
Tier.NVME = Tier.add("nvme", distance=2, in_memory=False, in_folders=True)

TIERS = (Tier.DEVICE, Tier.HOST, Tier.NVME)
"""From near to far. Where the device is host memory, the first two are the same."""


def all_tiers() -> tuple[Tier, ...]:
    """Return the tiers of which options may name one."""
    return tuple(_ROWS.values())


@dataclasses.dataclass(frozen=True)
class Topology:
    """The links between tiers."""

    host_apart: bool
    """Whether the device has memory of its own, and shards are copied between that and the host's."""

    def hops(self, tier: Tier) -> tuple[Tier, ...]:
        """Return the tiers that a shard passes from a tier to the device, both included; none from the device itself."""
        if tier.in_memory:
            return (tier, Tier.DEVICE) if self.host_apart and tier != Tier.DEVICE else ()
        return (tier, Tier.HOST, Tier.DEVICE) if self.host_apart else (tier, Tier.DEVICE)

    def is_offloaded(self, tier: Tier) -> bool:
        """Say whether what lives there must be loaded to the device."""
        return bool(self.hops(tier))

    def side(self, tier: Tier) -> Tier | None:
        """Return whose memory what lives there is counted in; None for drives."""
        if not tier.in_memory:
            return None
        return tier if self.host_apart else Tier.DEVICE

    def reads_at_once(self, tier: Tier) -> bool:
        """Say whether one hop from a drive ends on the device."""
        return not tier.in_memory and not self.host_apart

    def passes_host(self, tier: Tier) -> bool:
        """Say whether a shard passes host memory between a tier and the device."""
        return Tier.HOST in self.hops(tier)[1:]

    @property
    def sides(self) -> tuple[Tier, ...]:
        """The memories that are counted by themselves: the device's, and the host's where that is another."""
        return (Tier.DEVICE, Tier.HOST) if self.host_apart else (Tier.DEVICE,)

    def counted(self, sides: Sides) -> Sides:
        """Return bytes by side as they are counted: all as the device's where that is host memory."""
        return sides if self.host_apart else Sides(sides.device + sides.host, 0)

    def updated_on(self, placement: Placement) -> Tier:
        """Return the side on which parameters are updated."""
        return Tier.DEVICE if placement.update_on_device or not self.host_apart else Tier.HOST

    def step_buffers(self, tier: Tier, *, update_on_device: bool) -> tuple[bool, bool]:
        """Say whether pieces that live on a tier need memory on the host, and on the device, while a step updates them."""
        host = not tier.in_memory or (self.host_apart and tier == Tier.DEVICE and not update_on_device)
        return host, self.host_apart and tier != Tier.DEVICE and update_on_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """A tier for each kind of state."""

    params: Tier = Tier.DEVICE
    grads: Tier = Tier.DEVICE
    optimizer: Tier = Tier.DEVICE
    nvme: tuple[str, ...] = ()
    """Folders on drives; states are striped over several."""
    master: torch.dtype | None = None
    """The precision in which 16-bit parameters are updated, in a copy kept with the optimizer's states; None: their own."""
    reduce_dtype: torch.dtype | None = None
    """The type of gradients between ranks and until the step; None: the master copy's, or else the parameter's own."""
    update: Tier | None = None
    """The side on which parameters are updated, host or device; None: the one of the optimizer's states."""

    tile: int | None = None
    """Parameters of more bytes are cut into tiles of at most as many; None: none is."""

    piece_numel: int = PIECE_NUMEL
    """Elements of a piece of a shard, see `ComputeShape`."""

    reduce_grads: str = "backward"
    """When gradients are reduced over ranks: in each "backward", or at the "step", until which they are added up whole."""

    reshard_after_backward: bool = True
    """Whether full parameters are let go of behind each backward, or stay until their values change."""

    def __post_init__(self) -> None:
        """Let tiers be given by their words."""
        for field in ("params", "grads", "optimizer"):
            object.__setattr__(self, field, Tier(getattr(self, field)))
        if self.update is not None:
            object.__setattr__(self, "update", Tier(self.update))

    @property
    def without_tiles(self) -> Placement:
        """The same for parameters that are updated together: whether they are cut makes no difference."""
        return self if self.tile is None else dataclasses.replace(self, tile=None)

    @property
    def update_on_device(self) -> bool:
        """Whether the device updates parameters; where it is host memory that is the same."""
        return (self.update or self.optimizer) == Tier.DEVICE

    def master_of(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the type of the copy in which a parameter of type `dtype` is updated; None where it is updated itself."""
        return self.master if dtype in (torch.bfloat16, torch.float16) else None

    def reduce_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which gradients of a parameter of type `dtype` are reduced over ranks, added up and kept."""
        if not dtype.is_floating_point:
            return dtype
        return self.reduce_dtype or self.master_of(dtype) or dtype

    def reduces_at_step(self, numel: int, shard: int, *, tiled: bool) -> bool:
        """Return whether the gradient of a parameter of `numel`, whose shard has `shard`, is kept whole until the step.

        One in tiles is not, and where the shard is all of it there is nothing to reduce.
        """
        return self.reduce_grads == "step" and not tiled and shard < numel

    def gradient_numel(self, numel: int, shard: int, *, tiled: bool) -> int:
        """Return the elements that a rank holds of that gradient: its shard, and all of it where it is kept whole."""
        return shard + numel * self.reduces_at_step(numel, shard, tiled=tiled)

    def full_copy_numel(self, numel: int, shard: int, topology: Topology, *, tiled: bool) -> int:
        """Return the elements of a full copy that stays on the device until the parameter changes; 0: there is none.

        There is none of a parameter in tiles, nor where compute reads the shard itself.
        """
        moves = shard < numel or topology.is_offloaded(self.params)
        return numel if not self.reshard_after_backward and moves and not tiled else 0

    def of_parameter(self, *, dim: int, numel: int) -> Placement:
        """Return where the states of one parameter live: one without dimensions, or without elements, stays on the device.

        The former is updated, and its gradient reduced, in the types, and when, it is said here.
        """
        if dim and numel:
            return self
        own = dataclasses.replace(ON_DEVICE, piece_numel=self.piece_numel)
        if not numel:
            return own
        alike = {name: getattr(self, name) for name in ("master", "reduce_dtype", "reduce_grads", "reshard_after_backward")}
        return dataclasses.replace(own, **alike)

    def streams_values(self, topology: Topology) -> bool:
        """Say whether parameters and gradients must be loaded to where they are updated."""
        return topology.is_offloaded(self.params) or topology.is_offloaded(self.grads) or topology.updated_on(self) != Tier.DEVICE

    def streams(self, topology: Topology) -> bool:
        """Say whether anything must be loaded there, or stored back."""
        return self.streams_values(topology) or topology.is_offloaded(self.optimizer)


ON_DEVICE = Placement()
"""All on the device."""
