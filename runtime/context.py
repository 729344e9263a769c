"""The ranks that share a model, and what this rank has towards them: groups, lanes, collectives and the ledger."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist

from zinf_compile.errors import OptionError, ZinfError
from zinf_compile.runtime.comm.collectives import Collectives, DeviceCollectives, PeerToPeer, SingleRank
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.comm.steps_done import StepDone
from zinf_compile.runtime.device.link import Bridge, CudaBridge, Unified, player_of
from zinf_compile.runtime.lanes.lanes import InlineLane, Lane, Pending, StreamLane, ThreadLane
from zinf_compile.runtime.lanes.link_meter import WRITTEN, Meter
from zinf_compile.runtime.lanes.overlap_log import Spans, Timed
from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.memory.arena import GatherMemory
from zinf_compile.runtime.memory.ledger import Ledger
from zinf_compile.runtime.memory.reservations import ByteRoom, Claims
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.extent_store import STAGING_BYTES
from zinf_compile.runtime.system.malloc import return_large_blocks


class Context:
    """Everything a rank needs to move units of one process group. Creating one is a collective operation."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, *, timeout_s: float, player: Bridge | None = None
    ) -> None:
        self.group = group
        self.device = device
        self.waits: Spans | None = None
        """Where it is noted when compute stands still, see `overlap_log.recorded`; None: nowhere."""
        self.ranks = Ranks(group, timeout_s=timeout_s, waiting=self._waiting)
        self.rank, self.size = self.ranks.rank, self.ranks.size
        self.ledger = Ledger()
        """What is held on the device."""
        self.serials = itertools.count()
        self.steps_clock = 0
        """Changes whenever units take a step."""
        self.steps_digest = 0
        """Adds up all steps that units of these ranks went through."""
        self.last_step: StepDone | None = None
        self.eager_changes = 0
        """A checksum of the changes that eager code has made to shards of parameters; compared when a graph starts."""
        self.last_eager_change = ""
        """The last of them."""
        self.units: weakref.WeakSet[Any] = weakref.WeakSet()
        self.spoiled: weakref.WeakKeyDictionary[Any, tuple[str, int | None]] = weakref.WeakKeyDictionary()
        """Units of which a change ended in its middle: why, and the parameter's version then."""
        self.gather_memory = GatherMemory()
        self.meter = Meter()
        self.claims = Claims()
        self.usable: tuple[int, int] | None = None
        """Bytes of the device and of the host that each of several ranks may use, the least of all of them."""
        self.gradient_room = ByteRoom()
        """Bounds the full gradients on their way to other ranks or to their tier."""
        self.bridge: Bridge = player or self._bridge()
        self.bridge.attach(self.meter)
        self.host_ledger = self.ledger if self.bridge.unified else Ledger()
        """What is held in host memory; the same account where that is the device."""
        self.staging = BufferPool(
            STAGING_BYTES,
            pinned=device.type == "cuda",
            account=functools.partial(self.host_ledger.add, "bounced"),
        )
        """Where blocks pass that drives can't move from and to where they are."""
        self._engine: Engine | None = None
        self._swap_lane: Lane | None = None
        self._update_lane: Lane | None = None
        self.ending = False
        """The process ends: whoever works beside it stops."""
        self.chosen: dict[Hashable, bool] = {}
        """The same as `Unit.chosen`, by the names and forms of parameters that were decided about."""
        self.synchronised: set[tuple[int, str]] = set()
        """Buffers that have had rank 0's values: (serial of their model's first unit, name)."""
        self.gather_lane: Lane = InlineLane()
        self.reduce_lane: Lane = InlineLane()
        self.gathers: Collectives = SingleRank()
        self.reductions: Collectives = SingleRank()
        if self.ranks.connected:
            self._connect(device)

    def _connect(self, device: torch.device) -> None:
        new_group = self.ranks.new_group
        if device.type == "cpu":
            self.gathers, self.reductions = PeerToPeer(new_group("gloo")), PeerToPeer(new_group("gloo"))
            self.gather_lane = ThreadLane("zinf-gather", link="from ranks")
            self.reduce_lane = ThreadLane("zinf-reduce", link="to ranks")
        else:
            backend = dist.get_default_backend_for_device(device)
            self.gathers, self.reductions = DeviceCollectives(new_group(backend)), DeviceCollectives(new_group(backend))
            self.gather_lane, self.reduce_lane = StreamLane(device), StreamLane(device)

    def _bridge(self) -> Bridge:
        return Unified(self.gather_memory) if self.device.type == "cpu" else CudaBridge(self.device)

    @property
    def engine(self) -> Engine:
        """What moves bytes to and from drives; made when first needed. Who uses drives is short of memory."""
        if self._engine is None:
            return_large_blocks()
            self._engine = Engine(timeout_s=self.ranks.timeout_s)
            atexit.register(self._let_engine_go)
        return self._engine

    def wait_for_drives(self, timeout_s: float) -> None:
        """From now on a drive may stand still for so long."""
        self.ranks.timeout_s = timeout_s
        if self._engine is not None:
            self._engine.timeout_s = timeout_s

    def _let_engine_go(self) -> None:
        self._engine = None  # its last transfers are finished when it is dropped

    @property
    def swap_lane(self) -> Lane:
        """On which gradients leave for their tier; made when first needed."""
        if self._swap_lane is None:
            self._swap_lane = ThreadLane("zinf-swap", link=WRITTEN, forgiving=True)
        return self._swap_lane

    @property
    def update_lane(self) -> Lane:
        """On which what is left of a step is done beside the next forward; made when first needed."""
        if self._update_lane is None:
            self._update_lane = ThreadLane("zinf-update", forgiving=True)
        return self._update_lane

    def end(self) -> None:
        """The process ends: compare with the other ranks what was done, and stop what works beside it."""
        try:
            self.ranks.compare_at_end(self.steps_digest, self.last_step)
        finally:
            self.ending = True
            if isinstance(self._update_lane, ThreadLane):
                self._update_lane.close()

    def enlist(self, unit: Any) -> None:
        """Count a unit among those of these ranks for as long as it lives; memory for gathers goes with the last one."""
        weakref.finalize(unit, self._unit_gone).atexit = False  # made before the set's reference: called after the set forgot it
        self.units.add(unit)

    def _unit_gone(self) -> None:
        if not self.units:
            self.gather_memory.clear()

    def gather_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a `full_buffer` for a gather of the schedule: these come and go all the time."""
        if device.type != "cpu":  # there PyTorch's allocator keeps memory by itself
            return self.full_buffer(numel, dtype, device)
        return self.gather_memory.lend(numel, dtype)

    def full_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty flat buffer that a gather can fill, whatever mode the caller is in."""
        with torch.inference_mode(False), torch.no_grad():
            return self.gathers.full_buffer(numel, dtype, device)

    def staged_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory for what is read from a drive outside the schedule; counted, and made room for."""
        self.make_room(self.host_ledger, numel * dtype.itemsize)
        buffer = self.bridge.host_buffer(numel, dtype)
        self.host_ledger.track("staged", buffer)
        return buffer

    def has_room(self, ledger: Ledger, size: int) -> bool:
        """Say whether `size` more bytes stay within the cap, with all staging that may be needed at any moment."""
        cap = self.claims.device_cap if ledger is self.ledger else self.claims.host_cap
        return cap is None or self.least_cap(ledger, size) <= cap

    def least_cap(self, ledger: Ledger, size: int) -> int:
        """Return the cap that has room for `size` more bytes, with all staging that may be needed at any moment."""
        staged = ledger is self.host_ledger and self._engine is not None  # without drives there is none
        staging = max(0, self.staging.cap_bytes - self.staging.bytes) if staged else 0
        return ledger.total()[0] + staging + size

    def make_room(self, ledger: Ledger, size: int) -> None:
        """Where `size` more bytes exceed the cap, wait until gradients have left; then what was planned for fits."""
        if not self.has_room(ledger, size):
            with self._waiting(), self.meter.waiting():
                self.gradient_room.drain(lambda: self.has_room(ledger, size))

    def end_step(self) -> None:
        """A step of an optimizer is over."""
        self.meter.end_step()
        for ledger in {self.ledger, self.host_ledger}:
            ledger.end_step()

    def start(self, lane: Lane, transfer: Callable[[], None]) -> Pending:
        """Submit a transfer of a graph to a lane; what time that takes, compute stands still."""
        with self._waiting(), self.meter.waiting():
            return lane.submit(transfer)

    def finish(self, pending: Pending, what: str) -> None:
        """Wait for a transfer; one that got no answer or took too long raises `RankMismatchError` naming `what`."""
        try:
            with self._waiting(), self.meter.waiting():
                pending.wait()
        except ZinfError:
            raise
        except RuntimeError as error:
            raise self.ranks.explain(error, what) from error

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        return _UNTIMED if self.waits is None else Timed(self.waits)


_UNTIMED = contextlib.nullcontext()
_contexts: dict[tuple[object, str, Bridge | None], Context] = {}


@atexit.register  # at import: handlers that are registered later run before, and may still need what a step has to do
def _end() -> None:
    for context in _contexts.values():
        context.end()


def context_for(group: dist.ProcessGroup | None, device: torch.device, *, timeout_s: float, signature: str) -> Context:
    """Return the context of these ranks, made at the first call; all ranks must make that call."""
    world = int(os.environ.get("WORLD_SIZE") or "1")
    if group is None and world > 1:
        raise OptionError(
            f"WORLD_SIZE is {world} but torch.distributed is not initialised: call torch.distributed.init_process_group() before "
            "the first call of the compiled model, or unset WORLD_SIZE to train on this process alone"
        )
    player = player_of(device)
    key = (group, str(device), player)
    if key not in _contexts:
        _contexts[key] = Context(group, device, timeout_s=timeout_s, player=player)
    context = _contexts[key]
    if context.size > 1 and timeout_s != context.ranks.timeout_s:
        raise OptionError(
            f"option timeout_s={timeout_s:g} differs from the {context.ranks.timeout_s:g} of an earlier model on the same ranks; "
            "use one value, or a process group of its own"
        )
    context.wait_for_drives(timeout_s)
    context.ranks.admit(signature)
    return context
