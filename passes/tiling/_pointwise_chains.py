"""Which values between products with tiles needn't exist as a whole: decided here, acted upon in `tile_pointwise`."""

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
"""Of the last dimension: [start, end)."""

NO_SPANS: frozenset[Span] = frozenset()

MOST_PARTS = 64
"""Of one value: each is a few operators more in the graph, which take memory while it is compiled, as much as thin parts save."""

_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})


class Chains:
    """The values of a graph that are read in parts only, stretches of their last dimension that don't overlap."""

    def __init__(self, graph: fx.Graph) -> None:
        self.assembled = dict(_find_assembled(graph))
        """What is read as a whole, and is all that its inputs, which are made in parts, are for: those parts."""
        self.spans: dict[fx.Node, frozenset[Span]] = {}
        """Of each value that is read in parts only: which ones."""
        for node in reversed(graph.nodes):
            if (spans := self._find_spans(node)) and (is_elementwise(node) or is_row_view(node) or _is_row(node)):
                self.spans[node] = spans
        self.readers = [node for node in graph.nodes if self._is_reader(node)]
        """Slices, sums and assembled values: what is to be replaced, in order."""

    def _is_reader(self, node: fx.Node) -> bool:
        if node in self.assembled:
            return any(source in self.spans for source in node.all_input_nodes)
        return (is_slice(node) or is_sum(node)) and self._is_made_in_parts(turned(source_of(node)))

    def _is_made_in_parts(self, node: fx.Node) -> bool:
        while node in self.spans and is_row_view(node):
            node = source_of(node)
        return node in self.spans

    def _find_spans(self, node: fx.Node) -> frozenset[Span]:
        """Return the parts of a value that are read; none where somebody reads it otherwise."""
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
        if turned(user) is node and turned(user) is not user:
            return frozenset(map(span_of, user.users)) if all(map(is_slice, user.users)) else NO_SPANS
        if is_slice(user):
            return frozenset([span_of(user)])
        if is_row_view(user) or (is_elementwise(user) and fake_value(user).shape == fake_value(node).shape):
            return self.spans.get(user) or self.assembled.get(user, NO_SPANS)
        return NO_SPANS


def _find_assembled(graph: fx.Graph) -> Iterator[tuple[fx.Node, frozenset[Span]]]:
    """Yield what products with tiles read as a whole, where all that it is made from serves nothing else."""
    place = positions(graph)
    made: dict[fx.Node, set[fx.Node]] = {}
    borders: dict[fx.Node, set[frozenset[Span]]] = {}
    for node in graph.nodes:
        if _is_row(node):
            result, between = _follow(node, place)
            made.setdefault(result, set()).update(between)
            borders.setdefault(result, set()).add(frozenset((start, end) for _, start, end in parts_of_cat(node)[1]))
    for result, between in made.items():
        operands = {source for node in between for source in node.all_input_nodes if _is_like(source, node)}
        first, *others = borders[result]
        if operands - {result} <= between and not others and len(first) <= MOST_PARTS and _is_factor(result):
            yield result, first


def _follow(row: fx.Node, place: dict[fx.Node, int]) -> tuple[fx.Node, set[fx.Node]]:
    """Return the last element-wise result through which goes all that is made of a row of products, and what lies between."""
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
    """Say whether a node puts products with tiles together along the last dimension."""
    if node.target is not aten.cat.default or len(node.args) < 2 or node.args[1] not in (-1, fake_value(node).dim() - 1):
        return False
    return all(part.target in _PRODUCTS and any(map(is_of_tile, part.all_input_nodes)) for part in node.all_input_nodes)


def _is_factor(node: fx.Node) -> bool:
    """Say whether a product with a tile reads a value."""
    return any(
        _is_factor(user) if is_row_view(user) else user.target in _PRODUCTS and any(map(is_of_tile, user.all_input_nodes))
        for user in node.users
    )


def _is_like(source: fx.Node, node: fx.Node) -> bool:
    """Say whether a node's input is of its result's sizes."""
    value = source.meta["val"]
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == fake_value(node).shape


def source_of(node: fx.Node) -> fx.Node:
    """Return a node's first argument, which is a value."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def turned(node: fx.Node) -> fx.Node:
    """Return the matrix of which a value is the transpose; the value itself where it is none."""
    if node.target not in MOVES or fake_value(node).dim() != 2:
        return node
    return node if node.target is aten.permute.default and node.args[1] == [0, 1] else source_of(node)


def is_slice(node: fx.Node) -> bool:
    """Say whether a node takes, for products, a stretch of its input's last dimension, or of its transpose's."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4 or not all(isinstance(value, int) for value in node.args[1:]):
        return False
    source, (dim, start, end) = source_of(node), node.args[1:]
    last = 0 if turned(source) is not source else fake_value(source).dim() - 1
    if dim != last or not 0 <= start < end <= fake_value(source).shape[last]:  # type: ignore[operator]
        return False
    readers = [reader for user in node.users for reader in (user.users if turned(user) is not user else [user])]
    return all(reader.target in _PRODUCTS for reader in readers)


def span_of(cut: fx.Node) -> Span:
    """Return which stretch a slice takes."""
    start, end = cut.args[2:4]
    assert isinstance(start, int)
    assert isinstance(end, int)
    return start, end


def is_sum(node: fx.Node) -> bool:
    """Say whether a node is its input's sum over all but the last dimension."""
    if node.target is not aten.sum.dim_IntList:
        return False
    rank, dims = fake_value(source_of(node)).dim(), node.args[1]
    return isinstance(dims, (list, tuple)) and {int(dim) % rank for dim in dims} == {*range(rank - 1)}  # type: ignore[arg-type]


def is_row_view(node: fx.Node) -> bool:
    """Say whether a node has its input's elements, at most its dimensions but for the last one in another arrangement."""
    if node.target in ALIASES:
        return True
    sizes = node.args[1] if node.target in VIEWS else None
    return (
        isinstance(sizes, (list, tuple)) and bool(sizes) and fake_value(node).shape[-1] == fake_value(source_of(node)).shape[-1]
    )


def part_of_row(row: fx.Node, span: Span) -> fx.Node | None:
    """Return the product that is a stretch of those put together; None where there is none."""
    return next((part for part, *place in parts_of_cat(row)[1] if tuple(place) == span), None)
