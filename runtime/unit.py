"""A partitioned parameter, as the runtime knows it: this rank's shard and how to make it whole."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

import torch

from .home import Home
from .lanes import Pending
from .partition import shard_numel, shard_range
from .placement import ON_DEVICE, Placement

if TYPE_CHECKING:
    from .context import Context
    from .gradient_room import GradientShelves
    from .updates import Updates


class Unit:
    """One partitioned parameter on this rank. Its flat order is that of the parameter's memory.

    Its shard is a tensor on its device, or has a `home` elsewhere.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        shard: torch.Tensor | None,
        *,
        name: str,
        context: Context,
        placement: Placement = ON_DEVICE,
        home: Home | None = None,
    ) -> None:
        assert (shard is None) == (home is not None), "a shard is in one place"
        self.name = name
        self.context = context
        self.placement = placement
        self.parameter = weakref.ref(parameter)
        context.enlist(self)
        self.serial = next(context.serials)
        """Counts the parameters partitioned over these ranks; equal on all of them, since all partition in the same order."""
        self.family = self.serial
        """Equal for the parameters that were partitioned together: the serial of the first of them."""
        self.shape = tuple(parameter.shape)
        self.stride = tuple(parameter.stride())
        self.dtype = parameter.dtype
        self.device = parameter.device
        self.numel = math.prod(self.shape)
        self._shard = shard
        self.home = home
        """Where the shard is; None: on the device, in `shard`."""
        self.gradient_room: tuple[GradientShelves, int] | None = None
        """Where gradients go whose tier is a drive: the unit's number there."""
        self.updates: Updates | None = None
        """The step that may still have to update the shard."""
        self._whole: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the full parameter."""
        return self.numel * self.dtype.itemsize

    @property
    def shard(self) -> torch.Tensor:
        """This rank's elements, flat, then zeros up to `shard_numel`; only where they are on the device."""
        assert self._shard is not None, "the shard is brought by `load`"
        return self._shard

    @property
    def shard_numel(self) -> int:
        """Elements of the shard, padding included."""
        return shard_numel(self.numel, self.context.size)

    @property
    def at_hand(self) -> bool:
        """Whether this process has the whole value in memory of the device."""
        return self.home is None and self.context.size == 1

    def settle(self) -> None:
        """Return when no step has to update the shard any more; raise where one failed."""
        if self.updates is not None:
            self.updates.wait(self)

    def read(self, into: torch.Tensor) -> Pending:
        """Start to fill host memory with the shard as it is after its last step."""
        assert self.home is not None, "what is on the device needs no reading"
        return self.home.read(into) if self.updates is None else self.updates.read(self, into)

    def load(self) -> torch.Tensor:
        """Return the shard on the device: itself, or a copy of what is elsewhere."""
        if self.home is None:
            return self.shard
        bridge = self.context.bridge
        host = self.home.resident
        if host is None:
            host = bridge.host_buffer(self.shard_numel, self.dtype)
            self.context.host_ledger.track("staged", host)
            self.read(host).wait()
        if bridge.unified:
            return host
        shard = bridge.device_buffer(self.shard_numel, self.dtype)
        bridge.to_device(host, shard, None).wait()
        return shard

    def blank(self) -> torch.Tensor:
        """Return memory of the device to be filled with the shard, and then kept by `save`."""
        return self.shard if self.home is None else self.context.bridge.device_buffer(self.shard_numel, self.dtype)

    def save(self, shard: torch.Tensor) -> None:
        """Keep what `blank` returned."""
        if self.home is None:
            return
        if self.updates is not None:
            self.updates.replace(self)
        bridge = self.context.bridge
        if not bridge.unified:
            host = self.home.resident
            host = bridge.host_buffer(self.shard_numel, self.dtype) if host is None else host
            bridge.to_host(shard, host, None).wait()
            shard = host
        self.home.write(shard).wait()

    @property
    def valid(self) -> int:
        """Elements of the shard that are not padding."""
        start, end = shard_range(self.numel, self.context.size, self.context.rank)
        return end - start

    def logical(self, flat: torch.Tensor) -> torch.Tensor:
        """View a flat full tensor in the parameter's shape and strides."""
        return flat.as_strided(self.shape, self.stride)

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        """Lay a full tensor of the parameter's shape out flat in the parameter's order; copies only when it must."""
        if value.stride() != self.stride:
            value = torch.empty_strided(self.shape, self.stride, dtype=value.dtype, device=value.device).copy_(value)
        return value if self.stride == (1,) else value.as_strided((self.numel,), (1,))

    def whole(self) -> torch.Tensor:
        """On a single rank: the parameter's value, sharing memory with the shard but with a storage of its own.

        Its own storage, because who saves or compares tensors by storage must not see the whole arena.
        """
        assert self.at_hand, "only a single rank whose shard is on the device has the whole parameter at hand"
        if self._whole is None or self._whole.data_ptr() != self.shard.data_ptr():  # moved: to memory shared with a process
            own = (
                torch.utils.dlpack.from_dlpack(self.shard) if self.numel else torch.empty(0, dtype=self.dtype, device=self.device)
            )
            self._whole = self.logical(own)
        return self._whole

    def local_part(self, full: torch.Tensor) -> torch.Tensor:
        """Cut this rank's shard, padded with zeros, out of a full tensor of the parameter's shape (any data type)."""
        start, end = shard_range(self.numel, self.context.size, self.context.rank)
        part = self.flat(full.detach())[start:end]
        size = shard_numel(self.numel, self.context.size)
        if part.numel() == size:
            return part.clone()
        padded = part.new_zeros(size)
        padded[: part.numel()].copy_(part)
        return padded


def make_shards(parameters: list[torch.Tensor], context: Context) -> list[torch.Tensor]:
    """Allocate the shards of new units, one allocation per data type and device, each shard 64-byte aligned."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    places: list[tuple[tuple[torch.dtype, torch.device], int, int]] = []
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        count = shard_numel(parameter.numel(), context.size)
        offset = sizes.get(key, 0)
        places.append((key, offset, count))
        aligned = 64 // math.gcd(64, parameter.element_size())
        sizes[key] = offset + -(-count // aligned) * aligned
    arenas = {key: torch.zeros(total, dtype=key[0], device=key[1]) for key, total in sizes.items()}
    return [arenas[key][offset : offset + count] for key, offset, count in places]
