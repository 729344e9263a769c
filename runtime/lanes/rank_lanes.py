"""The lanes of one rank, one for each link, and its meter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from .lanes import ArrivalLane, InlineLane, Lane, Pending, ThreadLane
from .link_meter import WRITTEN, Meter
from .overlap_log import Spans, Timed
from .stream_lane import StreamLane

_UNTIMED = contextlib.nullcontext()

MOST_CHANGES = 1 << 14
"""Changes that may be queued: the memory they hold is bounded by what gradients may take."""

MOST_GATHERS = 1 << 10
"""Gathers that may be under way: the schedule bounds what is gathered ahead, and compute waits for no later one's shard."""
MOST_SAVED = 1 << 10
"""Saved values that may be queued: the schedule waits for those of a stretch of compute behind the next one."""


def _nothing() -> None:
    """Change nothing."""


class Lanes:
    """The lanes of a rank: of gathers, of reductions, of transfers between tiers, and of deferred updates."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.gather: Lane = InlineLane()
        self.reduce: Lane = InlineLane()
        self.meter = Meter()
        self.waits: Spans | None = None
        """Log of the times when compute stands still, see `overlap_log.recorded`; None: none is kept."""
        self._swap: Lane | None = None
        self._update: Lane | None = None
        self._changes: ArrivalLane | None = None
        self._saved: ThreadLane | None = None
        self._update_stream: torch.Stream | None = None

    def connect(self) -> None:
        """Begin to move between ranks beside compute: by threads on the CPU, by streams on a device."""
        if self._device.type == "cpu":
            self.gather = ThreadLane("zinf-gather", link="from ranks", most=MOST_GATHERS)
            self.reduce = ThreadLane("zinf-reduce", link="to ranks")
        else:
            self.gather = StreamLane(self._device, "zinf-gather", link="from ranks", most=MOST_GATHERS)
            self.reduce = StreamLane(self._device, "zinf-reduce", link="to ranks")

    @property
    def swap(self) -> Lane:
        """The lane of gradients to their tier; made when first needed."""
        if self._swap is None:
            self._swap = ThreadLane("zinf-swap", link=WRITTEN, forgiving=True, device=self._device)
        return self._swap

    @property
    def saved(self) -> ThreadLane:
        """The lane of saved values to drives, as many as two stretches of compute make; made when first needed."""
        if self._saved is None:
            self._saved = ThreadLane("zinf-saved", link=WRITTEN, most=MOST_SAVED, forgiving=True)
        return self._saved

    @property
    def update(self) -> Lane:
        """The lane of deferred steps, beside the next forward; made when first needed."""
        if self._update is None:
            self._update = ThreadLane("zinf-update", forgiving=True, device=self._device)
        return self._update

    def update_stream(self, device: torch.device) -> torch.Stream | None:
        """Return the stream to which the lane of updates issues, made when first needed; None on the CPU."""
        if self._update_stream is None and device.type != "cpu":
            self._update_stream = torch.Stream(device)
        return self._update_stream

    @property
    def changes(self) -> ArrivalLane:
        """The lane of changes of gradients in host memory beside a device, each after its copies; made when first needed."""
        if self._changes is None:
            self._changes = ArrivalLane("zinf-changes", most=MOST_CHANGES, device=self._device)
        return self._changes

    def finish_changes(self) -> None:
        """Return when all changes submitted so far are over: one wait is that of many. Failed ones raise where they are read."""
        self.changes.submit(_nothing).wait()

    def settle(self) -> None:
        """Let go of what transfers on streams held that are over by now."""
        for lane in (self.gather, self.reduce):
            if isinstance(lane, StreamLane):
                lane.settle()

    def threads(self) -> list[ThreadLane | StreamLane]:
        """Return the lanes that have, or may have, a thread of their own."""
        lanes = (self._changes, self.gather, self.reduce, self._saved, self._swap, self._update)
        return [lane for lane in lanes if isinstance(lane, ThreadLane | StreamLane)]

    def stop_updates(self) -> None:
        """Return when no step is worked on any more; the process ends."""
        if isinstance(self._update, ThreadLane):
            self._update.close()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which compute waits for other ranks."""
        return _UNTIMED if self.waits is None else Timed(self.waits)

    def start(
        self,
        lane: Lane,
        transfer: Callable[[], None],
        *,
        after: Sequence[Pending] = (),
        ended: Callable[[], None] | None = None,
    ) -> Pending:
        """Submit a transfer of a graph to a lane, see `Lane.submit`; what time that takes, compute stands still."""
        with self.waiting(), self.meter.waiting():
            return lane.submit(transfer, after=after, ended=ended)
