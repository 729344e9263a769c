"""Marks of gathers whose unit a backward finds on the device, because its forward has left it there."""

from __future__ import annotations

from torch import fx

_FOUND = "zinf_found"


def mark_found(gather: fx.Node) -> None:
    """Mark a gather: its unit is there if the forward was the last graph to run, and is brought for it otherwise."""
    gather.meta[_FOUND] = True


def is_found(gather: fx.Node) -> bool:
    """Return whether a gather's unit may be there already."""
    return bool(gather.meta.get(_FOUND))
