"""Aliasing of values and the one definition of element-wise, both read from operator schemas and tags."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from zinf_compile.ir.op_spec import SCHEDULE_OPS

from .token_loop import is_token_loop

aten = torch.ops.aten

HIDDEN_VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
        aten.lift.default,
    }
)
"""Operators that return a view, or may, without saying so in their schema."""

CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})
"""Copies that change the data type only: cheaper to recompute than to save."""

VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
"""Operators that change the shape and keep the order of elements."""

MOVES = frozenset({aten.transpose.int, aten.permute.default, aten.t.default})
"""Operators that change the order of dimensions."""

ALIASES = frozenset({aten.detach.default, aten.alias.default})
"""Operators that return their input."""

METADATA_OPS = frozenset(
    {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default, aten.size.default}
)
"""Operators that read no element of a tensor, so that a hollow parameter may be their input."""


def is_cast(node: fx.Node) -> bool:
    """Return whether the node converts a tensor to another data type."""
    return node.op == "call_function" and node.target in CASTS


def is_elementwise(node: fx.Node) -> bool:
    """Return whether each element of the result depends on the inputs' elements at its index alone, deterministically."""
    if is_cast(node):
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in node.target.tags and torch.Tag.nondeterministic_seeded not in node.target.tags


def is_view(node: fx.Node) -> bool:
    """Return whether the node's result, or each part of it, is a view of an input."""
    if node.op != "call_function" or node.target in METADATA_OPS:
        return False
    return not isinstance(node.target, torch._ops.HigherOrderOperator) and bool(aliased_inputs(node))


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs whose memory the node's result may share."""
    if node.op != "call_function" or node.target in SCHEDULE_OPS or is_token_loop(node):
        return []
    if node.target is operator.getitem and is_token_loop(node.args[0]):
        return []  # each result has memory of its own
    if node.target is operator.getitem or node.target in HIDDEN_VIEWS:
        return node.all_input_nodes[:1]
    if not isinstance(node.target, torch._ops.OpOverload):
        return list(node.all_input_nodes)  # higher-order operators have no schema: assume the worst
    schema = node.target._schema
    if not any(result.alias_info is not None for result in schema.returns):
        return []
    return _arguments(node, lambda alias: alias is not None)


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that the node's operator writes to, or whose memory it lends another tensor, as `set_` does."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    if node.target.overloadpacket is aten.set_:
        return list(node.all_input_nodes)
    return _arguments(node, lambda alias: alias is not None and alias.is_write)


def memory_of(node: fx.Node) -> fx.Node | None:
    """Return the operator that makes the memory of a value: the value itself, or what it is a view of; None if unknown."""
    while True:
        sources = aliased_inputs(node)
        if not sources:
            return node
        if len(sources) > 1:
            return None
        if isinstance(sources[0].meta.get("val"), (list, tuple)) and not aliased_inputs(sources[0]):
            return node if isinstance(sources[0].target, torch._ops.OpOverload) else None  # one of several results
        node = sources[0]


def sharing(value: fx.Node) -> set[fx.Node]:
    """Return every node that may share memory with a value, whichever of them makes that memory."""
    shared, seen, stack = set[fx.Node](), set[fx.Node](), [value]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        memory = memory_of(node)
        if memory is None:
            stack += aliased_inputs(node)
        else:
            for result in _same_results(memory):
                shared |= alias_closure(result)
    return shared


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
    """Return the nodes made from `roots` by views and casts alone, without the roots."""
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


def _same_results(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that take the same one of an operator's several results; a node that takes none is alone."""
    if node.target is not operator.getitem:
        return [node]
    owner, index = node.args
    results = owner.meta.get("val") if isinstance(owner, fx.Node) else None
    if not isinstance(results, (list, tuple)) or not isinstance(index, int):
        return [node]
    items = ((user, user.args[1]) for user in owner.users if user.target is operator.getitem)  # type: ignore[union-attr]
    return [user for user, place in items if isinstance(place, int) and place % len(results) == index % len(results)]


def _arguments(node: fx.Node, marked: Callable[[Any], bool]) -> list[fx.Node]:
    """Return the inputs whose place in the operator's schema has such a mark."""
    inputs: list[fx.Node] = []
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if marked(argument.alias_info):
            inputs += _nodes(node.args[position] if position < len(node.args) else node.kwargs.get(argument.name))
    return inputs


def _nodes(value: object) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, fx.Node)]
    return []
