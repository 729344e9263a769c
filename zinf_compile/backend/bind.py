"""Binds the arguments of one call to the units of the graph's parameter slots; partitions parameters at their first call.

Called by `graph_compiler` for each call of a graph; knows no FX graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from zinf_compile._torch import PARAMETER_TYPES, no_torch_function
from zinf_compile.errors import PartitionedParameterError, StepFailedError, StoreError
from zinf_compile.ir.checkpoint_folder import CheckpointFolder
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import ParameterSlot, Program, digest_of
from zinf_compile.ir.tiers import Placement, Tier
from zinf_compile.optim.first_call_in_step import refuse_running_steps
from zinf_compile.runtime.comm.steps_done import mixed
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.steps_taken import describe_steps, digest_of_steps
from zinf_compile.runtime.units.unit import Tile, Unit
from zinf_compile.runtime.units.updatable import why_spoiled
from zinf_compile.sharded.budget_checks import refuse_second_gradients
from zinf_compile.sharded.parameter import ShardedParameter, drop_held_values, unit_behind
from zinf_compile.sharded.partition import partition
from zinf_compile.sharded.short_ranks import Lack, is_any_short
from zinf_compile.sharded.synchronised_buffers import is_synchronised, note_synchronised

Arguments = Sequence[Any] | Mapping[int, Any]
"""The value of each input register."""


class Binder:
    """Binds the parameters of each call of one program."""

    def __init__(
        self,
        program: Program,
        context: Context,
        placements: Placements,
        *,
        lack: Callable[[Iterable[Unit], Sequence[Any]], Mapping[Tier, Lack]],
        refuse: Callable[[Context, Mapping[Tier, Lack]], NoReturn] = refuse_second_gradients,
        checkpoint: CheckpointFolder | None = None,
        place: Callable[[Sequence[ParameterSlot], Sequence[Any]], Placements] | None = None,
    ) -> None:
        """`lack` returns, by side, the memory that a call with given units and arguments lacks, `refuse` raises where it does.

        `checkpoint`: where the units are saved. `place` returns the placements of parameters that are first
        seen at a call; None: those that the graph was compiled for.
        """
        self._program = program
        self._context = context
        self._placements = placements
        self._lack, self._refuse = lack, refuse
        self._checkpoint = checkpoint
        self._place = place
        self._described: dict[tuple[int, ...], tuple[list[str], int]] = {}
        self._steps: tuple[tuple[int, tuple[int, ...]], int] = (-1, ()), 0
        """Key and result of the last digest of the units' steps."""
        self._suiting: dict[int, Placement] = {}
        """The placement of the last unit of each slot whose gradient is reduced as the graph was compiled for."""

    def bind(self, args: Sequence[Any], *, lacks_space: StoreError | None = None) -> Mapping[int, Unit | Tile]:
        """Return the unit of each slot, and its tiles, after all ranks have agreed on the call.

        `lacks_space` is raised, and an error that names this rank on all others.
        """
        program = self._program
        if not program.slots and not (program.buffers and self._context.size > 1):
            if lacks_space is not None:
                raise lacks_space
            return {}
        units = self._bind_units(args, lacks_space)
        tiles = {register: units[slot].tiles[number] for register, (slot, number) in program.tiles.items()}
        return {**units, **tiles} if tiles else units

    def _bind_units(self, args: Sequence[Any], lacks_space: StoreError | None) -> dict[int, Unit]:
        program, context = self._program, self._context
        drop_held_values()
        units, fresh = self._look_up(args)
        buffers = self._unsynchronised(args, units, fresh) if context.size > 1 else ()
        lacks = self._lack(units.values(), args)
        short, spoiled = is_any_short(lacks), why_spoiled(units.values()) if context.spoiled else None
        if context.size > 1:
            value = short + 2 * (spoiled is not None) + 4 * (lacks_space is not None)
            sent = self._agree(units, fresh, buffers, value=value + 8 * context.full_copies.digest(units.values()))
            everyone = [int(value) % 8 for value in sent]
            if len({int(value) // 8 for value in sent}) > 1:  # shards were handed out on some ranks only
                for unit in units.values():
                    context.full_copies.drop(unit)
            short = any(value % 2 for value in everyone)
            where = [rank for rank, value in enumerate(everyone) if value >= 4]
            if where and lacks_space is None:
                lacks_space = StoreError(f"rank {where[0]} has no space on its drives for saved values, see its error")
            where = [rank for rank, value in enumerate(everyone) if value % 4 >= 2]
            if where and spoiled is None:
                spoiled = StepFailedError(_SPOILED_ELSEWHERE.format(rank=where[0]))
        if lacks_space is not None:
            raise lacks_space
        if spoiled is not None:
            raise spoiled
        if short:
            self._refuse(context, lacks)
        if fresh:
            slots = [program.slots[r] for r in fresh]
            placements = None if self._place is None else self._place(slots, [args[r] for r in fresh])
            self._partition(args, fresh, placements, called=True)
            units.update((r, _unit_of(args[r])) for r in fresh)
        if self._checkpoint is not None:
            for unit in units.values():
                unit.checkpoint = self._checkpoint
        for r in buffers:
            _synchronise(args[r], context)
        if program.buffers and context.size > 1:
            model = _first_of(units.values())
            context.synchronised.update((model, name) for name in program.buffers.values())
        return units

    def partition_ahead(self, inputs: Sequence[Any]) -> None:
        """Partition the parameters that the captured graph was compiled with, given its inputs.

        Dynamo guards on a parameter's class when the backend returns: partitioned only at the first call, the parameter would
        fail that guard at the second, and the graph would be compiled again.
        """
        args = {r: inputs[slot.index] for r, slot in self._program.slots.items()}
        units, fresh = self._look_up(args)
        if fresh and self._context.size > 1:
            self._agree(units, fresh, ())
        if fresh:
            self._partition(args, fresh, called=False)

    def _unsynchronised(self, args: Arguments, units: Mapping[int, Unit], fresh: Sequence[int]) -> Sequence[int]:
        """Return the buffers to synchronise with rank 0: each once, even if the model replaces it."""
        program, known = self._program, self._context.synchronised
        if not program.buffers:
            return ()
        model = _first_of(units.values())
        return [
            r for r, name in program.buffers.items() if (fresh or (model, name) not in known) and not is_synchronised(args[r])
        ]

    def _look_up(self, args: Arguments) -> tuple[dict[int, Unit], list[int]]:
        """Return the units of partitioned parameters, and the registers of parameters that aren't partitioned yet."""
        units: dict[int, Unit] = {}
        fresh: list[int] = []
        with no_torch_function():
            for r, slot in self._program.slots.items():
                unit = _checked(args[r], slot, self._context)
                if unit is None:
                    fresh.append(r)
                elif unit.boxes != slot.tiles:
                    raise PartitionedParameterError(
                        f"parameter {slot.name} is cut into {len(unit.boxes)} tiles, but this graph was compiled for one of "
                        f"{len(slot.tiles)}: several models with different option tile or device_memory each need "
                        "model.compile(backend=...) of their own"
                    )
                else:
                    units[r] = unit
                    if slot.requires_grad and self._suiting.get(r) is not unit.placement:
                        _check_reduced_alike(unit, slot)
                        self._suiting[r] = unit.placement
        return units, fresh

    def _partition(self, args: Arguments, fresh: Sequence[int], placements: Placements | None = None, *, called: bool) -> None:
        slots = self._program.slots
        if self._context.left:
            raise PartitionedParameterError(
                f"the {self._program.name} was compiled for the drives of a process that forked this one: call "
                "torch.compiler.reset() here, which has models of this process compiled anew, or start processes by spawn"
            )
        refuse_running_steps([(args[r], slots[r]) for r in fresh])
        parameters = {r: (args[r], slots[r].name) for r in fresh}
        placed = placements or self._placements
        buffers = {name: args[r] for r, name in self._program.buffers.items()} if called else {}
        partition(parameters, self._context, lambda r: placed.of(slots[r]), called=called, buffers=buffers)

    def _agree(self, units: Mapping[int, Unit], fresh: Sequence[int], buffers: Sequence[int], *, value: int = 0) -> list[float]:
        """Check that all ranks are about to do the same; return the `value` of each."""
        program = self._program
        serials = tuple(unit.serial for unit in units.values())
        key = (len(fresh), *fresh, len(buffers), *buffers, *serials)
        if key not in self._described:
            lines = self._describe(fresh, buffers, serials)
            self._described[key] = (lines, digest_of(lines))
        lines, digest = self._described[key]
        if changed := self._context.eager_changes:
            lines = [*lines, f"changes of parameters outside graphs {changed:08x}, the last {self._context.last_eager_change}"]
            digest = digest_of([str(digest), lines[-1]])
        return self._context.ranks.agree(
            lines,
            what=f"starting the {program.name}",
            value=float(value),
            digest=mixed(digest, self._digest_of_steps(units, serials)),
            details=lambda: describe_steps(units.values()),
        )

    def _digest_of_steps(self, units: Mapping[int, Unit], serials: tuple[int, ...]) -> int:
        """Return a hash of the shards' steps, cached until the next step."""
        key = (self._context.steps_clock, serials)
        if self._steps[0] != key:
            self._steps = key, digest_of_steps(units.values())
        return self._steps[1]

    def _describe(self, fresh: Sequence[int], buffers: Sequence[int], serials: Sequence[int]) -> list[str]:
        program = self._program
        return [
            *(program.sequence or ("a graph that moves nothing",)),
            *(f"partition {program.slots[r].name}" for r in fresh),
            *(f"synchronise buffer {program.buffers[r]}" for r in buffers),
            f"partitioned parameters number {', '.join(map(str, serials))}",
        ]


_SPOILED_ELSEWHERE = (
    "the values of parameters on rank {rank} are incomplete: a change of them failed partway, see its error. Load a "
    "checkpoint of model and optimizer on all ranks to go on from there"
)


def _unit_of(parameter: torch.Tensor) -> Unit:
    unit = unit_behind(parameter)
    assert unit is not None, "every parameter of a call was checked or partitioned"
    return unit


def _first_of(units: Iterable[Unit]) -> int:
    """Return a key of the units' model: their first serial."""
    return min((unit.serial for unit in units), default=-1)


def _check_reduced_alike(unit: Unit, slot: ParameterSlot) -> None:
    """Check that a parameter's gradient is reduced as the graph was compiled for; its placement and slot decide that."""
    if unit.reduce_dtype != slot.reduce_dtype:
        raise PartitionedParameterError(
            f"gradients of parameter {slot.name} are kept in {unit.reduce_dtype}, but this graph was compiled to "
            f"reduce them in {slot.reduce_dtype}: several models with different option reduce_dtype or master each "
            "need model.compile(backend=...) of their own"
        )
    if slot.reduced_at_step != unit.reduced_at_step:
        raise PartitionedParameterError(
            f"parameter {slot.name} was partitioned with reduce_grads={unit.placement.reduce_grads!r}, but this "
            "graph was compiled otherwise: several models with different option reduce_grads each need "
            "model.compile(backend=...) of their own"
        )


def _checked(parameter: Any, slot: ParameterSlot, context: Context) -> Unit | None:
    """Check the parameter against the slot that the graph was compiled for; return its unit, None if it isn't partitioned."""
    kind = type(parameter)
    if kind is not ShardedParameter and kind not in PARAMETER_TYPES:  # saved by autograd or torch.utils.checkpoint
        saved = unit_behind(parameter)
        if saved is None:
            raise PartitionedParameterError(
                f"parameter {slot.name} came back to the backward as a copy: saved_tensors_hooks that replace tensors, such as "
                "save_on_cpu, can't hold a partitioned parameter; let them return parameters as they are"
            )
        return saved
    if parameter.requires_grad != slot.requires_grad or parameter.dtype != slot.dtype or parameter.shape != slot.shape:
        raise PartitionedParameterError(
            f"parameter {slot.name} changed after it was compiled: the graph has shape {list(slot.shape)}, {slot.dtype}, "
            f"requires_grad={slot.requires_grad}, found shape {list(parameter.shape)}, {parameter.dtype}, "
            f"requires_grad={parameter.requires_grad}. Call torch.compiler.reset() after such a change"
        )
    unit: Unit | None = getattr(parameter, "_zinf_unit", None)
    if kind is ShardedParameter:
        assert unit is not None, "a hollow parameter has a unit"
        own = unit.context
        if own.group is not context.group:
            raise PartitionedParameterError(
                f"parameter {slot.name} is partitioned over {own.size} ranks of another process group than this graph's "
                f"{context.size}; compile all uses of a model with one process group, made before the first compiled call"
            )
    elif unit is not None:
        raise PartitionedParameterError(
            f"the compiled model was called while {slot.name} is gathered: leave `with zinf_compile.gathered(...)` first, "
            'or let its code run eagerly inside: `with torch.compiler.set_stance("force_eager"):`'
        )
    return unit


def _synchronise(buffer: torch.Tensor, context: Context) -> None:
    note_synchronised(buffer)
    with torch.inference_mode(False), torch.no_grad():
        context.finish(context.lanes.gather.submit(lambda: context.gathers.broadcast(buffer)), "synchronising a buffer")
