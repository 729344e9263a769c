"""Traces a model on fake tensors and returns its scheduled graphs, without allocating a weight.

Called by `main`; runs the passes of the backend, and executes no program.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import networkx as nx
import torch
from torch import fx, nn

from zinf_compile._torch import (
    NEEDS_VALUES,
    convertible_parameters,
    fake_mode,
    fake_process_group,
    tree_leaves,
    tree_map,
)
from zinf_compile.backend.graph_compiler import Compiled, GraphCompiler
from zinf_compile.backend.plan_graphs import GraphPlanner, is_planned
from zinf_compile.backend.through_dynamo import raise_through_dynamo
from zinf_compile.config import Config
from zinf_compile.errors import ZinfError
from zinf_compile.ir.compute_shape import ComputeShape
from zinf_compile.ir.program import ParameterSlot, Program
from zinf_compile.ir.tiers import Topology
from zinf_compile.passes import Pass, graph_passes, joint_passes, pass_name, run_passes, verify
from zinf_compile.passes.analysis.planned_graph import PlannedGraph
from zinf_compile.passes.analysis.print_graph import graph_text
from zinf_compile.passes.analysis.summary import summarize
from zinf_compile.passes.analysis.traffic import Collective, Swap, Traffic, list_collectives, list_swaps, measure_traffic
from zinf_compile.passes.analysis.transfer_graph import build_transfer_graph
from zinf_compile.passes.lower import lower
from zinf_compile.plan.rates import Rates
from zinf_compile.plan.table import schedule_table
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.device.link import DeviceLink, HostIsDevice
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.memory.arena import GatherMemory
from zinf_compile.sharded.budget import GraphBudget
from zinf_compile.sharded.caps import find_caps

from .dump_error import DumpError, raised_by
from .target import Target


@dataclasses.dataclass(frozen=True, slots=True)
class Scheduled:
    """One scheduled graph of the model."""

    name: str
    kind: str
    """forward, backward or inference."""
    text: str
    """The graph after all passes, or after pass `after`. For a joint pass a forward shows the joint graph; a backward and an
    inference graph are empty."""
    summary: str
    """The graph after all passes, with one line for each region between transfers."""
    before: str
    """The graph before pass `after`; empty if none is given."""
    collectives: tuple[Collective, ...]
    swaps: tuple[Swap, ...]
    traffic: Traffic
    transfers: nx.DiGraph
    program: Program
    plan: str = ""
    """Where states live, if that was decided, and the table of the plan that it acts out, if a planner is given; else empty."""
    shape: ComputeShape | None = None
    """The values that decide bits."""
    saved: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Of a forward and its backward, the bytes that the forward saves, by what becomes of them: "keep", or a tier."""


def nothing_compiled(target: str) -> DumpError:
    """Return the error for a target of which no graph was captured."""
    return DumpError(
        f"target {target!r}: nothing of the model was compiled. Dynamo left its forward to eager code, or it has no parameters; "
        "TORCH_LOGS=graph_breaks names the places"
    )


DEVICES = ("cpu", "cuda")


def trace(
    target: Target,
    *,
    options: Mapping[str, Any] | None = None,
    world_size: int = 1,
    device: str = "cpu",
    after: str | None = None,
) -> list[Scheduled]:
    """Run the target's forward on fake tensors, as one of `world_size` ranks, and return every scheduled graph.

    Graphs come in the order of compilation, each forward followed by its backward. For a `device` other than "cpu" the schedule
    is that of a device with memory of its own; the operators remain the CPU's. `after` names the pass around which graphs are
    kept as text. Folders in the options need not exist, and memory is limited only by the options. Raises
    `DumpError` for an unknown pass or a target that returns something else, `OptionError` for bad options, `BudgetError` if the
    model exceeds their caps.
    """
    config = Config.from_options(options, check_folders=False)
    known = pass_names(config, device=device)
    if after is not None and after not in known:
        raise DumpError(f"pass {after!r} is not known; accepted: {', '.join(known)}")
    found: list[Scheduled] = []

    def compiler(number: int) -> GraphCompiler:
        return Recorder(config, number, found, world_size=world_size, after=after)

    run_on_fakes(target, compiler, world_size=world_size, device=device)
    return found


def run_on_fakes(target: Target, compiler: Callable[[int], GraphCompiler], *, world_size: int, device: str) -> None:
    """Run the target's forward on fake tensors as one of `world_size` ranks; `compiler` makes the compiler of each graph."""
    numbers = itertools.count()

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        try:
            return compiler(next(numbers)).compile(gm, inputs)
        except ZinfError as error:
            raise raise_through_dynamo(error) from error.__cause__

    with _clean_compiler(), fake_process_group(world_size), fake_mode() as mode, simulating(_simulated_device(device)):
        with convertible_parameters(mode), raised_by("the target"):
            result = target()
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], nn.Module):
            raise DumpError(f"the target returned a {type(result).__name__}; accepted: (model, example inputs)")
        model, inputs = result[0], _off_meta(*result)
        compiled: Any = torch.compile(model, backend=backend)
        try:
            with raised_by("the forward, called with the target's inputs,"):
                if isinstance(inputs, Mapping):
                    compiled(**inputs)
                else:
                    compiled(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
        except NEEDS_VALUES as error:
            raise DumpError(
                f"the forward runs {error.func}, whose result depends on values, and a trace has none; accepted: models whose "
                "shapes follow from those of their inputs. Such a model trains; zinf_compile.stats(model) describes its steps"
            ) from error


def _off_meta(model: nn.Module, inputs: Any) -> Any:
    """Give fake memory to what a target has made on the meta device; return its inputs. Parameters that are tied stay so."""
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def off(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made = nn.Parameter(made, False) if is_parameter else made
            known[id(tensor)] = tensor, made.requires_grad_(tensor.requires_grad)
        return known[id(tensor)][1]

    def off_meta(item: Any) -> Any:
        return off(item) if isinstance(item, torch.Tensor) and item.device.type == "meta" else item

    for name, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            held.update({name: off_meta(tensor) for name, tensor in held.items()})
        if any(isinstance(leaf, torch.Tensor) and leaf.device.type == "meta" for leaf in tree_leaves(vars(module))):
            raise DumpError(
                f"module {name or '(the model)'} refers to a tensor on the meta device that is no parameter or buffer of it; "
                "accepted: parameters and buffers on meta, other tensors on the CPU (nothing is allocated for them here)"
            )
    return tree_map(off_meta, inputs)


def pass_names(config: Config, *, device: str = "cpu") -> list[str]:
    """Return the passes by name, in order."""
    topology = Topology(host_apart=device != "cpu")
    plan = _plans_nothing if is_planned(config, topology) else None
    return [pass_name(p) for p in (*joint_passes(), *graph_passes(bucket_bytes=config.bucket_bytes, plan=plan))]


def _plans_nothing(graph: fx.Graph) -> PlannedGraph:
    raise AssertionError("the passes are named, not run")


class Recorder(GraphCompiler):
    """Schedules forward and backward as soon as the joint graph is partitioned; runs the forward alone, on fake tensors."""

    backward_ahead = False

    def __init__(self, config: Config, number: int, found: list[Scheduled], *, world_size: int, after: str | None) -> None:
        self._found, self._before = found, len(found)
        self._world_size = world_size
        self._after = after
        super().__init__(config)
        self.number = number

    def begin(self, config: Config) -> None:
        super().begin(config)
        del self._found[self._before :]
        self._joint_texts: tuple[str, str] | None = None
        self._graphs: dict[str, fx.GraphModule] = {}

    def run_joint_passes(self, joint: fx.GraphModule) -> None:
        self._joint_texts = self._run(joint, self.joint_passes(), policies=True)

    def cut(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = super().cut(joint, inputs, **kwargs)
        self._schedule(forward, "forward")
        self._schedule(backward, "backward")
        return forward, backward

    def schedule(self, graph: fx.GraphModule, kind: str) -> Program:
        if kind == "inference":
            self._schedule(graph, kind)
        graph.recompile()
        self._graphs[kind] = graph
        return self._found[-1].program

    def make_budget(self, slots: Sequence[ParameterSlot], inputs: Sequence[Any], context: Context) -> GraphBudget:
        caps = find_caps(self.config, context, held=0)
        if self.config.device_memory is None:  # no limit from this machine
            caps = dataclasses.replace(caps, device=sys.maxsize)
        if self.config.host_memory is None:
            caps = dataclasses.replace(caps, host=sys.maxsize)
        return GraphBudget(self.config, slots, inputs, context, self.placements, caps=caps)

    def make_planner(self, context: Context) -> GraphPlanner:
        return GraphPlanner(
            self.config,
            self.topology,
            rates=Rates.of(context.device.type, self.config.machine_name()),
            world_size=self._world_size,
            ranks=None,
            together=False,
        )

    def finish(self, program: Program, context: Context) -> Compiled:
        graph = self._graphs.get("inference") or self._graphs["forward"]

        def run(args: list[Any]) -> Any:
            values = list(args)
            args.clear()
            return graph(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _schedule(self, unscheduled: fx.GraphModule, kind: str) -> None:
        graph = fx.GraphModule(unscheduled, copy.deepcopy(unscheduled.graph))  # AOTAutograd continues with the original
        graph.meta.update(unscheduled.meta)
        texts = self._run(graph, self.graph_passes(kind))
        if texts is None and self._after is not None:  # a joint pass
            texts = self._joint_texts if kind == "forward" else None
            texts = texts or ("", "")
        verify(graph)
        program = lower(graph, name=f"{kind} of graph {self.number}", compile_region=_skip_compilation)
        before, text = texts or ("", self._text(graph))
        self._found.append(
            Scheduled(
                name=program.name,
                kind=kind,
                text=text,
                summary=summarize(graph, world_size=self._world_size),
                before=before,
                collectives=list_collectives(graph.graph, world_size=self._world_size),
                swaps=list_swaps(graph.graph, world_size=self._world_size),
                traffic=measure_traffic(graph.graph, world_size=self._world_size),
                transfers=build_transfer_graph(graph.graph, world_size=self._world_size),
                program=program,
                plan=self._plan_text(),
                shape=self.shape,
                saved=dict(self.decided.saved),
            )
        )

    def _plan_text(self) -> str:
        told = self.decided.told()
        text = f"# {told}\n".replace("\n  ", "\n#   ") if told else ""
        if self.planner is None:
            return text
        problem, plan = self.planner.made[-1]
        return f"{text}# plan by {plan.planner or self.planner.name}\n{schedule_table(problem, plan)}\n"

    def _run(self, gm: fx.GraphModule, passes: Sequence[Pass], *, policies: bool = False) -> tuple[str, str] | None:
        """Run the passes; return the graph as text before and after pass `after`, None if it isn't among them."""
        if self._after is None or self._after not in map(pass_name, passes):
            run_passes(gm, passes)
            return None
        texts = [("", self._text(gm, policies=policies))]
        run_passes(gm, passes, observe=lambda name, gm: texts.append((name, self._text(gm, policies=policies))))
        return next((before, after) for (_, before), (name, after) in itertools.pairwise(texts) if name == self._after)

    def _text(self, gm: fx.GraphModule, *, policies: bool = False) -> str:
        return graph_text(gm, sizes=True, policies=policies, world_size=self._world_size)


def _skip_compilation(region: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    return region.forward  # never called; compiling regions would take a tenth of the time at 70B


@cache
def _simulated_device(device: str) -> DeviceLink:
    return HostIsDevice(GatherMemory()) if device == "cpu" else SimulatedDevice()


@contextmanager
def _clean_compiler() -> Iterator[None]:
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()
