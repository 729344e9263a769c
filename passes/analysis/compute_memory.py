"""Memory of one graph's compute, an upper bound: saved activations and temporaries. `GraphBudget` counts it beside the units.

Note: what a value takes
    Views take nothing, and keep what they are views of. What one operator returns in several tensors is kept and dropped tensor
    by tensor. Each memory is rounded as allocators do. Gradients that a transfer takes over where they are completed are in the
    account of transfers, gathered units in that of gathers.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.op_spec import SCHEDULE_OPS, moves_values
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.sizes import round_up
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.graph.alias import aliased_inputs, is_elementwise, is_view
from zinf_compile.passes.graph.build_nodes import can_view
from zinf_compile.passes.graph.node_facts import hinted_numel, slot_behind, slot_of, starts_region, values_behind
from zinf_compile.passes.graph.remade import is_dropped
from zinf_compile.passes.graph.token_loop import SumOut, TokenLoop, is_token_loop
from zinf_compile.plan.compute_memory import ComputeMemory

ROUNDING = {"cpu": 64}
"""Bytes to whose multiples PyTorch's allocators round what is asked for, by type of device; elsewhere `DEVICE_ROUNDING`."""

DEVICE_ROUNDING = 512
"""Of accelerators' allocators."""

aten = torch.ops.aten

_MAKING = frozenset({ops.gather_rows, ops.copy_value, ops.random_state, ops.set_random_state})
"""Operators of the schedule whose results are memory of compute's."""

CONVOLUTIONS = frozenset({aten.convolution, aten.convolution_backward})

ATTENTIONS = frozenset(
    {aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward}
)

LIBRARY_CALLS = (
    CONVOLUTIONS
    | ATTENTIONS
    | {aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, aten.baddbmm_}
    | {aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward}
    | {aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_efficient_attention_backward}
    | {aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward}
)
"""Operators that no compiler fuses with others: they separate what it may fuse."""

Memory = tuple[fx.Node, int]
"""A node that makes memory, and which of its results this is."""


class ForwardValues:
    """What a forward hands to its backward, by the names that AOTAutograd gives in both."""

    def __init__(self) -> None:
        self.memory_of: dict[str, tuple[str, int]] = {}
        """By the name of a value, a key of its memory: equal for views of one memory."""
        self.bytes: dict[tuple[str, int], int] = {}
        self.kept: set[tuple[str, int]] = set()
        """Memories that are the caller's: the graph's inputs, and its results."""


def measure_compute(
    graph: fx.Graph,
    device: torch.device,
    *,
    by_operator: bool,
    forward: ForwardValues | None = None,
    results: int | None = None,
    gradient_stays: Callable[[ParameterSlot], bool] = lambda slot: False,
    stays: frozenset[str] = frozenset(),
) -> tuple[ComputeMemory, ForwardValues]:
    """Return the memory of a scheduled graph's compute on `device`, and what its backward must know of it.

    `forward`: of the graph whose backward this is. `by_operator`: regions run operator by operator; otherwise a compiler fuses
    what lies between two calls of libraries, whose inputs and results are then there at once. `results`: the number of outputs
    that the caller gets, the rest are saved for the backward; None: all. `gradient_stays`: whether
    a parameter's gradient is kept where it is made; another account has it then. `stays`: names of saved values that count as
    if they stayed on the device, although the graph moves them: so one graph shows what each choice of them takes.
    """
    account = _Account(graph, device, by_operator=by_operator, forward=forward, results=results, stays=stays)
    return account.measure(gradient_stays)


class _Account:
    def __init__(
        self,
        graph: fx.Graph,
        device: torch.device,
        *,
        by_operator: bool,
        forward: ForwardValues | None,
        results: int | None,
        stays: frozenset[str] = frozenset(),
    ) -> None:
        self._nodes = list(graph.nodes)
        self._place = {node: number for number, node in enumerate(self._nodes)}
        self._device = device
        self._align = ROUNDING.get(device.type, DEVICE_ROUNDING)
        self._by_operator = by_operator
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

    def measure(self, gradient_stays: Callable[[ParameterSlot], bool]) -> tuple[ComputeMemory, ForwardValues]:
        self._find_regions()
        shared = self._shared_placeholders()
        for node in self._nodes:
            self._enter(node, shared)
        output = self._nodes[-1]
        given = [self._staying(n) or n for n in output.args[0] if isinstance(n, fx.Node)] if output.args else []
        returned = given if self._results is None else given[: self._results]
        end = len(self._nodes) - 1
        for node in given:
            for memory in self._memories.get(node, ()):
                self._dies[memory] = end
                self._kept.add(memory)
        staying = 0
        for memory, slot in self._taken_over():
            if gradient_stays(slot):
                staying += self._bytes[memory]
                self._dies[memory] = end
            else:
                self._bytes[memory] = 0
        if not self._by_operator:
            for memory in self._bytes:
                if self._is_fused_away(memory[0]):
                    self._bytes[memory] = 0
                born, dies = self._fused[self._born[memory]], self._fused[min(self._dies[memory], end)]
                if born != dies:  # else it stays inside of a kernel, or lives as long as it would operator by operator
                    self._born[memory], self._dies[memory] = born[0], dies[1]
        handed = ForwardValues()
        results = {memory for node in returned for memory in self._memories.get(node, ()) if memory[0].op != "placeholder"}
        for node in given:
            for memory in self._memories.get(node, ())[:1]:
                key = (memory[0].name, memory[1])
                handed.memory_of[node.name] = key
                handed.bytes[key] = self._bytes.get(memory, 0)
                if memory in results or memory[0].op == "placeholder":
                    handed.kept.add(key)
        of_results = sum(self._bytes.get(memory, 0) for memory in results)
        saved = {m for n in given for m in self._memories.get(n, ()) if m[0].op != "placeholder"}
        kept, temporary = self._peak()
        kept, temporary = min(kept, kept + temporary - staying), max(0, temporary - staying)
        if self._forward is None:  # the caller may hold those of the call before
            kept += of_results
        else:
            shown = set(shared.values())
            kept += sum(self._forward.bytes[key] for key in self._forward.kept - shown)
        return ComputeMemory(
            activations=kept,
            temporaries=temporary,
            saved=sum(self._bytes.get(memory, 0) for memory in saved),
            results=of_results,
        ), handed

    def _peak(self) -> tuple[int, int]:
        """Return the bytes of activations and of temporaries at the moment when they are most."""
        births: dict[int, list[Memory]] = defaultdict(list)
        deaths: dict[int, list[Memory]] = defaultdict(list)
        for memory, size in self._bytes.items():
            if size:
                births[self._born[memory]].append(memory)
                deaths[self._dies[memory]].append(memory)
        live = [0, 0]
        most = (0, 0)
        for number in range(len(self._nodes)):
            for memory in births.pop(number, ()):
                live[memory not in self._kept] += self._bytes[memory]
            here = live[0], live[1] + self._scratch(self._nodes[number])
            if sum(here) > sum(most):
                most = here
            for memory in deaths.pop(number, ()):
                live[memory not in self._kept] -= self._bytes[memory]
        return most

    def _enter(self, node: fx.Node, shared: Mapping[fx.Node, tuple[str, int]]) -> None:
        """Note the memories of a node's value, which live until its last reader."""
        place = self._place[node]
        if node.op == "placeholder":
            self._enter_placeholder(node, shared)
        elif node.op == "call_function":
            if node.target is operator.getitem and (node.args[0], node.args[1]) in self._bytes:
                self._memories[node] = ((node.args[0], node.args[1]),)  # type: ignore[assignment]
            elif sources := aliased_inputs(node):
                self._memories[node] = tuple(dict.fromkeys(m for s in sources for m in self._memories.get(s, ())))
                if len(sources) > 1:  # some of them, or memory of its own
                    self._make(node)
            elif moves_values(node.target):
                self._enter_moving(node)
            elif node.target not in SCHEDULE_OPS or node.target in _MAKING:
                self._make(node)
        last = max((self._place[user] for user in node.users), default=place)
        for memory in self._memories.get(node, ()):
            self._dies[memory] = max(self._dies[memory], last)

    def _enter_moving(self, node: fx.Node) -> None:
        """Saved values are on the device until the wait for their first hop away, and from the start of their last hop back."""
        values = node.args[0]
        if any(value.name in self._stays for value in values_behind(node)):
            staying = self._staying(node)
            self._memories[node] = () if staying is None else self._memories.get(staying, ())
        elif node.target is ops.swap_values_out and not isinstance(values, fx.Node):
            moved = values_behind(node)
            self._memories[node] = tuple(dict.fromkeys(m for value in moved for m in self._memories.get(value, ())))
        elif node.target is ops.swap_values_in and node.args[2] == Tier.DEVICE:
            memory = (node, 0)
            self._bytes[memory] = sum(round_up(_extent_bytes(tensor), self._align) for tensor in _tensors(values_behind(node)))
            self._born[memory] = self._dies[memory] = self._place[node]
            self._memories[node] = (memory,)
        elif node.target is ops.wait_value and isinstance(values, fx.Node) and values.target is ops.swap_values_in:
            self._memories[node] = self._memories[values]

    def _staying(self, node: fx.Node) -> fx.Node | None:
        """Return the value that stays, where a node waits for its move; None for any other node."""
        if node.target is not ops.wait_value:
            return None
        value = values_behind(node)[node.args[1]]  # type: ignore[index]
        return value if value.name in self._stays else None

    def _make(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        made = []
        for number, tensor in enumerate(value if isinstance(value, (list, tuple)) else (value,)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device.type:
                memory = (node, number)
                self._bytes[memory] = round_up(_extent_bytes(tensor), self._align)
                self._born[memory] = self._dies[memory] = self._place[node]
                made.append(memory)
        # of several results each lives by itself, until the last reader of its item
        if not isinstance(value, (list, tuple)):
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
            if self._dies[memories[0]] == self._place[node] and self._computed_just_before(memories[0][0], node):
                yield memories[0], slot_behind(node)

    def _computed_just_before(self, node: fx.Node, reduction: fx.Node) -> bool:
        """Return whether a node belongs to the region that ends before the reduction and the transfers beside it."""
        before = reduction.prev
        while before.target in SCHEDULE_OPS:
            before = before.prev
        return self._regions[self._place[node]] == self._regions[self._place[before]]

    def _find_regions(self) -> None:
        """Find for each node the first and the last of its region, and of what a compiler may fuse with it."""
        self._regions = self._runs(lambda node: False)
        self._fused = self._runs(_calls_library)

    def _is_fused_away(self, node: fx.Node) -> bool:
        """Return whether a value is element-wise and element-wise operators that are fused with it are all that read it."""
        run, stack = self._fused[self._place[node]], [node]
        while stack:
            reader = stack.pop()
            if not is_elementwise(reader) and (reader is node or not is_view(reader)):
                return False
            if reader is node or is_view(reader):
                stack += reader.users
            if reader.op != "call_function" or self._fused[self._place[reader]] != run:
                return False
        return True

    def _runs(self, alone: Callable[[fx.Node], bool]) -> list[tuple[int, int]]:
        """Return for each node the first and last number of its run of compute; a transfer is a run by itself."""
        firsts: list[int] = []
        before = None
        for number, node in enumerate(self._nodes):
            lone = node.op != "call_function" or node.target in SCHEDULE_OPS or alone(node)
            begins = number == 0 or lone or before or starts_region(node)
            firsts.append(number if begins else firsts[-1])
            before = lone
        lasts = {first: number for number, first in enumerate(firsts)}
        return [(first, lasts[first]) for first in firsts]

    def _slice(self, loop: TokenLoop, node: fx.Node) -> int:
        """Return what a loop takes beside its results: the values of a slice, sums in a wider type, copies of strided inputs."""
        graph = loop.body.graph
        inputs = graph.find_nodes(op="placeholder")
        account = _Account(graph, self._device, by_operator=self._by_operator, forward=None, results=0)
        found, _ = account.measure(lambda slot: False)
        most = found.activations + found.temporaries
        most -= sum(round_up(_extent_bytes(value), self._align) for value in _tensors(inputs))
        for out in loop.outs:
            if isinstance(out, SumOut) and out.summed_in != out.dtype:
                most += round_up(format_of(out.summed_in).bytes(math.prod(out.shape)), self._align)
        for value, form in zip(_tensors(node.all_input_nodes), loop.rows, strict=False):
            if not can_view(value, (-1, *value.shape[form.lead :])):
                most += round_up(format_of(value.dtype).bytes(hinted_numel(value)), self._align)
        return most

    def _scratch(self, node: fx.Node) -> int:
        """Return what an operator takes beside its results: a loop over tokens, or a library as far as that is known."""
        if isinstance(node.target, TokenLoop):
            return self._slice(node.target, node)
        packet = getattr(node.target, "overloadpacket", None)
        if self._device.type != "cpu" or packet is None:
            return 0
        if packet in CONVOLUTIONS:  # oneDNN's copies of what it reads, in layouts of its own
            return sum(round_up(_extent_bytes(v), self._align) for v in _tensors(node.all_input_nodes))
        if packet in ATTENTIONS:  # of each thread, a block of scores and its part of the results
            query, key = list(_tensors(node.all_input_nodes[:3]))[-3:-1]
            rows, columns = min(256, _hint(query.shape[-2])), min(512, _hint(key.shape[-2]))
            return torch.get_num_threads() * 4 * (2 * rows * columns + 3 * max(rows, columns) * _hint(query.shape[-1]))
        return 0


def _calls_library(node: fx.Node) -> bool:
    return is_token_loop(node) or getattr(node.target, "overloadpacket", None) in LIBRARY_CALLS


def _tensors(nodes: Iterable[fx.Node]) -> Iterator[torch.Tensor]:
    return (value for node in nodes if isinstance(value := node.meta.get("val"), torch.Tensor))


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a traced tensor's first element to its last, dynamic sizes as traced."""
    sizes = [_hint(size) for size in tensor.shape]
    if 0 in sizes or tensor.layout != torch.strided:
        return 0
    extent = 1 + sum((size - 1) * _hint(stride) for size, stride in zip(sizes, tensor.stride(), strict=True))
    return format_of(tensor.dtype).bytes(extent)


def _hint(size: Any) -> int:
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else int(size)
