"""Memory of one captured graph's compute, as `GraphBudget` counts it within a declared `device_memory`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from zinf_compile._torch import no_torch_function
from zinf_compile.config import Config
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Tier, Topology
from zinf_compile.passes import as_performed
from zinf_compile.passes.analysis.compute_account import ComputeAccount, ForwardValues
from zinf_compile.passes.analysis.compute_choices import ChoiceAccounts
from zinf_compile.passes.analysis.compute_graph import DEVICE_ROUNDING, ComputeGraph
from zinf_compile.passes.analysis.compute_memory import account_compute
from zinf_compile.passes.analysis.step_regions import least_of_regions
from zinf_compile.plan.compute_memory import NO_COMPUTE, ComputeMemory
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.activations import storages_of
from zinf_compile.runtime.memory.rank_memory import Memory
from zinf_compile.runtime.memory.reservations import Reservation
from zinf_compile.runtime.system.accelerator import allocated_bytes
from zinf_compile.runtime.system.library_memory import take_workspaces
from zinf_compile.runtime.units.unit import Tile, Unit

from .caps import held_bytes
from .short_ranks import Lack
from .shortage import gradient_bytes, reserved_by_others


@dataclasses.dataclass(frozen=True, slots=True)
class Outside:
    """Bytes of the device that nothing of a graph holds, as found when it is compiled."""

    bytes: int
    saved: int
    """Of these, what other graphs had saved then, or returned: each call counts that anew."""
    leaves: int = 0
    """Of results of graphs that became leaves, as where a frozen embedding's result is told to require gradients: autograd holds
    those of the call before, and their gradients, for as long as the caller holds its loss."""
    own: int = 0
    """Of `saved`, results of an earlier variant of the same graph that the caller holds, as a loss."""

    def more(self, count: int) -> Outside:
        """Return the same with more bytes."""
        return dataclasses.replace(self, bytes=self.bytes + count)


class GraphCompute:
    """Measures the graphs of one captured graph in the order in which they are compiled: forward, then backward.

    Without a declared `device_memory` nothing counts: an upper bound is no reason to refuse a model that may well fit.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        topology: Topology,
        *,
        outside: Outside,
        gradient_stays: Callable[[ParameterSlot], bool],
    ) -> None:
        self.counts = config.device_memory is not None
        self._by_operator = config.compute == "fx"
        self._device, self._topology = device, topology
        self._found = outside
        self.outside, self.saved_outside = outside.bytes, outside.saved
        self._gradient_stays = gradient_stays
        self.is_backward = False
        """Whether the next graph is a backward."""
        self._results: int | None = None
        self._forward: ForwardValues | None = None
        self.is_forward = False
        """Whether the next graph has a backward, which alone makes gradients."""
        self.is_evaluation = False
        """Whether it is neither: it has no backward."""
        self.saved = 0
        """Bytes that the forward leaves to its backward, and its results."""
        self.free: Sequence[int] = ()
        """Bytes by which each region of the graph that was measured last holds less than the one that holds most. None where host
        memory is the device: an arena keeps there what gathers have used."""

    def expect(self, *, backward: bool, results: int | None) -> None:
        """Note what the next graph is; `results`: the outputs of a forward that are not saved for its backward."""
        self.is_backward, self._results = backward, None if backward else results
        self.is_forward = self.counts and not backward and results is not None
        self.is_evaluation = self.counts and not backward and results is None

    def measure(self, graph: fx.Graph) -> ComputeMemory:
        """Return the memory of a graph's compute."""
        if not self.counts:
            return NO_COMPUTE
        performed = self._as_performed(graph)
        facts = self._facts(performed)
        if self.is_backward:
            account = account_compute(facts, forward=self._forward, results=self._results)
        else:
            account = self.of_forward(account_compute(facts, results=self._results))
        found = self.memory(account)
        if not self.is_backward:
            self._forward, self.saved = account.handed, found.saved
        self.free = least_of_regions(performed, self.free_of_nodes(account)) if self._topology.host_apart else ()
        return found

    def held(self, graphs: Sequence[fx.Graph], results: int | None) -> list[list[int]]:
        """Return the bytes of compute in each region of a forward and its backward, as they are; none where nothing counts."""
        found: list[list[int]] = []
        handed: ForwardValues | None = None
        for graph in graphs if self.counts else ():
            performed = self._as_performed(graph)
            account = account_compute(self._facts(performed), forward=handed, results=None if found else results)
            handed = account.handed
            least = least_of_regions(performed, [-count for count in account.held(self._gradient_stays)])
            found.append([-count for count in least])
        return found

    def by_choice(self, graphs: Sequence[fx.Graph], results: int | None) -> AccountsByChoice:
        """Return the accounts of a forward and its backward, or of one graph, whose transfers are just in time.

        All that is marked in them as moving moves, and any of it may stay. `results`: as `expect` takes it.
        """
        performed = map(self._as_performed, graphs) if self.counts else ()
        return AccountsByChoice(self, list(map(self._facts, performed)), results)

    def of_forward(self, found: ComputeAccount) -> ComputeAccount:
        """Return the account of a forward, or of a graph without a backward: leaves of the call before may be there as well.

        It includes results of the call before, which count as outside no more.
        """
        outside = self._found
        twice = min(outside.own, found.results)
        self.outside, self.saved_outside = outside.bytes - twice, outside.saved - twice
        return dataclasses.replace(found, beside=found.beside + outside.leaves, results=found.results + outside.leaves)

    def memory(self, account: ComputeAccount) -> ComputeMemory:
        """Return the memory of a graph with this account, with the gradients that stay where parameters live now."""
        return dataclasses.replace(account.memory(self._gradient_stays), outside=self.outside)

    def free_of_nodes(self, account: ComputeAccount) -> list[int]:
        """Return the bytes by which each node of that graph holds less than the one that holds most."""
        return account.free(self._gradient_stays)

    def _as_performed(self, graph: fx.Graph) -> fx.Graph:
        return as_performed(graph, hops=self._topology.hops)

    def _facts(self, graph: fx.Graph) -> ComputeGraph:
        return ComputeGraph(graph, self._device, by_operator=self._by_operator)


class AccountsByChoice:
    """The accounts of a forward and its backward, or of one graph, for each choice of the saved values that stay."""

    def __init__(self, compute: GraphCompute, graphs: Sequence[ComputeGraph], results: int | None) -> None:
        """`graphs`: none where nothing counts."""
        self._compute = compute
        self._choices: list[ChoiceAccounts] = []
        for graph in graphs:
            forward = self._choices[0] if self._choices else None
            self._choices.append(ChoiceAccounts(graph, forward=forward, results=None if self._choices else results))
        self._known: dict[frozenset[str], list[ComputeAccount]] = {}

    @property
    def graphs(self) -> list[fx.Graph]:
        """The graphs as they will compute, with all that may leave leaving; none where nothing counts."""
        return [each.graph.graph for each in self._choices]

    def accounts(self, stays: frozenset[str]) -> list[ComputeAccount]:
        """Return the account of each graph where the values of these names stay on the device."""
        if stays not in self._known:
            found = [each.account(stays) for each in self._choices]
            self._known[stays] = [*map(self._compute.of_forward, found[:1]), *found[1:]]
        return self._known[stays]


class Rounding(NamedTuple):
    """What an accelerator's allocator may add to what is asked for, in bytes."""

    held: int
    """To shards, first and second gradients, and states; to full gradients in flight."""
    gathers: int
    """To shards that are loaded, and to gathered units."""

    @property
    def total(self) -> int:
        """To all of it."""
        return self.held + self.gathers


def rounding_bytes(
    config: Config, slots: Sequence[ParameterSlot], placements: Placements, *, topology: Topology, size: int
) -> Rounding:
    """Return what the allocator of an accelerator may add for these parameters on each of `size` ranks."""
    if config.device_memory is None or not topology.host_apart:
        return Rounding(0, 0)
    held = gathers = 0
    for own in map(placements.of, slots):
        kinds = ((own.params, 1), (own.grads, 2), (own.optimizer, 2 + (own.master is not None)))
        held += sum(count for tier, count in kinds if topology.side(tier) == Tier.DEVICE)
        held += (size > 1) + topology.is_offloaded(own.grads)
        gathers += (size > 1) + topology.is_offloaded(own.params)
    return Rounding(held * DEVICE_ROUNDING, gathers * DEVICE_ROUNDING)


def maker_of(units: Iterable[Unit | Tile]) -> Hashable:
    """Return what variants of one graph have in common, as the maker of activations: their parameters; None without any."""
    return frozenset(unit.serial for unit in units if not isinstance(unit, Tile)) or None


def outside_bytes(
    config: Config, context: Context, inputs: Sequence[Any], units: Iterable[Unit], *, collect: Callable[[], None]
) -> Outside:
    """Return the bytes of an accelerator's memory that are the user's own or libraries', beside `inputs` of a graph.

    `units`: of the graph's parameters, where an earlier variant of it has partitioned them; `collect` frees what nobody uses.
    On the CPU nothing tells whose memory is whose: there it is what other graphs have saved.
    """
    if config.device_memory is None:
        return Outside(0, 0)
    take_workspaces(context.device)
    maker = maker_of(units)
    found = _outside(context, inputs, maker)
    if found.bytes:
        collect()  # what nobody uses any more
        found = _outside(context, inputs, maker)
    return found


def _outside(context: Context, inputs: Sequence[Any], maker: Hashable) -> Outside:
    memory, device = context.memory, context.device
    with no_torch_function():
        storages = {
            s._cdata: s.nbytes() for v in inputs if isinstance(v, torch.Tensor) and (s := v.untyped_storage()).device == device
        }
    given, activations = frozenset(storages), memory.activations
    live, own, leaves = activations.held(given=given), activations.returned_by(maker, given=given), activations.leaves(inputs)
    found = live
    if device.type != "cpu":
        found = max(live, allocated_bytes(device) - memory.ledger.held() - sum(storages.values()))
    return Outside(found + leaves, live, leaves, own)  # with gradients of the leaves


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call of a forward, or of a graph without a backward, needs beside what is held when it begins, in bytes."""

    passing: int
    """The most that it or its backward holds at once, without what is outside of it."""
    saved: int
    """What it leaves to its backward, and its results."""
    results: int
    """Results of the call before that `passing` includes."""
    saved_outside: int
    """What other graphs had saved when this one was compiled, which reservations include."""
    outside: int
    """Beside `passing`: what others than graphs held when it was compiled, and the allocator's rounding."""
    reservations: Sequence[Reservation]
    """Those of the graph and its backward."""


def call_of(compute: GraphCompute, reservations: Sequence[Reservation]) -> Call | None:
    """Return what calls of graphs with these reservations are checked for; None where activations don't count."""
    if not compute.counts or not reservations:
        return None
    return Call(
        passing=max(reservation.passing for reservation in reservations) - compute.outside,
        saved=compute.saved,
        results=max(reservation.results for reservation in reservations),
        saved_outside=compute.saved_outside,
        outside=compute.outside - compute.saved_outside,
        reservations=reservations,
    )


def lack_for_call(context: Context, call: Call, units: Iterable[Unit | Tile], args: Sequence[Any]) -> Lack | None:
    """Return what a call lacks of the device, given what other calls have left there and what the user has taken meanwhile."""
    found = _lack_now(context, call, units := list(units), args)
    if found is not None and found.short:
        found = _lack_now(context, call, units, args)  # without what nobody uses any more, which has gone meanwhile
    return found


def _lack_now(context: Context, call: Call, units: Iterable[Unit | Tile], args: Sequence[Any]) -> Lack | None:
    memory, reservations = context.memory, context.memory.reservations
    cap = reservations.device_cap
    if cap is None:
        return None
    given = storages_of(args)
    live = memory.activations.held(given=given)
    beside = max(0, live - call.results)
    user = 0
    if context.device.type != "cpu":
        mine = memory.ledger.held() + live + sum(_sizes(args, context.device))
        user = max(0, allocated_bytes(context.device) - mine - call.outside)
    memory.taken = beside + user
    later = _while_others_run(memory, call, given) if beside else 0
    others = max(0, later - beside - call.passing - call.outside)
    more = beside + call.passing + call.outside + others + user
    gradients = gradient_bytes(context, units_without_gradient(units))[Tier.DEVICE]
    held = held_bytes(memory.ledger, more + gradients, cap, memory, begins=True) + gradients
    return Lack(
        needed=held + more,
        cap=cap,
        works=reservations.works(Tier.DEVICE, held + beside + others + user - call.saved_outside),
        text=f"this call needs {held + more:,} bytes on {context.device}: {held:,} for what is held and for gradients, "
        f"{beside:,} are activations and results of earlier calls whose backward is still to come, or that are kept, "
        f"{reserved_by_others(others)}{user + call.outside:,} are taken by others, {call.passing:,} are needed at once. "
        "Run their backwards first, keep fewer results, or use smaller batches; "
        "activations='nvme' moves all that is saved to a drive"
        + (
            ", reshard_after_forward=True keeps no parameter gathered for its backward" if any(reservations.kept.values()) else ""
        ),
    )


def _while_others_run(memory: Memory, call: Call, given: frozenset[int]) -> int:
    """Return the most that is held while the backward of another graph runs, of what the call leaves.

    Backwards of graphs whose results it reads come after its own, which frees what it saved: only its results may be there.
    """
    reservations, own = memory.reservations, {id(reservation) for reservation in call.reservations}
    behind = memory.activations.behind(given) - own
    others = reservations.passing_alone(lambda made: id(made) not in own and id(made) not in behind)
    return max(call.saved + others, call.results + reservations.passing_alone(lambda made: id(made) in behind))


def units_without_gradient(units: Iterable[Unit | Tile]) -> list[Unit]:
    """Return the units, also of tiles, whose parameters have no gradient now."""
    distinct = {part.unit if isinstance(part, Tile) else part for part in units}
    with no_torch_function():
        return [unit for unit in distinct if (p := unit.parameter()) is not None and p.grad is None]


def _sizes(values: Sequence[Any], device: torch.device) -> Iterator[int]:
    seen = set()
    for value in values:
        if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter) and value.device == device:
            storage = value.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage.nbytes()
