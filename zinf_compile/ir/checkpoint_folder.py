"""A folder that was announced for checkpoints, by options `checkpoint` and `checkpoint_keep`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CheckpointFolder:
    """A folder that was announced for checkpoints."""

    path: str
    """Absolute."""
    keep: int
    """Checkpoints that are kept there."""
