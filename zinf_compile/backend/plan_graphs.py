"""Plans for the transfers of one graph, by the planner that option `planner` names. `GraphCompiler` calls it for each graph."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Protocol

from torch import fx

from zinf_compile._torch import outside_tracing
from zinf_compile.config import Config
from zinf_compile.errors import PlanError, ZinfError
from zinf_compile.ir.placements import KINDS, Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Tier, Topology
from zinf_compile.passes.analysis.memory_needs import ahead_key
from zinf_compile.passes.analysis.planned_graph import PlannedGraph
from zinf_compile.passes.analysis.step_facts import StepFacts
from zinf_compile.passes.analysis.step_problem import problem_of_runs, structure_of, unit_members
from zinf_compile.plan.both_graphs import CODE_BETWEEN
from zinf_compile.plan.collector import rare_collections
from zinf_compile.plan.costs import Costs
from zinf_compile.plan.graph_plan import GraphRoom
from zinf_compile.plan.hold_back import within_room
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Plan
from zinf_compile.plan.planners import PLANNERS, just_in_time
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Allowed, Link, Memory
from zinf_compile.plan.rates import Rates
from zinf_compile.plan.rough_links import BETWEEN_RANKS, COPIES, DRIVE
from zinf_compile.plan.shards_between import Side, shards_between
from zinf_compile.plan.verify import check
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.system.process_wide import process_wide

from .kept_graphs import KeptGraph, LiveProgram, States, copy_of, keep, side_of
from .room_of_all import room_of_all

Room = Callable[[fx.Graph, int], GraphRoom]
"""Takes a graph and the bytes of its units; returns those for what is gathered or on its way."""

_plans: dict[Hashable, Plan] = process_wide({})
"""Plans that all ranks have, by options, collectives and homes: two layers may have the same names, and live apart. A rank
that compiles again alone, for another batch, keeps to them."""

_NEAR = ("just_in_time", "one_ahead")
"""Planners that use no more memory than fixed rules do."""


DEFAULT = "cached_prefetch"
"""The planner of graphs beside a device whose memory has a cap that is given, where option `planner` names none."""


LARGE = 300
"""Regions of a graph above which `greedy` takes its place: it plans in milliseconds what takes the default seconds."""


def is_planned(config: Config, topology: Topology) -> bool:
    """Say whether a planner plans transfers, or else fixed rules."""
    return config.planner is not None or (config.device_memory is not None and topology.host_apart)


class Again(Protocol):
    """Plans graphs again once costs are measured: a `Replanner`."""

    costs: Costs

    def add(self, kept: KeptGraph) -> None:
        """Take a graph that was planned."""


class GraphPlanner:
    """Plans graphs of one captured graph."""

    def __init__(
        self,
        config: Config,
        topology: Topology,
        *,
        rates: Rates,
        world_size: int,
        ranks: Ranks | None,
        together: bool,
        replanner: Again | None = None,
    ) -> None:
        self._is_default = config.planner is None
        self._given = DEFAULT if config.planner is None else config.planner
        self.name = DEFAULT if config.planner is None else config.planner_name()
        self._key = config.signature()
        self.placements = Placements(config.placement())
        """Where the states of each parameter live."""
        self.topology = topology
        self._rates, self._size = rates, world_size
        self._ranks = ranks
        """Those that follow the same plan; None: this process plans by itself, as `zinf dump` does."""
        self.made: list[tuple[StepProblem, Plan]] = []
        """The problem and the plan of each graph, in order."""
        self._together = together
        """Whether all ranks plan at the same point."""
        self._replanner = replanner
        self.costs = Costs() if replanner is None else replanner.costs
        """What is known of costs when a graph is planned."""
        self._forward: tuple[Side, int] | None = None
        """The graph before, of which shards may stay, and the bytes of its results."""
        self.kept: KeptGraph | None = None
        """The graph that was planned last; none where nothing will run."""

    @property
    def plans_pairs(self) -> bool:
        """Whether a forward and its backward may be planned as one: on one rank, by a planner of ours that uses all room."""
        return self._size == 1 and isinstance(self._given, str) and self.name not in _NEAR

    @property
    def leaves_shards(self) -> bool:
        """Whether a forward on several ranks may leave shards on the device for its backward, in room that is left."""
        return self._size > 1 and self.name not in _NEAR

    def plan(self, graph: fx.Graph, room: Room, *, is_backward: bool = False) -> PlannedGraph:
        """Plan a graph that `region_passes` have seen, within `room`. Collective where ranks plan together."""
        members = unit_members([graph], self.home)
        whole = 0 if self.name in _NEAR else sum(slot.bytes for slots in members.values() for slot in slots)
        own = room(graph, whole)
        problem = self._problem(graph, own, is_backward=is_backward)
        key = (self._key, ahead_key(graph), tuple(unit.home for unit in problem.units))
        if self._ranks is not None and self._ranks.size > 1:
            problem, plan = self._plan_of_all(self._ranks, problem, key)
        else:
            plan = self.made_for(problem)
        check(problem, plan, planner=self.name)
        self.made.append((problem, plan))
        found = frozenset[str]()
        if self.leaves_shards:
            side = side_of(problem, plan, members)
            if is_backward and self._forward is not None:
                found = shards_between(self._forward[0], side, between=CODE_BETWEEN * self._forward[1])
            self._forward = side, own.results
        if self._ranks is not None:
            placements = self.placements
            self.kept = KeptGraph(
                gm=copy_of(graph),
                problem=problem,
                plan=plan,
                members=members,
                together=self._together or self._ranks.size == 1,
                key=key,
                planner=self,
                params=lambda slot: self.topology.hops(placements.of(slot).params),
                grads=lambda slot: self.topology.hops(placements.of(slot).grads)[::-1],
                results=own.results,
                handed=found,
            )
        return PlannedGraph(plan, {slot.name: name for name, slots in members.items() for slot in slots}, finds=found)

    def scheduled(self, live: LiveProgram) -> KeptGraph | None:
        """Say which program acts the last plan out; return its graph, to be held as long as that may run."""
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.name, kept.live = live.program.name, live
            keep(kept)
            if self._replanner is not None:
                self._replanner.add(kept)
        return kept

    def adopt(self, key: Hashable, plan: Plan) -> None:
        """Let graphs of the same collectives that this rank compiles alone follow another plan."""
        if key in _plans:
            _plans[key] = plan

    def made_for(self, problem: StepProblem) -> Plan:
        """Return the planner's plan for a problem."""
        given = "greedy" if self._is_default and problem.count > LARGE else self._given
        planner = PLANNERS[given] if isinstance(given, str) else given
        assert planner is not None, "there is a planner"
        with rare_collections(), self._named_in_errors():
            plan = planner(problem)
        if not isinstance(plan, Plan):
            raise PlanError(f"planner {self.name!r} returned a {type(plan).__name__}; accepted: a Plan")
        return plan

    @contextlib.contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        """Say of a user's planner that it is what raised, and where: Dynamo drops causes and their frames."""
        try:
            yield
        except Exception as error:
            if isinstance(self._given, str) or isinstance(error, ZinfError):
                raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}:{last.lineno}"
            raise PlanError(f"planner {self.name!r} raised {type(error).__name__}: {error} ({where})") from error

    def _plan_of_all(self, ranks: Ranks, problem: StepProblem, key: Hashable) -> tuple[StepProblem, Plan]:
        """Return the plan of all ranks, and the problem that it is for: rank 0's, with the least room of all.

        Or, of a rank that compiles alone, its own problem, with that plan as it fits into its room.
        """
        if not self._together:  # the other ranks may have compiled the graph long ago
            return problem, within_room(problem, _plans[key]) if key in _plans else just_in_time(problem)
        with outside_tracing():
            problem = room_of_all(problem, ranks)
            with ranks.fail_together("planning", elsewhere=PlanError("planning failed on another rank, see there")):
                plan = self.made_for(problem) if ranks.rank == 0 else None
            shared: Plan = ranks.share(plan, what="sharing the plan")
            ranks.agree([shared.digest()], what="comparing plans")
        _plans[key] = shared
        return problem, shared

    def _problem(self, graph: fx.Graph, room: GraphRoom, *, is_backward: bool) -> StepProblem:
        """Return the graph's problem; what fits just in time by the account of the caps always does.

        There may be more room in regions whose compute takes less than the most.
        """
        problem = problem_of_runs([(graph, graph)], [(0, is_backward)], self.facts())
        plain = occupied(problem, just_in_time(problem))
        standing: dict[Tier | None, int] = defaultdict(int)
        for unit in problem.units:
            standing[unit.home] += unit.stored_bytes
        budgets: dict[str, int] = {}
        for tier, own in ((Tier.DEVICE, room.device), (Tier.HOST, room.host)):
            if tier in problem.tiers and math.isfinite(own):
                budgets[tier] = max(math.ceil(own) + standing[tier], int(plain[tier].max()))
        if room.more and Tier.DEVICE in budgets:
            most = max(room.more)
            budgets[Tier.DEVICE] += most
            taken = [most - more for more in room.more]
            regions = [dataclasses.replace(r, workspace_bytes=count) for r, count in zip(problem.regions, taken, strict=True)]
            problem = dataclasses.replace(problem, regions=tuple(regions))
        return problem.with_budgets(**budgets)

    def home(self, slot: ParameterSlot) -> Tier:
        """Return the tier on which a parameter's shard lives."""
        return self._home_of(self.placements.of(slot).params)

    def facts(
        self,
        *,
        only_params: bool = True,
        states: States | None = None,
        home: Callable[[ParameterSlot], Tier] | None = None,
        saved: Collection[Tier] = (),
    ) -> StepFacts:
        """Return the facts of these placements, by measured costs where there are some; with `states` those of whole steps.

        `home`: of the parameters of all graphs of a step; None: of this graph's. `saved`: where saved values live.
        """
        tiers, links = self._tiers_and_links(only_params=only_params, saved=saved)
        found = StepFacts(
            memories=tuple(Memory(tier=tier) for tier in tiers),
            links=tuple(map(self.costs.link, links)),
            world_size=self._size,
            allowed=Allowed() if only_params else Allowed(update=self._updated_on()),
            home=home or self.home,
            flops_per_second=self._rates.flops,
            bytes_per_second=self._rates.bytes,
            seconds=lambda nodes: self.costs.regions.get(structure_of(nodes)) if self.costs.regions else None,
            only_params=only_params,
        )
        return found if states is None else dataclasses.replace(found, state_types=states.types, has_master=states.has_master)

    def _updated_on(self) -> tuple[Tier, ...]:
        """Return the side that the user's word says; without a word each parameter is updated where its states live."""
        rest = self.placements.rest
        return () if rest.update is None else (self.topology.updated_on(rest),)

    def assumed_links(self, saved: Collection[Tier] = ()) -> list[Link]:
        """Return the links of a whole step at the rates that are assumed without a measurement; `saved`: as `facts` takes it."""
        return self._tiers_and_links(only_params=False, saved=saved)[1]

    def _tiers_and_links(self, *, only_params: bool, saved: Collection[Tier]) -> tuple[list[Tier], list[Link]]:
        kinds = ("params",) if only_params else KINDS
        places = (self.placements.rest, *self.placements.own.values())
        homes = [self._home_of(tier) for tier in (*(getattr(place, kind) for kind in kinds for place in places), *saved)]
        drives = list(dict.fromkeys(home for home in homes if not home.in_memory))
        tiers = [Tier.DEVICE, *([Tier.HOST] if self.topology.host_apart else []), *drives]
        links = []
        for near, far in itertools.pairwise(tiers):
            rate, side = (COPIES, near) if far.in_memory else (DRIVE, Tier.HOST)
            links.append(Link(name=f"{side} to {far}", source=near, destination=far, bytes_per_second=rate))
            links.append(Link(name=f"{far} to {side}", source=far, destination=near, bytes_per_second=rate))
        if self._size > 1:
            links.append(Link(name="from ranks", source=None, destination=Tier.DEVICE, bytes_per_second=BETWEEN_RANKS))
            links.append(Link(name="to ranks", source=Tier.DEVICE, destination=None, bytes_per_second=BETWEEN_RANKS))
        return tiers, list(self._rates.applied(links, self._size))

    def _home_of(self, tier: Tier) -> Tier:
        return (self.topology.hops(tier) or (Tier.DEVICE,))[0]
