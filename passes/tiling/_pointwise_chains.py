"""Analysis for `tile_pointwise`: values between products with tiles that needn't exist as a whole. Changes no graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import fx

from zinf_compile.passes.graph.alias import ALIASES, MOVES, VIEWS, is_elementwise
from zinf_compile.passes.graph.concat import parts_of_cat
from zinf_compile.passes.graph.node_facts import fake_value, positions

from ._forms import is_of_tile

aten = torch.ops.aten

Span = tuple[int, int]
"""[start, end) of the last dimension."""

NO_SPANS: frozenset[Span] = frozenset()

MOST_PARTS = 64
"""Limit of parts of one value. Each adds operators to the graph, whose compilation takes as much memory as thin parts save."""

_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})


class Chains:
    """Values of a graph that are read only in parts: disjoint spans of their last dimension."""

    def __init__(self, graph: fx.Graph) -> None:
        self.assembled = dict(_find_assembled(graph))
        """Values that are read as a whole and are the only use of inputs computed in parts: the parts of each."""
        self.spans: dict[fx.Node, frozenset[Span]] = {}
        """The parts of each value that is read only in parts."""
        for node in reversed(graph.nodes):
            if (spans := self._find_spans(node)) and (is_elementwise(node) or is_row_view(node) or _is_row(node)):
                self.spans[node] = spans
        self.readers = [node for node in graph.nodes if self._is_reader(node)]
        """Operators to replace, in order: slices, sums and assembled values."""

    def _is_reader(self, node: fx.Node) -> bool:
        if node in self.assembled:
            return any(source in self.spans for source in node.all_input_nodes)
        return (is_slice(node) or is_sum(node)) and self._is_made_in_parts(untransposed(source_of(node)))

    def _is_made_in_parts(self, node: fx.Node) -> bool:
        while node in self.spans and is_row_view(node):
            node = source_of(node)
        return node in self.spans

    def _find_spans(self, node: fx.Node) -> frozenset[Span]:
        """Return the parts of a value that are read, none if it has another reader."""
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or not value.dim():
            return NO_SPANS
        found = [self._read_by(user, node) for user in node.users if not is_sum(user)]
        spans = sorted(set().union(*found))
        gaps = [start - end for (_, end), (start, _) in itertools.pairwise(spans)]
        complete = spans and (spans[0][0], spans[-1][1]) == (0, value.shape[-1]) and not any(gaps)
        understood = all(found) and min(gaps, default=0) >= 0 and (complete or len(found) == len(node.users))
        return frozenset(spans) if understood and len(spans) <= MOST_PARTS else NO_SPANS

    def _read_by(self, user: fx.Node, node: fx.Node) -> frozenset[Span]:
        if user.op != "call_function":
            return NO_SPANS
        if untransposed(user) is node and untransposed(user) is not user:
            return frozenset(map(span_of, user.users)) if all(map(is_slice, user.users)) else NO_SPANS
        if is_slice(user):
            return frozenset([span_of(user)])
        if is_row_view(user) or (is_elementwise(user) and fake_value(user).shape == fake_value(node).shape):
            return self.spans.get(user) or self.assembled.get(user, NO_SPANS)
        return NO_SPANS


def _find_assembled(graph: fx.Graph) -> Iterator[tuple[fx.Node, frozenset[Span]]]:
    """Yield factors of products with tiles that are the only use of the values they are computed from, with their parts."""
    place = positions(graph)
    between_rows: dict[fx.Node, set[fx.Node]] = {}
    borders: dict[fx.Node, set[frozenset[Span]]] = {}
    for node in graph.nodes:
        if _is_row(node):
            result, between = _last_elementwise(node, place)
            between_rows.setdefault(result, set()).update(between)
            borders.setdefault(result, set()).add(frozenset((start, end) for _, start, end in parts_of_cat(node)[1]))
    for result, between in between_rows.items():
        operands = {source for node in between for source in node.all_input_nodes if _is_like(source, node)}
        first, *others = borders[result]
        if operands - {result} <= between and not others and len(first) <= MOST_PARTS and _is_factor(result):
            yield result, first


def _last_elementwise(row: fx.Node, place: dict[fx.Node, int]) -> tuple[fx.Node, set[fx.Node]]:
    """Return the last element-wise result through which every use of a row of products passes, and the values up to it."""
    found, seen, waiting = row, {row}, set(row.users)
    while waiting:
        node = min(waiting, key=place.__getitem__)
        waiting.remove(node)
        if not (
            is_row_view(node)
            or (is_elementwise(node) and any(_is_like(source, node) for source in seen & {*node.all_input_nodes}))
        ):
            break
        seen.add(node)
        if not waiting and is_elementwise(node):
            found = node
        waiting |= set(node.users)
    between = {node for node in seen if place[node] <= place[found]}
    return found, between


def _is_row(node: fx.Node) -> bool:
    """Return whether a node concatenates products with tiles along the last dimension."""
    if node.target is not aten.cat.default or len(node.args) < 2 or node.args[1] not in (-1, fake_value(node).dim() - 1):
        return False
    return all(part.target in _PRODUCTS and any(map(is_of_tile, part.all_input_nodes)) for part in node.all_input_nodes)


def _is_factor(node: fx.Node) -> bool:
    """Return whether a product with a tile reads a value."""
    return any(
        _is_factor(user) if is_row_view(user) else user.target in _PRODUCTS and any(map(is_of_tile, user.all_input_nodes))
        for user in node.users
    )


def _is_like(source: fx.Node, node: fx.Node) -> bool:
    """Return whether an input has the shape of the node's result."""
    value = source.meta["val"]
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == fake_value(node).shape


def source_of(node: fx.Node) -> fx.Node:
    """Return a node's first argument, which must be a node."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def untransposed(node: fx.Node) -> fx.Node:
    """Return the matrix whose transpose the value is, the value itself for anything else."""
    if node.target not in MOVES or fake_value(node).dim() != 2:
        return node
    return node if node.target is aten.permute.default and node.args[1] == [0, 1] else source_of(node)


def is_slice(node: fx.Node) -> bool:
    """Return whether a node slices the last dimension of its input, or of its input's transpose, for products."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4 or not all(isinstance(value, int) for value in node.args[1:]):
        return False
    source, (dim, start, end) = source_of(node), node.args[1:]
    last = 0 if untransposed(source) is not source else fake_value(source).dim() - 1
    if dim != last or not 0 <= start < end <= fake_value(source).shape[last]:  # type: ignore[operator]
        return False
    readers = [reader for user in node.users for reader in (user.users if untransposed(user) is not user else [user])]
    return all(reader.target in _PRODUCTS for reader in readers)


def span_of(cut: fx.Node) -> Span:
    """Return the span of a slice."""
    start, end = cut.args[2:4]
    assert isinstance(start, int)
    assert isinstance(end, int)
    return start, end


def is_sum(node: fx.Node) -> bool:
    """Return whether a node sums its input over all but the last dimension."""
    if node.target is not aten.sum.dim_IntList:
        return False
    rank, dims = fake_value(source_of(node)).dim(), node.args[1]
    return isinstance(dims, (list, tuple)) and {int(dim) % rank for dim in dims} == {*range(rank - 1)}  # type: ignore[arg-type]


def is_row_view(node: fx.Node) -> bool:
    """Return whether a node is an alias of its input, or a view that keeps the last dimension."""
    if node.target in ALIASES:
        return True
    sizes = node.args[1] if node.target in VIEWS else None
    return (
        isinstance(sizes, (list, tuple)) and bool(sizes) and fake_value(node).shape[-1] == fake_value(source_of(node)).shape[-1]
    )


def part_of_row(row: fx.Node, span: Span) -> fx.Node | None:
    """Return the concatenated product at `span`, None if there is none."""
    return next((part for part, *found in parts_of_cat(row)[1] if tuple(found) == span), None)
