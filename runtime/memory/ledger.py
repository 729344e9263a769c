"""The account of the bytes that the runtime holds, by kind."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Literal

import torch

Kind = Literal["params", "grads", "states", "gathered", "activations", "staging", "bounce"]
KINDS: tuple[Kind, ...] = ("params", "grads", "states", "gathered", "activations", "staging", "bounce")


class _Counted(weakref.ref[torch.Tensor]):
    """A tensor that is counted for as long as it lives; lighter than `weakref.finalize`."""

    __slots__ = ("count", "kind")
    kind: Kind
    count: int


@dataclasses.dataclass(slots=True)
class _Peak:
    kinds: dict[str, int]
    all: int

    def over(self, other: _Peak) -> _Peak:
        return _Peak({kind: max(count, other.kinds[kind]) for kind, count in self.kinds.items()}, max(self.all, other.all))


class Ledger:
    """Count bytes by kind, now and at the peak, of all time and of the last step; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may run inside any allocation, also one made under this lock
        self._now: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._all_now = 0
        self._peak = _Peak(dict.fromkeys(KINDS, 0), 0)
        """Peaks of the step under way."""
        self._before = self._peak
        self._last = _Peak(dict.fromkeys(KINDS, 0), 0)
        self._idle: int | None = None
        """Bytes of an arena that are lent to nobody; None without one."""
        self._beside = self._beside_last = 0
        """The most bytes held beside gathers, in the step under way and in the last one; counted where there is an arena."""
        self.watch: Callable[[int], None] | None = None
        """Told the bytes held at each change; None: nobody asks."""
        self._tracked: dict[int, _Counted] = {}  # by identity: references to tensors compare as the tensors do

    def add(self, kind: Kind, count: int) -> None:
        """Count `count` more bytes (fewer, when negative)."""
        with self._lock:
            self._now[kind] += count
            self._all_now += count
            if self.watch is not None:
                self.watch(self._all_now + (self._idle or 0))
            if count > 0:  # fewer bytes make no peak
                self._count(kind)

    def arena(self, change: int) -> None:
        """Count more (fewer, when negative) bytes that an arena for gathers keeps beside what is lent of it, and `add` counts.

        They are among the bytes "gathered" of `now` and of the peaks, but not in the first number of `total`: who needs memory
        for a gather may take them.
        """
        with self._lock:
            self._idle = (self._idle or 0) + change
            self._count("gathered")

    def beside_gathers(self) -> int:
        """Return the most bytes held beside gathers during the last step and the one under way, where there is an arena."""
        with self._lock:
            return max(self._beside, self._beside_last)

    def track(self, kind: Kind, *tensors: torch.Tensor) -> None:
        """Count the bytes of tensors, each until it is dropped."""
        count = 0
        for tensor in tensors:
            tracked = _Counted(tensor, self._forget)
            tracked.kind, tracked.count = kind, tensor.nbytes
            count += tracked.count
            self._tracked[id(tracked)] = tracked
        if count:
            self.add(kind, count)

    def now(self) -> dict[str, int]:
        """Return the bytes held, by kind."""
        with self._lock:
            return self._with_arena()

    def peak(self) -> dict[str, int]:
        """Return the most bytes held at any time, by kind."""
        with self._lock:
            return dict(self._before.over(self._peak).kinds)

    def total(self) -> tuple[int, int]:
        """Return the bytes held of all kinds together: now, and the most at any time."""
        with self._lock:
            return self._all_now, max(self._before.all, self._peak.all)

    def held(self) -> int:
        """Return the bytes held of all kinds together, with what an arena keeps beside what is lent of it."""
        with self._lock:
            return self._all_now + (self._idle or 0)

    def peak_of_last_step(self) -> dict[str, int]:
        """Return the most bytes held during the last step, by kind and of "all" together."""
        with self._lock:
            return {**self._last.kinds, "all": self._last.all}

    def end_step(self) -> None:
        """A step of an optimizer is over."""
        with self._lock:
            self._before, self._last = self._before.over(self._peak), self._peak
            self._peak = _Peak(self._with_arena(), self._all_now + (self._idle or 0))
            self._beside, self._beside_last = self._all_now - self._now["gathered"], self._beside

    def forget_peaks(self) -> None:
        """Let the peaks be what is held now."""
        with self._lock:
            self._peak = _Peak(self._with_arena(), self._all_now + (self._idle or 0))
            self._before = self._peak

    def _with_arena(self) -> dict[str, int]:
        return {**self._now, "gathered": self._now["gathered"] + (self._idle or 0)}

    def _count(self, kind: Kind) -> None:
        """Bring the peaks of a kind, and of all, up to what is held, the arena included."""
        idle, peak = self._idle or 0, self._peak
        held = self._now[kind] + (idle if kind == "gathered" else 0)
        peak.kinds[kind] = max(peak.kinds[kind], held)
        peak.all = max(peak.all, self._all_now + idle)
        if self._idle is not None:
            self._beside = max(self._beside, self._all_now - self._now["gathered"])

    def _forget(self, tracked: _Counted) -> None:
        del self._tracked[id(tracked)]
        with self._lock:  # as `add`; there is one for each gradient of a step
            self._now[tracked.kind] -= tracked.count
            self._all_now -= tracked.count
            if self.watch is not None:
                self.watch(self._all_now + (self._idle or 0))
