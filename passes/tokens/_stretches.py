"""Stretches of row operators that make wide values and return narrow ones, such as an MLP, and what reads them in the backward.

`tile_tokens` rewrites them. Nothing here depends on the number of tokens: ranks with other batches find the same stretches.

Note: what a stretch is
    It begins with a matrix product that widens its rows. Values wider than that product's input, which row operators alone read,
    belong to it with all these readers. So do the operators between two of its own, and a norm in front of it: the norm's input
    is saved in place of its result. In the backward it is what reads the values inside, what makes and reads wide gradients, and
    what lies between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from zinf_compile.ir.formats import format_of
from zinf_compile.passes.graph.alias import MOVES, derived_from, is_cast
from zinf_compile.passes.graph.node_facts import fake_value, is_backward, parameters, slot_of

from ._row_ops import REDUCTIONS, SAME_ORDER, RowOp, RowOps, Size, same_size

aten = torch.ops.aten

_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})

_MOST_STEPS = 64
"""Operators of a norm, at most."""


class LeftWholeError(Exception):
    """The stretch can't be computed a slice at a time. The message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """Operators that a loop computes, in order."""

    ops: RowOps
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    again: tuple[fx.Node, ...]
    """Those of the forward that the backward computes again."""
    row_bytes: int
    """Of the widest value of one token."""


class Stretches:
    """Finds the stretches of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        roots = [node for node, _ in parameters(graph)]
        self._whole = {*roots, *derived_from(roots)}
        self._taken: set[fx.Node] = set()
        self.skipped: list[tuple[fx.Node, str]] = []
        """Products whose stretch stays whole, and why."""

    def find(self) -> list[Stretch]:
        """Return the stretches, none of which share an operator."""
        found = []
        for tokens, products in self._widening():
            ops = RowOps(tokens, self._whole)
            for product in sorted(products, key=lambda node: -_inner(node)):
                if product in self._taken:
                    continue
                try:
                    stretch = _Finder(ops, product, self._taken).find()
                except LeftWholeError as error:
                    self.skipped.append((product, str(error)))
                    continue
                if stretch is not None:
                    self._taken.update(stretch.forward, stretch.backward)
                    found.append(stretch)
        return found

    def _widening(self) -> list[tuple[Size, list[fx.Node]]]:
        """Return the forward's products with weights that widen their rows, by the number of rows."""
        found: list[tuple[Size, list[fx.Node]]] = []
        for node in self._graph.nodes:
            if node.target not in _PRODUCTS or is_backward(node) or node.args[-1] not in self._whole:
                continue
            tokens, width = fake_value(node).shape
            if not isinstance(width, int) or width <= _inner(node) or _is_unknown(tokens):
                continue
            for known, products in found:
                if same_size(known, tokens):
                    products.append(node)
                    break
            else:
                found.append((tokens, [node]))
        return found


class _Finder:
    """Finds the stretch of one product."""

    def __init__(self, ops: RowOps, product: fx.Node, taken: set[fx.Node]) -> None:
        self._ops = ops
        self._product = product
        self._taken = taken
        self._wide = _inner(product)
        self._inside: set[fx.Node] = {product}

    def find(self) -> Stretch | None:
        """Return the stretch; None if there is nothing to gain."""
        self._grow()
        self._inside |= self._between(self._inside)
        self._inside |= self._kept_for_backward(self._inside)
        self._trim()
        if not self._is_worth():
            return None
        self._inside |= self._norm()
        forward = self._inside
        for node in sorted(forward):
            for unit in self._units(node):
                if (slot := slot_of(unit)) is not None and slot.tiles:
                    raise LeftWholeError(f"{slot.name} is in tiles")
        inner = {node for node in forward if all(user in forward or is_backward(user) for user in node.users)}
        backward = self._backward(inner)
        again = self._again(backward, inner)
        values = [node for node in (*forward, *backward) if not self._op(node).sums]
        row_bytes = max(self._row_bytes(node) for node in values)
        return Stretch(self._ops, tuple(sorted(forward)), tuple(sorted(backward)), tuple(sorted(again)), row_bytes)

    def _grow(self) -> None:
        waiting = [self._product]
        while waiting:
            node = waiting.pop()
            fresh = [user for user in node.users if not is_backward(user)] if self._is_inner(node) or _has_parts(node) else []
            fresh += [s for s in self._op(node).rows if not is_backward(s) and (self._is_inner(s) or _has_parts(s))]
            fresh = [each for each in dict.fromkeys(fresh) if each not in self._inside]
            self._inside.update(fresh)
            waiting += fresh

    def _is_inner(self, node: fx.Node) -> bool:
        """Return whether a value of the forward is wide and row operators alone read it there."""
        op = self._ops.of(node)
        if op is None or op.sums or node in self._taken or self._ops.width(node) <= self._wide:
            return False
        return all(is_backward(user) or self._takes_rows(user, node) for user in node.users)

    def _takes_rows(self, user: fx.Node, node: fx.Node) -> bool:
        op = self._ops.of(user)
        return op is not None and not op.sums and node in op.rows and node not in op.whole and user not in self._taken

    def _between(self, inside: set[fx.Node]) -> set[fx.Node]:
        """Return the operators between two of a set."""
        behind: set[fx.Node] = set()
        last = max(inside)
        node = min(inside)
        order = []
        while node is not last:
            order.append(node)
            if node not in inside and any(source in inside or source in behind for source in node.all_input_nodes):
                behind.add(node)
            node = node.next
        found: set[fx.Node] = set()
        for node in reversed(order):
            if node in behind and any(user in inside or user in found for user in node.users):
                found.add(node)
        for node in found:
            op = self._ops.of(node)
            if not self._is_turned(node) and (op is None or op.sums or node in self._taken):
                raise LeftWholeError(f"{node.name} reads it, and is read by it, as a whole")
        return {node for node in found if not self._is_turned(node)}

    def _trim(self) -> None:
        """Leave out views at both ends, and what makes a narrower value of a wide one from elsewhere, such as a mask."""
        changed = True
        while changed:
            changed = False
            for node in list(self._inside):
                op = self._op(node)
                first = not any(source in self._inside for source in op.rows)
                last = not any(user in self._inside for user in node.users if not is_backward(user))
                narrows = sum(map(self._row_bytes, op.rows)) > self._row_bytes(node)
                if (node.target in SAME_ORDER and (first or last)) or (first and narrows and not op.product):
                    self._inside.remove(node)
                    changed = True

    def _is_worth(self) -> bool:
        """Return whether the widest value inside is wider than what the stretch returns."""
        given = [node for node in self._inside if any(u not in self._inside and not is_backward(u) for u in node.users)]
        own = [node for node in self._inside if node not in given and node.target not in SAME_ORDER]
        return bool(own) and max(map(self._row_bytes, own)) > sum(map(self._row_bytes, given))

    def _norm(self) -> set[fx.Node]:
        """Return the operators of the norm that makes the only input; empty if there is none."""
        live = {s for node in self._inside for s in self._op(node).rows if s not in self._inside}
        pulled: set[fx.Node] = set()
        reduced = False
        for _ in range(_MOST_STEPS):
            if len(live) == 1 and reduced:
                (source,) = live
                if is_cast(source) and (op := self._ops.of(source)) and self._row_bytes(op.rows[0]) <= self._row_bytes(source):
                    pulled.add(source)
                pulled |= self._kept_for_backward(pulled)
                inside = self._inside | pulled
                alone = all(is_backward(user) or user in inside for node in pulled for user in node.users)
                return pulled if alone else set()
            node = max(live)
            op = self._ops.of(node)
            if op is None or op.sums or op.product or is_backward(node) or node in self._taken or not op.rows:
                return set()
            reduced = reduced or node.target in REDUCTIONS
            pulled.add(node)
            live = (live - {node}) | set(op.rows)
        return set()

    def _kept_for_backward(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return row operators of the forward that read some nodes, and that the backward alone reads."""
        found: set[fx.Node] = set()
        waiting = list(nodes)
        while waiting:
            for user in waiting.pop().users:
                op = None if is_backward(user) or user in found else self._ops.of(user)
                if op is not None and not op.sums and all(map(is_backward, user.users)):
                    found.add(user)
                    waiting.append(user)
        return found

    def _backward(self, inner: set[fx.Node]) -> set[fx.Node]:
        found: set[fx.Node] = set()
        waiting: list[fx.Node] = []

        def add(nodes: Iterable[fx.Node]) -> None:
            fresh = [node for node in dict.fromkeys(nodes) if node not in found]
            found.update(fresh)
            waiting.extend(fresh)

        for node in inner:
            for reader in self._readers(node):
                if not self._reads_rows(reader, node):
                    raise LeftWholeError(f"{reader.name} reads {node.name} as a whole")
                add([reader])
        while waiting:
            while waiting:
                node = waiting.pop()
                if self._is_inner_gradient(node) or _has_parts(node):
                    add(self._readers(node))
                add(s for s in self._op(node).rows if is_backward(s) and (self._is_inner_gradient(s) or _has_parts(s)))
            if found:
                add(self._between(found))
            if found and not waiting:
                add(self._norm_backward(found))
        return found

    def _norm_backward(self, inside: set[fx.Node]) -> set[fx.Node]:
        """Return the operators behind a stretch, up to the gradient of a norm's input; empty if they return more than that."""
        pulled: set[fx.Node] = set()
        for _ in range(_MOST_STEPS):
            behind: dict[fx.Node, set[fx.Node]] = {}
            for node in inside | pulled:
                others = {reader for reader in self._readers(node) if reader not in inside and reader not in pulled}
                if others and not self._op(node).sums:
                    behind[node] = others
            if len(behind) <= 1:
                return pulled
            reader = min(set().union(*behind.values()))
            op = self._ops.of(reader)
            alone = all(self._reads_rows(reader, node) for node, others in behind.items() if reader in others)
            if op is None or not alone or (op.product and not op.sums):
                return set()
            pulled.add(reader)
        return set()

    def _is_inner_gradient(self, node: fx.Node) -> bool:
        op = self._ops.of(node)
        if op is None or op.sums or node in self._taken or self._ops.width(node) <= self._wide:
            return False
        return all(self._reads_rows(reader, node) for reader in self._readers(node))

    def _reads_rows(self, reader: fx.Node, node: fx.Node) -> bool:
        op = self._ops.of(reader)
        return op is not None and node in op.rows and node not in op.whole and reader not in self._taken

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the backward's readers of a value, of its transpose, too."""
        for user in node.users:
            if is_backward(user) or user.op == "output":
                if self._is_turned(user):
                    yield from user.users
                else:
                    yield user

    def _is_turned(self, node: fx.Node) -> bool:
        """Return whether a value is the transpose of rows, which products that sum over tokens read."""
        return node.target in MOVES and self._ops.of(node) is None and node.op == "call_function"

    def _again(self, backward: set[fx.Node], inner: set[fx.Node]) -> set[fx.Node]:
        found: set[fx.Node] = set()
        waiting = [source for node in backward for source in self._op(node).rows if source in inner]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += [source for source in self._op(node).rows if source in self._inside]
        return found

    def _units(self, node: fx.Node) -> Iterator[fx.Node]:
        stack = list(self._op(node).whole)
        while stack:
            source = stack.pop()
            yield source
            stack += source.all_input_nodes

    def _op(self, node: fx.Node) -> RowOp:
        op = self._ops.of(node)
        if op is None:
            raise LeftWholeError(f"{node.name} reads it as a whole")
        return op

    def _row_bytes(self, node: fx.Node) -> int:
        value = node.meta["val"]
        values: Sequence[torch.Tensor] = value if isinstance(value, (list, tuple)) else [value]
        return max(format_of(each.dtype).bytes(self._ops.width(node)) for each in values if isinstance(each, torch.Tensor))


def _inner(product: fx.Node) -> int:
    """Return the elements of the rows that a product reads."""
    size = fake_value(product.args[-1]).shape[0]  # type: ignore[arg-type]
    assert isinstance(size, int), "a weight's sizes are known"
    return size


def _has_parts(node: fx.Node) -> bool:
    """Return whether an operator has several results, which `getitem` takes apart."""
    return isinstance(node.meta.get("val"), (list, tuple))


def _is_unknown(size: Size) -> bool:
    """Return whether a size is known only when the operators before have run, such as the number of an expert's tokens."""
    return isinstance(size, torch.SymInt) and size.node.hint is None
