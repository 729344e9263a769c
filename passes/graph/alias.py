"""Which values share memory, and which are made element by element: read from operator schemas and tags."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from zinf_compile.ir.op_spec import SCHEDULE_OPS

aten = torch.ops.aten

HIDDEN_VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
        aten.lift.default,
    }
)
"""Views (or maybe views) whose schema doesn't say so."""

CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})
"""Copies that change the data type only: cheaper made again than kept."""

VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
"""They arrange elements in other dimensions."""

MOVES = frozenset({aten.transpose.int, aten.permute.default, aten.t.default})
"""They change the order of dimensions."""

ALIASES = frozenset({aten.detach.default, aten.alias.default})
"""Other names of a value."""

METADATA_OPS = frozenset(
    {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default, aten.size.default}
)
"""Operators that never touch a tensor's memory: a hollow parameter is good enough for them."""


def is_cast(node: fx.Node) -> bool:
    """Say whether the node converts a tensor to another data type."""
    return node.op == "call_function" and node.target in CASTS


def is_elementwise(node: fx.Node) -> bool:
    """Say whether each element of a result is made from the elements at its place alone, the same each time."""
    if is_cast(node):
        return True
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.pointwise in tags and not {torch.Tag.nondeterministic_seeded, torch.Tag.inplace} & {*tags}


def is_view(node: fx.Node) -> bool:
    """Say whether the node's result is another view of a tensor's memory, or several."""
    if node.op != "call_function" or node.target in METADATA_OPS:
        return False
    return not isinstance(node.target, torch._ops.HigherOrderOperator) and bool(aliased_inputs(node))


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs whose memory the node's result may share."""
    if node.op != "call_function" or node.target in SCHEDULE_OPS:
        return []
    if node.target is operator.getitem or node.target in HIDDEN_VIEWS:
        return node.all_input_nodes[:1]
    if not isinstance(node.target, torch._ops.OpOverload):
        return list(node.all_input_nodes)  # higher-order operators have no schema: assume the worst
    schema = node.target._schema
    if not any(result.alias_info is not None for result in schema.returns):
        return []
    inputs: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        inputs += _nodes(value)
    return inputs


def alias_closure(root: fx.Node) -> set[fx.Node]:
    """Return `root` and every node that may share its memory."""
    closure, stack = {root}, [root]
    while stack:
        current = stack.pop()
        for user in current.users:
            if user not in closure and user.op == "call_function" and current in aliased_inputs(user):
                closure.add(user)
                stack.append(user)
    return closure


def derived_from(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes made from `roots` by views and casts alone; the roots are not among them."""
    derived: set[fx.Node] = set()
    stack = list(roots)
    known = set(stack)
    while stack:
        current = stack.pop()
        for user in current.users:
            if user in derived or not (is_cast(user) or is_view(user)):
                continue
            tensors = [n for n in user.all_input_nodes if not isinstance(n.meta.get("val"), (torch.SymInt, int))]
            if all(n in known for n in tensors):
                derived.add(user)
                known.add(user)
                stack.append(user)
    return derived


def _nodes(value: object) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, fx.Node)]
    return []
