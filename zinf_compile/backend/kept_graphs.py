"""Graphs that were planned, kept as they were before their plan: planned anew between two steps, they are lowered again from the
regions that are compiled already. And the programs that run, which can be replaced then.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from zinf_compile._torch import LazyGraphModule
from zinf_compile.errors import PlanError
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import ParameterSlot, Program
from zinf_compile.ir.tiers import Tier, Topology
from zinf_compile.passes import copied, planned_passes, run_passes, verify
from zinf_compile.passes.analysis.planned_graph import PlannedGraph
from zinf_compile.passes.analysis.step_facts import StepFacts
from zinf_compile.passes.analysis.step_problem import structure_of
from zinf_compile.passes.analysis.step_regions import find_regions
from zinf_compile.passes.graph.region_structure import structure
from zinf_compile.passes.lower import RegionCompiler, lower
from zinf_compile.passes.schedule.insert_swaps import Path
from zinf_compile.plan.costs import Costs
from zinf_compile.plan.plan import Plan
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Link
from zinf_compile.plan.shards_between import Side
from zinf_compile.runtime.memory.handed_on import HandedOn
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.sharded.compute_budget import GraphCompute

from .bind import Binder

Function = Callable[[list[Any]], Sequence[Any]]


class LiveProgram:
    """A program and its binder as they run now."""

    def __init__(self, program: Program, make_binder: Callable[[Program], Binder], *, finds: HandedOn | None = None) -> None:
        """`finds`: of a backward, what its forward leaves on the device for it."""
        self._make_binder, self._finds = make_binder, finds
        self.replace(program)

    def replace(self, program: Program) -> None:
        """Run another program from the next call on, with the same inputs and outputs."""
        self.program, self.binder = program, self._make_binder(program)
        if self._finds is not None:
            self._finds.wanted = program.finds_planned if self._finds.shards else program.finds


@dataclasses.dataclass(frozen=True, slots=True)
class States:
    """What an optimizer keeps for a parameter."""

    types: Callable[[ParameterSlot], tuple[torch.dtype, ...]]
    has_master: Callable[[ParameterSlot], bool]


class Planned(Protocol):
    """A `GraphPlanner`."""

    costs: Costs

    placements: Placements
    """Where the states of each parameter of the graph live."""

    @property
    def topology(self) -> Topology:
        """How tiers are linked."""

    @property
    def plans_pairs(self) -> bool:
        """Whether a forward and its backward may be planned as one."""

    @property
    def leaves_shards(self) -> bool:
        """Whether a forward on several ranks may leave shards on the device for its backward."""

    def home(self, slot: ParameterSlot) -> Tier:
        """Return the tier on which a parameter's shard lives."""

    def made_for(self, problem: StepProblem) -> Plan:
        """Return the planner's plan for a problem."""

    def adopt(self, key: Hashable, plan: Plan) -> None:
        """Let graphs of the same collectives that this rank compiles alone follow another plan."""

    def assumed_links(self, saved: Collection[Tier] = ()) -> list[Link]:
        """Return the links of a whole step at the rates that are assumed without a measurement."""

    def facts(
        self,
        *,
        only_params: bool = True,
        states: States | None = None,
        home: Callable[[ParameterSlot], Tier] | None = None,
        saved: Collection[Tier] = (),
    ) -> StepFacts:
        """Return what problems are made with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Then:
    """What a graph may be planned as from the next step on."""

    problem: StepProblem
    plan: Plan
    members: Mapping[str, Sequence[ParameterSlot]]
    handed: frozenset[str] = frozenset()
    gm: fx.GraphModule | None = None
    """The graph with other marks of when saved values move; None: as it is."""


@dataclasses.dataclass(eq=False, kw_only=True)
class KeptGraph:
    """One planned graph."""

    gm: fx.GraphModule
    """As `region_passes` leave it: regions are numbered as in the problem."""
    problem: StepProblem
    """With the seconds that were assumed when it was compiled."""
    plan: Plan
    """The one that is acted out."""
    members: Mapping[str, Sequence[ParameterSlot]]
    """The slots of each unit of the problem."""
    planner: Planned
    together: bool
    """Whether all ranks planned it at the same point: then they also plan it anew together."""
    key: Hashable
    """Options and collectives: graphs with the same follow one plan, also those that a rank has compiled alone."""
    params: Path = ()
    grads: Path = ()
    """As those of `graph_passes`."""
    handed: frozenset[str] = frozenset()
    """Units that it leaves on the device for its backward, or that it finds there as one."""
    results: int = 0
    """Bytes of what the caller gets of it."""
    compute: GraphCompute | None = None
    """Measures the memory of its compute; None: nothing does."""
    own_outputs: int | None = None
    """The number of a forward's outputs that are not saved for its backward."""
    name: str = ""
    """Of its program."""
    functions: dict[Hashable, Function] = dataclasses.field(default_factory=dict)
    """The compiled regions by structure."""
    live: LiveProgram | None = None

    @property
    def structures(self) -> list[str]:
        """Return the structure of each region, under which its seconds are kept."""
        return [structure_of(nodes) for nodes in find_regions(self.gm.graph).compute]

    @property
    def number(self) -> str:
        """The captured graph's, which a forward and its backward share."""
        return self.name.rpartition(" ")[2]

    @property
    def is_backward(self) -> bool:
        """Whether it is a backward."""
        return self.name.startswith("backward")

    def planned(self, then: Then) -> PlannedGraph:
        """Return a plan as passes look things up in it."""
        units = {slot.name: name for name, slots in then.members.items() for slot in slots}
        leaves, finds = (frozenset(), then.handed) if self.is_backward else (then.handed, frozenset())
        return PlannedGraph(then.plan, units, leaves=leaves, finds=finds)

    def noting(self, compile_region: RegionCompiler) -> RegionCompiler:
        """Return a compiler of regions whose results are kept."""

        def compile_and_note(region: fx.GraphModule) -> Function:
            key, found = structure(region), compile_region(region)
            self.functions[key] = found
            return found

        return compile_and_note

    def lower(self, then: Then) -> Program:
        """Return the program that acts out another plan. No region is compiled for it."""
        gm = copied(self.gm if then.gm is None else then.gm)
        planned = self.planned(then)
        hops = self.planner.topology.hops
        run_passes(gm, planned_passes(params=self.params, grads=self.grads, plan=lambda graph: planned, hops=hops))
        verify(gm)
        return lower(gm, name=self.name, compile_region=self._known)

    def take(self, then: Then, program: Program) -> None:
        """Run a program that acts out another plan from the next call on."""
        assert self.live is not None, "it was scheduled"
        if self.together:  # else the plan may be held back, for this rank's room alone
            self.planner.adopt(self.key, then.plan)
        self.live.replace(dataclasses.replace(program, buffers=self.live.program.buffers))
        self.problem, self.plan, self.members, self.handed = then.problem, then.plan, then.members, then.handed
        self.gm = self.gm if then.gm is None else then.gm

    def _known(self, region: fx.GraphModule) -> Function:
        found = self.functions.get(structure(region))
        if found is None:
            raise PlanError(f"a plan for the {self.name} needs a region that is not compiled")
        return found


def side_of(problem: StepProblem, plan: Plan, members: Mapping[str, Sequence[ParameterSlot]]) -> Side:
    """Return a graph as it is asked for shards that stay between it and another one."""
    return Side(problem, plan, {name: {slot.key for slot in slots} for name, slots in members.items()})


_kept: weakref.WeakValueDictionary[str, KeptGraph] = process_wide(weakref.WeakValueDictionary())


def keep(kept: KeptGraph) -> None:
    """Let `kept_graph` find it, for as long as its program may run."""
    _kept[kept.name] = kept


def kept_graph(name: str) -> KeptGraph | None:
    """Return the graph of a program; None where it wasn't planned."""
    return _kept.get(name)


def copy_of(graph: fx.Graph) -> fx.GraphModule:
    """Return a copy of a graph that passes are about to change."""
    owner = graph.owning_module
    assert owner is not None, "passes work on graph modules"
    gm = LazyGraphModule(owner, copy.deepcopy(graph))
    gm.meta.update(owner.meta)
    return gm
