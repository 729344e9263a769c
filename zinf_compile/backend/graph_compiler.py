"""Compiles one captured graph whose parameters are partitioned. `entry` calls it; `zinf dump` subclasses `GraphCompiler`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx

from zinf_compile._torch import aot_autograd, aot_settings
from zinf_compile.config import Config
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import NOTHING, ParameterSlot, Program
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.steps import Reduce
from zinf_compile.ir.tiers import Tier, Topology
from zinf_compile.optim.step_hooks import install
from zinf_compile.optim.unused import free_buffers_of
from zinf_compile.passes import Pass, graph_passes, inference_passes, joint_passes, region_passes, run_passes, verify
from zinf_compile.passes.activations.raise_saved_views import raise_saved_views
from zinf_compile.passes.analysis.saved_memories import find_memories
from zinf_compile.passes.graph.node_facts import counts_all, pass_notes
from zinf_compile.passes.joint.clone_aliased_outputs import clone_aliased_outputs
from zinf_compile.passes.lower import RegionCompiler, lower, run_by_operator
from zinf_compile.plan.rates import Rates
from zinf_compile.plan.saved_homes import choose_homes
from zinf_compile.runtime.context import Context, context_for
from zinf_compile.runtime.memory.handed_on import HandedOn
from zinf_compile.runtime.system.host_limits import warn_of_caps
from zinf_compile.runtime.system.malloc import return_large_blocks
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.sharded.allowed_homes import farthest_homes, is_open
from zinf_compile.sharded.budget import GraphBudget
from zinf_compile.sharded.call_checks import CallChecks
from zinf_compile.sharded.caps import agree_on_device
from zinf_compile.sharded.place_at_call import place_at_call
from zinf_compile.sharded.recompile_limit import raise_limit

from .bind import Binder
from .budgets_by_tiles import BudgetsByTiles
from .capture import Captured, cut_into_tiles, explaining_empty_inputs, log_tiles, mark_inputs, read_inputs, tell_of_tiles
from .choices import Choices
from .compiled_together import compiled_together
from .decide_memory import Cut, MemoryDecision, decide_memory
from .double_backward import reject_double_backward
from .home_planner import HomePlanner
from .kept_graphs import LiveProgram
from .losses import Losses
from .placement_of_inputs import follow_units, placements_of, refuse_closed, with_piece
from .plan_graphs import GraphPlanner, is_planned
from .regions import InductorRegions, prepare
from .remake import ForwardRegions, plan_remade
from .replan import replanner_of
from .run_graph import runner
from .saved_values import SavedSpace, refuse_activation_budget
from .static_shapes import with_static_shapes
from .tiles_of_inputs import follows_cap, may_cut, note_tiles, recut_inputs

Compiled = Callable[..., Any]
_numbers: list[int] = process_wide([])
"""Numbers of the graphs compiled so far."""


class NothingMovesError(Exception):
    """Homes were decided, all on the device of one rank: then parameters need not be partitioned."""


class GraphCompiler:
    """Compiles one captured graph. `zinf dump` subclasses it to inspect the result."""

    backward_ahead = True
    """Compile the backward together with its forward: regions in parallel, errors before any parameter is partitioned."""
    partitions = True
    """Whether parameters are partitioned when the graph runs, and hold no values then."""

    def __init__(self, config: Config, *, given: Sequence[str] = (), stops: bool = False) -> None:
        self._given = given
        """Names of the options that the user set."""
        self.together = False
        """Whether all ranks compile the graph at the same point."""
        self._stops = stops
        """Whether to raise `NothingMovesError` once that is decided."""
        self.number = len(_numbers)
        _numbers.append(self.number)
        self.begin(config)

    def begin(self, config: Config) -> None:
        """Start anew with a configuration."""
        self.config = config
        self._budget: GraphBudget | None = None
        self.shape = config.shape()
        """The values that decide bits. Tiers don't change it."""
        self._bucket = self.shape.bucket_bytes
        self._choices: Choices | None = None
        self._handed = HandedOn()
        self._losses: Losses | None = None
        self.topology = Topology(host_apart=False)
        self.placements = Placements(config.placement())
        """Where the states of each parameter live."""
        self.homes: HomePlanner | None = None
        """Decides where states live; None: options or units say so already."""
        self.decided = MemoryDecision(self.placements)
        """What was decided when the graph was cut."""
        self._binder: Binder | None = None
        self._results: int | None = None
        """The number of a forward's outputs that are not saved for its backward."""
        self.planner: GraphPlanner | None = None
        self._forward_regions, self._regions = ForwardRegions(), InductorRegions(mode=config.mode, on_refusal=config.on_refusal)

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        """Return the callable that Dynamo runs in place of the captured graph."""
        refuse_closed(example_inputs)
        captured = read_inputs(gm, example_inputs, partitions=self.partitions)
        asked = self.config
        config = self.config = follow_units(asked, self._given, example_inputs)
        group, signature = config.resolve_group(), config.signature()
        context = context_for(group, captured.device, timeout_s=config.timeout_s, signature=signature)
        with context.ranks.telling():
            self.together = compiled_together(captured.slots.values(), example_inputs, signature)
            follows = follows_cap(asked, self._given, example_inputs)
            compiled = self._compile(gm, example_inputs, captured, context, asked, tiles_follow=follows)
            if isinstance(compiled, Config):
                tell_of_tiles(config, compiled, self.number)
                recut_inputs(compiled, example_inputs)
                self.begin(compiled)
                compiled = self._compile(gm, example_inputs, captured, context, asked, tiles_follow=False)
                note_tiles(asked.tile_bytes, self.config, example_inputs)
            assert callable(compiled), "tiles were chosen so that the graph fits"
            return compiled

    def _compile(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        captured: Captured,
        context: Context,
        asked: Config,
        *,
        tiles_follow: bool,
    ) -> Compiled | Config:
        """Return the same, on the ranks of a context; the configuration with smaller tiles, where only that fits.

        `asked`: the options before they followed those of earlier graphs; `tiles_follow`: tiles do from `device_memory`.
        """
        plans = len(context.plans)
        free_buffers_of(example_inputs)
        if context.size > 1 or farthest_homes(self.config, context.link.topology).params != Tier.DEVICE:
            raise_limit()
        captured = cut_into_tiles(captured, example_inputs, self.config.placement(), context.ranks.shard_group)
        self.topology, slots = context.link.topology, list(captured.slots.values())
        numel = sum(slot.numel for slot in slots) // context.ranks.shard_group.size
        self.config = with_piece(self.config, example_inputs, numel)
        self.placements = self.place(slots, example_inputs)
        if is_open(self.config, self.topology) and len(self.placements.own) < len(slots):
            together = self.together
            self.homes = HomePlanner(self.config, slots, example_inputs, self.placements, context, together=together)
        likely = self.placements if self.homes is None else self.homes.likely()
        self._choices = Choices(slots, example_inputs, context, likely, first=self.together)
        log_tiles(slots, self.number)
        self.shape = self.config.shape()
        self._losses = Losses(self.shape, self._choices, ranks=context.size)
        self._bucket = self.shape.bucket_of(slots)
        self._budget = self.make_budget(slots, example_inputs, context)
        self.planner = self.make_planner(context) if is_planned(self.config, self.topology) else None
        if self.planner is not None:
            self.planner.placements = self.placements
        if self.config.compute == "inductor":
            prepare(captured.device)
        if self.partitions:
            placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
            clone_aliased_outputs(gm, {placeholders[index] for index in captured.slots})
        compiled = self._trace(gm, example_inputs, captured, context)
        reservations = context.memory.reservations
        if tiles_follow or asked.tile is not None or asked.device_memory is None:
            reservations.tiles_of = asked.device_bytes if tiles_follow else None

        def measure(config: Config, captured: Captured) -> GraphBudget:
            return _Measurer(config).measure(gm, example_inputs, captured, context, like=self)

        shards = None if asked.has_piece else numel
        by_tiles = BudgetsByTiles(
            self.config, captured, example_inputs, context, self._budget, measure, shards=shards, together=self.together
        )
        alone, measures = context.size == 1, by_tiles if tiles_follow else None
        cuts = (alone or self.together) and may_cut(example_inputs, alone=alone)
        if (smaller := self._budget.check(measure=measures, may_cut=cuts)) is not None:
            reservations.tiles_of = smaller
            del context.plans[plans:]
            return by_tiles.cut_as(smaller)
        if self.partitions and not self.topology.host_apart:
            return_large_blocks(self._budget.caps.device)
        self._regions.compile(rank=context.rank, ranks=context.size)
        if self._binder is not None and self.together:
            self._binder.partition_ahead(example_inputs)
        self._choices.keep()
        return compiled

    def _trace(self, gm: fx.GraphModule, example_inputs: Sequence[Any], captured: Captured, context: Context) -> Compiled:
        """Run AOTAutograd and the passes on a captured graph."""
        losses = self._losses
        assert losses is not None, "how losses are computed is known before a graph is traced"

        def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            mark_inputs(joint, captured, partitions=self.partitions)
            losses.decide(joint)
            self.run_joint_passes(joint)
            joint.recompile()
            return self.cut(joint, joint_inputs, **kwargs)

        def stage(kind: str) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
            def compile_stage(graph: fx.GraphModule, fakes: Sequence[Any]) -> Compiled:
                if kind == "inference":
                    mark_inputs(graph, captured, partitions=self.partitions)
                    losses.decide(graph)
                    self.run_inference_passes(graph)
                    self._decide_memory(Cut((graph,), None, self._bucket))
                return self.finish(self.schedule(graph, kind), context)

            return compile_stage

        if losses.are_chunked(gm):
            example_inputs = with_static_shapes(gm, example_inputs)
        compiler = aot_autograd(
            fw_compiler=stage("forward"),
            bw_compiler=stage("backward"),
            inference_compiler=stage("inference"),
            partition_fn=partition,
            decompositions=losses.decompositions(gm),
        )
        with aot_settings(backward_ahead=self.backward_ahead), explaining_empty_inputs(captured, example_inputs):
            return reject_double_backward(compiler(gm, example_inputs))

    def place(self, slots: Sequence[ParameterSlot], inputs: Sequence[Any]) -> Placements:
        """Return where the states of each parameter live: where they do already, or where the options say."""
        return placements_of(self.config, slots, inputs, self.topology)

    def make_budget(self, slots: Sequence[ParameterSlot], inputs: Sequence[Any], context: Context) -> GraphBudget:
        """Return the graph's memory budget under the caps."""
        warn_of_caps(self.config, context.device)
        agree_on_device(context)
        budget = GraphBudget(self.config, slots, inputs, context, self.placements, together=self.together)
        declared = (self.config.device_memory, budget.caps.device), (self.config.host_memory, budget.caps.host)
        device, host = (None if asked is None else cap for asked, cap in declared)
        context.memory.reservations.declare(device=device, host=host)
        return budget

    def make_planner(self, context: Context) -> GraphPlanner:
        """Return what plans the graphs, with all ranks together where they compile together."""
        return GraphPlanner(
            self.config,
            self.topology,
            rates=Rates.of(context.device.type, self.config.machine_name(), context.rates),
            world_size=context.size,
            ranks=context.ranks,
            together=self.together,
            replanner=replanner_of(context),
        )

    def run_joint_passes(self, joint: fx.GraphModule) -> None:
        """Rewrite the joint graph."""
        run_passes(joint, self.joint_passes())

    def run_inference_passes(self, graph: fx.GraphModule) -> None:
        """Rewrite a graph without a backward."""
        run_passes(graph, inference_passes(**self._settings()))

    def joint_passes(self) -> tuple[Pass, ...]:
        """Return the passes of the joint graph."""
        return joint_passes(**self._settings())

    def _settings(self) -> dict[str, Any]:
        return {} if self._losses is None else self._losses.settings()

    def cut(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition the joint graph into forward and backward, and decide where the states of its parameters live."""
        refuse_activation_budget()
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        own = self._results = kwargs["num_fwd_outputs"]
        pass_notes(joint, forward)
        saved = find_memories(raise_saved_views(forward, own_outputs=own).graph, backward.graph, own_outputs=own)
        left = plan_remade(forward, backward, self.config.activations, bucket_bytes=self._bucket, own_outputs=own)
        self._decide_memory(Cut((forward, backward), own, self._bucket, saved, self.choose_homes(left)))
        return forward, backward

    def choose_homes(self, memories: Sequence[SavedMemory]) -> tuple[SavedMemory, ...]:
        """Return the saved memory that leaves the device between forward and backward where a word says so, with its tier."""
        return choose_homes(memories, self.config.saved_values(), self.topology)

    def _decide_memory(self, cut: Cut) -> None:
        assert self._budget is not None, "a graph's caps are known before it is traced"
        self.decided = decide_memory(cut, self.config, self._budget, self.homes, together=self.together)
        self.placements = self.decided.placements
        if self._stops and self.homes is not None and self.homes.all_near:
            raise NothingMovesError
        if self.homes is not None and self.planner is not None:
            self.planner.placements = self.homes.paths

    def schedule(self, graph: fx.GraphModule, kind: str) -> Program:
        """Insert the schedule into a graph and lower it."""
        run_passes(graph, self.graph_passes(kind))
        verify(graph)
        compile_region: RegionCompiler = self._forward_regions.of(kind, self.region_compiler(kind))
        kept = None if self.planner is None else self.planner.kept
        if kept is not None:
            compile_region = kept.noting(compile_region)
        program = lower(graph, name=f"{kind} of graph {self.number}", compile_region=compile_region)
        return dataclasses.replace(program, buffers={}) if kind == "backward" else program

    def region_compiler(self, kind: str) -> RegionCompiler:
        """Return what compiles the regions of a graph: Inductor, or none."""
        backward = kind == "backward"
        return partial(self._regions.collect, backward=backward) if self.config.compute == "inductor" else run_by_operator

    def graph_passes(self, kind: str = "inference") -> tuple[Pass, ...]:
        """Return the passes that write the schedule of the next graph, a forward, a backward or one without."""
        if self._budget is not None:
            self._budget.compute.expect(backward=kind == "backward", results=self._results if kind == "forward" else None)
        paths, plan = self.placements if self.homes is None else self.homes.paths, None
        if self.planner is not None and self._budget is not None:
            plan = partial(self.planner.plan, room=self._budget.room, is_backward=kind == "backward")
        return graph_passes(
            bucket_bytes=self._bucket,
            params=lambda slot: self.topology.hops(paths.of(slot).params),
            grads=lambda slot: self.topology.hops(paths.of(slot).grads)[::-1],
            limits=None if self._budget is None else self._budget.limits,
            counts=counts_all if self._budget is None else self._budget.counts,
            plan=plan,
            hops=self.topology.hops,
        )

    def finish(self, program: Program, context: Context) -> Compiled:
        """Return the callable that AOTAutograd runs."""
        makes_gradients = any(isinstance(step, Reduce) for step in program.steps)
        checks = CallChecks(self._budget, context, makes_gradients=makes_gradients)
        bind = partial(
            Binder,
            context=context,
            placements=self.placements,
            lack=checks.lack,
            refuse=checks.refuse,
            checkpoint=self.config.checkpoint_folder(),
            place=None if self.homes is None else partial(place_at_call, self.config, self.placements, context),
        )
        takes = self._budget is not None and self._budget.compute.is_backward
        self._handed.shards = context.size > 1  # which gather alike
        live = LiveProgram(program, bind, finds=self._handed if takes else None)
        self._binder = self._binder or live.binder  # of the forward, which is compiled first
        kept = None if self.planner is None else self.planner.scheduled(live)
        if kept is not None and self._budget is not None:
            kept.compute, kept.own_outputs = self._budget.compute, self._results
        run = runner(
            live,
            context,
            SavedSpace(program, context, self.config.placement().nvme),
            checks,
            makes_gradients=makes_gradients,
            results=self._results,
            handed=None if takes else self._handed,
            takes=takes,
        )
        run.budget, run.kept = self._budget, kept  # type: ignore[attr-defined]  # reservations, as long as the graph may run
        return run


class _Measurer(GraphCompiler):
    """Compiles a graph that exceeds its budget with other tiles, up to where that is asked for limits. The result never runs."""

    def measure(
        self, gm: fx.GraphModule, inputs: Sequence[Any], captured: Captured, context: Context, *, like: GraphCompiler
    ) -> GraphBudget:
        """Return the budget of the graph that `like` compiles, with this configuration."""
        slots, self.topology = list(captured.slots.values()), like.topology
        self._losses, self.together = like._losses, like.together
        self._bucket = self.shape.bucket_of(slots)
        self.placements, self.homes = self.place(slots, inputs), like.homes
        self._budget = GraphBudget(self.config, slots, inputs, context, self.placements, measuring=True)
        self._trace(gm, inputs, captured, context)
        return self._budget

    def schedule(self, graph: fx.GraphModule, kind: str) -> Program:
        assert self._budget is not None, "a graph's caps are known before it is traced"
        self._budget.compute.expect(backward=kind == "backward", results=self._results if kind == "forward" else None)
        self._budget.limits(run_passes(graph, region_passes(bucket_bytes=self._bucket)).graph)
        return NOTHING

    def finish(self, program: Program, context: Context) -> Compiled:
        return make_boxed_func(_never_runs)


def _never_runs(*args: Any) -> Any:
    raise AssertionError("a graph that is measured never runs")


__all__ = ["Compiled", "GraphCompiler", "NothingMovesError"]


install()  # at import: the first compiled call may come inside an optimizer's step(closure), which needs the hooks
