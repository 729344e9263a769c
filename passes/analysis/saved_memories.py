"""Memory that a forward makes and its backward reads, which may leave the device in between.

The backend calls it right after the cut, for the plan to choose from; `passes/activations` acts on the choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from zinf_compile.ir.op_spec import SCHEDULE_OPS
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.value_spans import ValueForm, span_of
from zinf_compile.passes.graph.alias import memory_of
from zinf_compile.passes.graph.node_facts import symbols_of
from zinf_compile.passes.graph.remade import is_dropped


def find_memories(forward: fx.Graph, backward: fx.Graph, *, own_outputs: int) -> tuple[SavedMemory, ...]:
    """Return the memory that a forward saves, in the order in which it is made.

    `own_outputs` are the forward's outputs for the user, which are first. Memory of those, and of the graph's inputs, is left
    out: the user has it anyway, and may write to it. So are numbers, values of which it isn't known what they are views of, and
    those that were dropped.
    """
    outputs = returned(forward)
    placeholders = {node.name for node in backward.nodes if node.op == "placeholder" and not is_dropped(node)}
    held = {memory_of(node) for node in outputs[:own_outputs] if isinstance(node, fx.Node)}
    found: dict[fx.Node, list[int]] = {}
    for position, node in enumerate(outputs[own_outputs:], own_outputs):
        if not isinstance(node, fx.Node) or node.name not in placeholders or not _is_dense(node):
            continue
        root = memory_of(node)
        if root is not None and root.op == "call_function" and root not in held and root.target not in SCHEDULE_OPS:
            found.setdefault(root, []).append(position)
    place = {node: number for number, node in enumerate(forward.nodes)}
    return tuple(
        SavedMemory(
            name=outputs[positions[0]].name,
            outputs=tuple(positions),
            inputs=tuple(outputs[position].name for position in positions),
            bytes=bytes_together([outputs[position] for position in positions]),
            dynamic=any(symbols_of(outputs[position]) for position in positions),
        )
        for root, positions in sorted(found.items(), key=lambda row: place[row[0]])
    )


def returned(graph: fx.Graph) -> Sequence[fx.Node]:
    """Return the outputs of a graph."""
    values = graph.output_node().args[0]
    assert isinstance(values, (list, tuple)), "a graph returns a tuple of values"
    return values  # type: ignore[return-value]


def bytes_together(values: Sequence[fx.Node]) -> int:
    """Return the bytes that move with values of one memory, dynamic sizes as traced."""
    start, end = span_of(map(_form, values))
    return end - start


def _form(node: fx.Node) -> ValueForm:
    value = node.meta["val"]
    shape, stride, (offset,) = map(_hinted, (value.shape, value.stride(), [value.storage_offset()]))
    return ValueForm(shape, stride, offset, value.element_size())


def _hinted(sizes: Sequence[int | torch.SymInt]) -> list[int]:
    return [int(size.node.hint or 0) if isinstance(size, torch.SymInt) else size for size in sizes]


def _is_dense(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_sparse and not value.is_quantized
