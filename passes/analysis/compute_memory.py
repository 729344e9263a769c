"""Memory of one graph's compute, an upper bound: saved activations and temporaries. `GraphBudget` counts it beside the units.

Note: what a value takes
    Views take nothing, and keep what they are views of. What one operator returns in several tensors is kept and dropped tensor
    by tensor. Each memory is rounded as allocators do. Gradients that a transfer takes over where they are completed are in the
    account of transfers, gathered units in that of gathers.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.sizes import round_up
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.graph.build_nodes import can_view
from zinf_compile.passes.graph.node_facts import slot_behind, slot_of
from zinf_compile.passes.graph.remade import is_dropped
from zinf_compile.passes.graph.token_loop import SumOut, TokenLoop

from .compute_account import ComputeAccount, ForwardValues, Stretch
from .compute_graph import ComputeGraph, tensors_of
from .library_memory import library_bytes
from .saved_memories import bytes_together

Memory = tuple[fx.Node, int]
"""A node that makes memory, and which of its results this is."""

Gradient = tuple[int, ParameterSlot, int, int]
"""The place where a gradient is made, whose it is, its bytes, and those by its own account."""

Bytes = npt.NDArray[np.int64]


class Life(NamedTuple):
    """The places of the first and the last node beside which a memory is there."""

    born: int
    dies: int
    bytes: int
    is_activation: bool


def account_compute(
    graph: ComputeGraph,
    *,
    forward: ForwardValues | None = None,
    results: int | None = None,
    stays: frozenset[str] = frozenset(),
) -> ComputeAccount:
    """Return the account of a scheduled graph's compute.

    `forward`: of the graph whose backward this is. `results`: the number of outputs that the caller gets, the rest are saved for
    the backward; None: all. `stays`: names of saved values that count as if they stayed on the device, although the graph moves
    them: so one graph shows what each choice of them takes.
    """
    return LiveMemories(graph, forward=forward, results=results, stays=stays).account


class LiveMemories:
    """The memories of one graph's compute, with the nodes between which each is there; see `account_compute`."""

    def __init__(
        self, graph: ComputeGraph, *, forward: ForwardValues | None, results: int | None, stays: frozenset[str] = frozenset()
    ) -> None:
        self._graph, self._nodes, self._place = graph, graph.nodes, graph.place
        self._forward = forward
        self._results = results
        self._stays = stays
        self._memories: dict[fx.Node, tuple[Memory, ...]] = {}
        """The memories that a node's value refers to."""
        self._bytes: dict[Memory, int] = {}
        self._born: dict[Memory, int] = {}
        self._dies: dict[Memory, int] = {}
        self._kept: set[Memory] = set()
        """Activations: not temporaries."""
        self.made: dict[Memory, tuple[ParameterSlot, int, int]] = {}
        """The memories of gradients that may stay where they are made: (whose, bytes, by their own account)."""
        self.saved: set[Memory] = set()
        """Memories that the graph returns or saves."""
        self.account = self._find_account()

    def lives(self) -> dict[Memory, Life]:
        """Return when each memory is there, without gradients that may stay."""
        return {m: Life(self._born[m], self._dies[m], size, m in self._kept) for m, size in self._bytes.items()}

    @property
    def gradients(self) -> list[Gradient]:
        """The gradients that may stay where they are made."""
        return [(self._born[memory], *row) for memory, row in self.made.items()]

    def behind(self, node: fx.Node) -> tuple[Memory, ...]:
        """Return the memories that a node's value refers to."""
        return self._memories.get(node, ())

    def _find_account(self) -> ComputeAccount:
        shared = self._shared_placeholders()
        for node in self._nodes:
            self._enter(node, shared)
        output = self._nodes[-1]
        outputs: Any = output.args[0] if output.args else ()
        given = [self._staying(n) or n for n in outputs if isinstance(n, fx.Node)]
        returned = given if self._results is None else given[: self._results]
        end = len(self._nodes) - 1
        for node in given:
            for memory in self._memories.get(node, ()):
                self._dies[memory] = end
                self._kept.add(memory)
        gradients = [(memory, slot, self._bytes[memory]) for memory, slot in self._taken_over()]
        if not self._graph.by_operator:
            staying = {memory for memory, *_ in gradients}
            for memory in self._bytes:
                self._fuse(memory, end if memory in staying else min(self._dies[memory], end))
        self.made = {memory: (slot, self._bytes.pop(memory), own) for memory, slot, own in gradients}
        handed = ForwardValues()
        results = {memory for node in returned for memory in self._memories.get(node, ()) if memory[0].op != "placeholder"}
        for node in given if self._forward is None else ():
            for memory in self._memories.get(node, ())[:1]:
                key = (memory[0].name, memory[1])
                handed.memory_of[node.name] = key
                handed.bytes[key] = self._bytes.get(memory, 0)
                if memory in results or memory[0].op == "placeholder":
                    handed.kept.add(key)
        of_results = sum(self._bytes.get(memory, 0) for memory in results)
        self.saved = {m for n in given for m in self._memories.get(n, ()) if m[0].op != "placeholder"}
        if self._forward is None:  # the caller may hold those of the call before
            beside = of_results
        else:
            shown = set(shared.values())
            beside = sum(self._forward.bytes[key] for key in self._forward.kept - shown)
        self.changes = changes_of(self.lives().values(), len(self._nodes))
        """Bytes that come and go at each node: see `changes_of`."""
        live = live_bytes(self.changes, scratch_of(self._graph))
        return ComputeAccount(
            stretches=stretches_of(live, self.gradients),
            live=live.sum(0).tolist(),
            beside=beside,
            saved=sum(self._bytes.get(memory, 0) for memory in self.saved),
            results=of_results,
            handed=handed,
        )

    def _fuse(self, memory: Memory, dies: int) -> None:
        """Let a memory live from the beginning of the kernel that may make it to the end of the one that may read it last."""
        if self._graph.is_fused_away(memory[0]):
            self._bytes[memory] = 0
        first, last = self._graph.fused_run(self._born[memory]), self._graph.fused_run(dies)
        if first != last:  # else it stays inside of a kernel, or lives as long as it would operator by operator
            self._born[memory], self._dies[memory] = first[0], last[1]

    def _enter(self, node: fx.Node, shared: Mapping[fx.Node, tuple[str, int]]) -> None:
        """Note the memories of a node's value, which live until its last reader."""
        if node.op == "placeholder":
            self._enter_placeholder(node, shared)
        elif node.op == "call_function":
            if node.target is operator.getitem and (node.args[0], node.args[1]) in self._bytes:
                self._memories[node] = ((node.args[0], node.args[1]),)  # type: ignore[assignment]
            elif sources := self._graph.aliases(node):
                self._memories[node] = tuple(dict.fromkeys(m for s in sources for m in self._memories.get(s, ())))
                if len(sources) > 1:  # some of them, or memory of its own
                    self._make(node)
            elif node in self._graph.moving:
                self._enter_moving(node)
            elif node in self._graph.making:
                self._make(node)
        if memories := self._memories.get(node):
            last = self._graph.last_reader(node)
            for memory in memories:
                self._dies[memory] = max(self._dies[memory], last)

    def _enter_moving(self, node: fx.Node) -> None:
        """Saved values are on the device until the wait for their first hop away, and from the start of their last hop back."""
        values, moved = node.args[0], self._graph.moving[node]
        if any(value.name in self._stays for value in moved):
            staying = self._staying(node)
            self._memories[node] = () if staying is None else self._memories.get(staying, ())
        elif node.target is ops.swap_values_out and not isinstance(values, fx.Node):
            self._memories[node] = tuple(dict.fromkeys(m for value in moved for m in self._memories.get(value, ())))
        elif node.target is ops.swap_values_in and node.args[2] == Tier.DEVICE:
            memory = (node, 0)
            self._bytes[memory] = round_up(bytes_together(moved), self._graph.align)
            self._born[memory] = self._dies[memory] = self._place[node]
            self._memories[node] = (memory,)
        elif node.target is ops.wait_value and isinstance(values, fx.Node) and values.target is ops.swap_values_in:
            self._memories[node] = self._memories[values]

    def _staying(self, node: fx.Node) -> fx.Node | None:
        """Return the value that stays, where a node waits for its move; None for any other node."""
        if node.target is not ops.wait_value:
            return None
        value = self._graph.moving[node][node.args[1]]  # type: ignore[index]
        return value if value.name in self._stays else None

    def _make(self, node: fx.Node) -> None:
        made = []
        for number, size in self._graph.made(node):
            memory = (node, number)
            self._bytes[memory] = size
            self._born[memory] = self._dies[memory] = self._place[node]
            made.append(memory)
        # of several results each lives by itself, until the last reader of its item
        if not isinstance(node.meta.get("val"), (list, tuple)):
            self._memories[node] = (*self._memories.get(node, ()), *made)

    def _enter_placeholder(self, node: fx.Node, shared: Mapping[fx.Node, tuple[str, int]]) -> None:
        moves = bool(node.users) and all(user.target is ops.swap_values_in for user in node.users)
        if slot_of(node) is not None or is_dropped(node) or (moves and node.name not in self._stays):
            return  # hollow: a parameter, or a value that is elsewhere, or is made again
        self._make(node)
        if (node, 0) not in self._bytes:
            return
        memory = (node, 0)
        self._born[memory] = 0
        self._kept.add(memory)
        key = shared.get(node)
        if key is None:  # an input, or a tangent: the caller holds it
            self._dies[memory] = len(self._nodes) - 1
            return
        assert self._forward is not None
        first = next(other for other, known in shared.items() if known == key)
        if first is not node:
            del self._bytes[memory]
            self._memories[node] = ((first, 0),)
            return
        self._bytes[memory] = self._forward.bytes[key]
        if key in self._forward.kept:
            self._dies[memory] = len(self._nodes) - 1

    def _shared_placeholders(self) -> dict[fx.Node, tuple[str, int]]:
        """Return the key of the forward's memory behind each placeholder of a backward."""
        if self._forward is None:
            return {}
        known = self._forward.memory_of
        return {n: known[n.name] for n in self._nodes if n.op == "placeholder" and n.name in known and slot_of(n) is None}

    def _taken_over(self) -> Iterator[tuple[Memory, ParameterSlot]]:
        """Yield the memories of gradients that their reduction takes over, computed in the region before it, and whose it is."""
        for node in self._nodes:
            if node.target is not ops.reduce_scatter or not isinstance(node.args[0], fx.Node):
                continue
            memories = self._memories.get(node.args[0], ())
            if len(memories) != 1 or memories[0][0].op != "call_function" or memories[0] in self._kept:
                continue
            if self._dies[memories[0]] == self._place[node] and self._graph.computed_just_before(memories[0][0], node):
                yield memories[0], slot_behind(node)


def scratch_of(graph: ComputeGraph) -> Bytes:
    """Return what each operator takes beside its results: a loop over tokens, or a library as far as that is known."""
    if graph.scratch is None:
        loops = ((node, node.target) for node in graph.nodes)
        graph.scratch = np.array(
            [_slice(loop, n, graph) if isinstance(loop, TokenLoop) else library_bytes(n, graph) for n, loop in loops],
            dtype=np.int64,
        )
    return graph.scratch


def changes_of(lives: Iterable[Life], count: int) -> Bytes:
    """Return the bytes that come at each of a graph's `count` nodes less those that go: a row of activations, one of others."""
    found = [[0] * (count + 1), [0] * (count + 1)]
    for life in lives:
        row = found[not life.is_activation]
        row[life.born] += life.bytes
        row[life.dies + 1] -= life.bytes
    return np.array(found, dtype=np.int64)


def live_bytes(changes: Bytes, scratch: Bytes) -> Bytes:
    """Return the bytes of activations and of temporaries at each node, without gradients that may stay."""
    live: Bytes = changes.cumsum(axis=1)[:, :-1]
    live[1] += scratch
    return live


def stretches_of(live: Bytes, gradients: Iterable[Gradient]) -> list[Stretch]:
    """Return the parts of a graph between the moments when gradients are made that may stay."""
    order = sorted(gradients, key=lambda row: row[0])
    total, starts = live.sum(0), [0, *(row[0] for row in order)]
    found = []
    for (start, end), gradient in zip(itertools.pairwise([*starts, len(total)]), [None, *order], strict=True):
        most = start + int(total[start:end].argmax()) if start < end else None
        kept, temporaries = (0, 0) if most is None else map(int, live[:, most])
        _, slot, bytes_made, own = (0, None, 0, 0) if gradient is None else gradient
        found.append(Stretch(kept=kept, temporaries=temporaries, gradient=slot, made=bytes_made, own=own, start=start))
    return found


def _slice(loop: TokenLoop, node: fx.Node, outer: ComputeGraph) -> int:
    """Return what a loop takes beside its results: the values of a slice, sums in a wider type, copies of strided inputs."""
    graph = ComputeGraph(loop.body.graph, outer.device, by_operator=outer.by_operator)
    found = account_compute(graph, results=0).memory()
    most = found.activations + found.temporaries
    most -= sum(map(graph.bytes, tensors_of(loop.body.graph.find_nodes(op="placeholder"))))
    for out in loop.outs:
        if isinstance(out, SumOut) and out.summed_in != out.dtype:
            most += round_up(format_of(out.summed_in).bytes(math.prod(out.shape)), graph.align)
    for value, form in zip(tensors_of(node.all_input_nodes), loop.rows, strict=False):
        if not can_view(value, (-1, *value.shape[form.lead :])):
            most += graph.bytes_of_copy(value, value.dtype)
    return most
