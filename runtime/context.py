"""The ranks that share a model, and what this rank has towards them: groups, lanes, collectives and the ledger."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import itertools
import json
import os
import pickle
import re
import struct
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from zinf_compile._torch import level_group_names
from zinf_compile.errors import OptionError, RankMismatchError, ZinfError
from zinf_compile.ir.program import digest_of
from zinf_compile.runtime.comm.collectives import Collectives, DeviceCollectives, PeerToPeer, SingleRank
from zinf_compile.runtime.comm.steps_done import ADVICE, StepDone, describe, differ_in_steps, mixed
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
from zinf_compile.runtime.system.process_wide import process_wide


class Context:
    """Everything a rank needs to move units of one process group. Creating one is a collective operation."""

    closed: ClassVar[bool] = False
    """Let go of: see `close_context`."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, *, timeout_s: float, player: Bridge | None = None
    ) -> None:
        self.group = group
        self.device = device
        self.timeout_s = timeout_s
        self._signatures: set[str] = set()
        self.rank = group.rank() if group is not None else 0
        self.size = group.size() if group is not None else 1
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
        self.waits: Spans | None = None
        """Where it is noted when compute stands still, see `overlap_log.recorded`; None: nowhere."""
        self.gathers: Collectives = SingleRank()
        self.reductions: Collectives = SingleRank()
        self._control: dist.ProcessGroup | None = None
        self.groups: list[dist.ProcessGroup] = []
        """Those made for this context."""
        self._process = os.getpid()
        if group is not None and self.size > 1 and dist.get_backend(group) != "fake":
            self._connect(group, device)

    def _connect(self, group: dist.ProcessGroup, device: torch.device) -> None:
        ranks = dist.get_process_group_ranks(group)
        timeout = datetime.timedelta(seconds=self.timeout_s)

        some = len(ranks) < dist.get_world_size()
        if some:
            self._patiently(lambda: level_group_names(group), "starting")

        def new_group(backend: str) -> dist.ProcessGroup:
            made: list[object] = []
            self._patiently(
                lambda: made.append(dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=some)),
                "starting (the others never called a compiled model)",
            )
            assert isinstance(made[0], dist.ProcessGroup)
            self.groups.append(made[0])
            return made[0]

        self._control = new_group("gloo")
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
            self._engine = Engine(timeout_s=self.timeout_s)
            atexit.register(self.let_engine_go)
        return self._engine

    def wait_for_drives(self, timeout_s: float) -> None:
        """From now on a drive may stand still for so long."""
        self.timeout_s = timeout_s
        if self._engine is not None:
            self._engine.timeout_s = timeout_s

    def let_engine_go(self) -> Engine | None:
        """Have no engine any more; return it. Its last transfers are finished when it is dropped."""
        engine, self._engine = self._engine, None
        atexit.unregister(self.let_engine_go)
        return engine

    def thread_lanes(self) -> list[ThreadLane]:
        """Return the lanes that have a thread of their own."""
        lanes = (self.gather_lane, self.reduce_lane, self._swap_lane, self._update_lane)
        return [lane for lane in lanes if isinstance(lane, ThreadLane)]

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
            self._compare_at_end()
        finally:
            self.ending = True
            if isinstance(self._update_lane, ThreadLane):
                self._update_lane.close()

    def _compare_at_end(self) -> None:
        """Raise `RankMismatchError` where the last steps were not taken by all ranks, or other ranks go on.

        Not after an error, which says enough, and not in a forked child, which shares its parent's connections. A rank that does
        not end within `_END_WITHIN_S` seconds of this one is left to itself.
        """
        if self._control is None or os.getpid() != self._process or hasattr(sys, "last_value"):
            return
        try:
            self.agree(
                [ENDING],
                what=ENDING,
                digest=mixed(digest_of([ENDING]), self.steps_digest),
                details=lambda: describe([self.last_step], self.steps_digest),
                within_s=_END_WITHIN_S,
            )
        except RankMismatchError as error:
            if not isinstance(
                error.__cause__, RuntimeError | dist.DistError
            ):  # not only left alone, by ranks that ended otherwise
                raise

    def admit(self, signature: str) -> None:
        """Check, the first time these options are used, that all ranks use them."""
        if signature not in self._signatures:
            self.agree([f"options {signature}"], what="starting", mismatch=OptionError)
            self._signatures.add(signature)

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

    def agree(
        self,
        lines: Sequence[str],
        *,
        what: str,
        digest: int | None = None,
        details: Callable[[], Sequence[str]] = tuple,
        value: float = 0.0,
        mismatch: type[Exception] = RankMismatchError,
        within_s: float | None = None,
    ) -> list[float]:
        """Check that all ranks are about to do the same, and exchange one number on the way.

        16 bytes per rank on the control group: a hash of `lines`, or `digest`, and `value`. On a mismatch all ranks raise, naming
        the first line that differs, or the first of `details`, which only then are asked for. Waits `within_s` seconds, by
        default as long as option `timeout_s` says. Returns every rank's value.
        """
        if self._control is None:
            return [value]
        mine = digest_of(lines) if digest is None else digest
        bits = struct.unpack("<q", struct.pack("<d", value))[0]
        everyone = self._gather(torch.tensor([mine, bits]), f"{what} ({lines[0]})" if lines else what, within_s)
        digests, values = zip(*(pair.tolist() for pair in everyone), strict=True)
        if any(other != mine for other in digests):
            text = json.dumps([what, *lines, *details()]).encode()
            comparing = f"{what} (comparing ranks)"
            sizes = torch.cat(self._gather(torch.tensor([len(text)]), comparing, within_s)).tolist()
            padded = torch.frombuffer(bytearray(text.ljust(max(sizes))), dtype=torch.uint8)
            described = [json.loads(bytes(row.tolist())) for row in self._gather(padded, comparing, within_s)]
            raise mismatch(_first_difference(described))
        return [struct.unpack("<d", struct.pack("<q", other))[0] for other in values]

    def _gather(self, mine: torch.Tensor, what: str, within_s: float | None) -> list[torch.Tensor]:
        """Return every rank's tensor, of one size on all. Works after `destroy_process_group`, too: at the end of a process."""
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        group = self._control
        assert group is not None, "there are others"

        def exchange() -> None:
            work = group.allgather([everyone], [mine])
            if within_s is None:
                work.wait()
            else:
                work.wait(datetime.timedelta(seconds=within_s))

        self._patiently(exchange, what)
        return everyone

    def exchange(self, values: torch.Tensor, *, what: str) -> torch.Tensor:
        """Return every rank's `values` (a vector of doubles), stacked by rank."""
        if self._control is None:
            return values.unsqueeze(0)
        if values.numel() == 1:  # fits into the check itself
            return torch.tensor(self.agree([what], what=what, value=float(values)), dtype=torch.float64).unsqueeze(1)
        self.agree([f"{what} of {values.numel()} values"], what=what)
        out = [torch.empty(values.numel(), dtype=torch.float64) for _ in range(self.size)]
        mine = values.to("cpu", torch.float64)
        self._patiently(lambda: dist.all_gather(out, mine, group=self._control), what)
        return torch.stack(out)

    def share(self, value: Any, *, what: str, source: int = 0) -> Any:
        """Return one rank's value on every rank; what can't be pickled is an error on all of them."""
        if self._control is None:
            return value
        error: Exception | None = None
        shared: list[bytes] = [b""]
        try:
            if self.rank == source:
                shared[0] = pickle.dumps(value)
        except Exception as raised:
            error = raised
        failed = self.agree([what], what=what, value=float(error is not None))[source]
        if error is not None:
            raise error
        if failed:
            raise RankMismatchError(f"{what} failed on rank {source}, see there")
        self._patiently(lambda: dist.broadcast_object_list(shared, group_src=source, group=self._control), what)
        return pickle.loads(shared[0])

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
        except ZinfError:  # it says what it is about
            raise
        except RuntimeError as error:
            if _TRANSPORT.search(str(error)) or isinstance(error, dist.DistError):
                raise self.failed(what, error) from error
            raise RuntimeError(f"rank {self.rank} of {self.size} failed while {what}: {error}") from error

    def failed(self, what: str, error: BaseException) -> RankMismatchError:
        """Turn a broken or timed-out transfer into the error a user can act on."""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return RankMismatchError(
            f"rank {self.rank} of {self.size} got no answer from another rank while {what}; time-out {self.timeout_s:g} s "
            f"(option timeout_s). Usually a rank ended, took another branch of the model or ran out of batches: every rank must "
            f"run the same graphs in the same order. The transport said: {reason}"
        )

    def _patiently(self, exchange: Callable[[], object], what: str) -> None:
        try:
            with self._waiting():
                exchange()
        except (RuntimeError, dist.DistError) as error:
            raise self.failed(what, error) from error

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        return _UNTIMED if self.waits is None else Timed(self.waits)


_UNTIMED = contextlib.nullcontext()
_END_WITHIN_S = 10.0
ENDING = "ending"
"""What a rank does whose process ends without an error."""
_TRANSPORT = re.compile(r"gloo|nccl|ucc|mpi\b|tcp|socket|connection|peer|timed? ?out", re.IGNORECASE)
"""What the messages of broken transfers have in common; they have no class of their own."""

_contexts: dict[tuple[object, str, Bridge | None], Context] = process_wide({})


def all_contexts() -> list[Context]:
    """Return the contexts that this process has made."""
    return list(_contexts.values())


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
    if context.size > 1 and timeout_s != context.timeout_s:
        raise OptionError(
            f"option timeout_s={timeout_s:g} differs from the {context.timeout_s:g} of an earlier model on the same ranks; use "
            "one value, or a process group of its own"
        )
    context.wait_for_drives(timeout_s)
    context.admit(signature)
    return context


def _first_difference(described: list[list[str]]) -> str:
    first, *expected = described[0]
    for rank, (what, *lines) in enumerate(described):
        for here, there in itertools.zip_longest(lines, expected, fillvalue="nothing more"):
            if here != there:
                text = (
                    f"the ranks are not doing the same thing; first difference: rank 0, {first}, has {there!r}; rank {rank}, "
                    f"{what}, has {here!r}. Every rank must use the same options and run the same graphs in the same order."
                )
                if differ_in_steps(here, there):
                    text = f"{text} {ADVICE}"
                if ENDING in (first, what) and first != what:
                    text = f"{text} One rank's process has ended: has it run out of batches, or left the loop by itself?"
                return text
    return "the ranks are not doing the same thing, though they describe it alike"
