"""Operators that compute each token's row from the same token's rows, and those that sum over all tokens.

`RowOps` reads one from a node and its shapes; `_bodies` repeats it on the rows of a slice. A value has rows if its first
dimensions, its lead, together count the tokens: [tokens, width] and [batch, sequence, width] have the same rows.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx

from zinf_compile.passes.graph.alias import ALIASES, MOVES, VIEWS, is_elementwise
from zinf_compile.passes.graph.node_facts import fake_value

aten = torch.ops.aten

Size = int | torch.SymInt

SAME_ORDER = VIEWS | {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default}
"""Operators that change the shape and keep the order of elements."""

_FILLED = frozenset({aten.full.default})
_FILLED_LIKE = frozenset({aten.zeros_like.default, aten.ones_like.default, aten.full_like.default})
SIZED: Mapping[object, int] = {
    aten.expand.default: 1,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
    aten.full.default: 0,
}
"""Operators that take the sizes of their result, and where."""

_OVER_DIMS: Mapping[object, int] = {
    aten.sum.dim_IntList: 1,
    aten.mean.dim: 1,
    aten.amax.default: 1,
    aten.amin.default: 1,
    aten.var.correction: 1,
    aten.var_mean.correction: 1,
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
    aten.linalg_vector_norm.default: 2,
    aten.slice.Tensor: 1,
    aten.select.int: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.unsafe_split.Tensor: 2,
    aten.unsafe_split_with_sizes.default: 2,
    aten.slice_backward.default: 2,
    aten.select_backward.default: 2,
    aten.cat.default: 1,
    aten.permute.default: 1,
    aten.transpose.int: 1,
}
"""Operators that work along dimensions, and the position of these."""

_NORMS: Mapping[object, tuple[int, ...]] = {
    aten.native_layer_norm.default: (0,),
    aten.native_layer_norm_backward.default: (0, 1, 3, 4),
}
"""Norms over the last dimensions, the second or third argument, and their arguments that have rows."""

REDUCTIONS = frozenset(
    {aten.sum.dim_IntList, aten.mean.dim, aten.var.correction, aten.var_mean.correction, aten.linalg_vector_norm.default}
) | frozenset({aten.native_layer_norm.default})
"""Operators that begin a norm."""

_SUMMED_RESULTS: Mapping[object, frozenset[object]] = {aten.native_layer_norm_backward.default: frozenset({1, 2})}
"""Those of several results that are sums over all tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowOp:
    """One operator, read for a number of tokens."""

    node: fx.Node
    rows: tuple[fx.Node, ...]
    """Inputs of which it takes the token's row."""
    whole: tuple[fx.Node, ...] = ()
    """Inputs that it takes whole for each token."""
    sums: bool = False
    """Whether its result is a sum over all tokens."""
    product: bool = False
    """Whether it is a matrix product."""


class RowOps:
    """The row operators of a graph for one number of tokens."""

    def __init__(self, tokens: Size, whole: Set[fx.Node]) -> None:
        self.tokens = tokens
        self._whole = whole
        """Parameters and values derived from them by views and casts."""
        self._known: dict[fx.Node, RowOp | None] = {}

    def of(self, node: fx.Node) -> RowOp | None:
        """Return the operator; None for one that isn't of rows."""
        if node not in self._known:
            self._known[node] = None if node.op != "call_function" or node in self._whole else self._read(node)
        return self._known[node]

    def lead(self, shape: Sequence[Size]) -> int:
        """Return how many of the first dimensions count the tokens; 0 for a shape without rows."""
        count: Size = 1
        for number, size in enumerate(shape, 1):
            count = size if isinstance(count, int) and count == 1 else count * size
            if same_size(count, self.tokens):
                return number if all(isinstance(other, int) for other in shape[number:]) else 0
        return 0

    def width(self, node: fx.Node) -> int:
        """Return the elements of a value's row, the most of several results; 0 for one without rows."""
        value = node.meta.get("val")
        widths = [0]
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor) and (lead := self.lead(each.shape)):
                widths.append(math.prod(each.shape[lead:]))
        return max(widths)

    def _read(self, node: fx.Node) -> RowOp | None:
        target = node.target
        if target is operator.getitem:
            return self._item(node)
        sizes = [n for n in node.all_input_nodes if not isinstance(n.meta.get("val"), (torch.Tensor, tuple, list))]
        if sizes and target not in SAME_ORDER and target not in SIZED:  # where they are those of the result
            return None
        rule = self._rule(node)
        return None if rule is None else rule(node)

    def _rule(self, node: fx.Node) -> Callable[[fx.Node], RowOp | None] | None:
        target = node.target
        if target in (aten.mm.default, aten.addmm.default):
            return self._product
        if target in SAME_ORDER or target in ALIASES or target in _FILLED_LIKE:
            return self._same_order
        if target in _NORMS:
            return self._norm
        if target in _OVER_DIMS:
            return self._over_dims
        if target is aten.t.default:
            return None
        if is_elementwise(node) or target is aten.expand.default or target in _FILLED:
            return self._elementwise
        return None

    def _item(self, node: fx.Node) -> RowOp | None:
        source, number = node.args
        if not isinstance(source, fx.Node) or self.of(source) is None or not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        sums = number in _SUMMED_RESULTS.get(source.target, ())
        return RowOp(node, (source,), sums=sums) if sums or self.lead(fake_value(node).shape) else None

    def _product(self, node: fx.Node) -> RowOp | None:
        *bias, a, b = node.args
        assert isinstance(a, fx.Node)
        assert isinstance(b, fx.Node)
        if not bias and a.target in MOVES and a not in self._whole and b not in self._whole:
            source = a.args[0]
            assert isinstance(source, fx.Node)
            if all(same_size(fake_value(n).shape[0], self.tokens) for n in (source, b)):
                return RowOp(node, (source, b), sums=True, product=True)
        if not same_size(fake_value(a).shape[0], self.tokens) or a in self._whole or not _is_static(fake_value(b)):
            return None
        rows, whole = (a,), (b,)
        if bias:
            found = self._broadcast(bias[0], fake_value(node).shape, 1)  # type: ignore[arg-type]
            if found is None:
                return None
            rows, whole = ((*rows, bias[0]), whole) if found else (rows, (bias[0], *whole))  # type: ignore[assignment]
        return RowOp(node, rows, whole, product=True)

    def _same_order(self, node: fx.Node) -> RowOp | None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        found = self.lead(fake_value(source).shape) and self.lead(fake_value(node).shape)
        return RowOp(node, (source,)) if found and source not in self._whole else None

    def _norm(self, node: fx.Node) -> RowOp | None:
        places = _NORMS[node.target]
        source, over = node.args[places[-1] if len(places) == 1 else 1], node.args[1 if len(places) == 1 else 2]
        assert isinstance(source, fx.Node)
        assert isinstance(over, (list, tuple))
        lead = self.lead(fake_value(source).shape)
        if not lead or len(over) > fake_value(source).dim() - lead:
            return None
        rows = tuple(node.args[place] for place in places)
        whole = tuple(n for n in node.all_input_nodes if n not in rows)
        return RowOp(node, rows, whole)  # type: ignore[arg-type]

    def _over_dims(self, node: fx.Node) -> RowOp | None:
        sources = [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
        ranks = {fake_value(n).dim() for n in sources}
        leads = {self.lead(fake_value(n).shape) for n in sources}
        if any(n in self._whole for n in sources) or len(leads) != 1 or not all(leads):
            return None
        (lead,) = leads
        place = _OVER_DIMS[node.target]
        if node.target in SIZED:
            ranks = {fake_value(node).dim()}
        if len(ranks) != 1:
            return None
        (rank,) = ranks
        dims = _dims(node, place)
        if dims is None:
            return None
        at = [dim % rank for dim in dims]
        if node.target is aten.permute.default:
            return RowOp(node, tuple(sources)) if at[:lead] == [*range(lead)] else None
        if node.target is aten.transpose.int:
            at = [dim % rank for dim in node.args[1:3]]  # type: ignore[operator, misc]
        if all(dim >= lead for dim in at):
            return RowOp(node, tuple(sources))
        if node.target is aten.sum.dim_IntList and {*range(lead)} <= {*at}:
            return RowOp(node, tuple(sources), sums=True)
        return None

    def _elementwise(self, node: fx.Node) -> RowOp | None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not (lead := self.lead(value.shape)):
            return None
        rows: list[fx.Node] = []
        whole: list[fx.Node] = []
        for source in node.all_input_nodes:
            if not isinstance(source.meta.get("val"), torch.Tensor):
                continue  # a size
            found = self._broadcast(source, value.shape, lead)
            if found is None:
                return None
            (rows if found else whole).append(source)
        return RowOp(node, tuple(rows), tuple(whole))

    def _broadcast(self, source: fx.Node, shape: Sequence[Size], lead: int) -> bool | None:
        """Return whether an element-wise operator reads a token's row of an input; None if its rows are others.

        An input without rows is read whole. Dimensions are aligned at their ends.
        """
        own = fake_value(source).shape
        missing = len(shape) - len(own)
        if missing >= lead:
            return False if _is_static(fake_value(source)) else None
        mine = own[: lead - missing]
        if all(isinstance(size, int) and size == 1 for size in mine):
            return False if _is_static(fake_value(source)) else None
        alike = all(map(same_size, mine, shape[missing:lead]))
        if alike and all(same_size(size, 1) for size in shape[:missing]) and source not in self._whole:
            return True
        return None


def same_size(one: Size, other: Size) -> bool:
    """Return whether two sizes are equal whatever the sizes known at run time are."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return bool(_expression(one) == _expression(other))


def _expression(size: Size) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _is_static(value: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in value.shape)


def _dims(node: fx.Node, place: int) -> list[int] | None:
    """Return the dimensions that an operator works along; None if it works along all."""
    given = node.args[place] if len(node.args) > place else node.kwargs.get("dim")
    if given is None:
        return [0] if node.target in (aten.slice.Tensor, aten.cat.default, aten.split.Tensor) else None
    dims = [dim for dim in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(dim, int)]
    return dims if dims and (not isinstance(given, (list, tuple)) or len(dims) == len(given)) else None
