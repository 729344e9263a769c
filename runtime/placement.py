"""Where the user wants the states of a model to live."""

from __future__ import annotations

import dataclasses

TIERS = ("device", "nvme")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """A tier for each kind of state."""

    optimizer: str = "device"
    nvme: tuple[str, ...] = ()
    """Folders on drives; states are striped over several."""


ON_DEVICE = Placement()
"""All on the device."""
