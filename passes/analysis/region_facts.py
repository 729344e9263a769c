"""Facts of the compute between transfers: its operators, where they come from, floating-point operations, and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from zinf_compile.ir import compute_ops
from zinf_compile.ir.formats import format_of
from zinf_compile.passes.graph.alias import METADATA_OPS, aliased_inputs
from zinf_compile.passes.graph.node_facts import fake_value, hinted_numel, module_of
from zinf_compile.passes.graph.token_loop import TokenLoop

from .blocks import block_of

aten = torch.ops.aten

_AS = {compute_ops.mm_out: aten.mm, compute_ops.addmm_out: aten.addmm}
"""Products that write into a given matrix, their first argument, and the operators that count their operations."""

_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
"""Operators whose operations follow from the shapes of their tensors."""

_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
"""Attention of the CPU, which PyTorch doesn't count, and the GPU's, which takes as many operations."""


def kind_of(node: fx.Node) -> str:
    """Return an operator's name without its namespace."""
    if node.op == "get_attr":
        return "constant"
    target: Any = node.target
    return str(target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else target.__name__)


def shape_of(node: fx.Node) -> tuple[object, ...]:
    """Return the shape and data type of an operator's result, comparable; empty for what is no tensor."""
    value = node.meta.get("val")
    return (str(tuple(value.shape)), value.dtype) if isinstance(value, torch.Tensor) else ()


def type_of(node: fx.Node) -> torch.dtype:
    """Return the data type of an operator's result, or of the first of several; of its first input where it writes in place."""
    for value in (node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)):
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                return each.dtype
    raise AssertionError(f"{node} has neither results nor inputs that are tensors")


def blocks_of(nodes: Sequence[fx.Node]) -> list[str]:
    """Return the blocks of the operators in order of appearance; their modules where no block is known."""
    modules = [module for node in nodes if (module := module_of(node))]
    return list(dict.fromkeys(filter(None, map(block_of, modules)))) or list(dict.fromkeys(modules))


def place_of(nodes: Sequence[fx.Node]) -> str:
    """Return where in the model a region's operators come from; empty where that is unknown."""
    blocks = blocks_of(nodes)
    return f"{blocks[0]} .. {blocks[-1]}" if len(blocks) > 1 else "".join(blocks)


def operations_of(node: fx.Node) -> int:
    """Return an operator's floating-point operations, dynamic sizes as traced; 0 where PyTorch has no formula."""
    target: Any = node.target
    if isinstance(target, TokenLoop):
        of_slice = sum(map(operations_of, target.body.graph.nodes))
        return of_slice * target.tokens([fake_value(n) for n in node.args[:1] if isinstance(n, fx.Node)]) // target.tile
    arguments = list(node.args)
    if target in _AS:
        target, arguments = _AS[target], arguments[1:]
    packet = getattr(target, "overloadpacket", target)
    count = flop_registry.get(_ATTENTION.get(packet, packet))
    if count is None:
        return 0
    given: Any = (arguments, dict(node.kwargs), node)
    values, named, out = fx.node.map_arg(given, lambda n: n.meta.get("val"))
    if packet in _ATTENTION:
        values, named = _with_equal_heads(values[: 4 if "backward" in str(packet) else 3]), {}
    if packet in _PRODUCTS and (shapes := _fixed_shapes(values)) is not None:  # equal blocks ask for the same
        return _operations_of_product(packet, shapes)
    found = count(*values, **named, out_val=out)
    if isinstance(found, torch.SymInt):
        return int(found.node.hint or 0)
    return int(found) if isinstance(found, int) else 0


def _fixed_shapes(values: Sequence[Any]) -> tuple[torch.Size, ...] | None:
    """Return the shapes of the tensors among some values; None where a size is dynamic."""
    shapes = tuple(value.shape for value in values if isinstance(value, torch.Tensor))
    return shapes if all(type(size) is int for shape in shapes for size in shape) else None


@lru_cache(maxsize=4096)
def _operations_of_product(packet: torch._ops.OpOverloadPacket, shapes: tuple[torch.Size, ...]) -> int:
    return int(flop_registry[packet](*shapes))


def _with_equal_heads(values: Sequence[torch.Tensor]) -> list[torch.Size]:
    """Return the shapes, of keys and values that several heads share as if each had its own: the formula expects that."""
    heads = values[0].shape[1]
    return [torch.Size((v.shape[0], heads, *v.shape[2:])) for v in values]


def owners_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return for each node the one whose memory its result shares: itself, or what it is a view of."""
    owners: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        sources = aliased_inputs(node)
        owners[node] = owners.get(sources[0], sources[0]) if len(sources) == 1 else node
    return owners


def bytes_of_region(nodes: Sequence[fx.Node], owners: Mapping[fx.Node, fx.Node]) -> int:
    """Return the bytes of a region's inputs and outputs, each memory once."""
    inside = set(nodes)
    moved: dict[fx.Node, None] = {}
    for node in nodes:
        if owners[node] is node and node.target not in METADATA_OPS:
            moved.update((owners[s], None) for s in node.all_input_nodes if owners[s] not in inside)
        if owners[node] in inside and any(user not in inside for user in node.users):
            moved[owners[node]] = None
    return sum(bytes_of_value(node.meta.get("val")) for node in moved)


def bytes_of_value(value: object) -> int:
    """Return the bytes of a traced tensor, or of a list of tensors, dynamic sizes as traced."""
    if isinstance(value, (list, tuple)):
        return sum(bytes_of_value(item) for item in value)
    return format_of(value.dtype).bytes(hinted_numel(value)) if isinstance(value, torch.Tensor) else 0
