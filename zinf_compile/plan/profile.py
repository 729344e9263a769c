"""Profiles of machines: rates of one device, of its links and of its drives, with their sources. `zinf plan --machine` reads one.

A profile is JSON: shipped ones lie in `profiles/`, `zinf doctor --profile FILE` measures this machine. Rates are those that a
program reaches at best, not measured in a step: a plan on paper is as good as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from zinf_compile.errors import PlanError

from .as_json import read_json, write_json

FOLDER = Path(__file__).parent / "profiles"
VERSION = 1
"""Of the JSON."""
MEASURED = 0.6
"""Share of the products' rate on paper that large products of a step reach, where a profile does not say."""
LEAST_RATE, MOST_RATE = 1e3, 1e18
"""FLOP/s and bytes/s outside of these are taken for a wrong unit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Rates of a drive for transfers of one size, lasting so long."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    both_bytes_per_second: float = 0.0
    """Of reads and writes together while both go on; 0: as the slower one alone."""
    extent_bytes: int = 0
    """Of one transfer; 0: large ones."""
    seconds: float = 0.0
    """For how long this was kept up; 0: for as long as you like."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One drive of a node."""

    rates: tuple[Rate, ...]
    capacity_bytes: int = 0
    """0: not known."""
    writes_bytes: float = 0.0
    """What it may write in its life, as its maker says; 0: not known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A machine: devices of a node, their links, its memory and its drives. Link rates are of one device and one direction."""

    name: str
    device_memory_bytes: int
    flops_per_second: Mapping[str, float]
    """Dense products by type, on paper: float32, bfloat16, float16."""
    reached: float = MEASURED
    """Share of that which large products reach."""
    device_bytes_per_second: float
    """Of the device's memory."""
    host_is_device: bool = False
    """The device is the processor: there is no host memory beside it."""
    host_memory_bytes: int = 0
    """Of the node; 0 where it is up to the node: then the budget says it."""
    host_bytes_per_second: float = 1e11
    """Of the node's host memory, which updates on the host are bound by."""
    to_device_bytes_per_second: float = 0.0
    from_device_bytes_per_second: float = 0.0
    ranks_bytes_per_second: float = 0.0
    """That a device receives from the others of its node."""
    network_bytes_per_second: float = 0.0
    """That a device receives from other nodes; 0: as `ranks_bytes_per_second`."""
    latency_seconds: float = 1e-5
    """Of a transfer."""
    devices_per_node: int = 1
    drive: Drive | None = None
    drives: int = 1
    source: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Where each figure is from."""

    def __post_init__(self) -> None:
        """Refuse figures that make no sense."""
        _check(self)

    def flops(self, dtype: str) -> float:
        """Return the FLOP/s that products in a type reach: of the nearest wider type where the profile lacks it."""
        table = self.flops_per_second
        order = (dtype, *(("bfloat16", "float16") if dtype in ("bfloat16", "float16") else ()), "float32", *table)
        return self.reached * next(table[each] for each in order if each in table)

    def to_json(self) -> str:
        """Return the profile as text that `from_json` reads."""
        return write_json(self, kind="machine profile", version=VERSION)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile; raises `PlanError` naming the field that is wrong."""
        return read_json(cls, text, kind="machine profile", version=VERSION)


def shipped() -> list[str]:
    """Return the names of the profiles that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def find_profile(name: str) -> Profile:
    """Return a shipped profile by its name, or that of a file; raise `PlanError` for what is neither."""
    path = FOLDER / f"{name}.json" if name in shipped() else Path(name)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(shipped())
        raise PlanError(
            f"machine {name!r} is no shipped profile, and no file that can be read ({error}); accepted: {known}, or a file "
            "that `zinf doctor --profile FILE` wrote; --machine of `zinf plan` takes `here` as well"
        ) from None
    try:
        return Profile.from_json(text)
    except PlanError as error:
        raise PlanError(f"machine {name!r}: {error}; correct the file, or measure again: zinf doctor --profile FILE") from None


def _check(profile: Profile) -> None:
    _between(profile, "device_memory_bytes", 1, 1 << 50)
    _between(profile, "host_memory_bytes", 0, 1 << 50)
    if not profile.flops_per_second:
        raise PlanError("flops_per_second is empty; accepted: a rate for float32 or bfloat16 at least")
    for dtype, rate in profile.flops_per_second.items():
        _rate(f"flops_per_second of {dtype}", rate)
    if not 0 < profile.reached <= 1:
        raise PlanError(f"reached is {profile.reached}; accepted: more than 0, and at most 1")
    _rate("device_bytes_per_second", profile.device_bytes_per_second)
    _rate("host_bytes_per_second", profile.host_bytes_per_second)
    for name in (
        "ranks_bytes_per_second",
        "network_bytes_per_second",
        "to_device_bytes_per_second",
        "from_device_bytes_per_second",
    ):
        needed = name.endswith("device_bytes_per_second") and not profile.host_is_device
        if needed or getattr(profile, name):
            _rate(name, getattr(profile, name))
    if not (0 <= profile.latency_seconds < 1):
        raise PlanError(f"latency_seconds is {profile.latency_seconds}; accepted: 0 to 1, in seconds")
    for name in ("devices_per_node", "drives"):
        _between(profile, name, 1, 1024)
    if profile.drive is not None:
        _check_drive(profile.drive)


def _check_drive(drive: Drive) -> None:
    if not drive.rates:
        raise PlanError("the drive has no rates; accepted: at least one row")
    for number, rate in enumerate(drive.rates):
        _rate(f"drive.rates[{number}].read_bytes_per_second", rate.read_bytes_per_second)
        _rate(f"drive.rates[{number}].write_bytes_per_second", rate.write_bytes_per_second)
        total = rate.read_bytes_per_second + rate.write_bytes_per_second
        if not 0 <= rate.both_bytes_per_second <= 1.05 * total:
            raise PlanError(
                f"drive.rates[{number}].both_bytes_per_second is {rate.both_bytes_per_second:g}, more than reads and "
                f"writes alone move together, {total:g}; accepted: 0 (not known) to that"
            )
        for name, value in (("extent_bytes", rate.extent_bytes), ("seconds", rate.seconds)):
            if not 0 <= value < math.inf:
                raise PlanError(f"drive.rates[{number}].{name} is {value}; accepted: 0 or more")
    for name in ("writes_bytes", "capacity_bytes"):
        if not 0 <= getattr(drive, name) < math.inf:
            raise PlanError(f"drive.{name} is {getattr(drive, name)}; accepted: 0 (not known) or more")


def _between(profile: Profile, name: str, least: int, most: int) -> None:
    value = getattr(profile, name)
    if not least <= value <= most:
        raise PlanError(f"{name} is {value:,}; accepted: {least:,} to {most:,}")


def _rate(name: str, value: float) -> None:
    if not (math.isfinite(value) and LEAST_RATE <= value <= MOST_RATE):
        raise PlanError(f"{name} is {value:g}; accepted: {LEAST_RATE:g} to {MOST_RATE:g} a second, in FLOP or bytes")
