"""The host memory that this rank could take now, for what no graph planned for."""

from __future__ import annotations

from .limits import usable_host_bytes
from .runtime.context import Context


def host_room_bytes(context: Context) -> int:
    """Return the host memory that this rank could take now beside what it holds, within the caps that were declared."""
    claims, room = context.claims, usable_host_bytes()
    if claims.declared_host is not None:
        room = min(room, claims.declared_host - context.host_ledger.total()[0])
    if context.bridge.unified and claims.declared_device is not None:
        room = min(room, claims.declared_device - context.ledger.total()[0])
    return max(0, room)
