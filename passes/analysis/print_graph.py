"""Graphs as text, one operator a line. `zinf dump`, `summary` and the tests call it."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import LONE_GROUP, SCHEDULE_OPS, has_unit, position_of
from zinf_compile.passes.graph.node_facts import (
    argument_of,
    display_name,
    fake_value,
    part_of,
    policy_of,
    rows_bytes,
    skipped_notes,
    slot_behind,
    values_behind,
    wire_bytes,
)
from zinf_compile.passes.graph.token_loop import TokenLoop

from .saved_memories import bytes_together
from .traffic import bytes_moved, is_swap


def graph_text(gm: fx.GraphModule, *, sizes: bool = False, policies: bool = False, world_size: int = 1) -> str:
    """Print the graph with short names.

    With `sizes`, schedule operators show the parameter's name and bytes. Bytes are those of the whole unit; a swap shows the
    shard of one of `world_size` ranks, and `gather_rows` an upper bound of its rows. Parts of values that never exist as a whole
    show their name and bytes, loops over slices of tokens the operators of a slice. The text begins with the rewrites that passes
    skipped, with reasons. With `policies`, other operators show their checkpoint policy.
    """
    lines = [f"# {what}" for what in skipped_notes(gm)] if sizes else []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        line = graph_text_line(node)
        if sizes and node.target in SCHEDULE_OPS:
            line = with_sizes(line, node, world_size=world_size)
        elif sizes and part_of(node):
            line = f"{line:<60}  # {part_of(node)} {fake_value(node).nbytes:,} B"
        elif sizes and isinstance(node.target, TokenLoop):
            line = f"{line:<60}  # slices of {node.target.tile} tokens\n" + _indented(node.target.body)
        elif policies and policy_of(node):
            line = f"{line:<60}  # {policy_of(node)}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _indented(body: fx.GraphModule) -> str:
    return "\n".join(f"    {line}" for line in graph_text(body).splitlines())


def with_sizes(line: str, node: fx.Node, *, world_size: int) -> str:
    """Append the parameter's name, or those of saved values, and the bytes moved or held, to the line of a schedule operator."""
    if values := values_behind(node):
        number = argument_of(node, "number")
        names = ", ".join(value.name for value in ([values[number]] if isinstance(number, int) else values))
        return f"{line:<60}  # {names} {bytes_together(values):,} B"
    if not has_unit(node.target):
        return line
    unit = slot_behind(node)
    size = f"{bytes_moved(node, world_size=world_size) if is_swap(node) else wire_bytes(node):,}"
    if node.target is ops.gather_rows:
        size = f"up to {rows_bytes(node):,} of {unit.bytes:,}"
    return f"{line:<60}  # {unit.name} {size} B"


def graph_text_line(node: fx.Node) -> str:
    """Print one operator with short names."""
    if node.op == "output":
        return f"return {_value(node.args[0])}"
    args = node.args
    place = position_of(node.target, "group")
    if place is not None and args[place:] == (LONE_GROUP,):
        args = args[:place]
    arguments = [_value(a) for a in args] + [f"{k}={_value(v)}" for k, v in node.kwargs.items()]
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    if node.target is operator.getitem:
        return f"{node.name} = {arguments[0]}[{arguments[1]}]"
    call = f"{_target(node)}({', '.join(arguments)})"
    return f"{node.name} = {call}" if _gives_result(node) else call


def _gives_result(node: fx.Node) -> bool:
    return not isinstance(node.target, torch._ops.OpOverload) or bool(node.target._schema.returns)


def _target(node: fx.Node) -> str:
    target: str | Callable[..., object] = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _value(value: object) -> str:
    if isinstance(value, fx.Node):
        return display_name(value)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_value(v) for v in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return f'"{value}"' if isinstance(value, str) else str(value)
