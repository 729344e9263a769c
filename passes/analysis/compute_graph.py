"""A graph's compute as the account of its memory reads it: what follows from the graph alone, found once for many accounts of it.

Used by `compute_memory`: where regions begin and end, what a compiler may fuse within them, the bytes of results, aliases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.op_spec import SCHEDULE_OPS, moves_values
from zinf_compile.ir.sizes import round_up
from zinf_compile.passes.graph.alias import aliased_inputs, is_elementwise, is_view
from zinf_compile.passes.graph.node_facts import hinted_numel, starts_region, values_behind
from zinf_compile.passes.graph.remade import is_result
from zinf_compile.passes.graph.token_loop import is_token_loop

ROUNDING = {"cpu": 64}
"""Bytes to whose multiples PyTorch's allocators round what is asked for, by type of device; elsewhere `DEVICE_ROUNDING`."""

DEVICE_ROUNDING = 512
"""Of accelerators' allocators."""

_MAKING = frozenset({ops.gather_rows, ops.copy_value, ops.random_state, ops.set_random_state, ops.keep_for_backward})
"""Operators of the schedule whose results are memory of compute's."""

aten = torch.ops.aten

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

Run = tuple[int, int]
"""The places of the first and the last node of a run of compute."""


class ComputeGraph:
    """Facts of one scheduled graph, which must not change any more."""

    def __init__(self, graph: fx.Graph, device: torch.device, *, by_operator: bool) -> None:
        """`by_operator`: regions run operator by operator.

        Otherwise a compiler fuses what lies between two calls of libraries, whose inputs and results are then there at once.
        """
        self.graph, self.device, self.by_operator = graph, device, by_operator
        self.align = ROUNDING.get(device.type, DEVICE_ROUNDING)
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.place = {node: number for number, node in enumerate(self.nodes)}
        calls = [node for node in self.nodes if node.op == "call_function"]
        self.moving = {node: values_behind(node) for node in calls if moves_values(node.target)}
        """Operators that move saved values, each with these."""
        self.making = {node for node in calls if node.target not in SCHEDULE_OPS or node.target in _MAKING}
        """Operators whose results may be memory of compute's."""
        self.scratch: npt.NDArray[np.int64] | None = None
        """What each operator takes beside its results, once an account has asked."""
        self._regions = self._runs(lambda node: False)
        self._fused = self._runs(_calls_library)
        self._aliases: dict[fx.Node, list[fx.Node]] = {}
        self._last_readers: dict[fx.Node, int] = {}
        self._ends_before: dict[fx.Node, Run] = {}
        self._made: dict[fx.Node, tuple[tuple[int, int], ...]] = {}
        self._fused_away: dict[fx.Node, bool] = {}

    def aliases(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs whose memory the node's result may share."""
        if node not in self._aliases:
            self._aliases[node] = aliased_inputs(node)
        return self._aliases[node]

    def last_reader(self, node: fx.Node) -> int:
        """Return the place of a node's last user; its own where nothing reads it.

        What runs again returns the forward's results whether or not they are read: these are there until their region ends.
        """
        if node not in self._last_readers:
            last = max((self.place[user] for user in node.users), default=self.place[node])
            self._last_readers[node] = max(last, self._regions[self.place[node]][1]) if is_result(node) else last
        return self._last_readers[node]

    def made(self, node: fx.Node) -> tuple[tuple[int, int], ...]:
        """Return which of a node's results are tensors on the device, each with its bytes."""
        if node not in self._made:
            value = node.meta.get("val")
            results = value if isinstance(value, (list, tuple)) else (value,)
            self._made[node] = tuple(
                (number, self.bytes(tensor))
                for number, tensor in enumerate(results)
                if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device.type
            )
        return self._made[node]

    def bytes(self, tensor: torch.Tensor) -> int:
        """Return what a traced tensor takes of an allocator."""
        return round_up(extent_bytes(tensor), self.align)

    def bytes_of_copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> int:
        """Return what a copy of a traced tensor takes, without gaps and in a data type."""
        return round_up(format_of(dtype).bytes(hinted_numel(tensor)), self.align)

    def fused_run(self, place: int) -> Run:
        """Return the nodes that a compiler may fuse with the one at a place."""
        return self._fused[place]

    def computed_just_before(self, node: fx.Node, reduction: fx.Node) -> bool:
        """Return whether a node belongs to the region that ends before the reduction and the transfers beside it."""
        if reduction not in self._ends_before:
            before = reduction.prev
            while before.target in SCHEDULE_OPS:
                before = before.prev
            self._ends_before[reduction] = self._regions[self.place[before]]
        return self._regions[self.place[node]] == self._ends_before[reduction]

    def is_fused_away(self, node: fx.Node) -> bool:
        """Return whether a value is element-wise and element-wise operators that are fused with it are all that read it."""
        if node not in self._fused_away:
            self._fused_away[node] = self._find_fused_away(node)
        return self._fused_away[node]

    def _find_fused_away(self, node: fx.Node) -> bool:
        if is_result(node):
            return False
        run, stack = self._fused[self.place[node]], [node]
        while stack:
            reader = stack.pop()
            if not is_elementwise(reader) and (reader is node or not is_view(reader)):
                return False
            if reader is node or is_view(reader):
                stack += reader.users
            if reader.op != "call_function" or self._fused[self.place[reader]] != run:
                return False
        return True

    def _runs(self, alone: Callable[[fx.Node], bool]) -> list[Run]:
        """Return for each node the first and last number of its run of compute; a transfer is a run by itself."""
        firsts: list[int] = []
        before = None
        for number, node in enumerate(self.nodes):
            lone = node.op != "call_function" or node.target in SCHEDULE_OPS or alone(node)
            begins = number == 0 or lone or before or starts_region(node)
            firsts.append(number if begins else firsts[-1])
            before = lone
        lasts = {first: number for number, first in enumerate(firsts)}
        return [(first, lasts[first]) for first in firsts]


def tensors_of(nodes: Iterable[fx.Node]) -> Iterator[torch.Tensor]:
    """Yield the traced tensors of nodes whose results are tensors."""
    return (value for node in nodes if isinstance(value := node.meta.get("val"), torch.Tensor))


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a traced tensor's first element to its last, dynamic sizes as traced."""
    sizes = [hint_of(size) for size in tensor.shape]
    if 0 in sizes or tensor.layout != torch.strided:
        return 0
    extent = 1 + sum((size - 1) * hint_of(stride) for size, stride in zip(sizes, tensor.stride(), strict=True))
    return format_of(tensor.dtype).bytes(extent)


def hint_of(size: Any) -> int:
    """Return a traced size as a number."""
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else int(size)


def _calls_library(node: fx.Node) -> bool:
    return is_token_loop(node) or getattr(node.target, "overloadpacket", None) in LIBRARY_CALLS
