"""The lanes of one rank, one for each link, and what is noted of the time for which compute waits for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from .lanes import InlineLane, Lane, Pending, StreamLane, ThreadLane
from .link_meter import WRITTEN, Meter
from .overlap_log import Spans, Timed

_UNTIMED = contextlib.nullcontext()


class Lanes:
    """Where the transfers of a rank are performed: gathers and reductions, and what moves between tiers."""

    def __init__(self) -> None:
        self.gather: Lane = InlineLane()
        self.reduce: Lane = InlineLane()
        self.meter = Meter()
        self.waits: Spans | None = None
        """Where it is noted when compute stands still, see `overlap_log.recorded`; None: nowhere."""
        self._swap: Lane | None = None
        self._update: Lane | None = None

    def connect(self, device: torch.device) -> None:
        """Begin to move between ranks beside compute: by threads on the CPU, by streams on a device."""
        if device.type == "cpu":
            self.gather, self.reduce = ThreadLane("zinf-gather", link="from ranks"), ThreadLane("zinf-reduce", link="to ranks")
        else:
            self.gather, self.reduce = StreamLane(device), StreamLane(device)

    @property
    def swap(self) -> Lane:
        """On which gradients leave for their tier; made when first needed."""
        if self._swap is None:
            self._swap = ThreadLane("zinf-swap", link=WRITTEN, forgiving=True)
        return self._swap

    @property
    def update(self) -> Lane:
        """On which what is left of a step is done beside the next forward; made when first needed."""
        if self._update is None:
            self._update = ThreadLane("zinf-update", forgiving=True)
        return self._update

    def threads(self) -> list[ThreadLane]:
        """Return the lanes that have a thread of their own."""
        return [lane for lane in (self.gather, self.reduce, self._swap, self._update) if isinstance(lane, ThreadLane)]

    def stop_updates(self) -> None:
        """Return when no step is worked on any more; the process ends."""
        if isinstance(self._update, ThreadLane):
            self._update.close()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which compute waits for other ranks."""
        return _UNTIMED if self.waits is None else Timed(self.waits)

    def start(self, lane: Lane, transfer: Callable[[], None]) -> Pending:
        """Submit a transfer of a graph to a lane; what time that takes, compute stands still."""
        with self.waiting(), self.meter.waiting():
            return lane.submit(transfer)
