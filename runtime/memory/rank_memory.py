"""The memory of one rank: its ledgers, caps and buffers."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Mapping

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.sizes import Sides
from zinf_compile.ir.tiers import Topology
from zinf_compile.runtime.system.malloc import keep_free_memory

from .activations import Activations
from .aligned_buffers import BufferPool
from .arena import GatherMemory
from .device_arena import DeviceArena
from .inflight import InflightLimit
from .ledger import Ledger
from .pending_gradients import PendingGradients
from .reservations import Reservations


class Memory:
    """The accounts of a rank's memory, on the device and on the host beside it, and what is reserved of it.

    `waiting` is entered while compute waits for memory, `drives_used` says whether
    anything moves to and from drives, `free_host` is the link's `free_host_memory`.
    """

    def __init__(
        self,
        device: torch.device,
        gather_memory: GatherMemory | DeviceArena,
        *,
        topology: Topology,
        staging_bytes: int,
        host_buffer: Callable[[int, torch.dtype], torch.Tensor],
        waiting: Callable[[], contextlib.AbstractContextManager[None]],
        drives_used: Callable[[], bool],
        free_host: Callable[[Callable[[], bool]], None],
    ) -> None:
        self.ledger = Ledger()
        """The account of the device's memory."""
        self.host_ledger = Ledger() if topology.host_apart else self.ledger
        """The account of host memory; the same one where that is the device."""
        self.gather_memory = gather_memory
        """Memory for gathers and swaps of the schedule; on a device with memory of its own a part of that."""
        self.reservations = Reservations()
        self.activations = Activations()
        """What graphs have saved for their backwards, or returned, and is still there."""
        self.saved: weakref.WeakKeyDictionary[object, Mapping[str, int]] = weakref.WeakKeyDictionary()
        """Of each graph that may run, the bytes that a forward saves, by what becomes of them."""
        self.taken = 0
        """Bytes of the device beside the runtime's account and what was planned, as the last check of a call saw them: tensors of
        the user's, and what earlier calls have left there."""
        self._steps, self._trains = 0, False
        if isinstance(gather_memory, DeviceArena):
            gather_memory.account, gather_memory.limit = self.ledger.arena, self._arena_limit
            self.ledger.arena(0)
        self.usable: tuple[int, int] | None = None
        """Bytes of the device and of the host that each of several ranks may use, the least of all of them."""
        self.inflight_gradients = InflightLimit()
        """Bounds the full gradients in flight to other ranks or to their tier."""
        self.chunks = Sides(0, 0)
        """Bytes that optimizers hold for one chunk each, which graphs plan for: they are in the ledgers as well."""
        self._chunks_lock = threading.RLock()  # a finaliser may run inside any allocation
        self.lets_leave = False
        """Whether the graph that is about to run has to wait for gradients that leave the device, before it computes."""
        self.pending_gradients = PendingGradients()
        """Gradients that deferred steps have still to apply."""
        self.staging = BufferPool(
            staging_bytes, pinned=device.type != "cpu", account=functools.partial(self.host_ledger.add, "bounce")
        )
        """Staging for blocks whose memory is not aligned."""
        self._host_buffer, self._waiting, self._drives_used = host_buffer, waiting, drives_used
        self._free_host = free_host

    def count_chunk(self, *, device: int, host: int) -> None:
        """Count more (fewer, when negative) bytes of `chunks`. Any thread may call."""
        apart = self.host_ledger is not self.ledger
        with self._chunks_lock:
            self.chunks = self.chunks.plus(Sides(device, host) if apart else Sides(device + host, 0))

    def staged_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory for what is read from a drive outside the schedule; counted, and made room for."""
        self.make_room(self.host_ledger, format_of(dtype).bytes(numel))
        buffer = self._host_buffer(numel, dtype)
        self.host_ledger.track("staging", buffer)
        return buffer

    def has_room(self, ledger: Ledger, size: int) -> bool:
        """Say whether `size` more bytes stay within the cap, with all staging that may be needed at any moment."""
        cap = self.reservations.device_cap if ledger is self.ledger else self.reservations.host_cap
        return cap is None or self.least_cap(ledger, size) <= cap

    def least_cap(self, ledger: Ledger, size: int) -> int:
        """Return the cap that has room for `size` more bytes, with all staging that may be needed at any moment."""
        staged = ledger is self.host_ledger and self._drives_used()  # without drives there is none
        planned = min(self.staging.cap_bytes, self.reservations.staging or 0)
        staging = max(0, planned - self.staging.bytes) if staged else 0
        return ledger.total()[0] + staging + size

    def wait_copied(self, ledger: Ledger, enough: Callable[[], bool]) -> None:
        """Where an account is the host's, wait until copies to the device have let go of `enough` memory, or of all they read."""
        if ledger is not self.ledger and not enough():
            with self._waiting():
                self._free_host(enough)

    def make_room(self, ledger: Ledger, size: int) -> None:
        """Where `size` more bytes exceed the cap, wait for copies to the device and for gradients: what was planned then fits."""

        def enough() -> bool:
            return self.has_room(ledger, size)

        if not enough():
            self.wait_copied(ledger, enough)
            with self._waiting():
                self.inflight_gradients.drain(enough)
                if not enough():
                    self.pending_gradients.wait()

    def has_room_for_graphs(self) -> bool:
        """Say whether what is held, gradients included, leaves room for any graph that was planned, but for what leaves now."""
        reservations = self.reservations
        sides = (
            (self.ledger, reservations.device_cap, reservations.passing),
            (self.host_ledger, reservations.host_cap, reservations.passing_host),
        )
        leaving = {self.ledger: self.inflight_gradients.held if self.host_ledger is not self.ledger else 0}
        return all(
            cap is None or ledger.total()[0] - ledger.now()["bounce"] - leaving.get(ledger, 0) + passing <= cap
            for ledger, cap, passing in sides
        )

    def let_leave(self) -> None:
        """Wait for gradients that leave the device, beside which a graph has begun: it is about to compute."""
        self.lets_leave = False
        with self._waiting():
            self.inflight_gradients.drain(lambda: False)

    def begin_graph(self, *, makes_gradients: bool) -> None:
        """Wait for the gradients of deferred steps, where the graph makes others or there is no room for it beside them."""
        self._trains = self._trains or makes_gradients
        if makes_gradients or not self.has_room_for_graphs():
            with self._waiting():
                self.pending_gradients.wait()

    def trim_arena(self) -> None:
        """Keep no more for gathers than the cap leaves now, before a graph runs."""
        if isinstance(self.gather_memory, DeviceArena) and self.reservations.device_cap is not None:
            self.gather_memory.trim()

    def _arena_limit(self) -> int | None:
        """Return how large an arena for gathers may be that stays, also while nothing is gathered; nothing is lent of it now.

        Where nothing is trained, no more than was planned for gathers alone. In the first step none: what it lends in its first
        backwards would lie beside what it has for forwards. Then what the cap leaves beside the most that was held for other
        things meanwhile, or was planned to be: states come with the first step, and second gradients with any.
        """
        reservations = self.reservations
        if reservations.device_cap is None:
            return None
        gathers = max(0, reservations.passing - reservations.reduced - reservations.compute)
        if not self._steps:
            return 0 if self._trains else gathers
        held = max(self.ledger.beside_gathers(), max(self.ledger.total()[0], reservations.beside) + reservations.reduced)
        return max(0, reservations.device_cap - held - reservations.compute + reservations.rounding - self.taken)

    def end_step(self) -> None:
        """Note that a step of an optimizer is over."""
        self._steps += 1
        for ledger in {self.ledger, self.host_ledger}:
            ledger.end_step()
        if self.host_ledger is self.ledger and (room := self.spare()) is not None:
            keep_free_memory(self.freed_by_step(), room=room)

    def forget_units(self) -> None:
        """Keep nothing for gathers and steps: no unit is there any more."""
        self.gather_memory.clear()
        if self.host_ledger is self.ledger:
            keep_free_memory(0, room=0)

    def freed_by_step(self) -> int:
        """Return the bytes of the device that a step frees for the next one: gradients, and what passes while graphs run."""
        return self.ledger.now()["grads"] + self.reservations.passing

    def spare(self) -> int | None:
        """Return the bytes that the device's cap leaves beside all that is held, and that was planned; None without a cap."""
        cap, passing = self.reservations.device_cap, self.reservations.passing
        return None if cap is None else max(0, cap - self.least_cap(self.ledger, passing))
