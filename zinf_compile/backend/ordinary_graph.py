"""Graphs whose parameters stay ordinary ones, because nothing would move: on one rank, where no option says where anything lives,
or all was decided to live on the device.

Optimizers, checkpoints and user code find tensors that hold their values. Such a graph has the regions that it would have if they
were partitioned, and computes the same bits. A graph with other options that meets the same parameters later partitions them;
Dynamo then compiles this one again, for partitioned ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition
from torch import fx, nn

from zinf_compile.config import Config
from zinf_compile.ir.program import Program
from zinf_compile.ir.steps import Region
from zinf_compile.passes import Pass, ordinary_passes, run_passes
from zinf_compile.passes.joint.insert_reduce_scatters import insert_reduce_scatters
from zinf_compile.passes.lower import lower
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.system.host_limits import usable_bytes
from zinf_compile.sharded.budget import GraphBudget
from zinf_compile.sharded.ordinary import is_ordinary, is_used, note_ordinary
from zinf_compile.sharded.parameter import unit_of

from .decide_memory import Cut
from .graph_compiler import Compiled, GraphCompiler

_log = logging.getLogger("zinf_compile")

OF_COMPUTE = frozenset({"compute", "mode", "on_refusal", "chunk_loss", "timeout_s", "machine"})
"""Options that say how graphs compute, and how fast: nothing of where anything lives."""

OF_NO_PLACE = OF_COMPUTE | {"nvme"}
"""And those that say what there is, and bound nothing."""

_MORE = 3
"""Bytes to come for each of a trained parameter: its gradient, and two states of an optimizer."""


def may_stay(config: Config, given: Collection[str], inputs: Sequence[Any]) -> bool:
    """Say whether a graph's parameters may stay ordinary ones on one rank, with options that were `given`, if nothing moves."""
    if not OF_NO_PLACE.issuperset(given) or any(unit_of(value) is not None for value in inputs):
        return False
    if any(isinstance(value, nn.Parameter) and value.is_meta for value in inputs):
        return False  # refused
    return not dist.is_initialized() or dist.get_world_size(config.resolve_group()) == 1


def nothing_moves(config: Config, inputs: Sequence[Any]) -> bool:
    """Say whether everything that a graph reads and makes stays on the device, as far as that is known before it is traced.

    It doesn't where gradients and two states of each parameter have no room there: the graph is then refused, with the options
    that it needs, by the account of memory of one whose parameters are partitioned. What was trained as it is has the room; what
    is evaluated needs none.
    """
    parameters = [value for value in inputs if isinstance(value, nn.Parameter)]
    if any(map(is_ordinary, parameters)):
        return True
    return not config.nvme and has_room(inputs)  # with a drive homes are decided


def has_room(inputs: Sequence[Any]) -> bool:
    """Say whether what steps add to a graph's parameters has room where they are."""
    parameters = [value for value in inputs if isinstance(value, nn.Parameter)]
    more = {parameter.device: 0 for parameter in parameters}
    for parameter in parameters if torch.is_grad_enabled() else ():
        more[parameter.device] += _MORE * parameter.nbytes * parameter.requires_grad
    return all(count <= usable_bytes(device)[0] for device, count in more.items())


class OrdinaryCompiler(GraphCompiler):
    """Compiles a graph whose parameters stay ordinary ones."""

    partitions = False

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        """Return the callable that Dynamo runs in place of the captured graph."""
        trains = torch.is_grad_enabled()
        compiled = super().compile(gm, example_inputs)
        _log.info("graph %d: parameters stay ordinary ones: on one rank, with these options, nothing moves", self.number)
        places = [index for index, value in enumerate(example_inputs) if isinstance(value, nn.Parameter)]
        return _noting(compiled, places, trains=trains) if places else compiled

    def make_budget(self, slots: Sequence[Any], inputs: Sequence[Any], context: Context) -> GraphBudget:
        """Return a budget that refuses nothing, and reserves nothing: `nothing_moves` has found room.

        It knows of no parameters, and so holds no weak references: PyTorch swaps the tensors of none that has any.
        """
        return GraphBudget(self.config, (), inputs, context, self.placements, measuring=True)

    def joint_passes(self) -> tuple[Pass, ...]:
        """Return the passes of the joint graph: gradients stay as they are made."""
        return tuple(each for each in super().joint_passes() if each is not insert_reduce_scatters)

    def cut(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition the joint graph into forward and backward."""
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def _decide_memory(self, cut: Cut) -> None:
        """Decide nothing: all of it stays."""

    def schedule(self, graph: fx.GraphModule, kind: str) -> Program:
        """Lower the graph to its regions."""
        run_passes(graph, ordinary_passes(bucket_bytes=self._bucket))
        return lower(graph, name=f"{kind} of graph {self.number}", compile_region=self.region_compiler(kind))

    def finish(self, program: Program, context: Context) -> Compiled:
        """Return the callable that AOTAutograd runs."""
        return _runner(program)


def _noting(compiled: Compiled, places: Sequence[int], *, trains: bool) -> Compiled:
    """Return a compiled graph that notes the parameters among its inputs at the first of their calls; `trains`: as ordinary ones.

    One graph serves all models that are alike: whose they are, a call says. Two graphs may share some of them: the first and the
    last are looked at.
    """
    first, last = places[0], places[-1]
    is_noted = is_ordinary if trains else is_used

    def run(*args: Any) -> Any:
        if not (is_noted(args[first]) and is_noted(args[last])):
            note_ordinary([args[place] for place in places if not is_noted(args[place])], trained=trains)
        return compiled(*args)

    return run


def _runner(program: Program) -> Callable[[list[Any]], list[Any]]:
    """Return a callable that runs the regions of a program, which has no other steps, on a list of values, which it empties."""
    regions = [(step, freed) for step, freed in zip(program.steps, program.frees, strict=True) if isinstance(step, Region)]
    assert len(regions) == len(program.steps), "nothing is transferred"
    constants, more = program.constants, program.registers - program.inputs
    outputs = [place[0] if isinstance(place, tuple) else place for place in program.outputs]

    def run(args: list[Any]) -> list[Any]:
        registers = [*args, *[None] * more]
        args.clear()
        for register, value in constants.items():
            registers[register] = value
        for step, freed in regions:
            values = [registers[r] for r in step.inputs]
            for r in freed:
                registers[r] = None
            for place, value in zip(step.outputs, step.fn(values), strict=True):
                if place not in freed:
                    registers[place] = value
        return [None if r is None else registers[r] for r in outputs]

    run._boxed_call = True  # type: ignore[attr-defined]  # tells AOTAutograd that `run` takes a list and empties it
    return run
