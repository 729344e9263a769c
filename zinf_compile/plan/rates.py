"""Rates by which decisions are made before anything has run: of a machine's profile, measured on its device, or rough ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from zinf_compile.ir.device_rates import DeviceRates
from zinf_compile.ir.tiers import Tier

from .on_paper import place
from .problem_parts import Link
from .profile import Profile, find_profile
from .rough_links import rough_bytes, rough_flops, rough_links

Ends = tuple[Tier | None, Tier | None]

NOTHING = DeviceRates()


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a device and its links: an error makes a step slower, never wrong."""

    kind: str
    """The type of device, as PyTorch names it."""
    profile: Profile | None = None
    """Of the machine; what it lacks is rough."""
    measured: DeviceRates = NOTHING
    """On the device; what was not measured is rough. A profile says all instead."""

    @classmethod
    def of(cls, kind: str, machine: str | None, measured: DeviceRates | None = None) -> Rates:
        """Return the rates of a shipped profile by its name, or of a profile's file; `measured` ones where `machine` is None.

        Raises `PlanError` for what is neither.
        """
        return cls(kind, None if machine is None else find_profile(machine), measured or NOTHING)

    def flops(self, dtype: object) -> float:
        """Return the operations per second of products in a type."""
        name = str(dtype).removeprefix("torch.")
        if self.profile is not None:
            return self.profile.flops(name)
        return self.measured.flops.get(name) or rough_flops(self.kind)

    @property
    def bytes(self) -> float:
        """Return the bytes per second of the device's memory."""
        return rough_bytes(self.kind) if self.profile is None else self.profile.device_bytes_per_second

    def links(self, tiers: Sequence[Tier], size: int) -> Iterator[Link]:
        """Yield the links between tiers from near to far, and between `size` ranks."""
        return self.applied(rough_links(tiers, size), size)

    def applied(self, links: Iterable[Link], size: int) -> Iterator[Link]:
        """Yield links of one of `size` ranks, each at its rate where that is known."""
        known = _of_measured(self.measured) if self.profile is None else _known(self.profile, size)
        for link in links:
            rate = known.get(_ends(link), 0.0)
            yield dataclasses.replace(link, bytes_per_second=rate) if rate else link


def _of_measured(measured: DeviceRates) -> dict[Ends, float]:
    return {(Tier.HOST, Tier.DEVICE): measured.to_device, (Tier.DEVICE, Tier.HOST): measured.to_host}


def _known(profile: Profile, size: int) -> dict[Ends, float]:
    """Return the bytes per second of the links of a profile for one of `size` ranks."""
    between = profile.ranks_bytes_per_second or profile.network_bytes_per_second
    drives = 0 if profile.drive is None else profile.drives
    found = place(
        profile,
        world=size if between else 1,
        device_memory=profile.device_memory_bytes,
        host_memory=profile.host_memory_bytes or None,
        drives=drives,
    )
    return {_ends(link): link.bytes_per_second / link.sharers for link in found.links}


def _ends(link: Link) -> Ends:
    """Return both ends of a link; a drive's other one is memory, whichever it is."""
    ends = link.source, link.destination
    if any(tier is not None and not tier.in_memory for tier in ends):
        return tuple(None if tier is None or tier.in_memory else tier for tier in ends)  # type: ignore[return-value]
    return ends
