"""The context of one rank: its ranks, memory, lanes, drives and units, for all models of one process group and device."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from zinf_compile.errors import OptionError, ZinfError
from zinf_compile.ir.device_rates import DeviceRates
from zinf_compile.ir.sizes import STAGING_BYTES
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.comm.collectives import Collectives, DeviceCollectives, PeerToPeer, SingleRank
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.comm.shard_group import ShardGroup
from zinf_compile.runtime.comm.steps_done import StepDone
from zinf_compile.runtime.device.link import AcceleratorLink, DeviceLink, HostIsDevice
from zinf_compile.runtime.device.simulated import simulated_link
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.lanes.rank_lanes import Lanes
from zinf_compile.runtime.lanes.step_recorder import StepRecorder
from zinf_compile.runtime.memory.arena import GatherMemory
from zinf_compile.runtime.memory.device_arena import DeviceArena
from zinf_compile.runtime.memory.full_copies import FullCopies
from zinf_compile.runtime.memory.leaving_norms import LeavingNorms
from zinf_compile.runtime.memory.rank_memory import Memory
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.value_space import ValueSpace
from zinf_compile.runtime.system.malloc import return_large_blocks
from zinf_compile.runtime.system.process_wide import process_wide


class Context:
    """The runtime of one rank for the units of one process group. Creating one is a collective operation."""

    closed: ClassVar[bool] = False
    """Whether it was closed by `close_context`."""
    left = False
    """Whether it is that of a process that forked this one, with drives: nothing new can be partitioned in it."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, *, timeout_s: float, link: DeviceLink | None = None
    ) -> None:
        self.group = group
        self.device = device
        self.lanes = Lanes(device)
        self.ranks = Ranks(group, timeout_s=timeout_s, waiting=self.lanes.waiting)
        self.rank, self.size = self.ranks.rank, self.ranks.size
        gather_memory = GatherMemory() if device.type == "cpu" else DeviceArena(device)
        if isinstance(gather_memory, DeviceArena):
            self.link: DeviceLink = AcceleratorLink(device, gather_memory)
        else:
            self.link = link or HostIsDevice(gather_memory)
        self.link.attach(self.lanes.meter)
        self.lanes.meter.on_streams = device.type != "cpu"
        self._engine: Engine | None = None
        self.memory = Memory(
            device,
            gather_memory,
            topology=self.link.topology,
            staging_bytes=STAGING_BYTES,
            host_buffer=self.link.host_buffer,
            waiting=self._waiting_for_memory,
            drives_used=lambda: self._engine is not None,
            free_host=self.link.free_host_memory,
        )
        self.rates: DeviceRates | None = None
        """Of the device, the least of all ranks; None: nobody has asked."""
        self.step_ended: list[Callable[[], None]] = []
        """Called behind each step of an optimizer."""
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
        self.ending = False
        """Whether the process ends: lanes stop."""
        self.full_copies = FullCopies()
        """Full units that stay on the device until they change."""
        self.leaving_norms = LeavingNorms()
        """Norms that are taken of gradients before they leave the device."""
        self.whole_gradients: weakref.WeakSet[Any] = weakref.WeakSet()
        """Full gradients that are to be reduced when they are first read."""
        self.chosen: dict[Hashable, bool] = {}
        """Decisions as in `Unit.chosen`, by names and shapes of the parameters."""
        self.plans: list[Callable[[], str]] = []
        """What was decided for models, as text for the log at their first step."""
        self.synchronised: set[tuple[int, str]] = set()
        """Buffers that have had rank 0's values: (serial of their model's first unit, name)."""
        self._value_spaces: weakref.WeakValueDictionary[tuple[Tier, tuple[str, ...]], ValueSpace] = weakref.WeakValueDictionary()
        self._collectives: dict[tuple[int, ...], tuple[Collectives, Collectives]] = {}
        if self.ranks.connected:
            self.lanes.connect()
        self.gathers, self.reductions = self.collectives(self.ranks.shard_group)

    def collectives(self, group: ShardGroup) -> tuple[Collectives, Collectives]:
        """Return a group's collectives for gathers and for reductions; made at the first call for its ranks, as by `Ranks.of`."""
        found = self._collectives.get(group.partition)
        if found is None:
            found = self._collectives[group.partition] = self._connect(self.ranks.of(group))
        return found

    def _connect(self, ranks: Ranks) -> tuple[Collectives, Collectives]:
        if not ranks.connected:
            return SingleRank(), SingleRank()
        if self.device.type == "cpu":
            return PeerToPeer(ranks.new_group("gloo")), PeerToPeer(ranks.new_group("gloo"))
        backend = dist.get_default_backend_for_device(self.device)
        return DeviceCollectives(ranks.new_group(backend)), DeviceCollectives(ranks.new_group(backend))

    @property
    def engine(self) -> Engine:
        """The I/O engine of drives; made when first needed. Freed blocks go back to the system from then on."""
        if self._engine is None:
            return_large_blocks()
            self._engine = Engine(timeout_s=self.ranks.timeout_s)
            atexit.register(self.let_engine_go)
        return self._engine

    def value_space(self, tier: Tier, folders: tuple[str, ...]) -> ValueSpace:
        """Return the space for saved values on drives, the same for all graphs that still use it."""
        found = self._value_spaces.get((tier, folders))
        if found is None:
            found = self._value_spaces[tier, folders] = ValueSpace(tier, folders, self.engine, self.memory.staging)
        return found

    def wait_for_drives(self, timeout_s: float) -> None:
        """Set the time-out of drives."""
        self.ranks.timeout_s = timeout_s
        if self._engine is not None:
            self._engine.timeout_s = timeout_s

    def let_engine_go(self) -> Engine | None:
        """Have no engine any more; return it. Its last transfers are finished when it is dropped."""
        engine, self._engine = self._engine, None
        atexit.unregister(self.let_engine_go)
        return engine

    def end(self) -> None:
        """The process ends: compare with the other ranks what was done, and stop what works beside it."""
        try:
            self.ranks.compare_at_end(self.steps_digest, self.last_step)
        finally:
            self.ending = True
            self.lanes.stop_updates()

    def enlist(self, unit: Any) -> None:
        """Count a unit among those of these ranks for as long as it lives; memory for gathers goes with the last one."""
        weakref.finalize(unit, self._unit_gone).atexit = False  # made before the set's reference: called after the set forgot it
        self.units.add(unit)

    def _unit_gone(self) -> None:
        if not self.units:
            self.memory.forget_units()
            if not self.closed:  # else it has no link any more
                self.link.clear()

    def gather_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a `full_buffer` for a gather of the schedule: these come and go all the time."""
        (buffer,) = self.gather_buffers([numel], dtype, device)
        return buffer

    def gather_buffers(self, numels: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """Return several as `gather_buffer` does."""
        memory = self.memory.gather_memory
        if not isinstance(memory, DeviceArena):
            return [memory.lend(numel, dtype) for numel in numels]
        padded = [self.gathers.padded_numel(numel) for numel in numels]
        lent = memory.lend_together(padded, dtype)
        return [buffer if numel == held else buffer[:numel] for buffer, numel, held in zip(lent, numels, padded, strict=True)]

    def full_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty flat buffer that a gather can fill, whatever mode the caller is in."""
        with torch.inference_mode(False), torch.no_grad():
            return self.gathers.full_buffer(numel, dtype, device)

    def end_step(self) -> None:
        """A step of an optimizer is over."""
        ended = self.lanes.meter.end_step()
        self.memory.end_step()
        self.leaving_norms.end_step()
        if ended is not None:
            record = ended.finish()
            self.lanes.meter.recorded(record)
            for told in ended.then:
                told(record)
        for step_ended in self.step_ended:
            step_ended()

    def record_next_step(self) -> StepRecorder:
        """Return what notes the next step: it begins with the first graph behind the end of the last one."""
        ledgers = {Tier.DEVICE: self.memory.ledger, Tier.HOST: self.memory.host_ledger}
        sides = {str(side): ledgers[side] for side in self.link.topology.sides}
        return self.lanes.meter.record_next(lambda: StepRecorder(self.device, sides))

    def finish(self, pending: Pending, what: str) -> None:
        """Wait for a transfer; one that got no answer or took too long raises `RankMismatchError` naming `what`."""
        try:
            with self.lanes.waiting(), self.lanes.meter.waiting():
                pending.wait()
        except ZinfError:
            raise
        except RuntimeError as error:
            raise self.ranks.explain(error, what) from error

    @contextlib.contextmanager
    def _waiting_for_memory(self) -> Iterator[None]:
        with self.lanes.waiting(), self.lanes.meter.waiting():
            yield


_contexts: dict[tuple[object, str, DeviceLink | None], Context] = process_wide({})


def all_contexts() -> list[Context]:
    """Return the contexts that this process has made."""
    return list(_contexts.values())


@atexit.register  # at import: handlers that are registered later run before, and may still need what a step has to do
def _end() -> None:
    for context in _contexts.values():
        context.end()


def _leave_drives_to_parent() -> None:
    """Have new models of a forked child make an engine and threads of their own: those of its parent are not there."""
    for key, context in list(_contexts.items()):
        if context.size == 1 and context._engine is not None:
            del _contexts[key]
            context.left = True


os.register_at_fork(after_in_child=_leave_drives_to_parent)


def context_for(group: dist.ProcessGroup | None, device: torch.device, *, timeout_s: float, signature: str) -> Context:
    """Return the context of these ranks, made at the first call; all ranks must make that call."""
    world = int(os.environ.get("WORLD_SIZE") or "1")
    if group is None and world > 1:
        raise OptionError(
            f"WORLD_SIZE is {world} but torch.distributed is not initialised: call torch.distributed.init_process_group() before "
            "the first call of the compiled model, or unset WORLD_SIZE to train on this process alone"
        )
    link = simulated_link(device)
    key = (group, str(device), link)
    if key not in _contexts:
        _contexts[key] = Context(group, device, timeout_s=timeout_s, link=link)
    context = _contexts[key]
    if context.size > 1 and timeout_s != context.ranks.timeout_s:
        raise OptionError(
            f"option timeout_s={timeout_s:g} differs from the {context.ranks.timeout_s:g} of an earlier model on the same ranks; "
            "use one value, or a process group of its own"
        )
    context.wait_for_drives(timeout_s)
    context.ranks.admit(signature)
    return context
