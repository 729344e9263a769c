"""The graph of one slice, and the loop over it: operators of a stretch repeated on the rows of a slice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zinf_compile.ir.formats import is_narrower
from zinf_compile.passes.graph.build_nodes import new_node
from zinf_compile.passes.graph.node_facts import fake_mode_of, fake_value
from zinf_compile.passes.graph.region_structure import structure
from zinf_compile.passes.graph.token_loop import RowsIn, SumOut, TokenLoop

from ._row_ops import SAME_ORDER, SIZED, RowOp, RowOps, same_size
from ._stretches import LeftWholeError

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class LoopPlan:
    """A loop, with its inputs and results in the graph."""

    loop: TokenLoop
    rows: tuple[fx.Node, ...]
    whole: tuple[fx.Node, ...]
    outs: tuple[fx.Node, ...]


class LoopMaker:
    """Makes the loops of a graph. Equal slices share one graph."""

    def __init__(self) -> None:
        self._bodies: dict[tuple[Any, ...], fx.GraphModule] = {}

    def make(self, ops: RowOps, nodes: Sequence[fx.Node], outs: Sequence[fx.Node], tile: int) -> LoopPlan:
        """Return the loop that computes `nodes`, in their order, for `outs`; raise `LeftWholeError` where there is none."""
        inside = set(nodes)
        found = [ops.of(node) for node in nodes]
        known = [op for op in found if op is not None]
        rows = tuple(dict.fromkeys(source for op in known for source in op.rows if source not in inside))
        whole = tuple(dict.fromkeys(source for op in known for source in op.whole))
        if strange := [n for n in (*rows, *whole) if not isinstance(n.meta.get("val"), torch.Tensor)]:
            raise LeftWholeError(f"{strange[0].name} is no tensor")
        if strange := [n for n in whole if n in inside or any(not isinstance(size, int) for size in fake_value(n).shape)]:
            raise LeftWholeError(f"{strange[0].name} is read as a whole")
        forms = [RowsIn(lead=ops.lead(fake_value(node).shape)) for node in rows]
        results = [self._result(ops, node, rows, forms) for node in outs]
        sizes: dict[int, int | None] = {tile: tile}
        if not isinstance(ops.tokens, int):
            sizes[0] = None
        elif left := ops.tokens % tile:
            sizes[left] = left
        bodies = {key: self._body(ops, known, rows, whole, outs, results, size) for key, size in sizes.items()}
        return LoopPlan(TokenLoop(tile=tile, rows=forms, outs=results, bodies=bodies), rows, whole, tuple(outs))

    def _result(self, ops: RowOps, node: fx.Node, rows: Sequence[fx.Node], forms: Sequence[RowsIn]) -> RowsIn | SumOut:
        op, value = ops.of(node), fake_value(node)
        assert op is not None
        if op.sums:
            narrow = is_narrower(value.dtype, torch.float32)
            summed_in = torch.float32 if narrow else value.dtype
            return SumOut(tuple(value.shape), value.dtype, summed_in, inside=op.product and not narrow)
        lead = ops.lead(value.shape)
        sizes, width = value.shape[:lead], tuple(value.shape[lead:])
        if all(isinstance(size, int) for size in sizes):
            return RowsIn(lead, sizes=tuple(sizes), width=width, dtype=value.dtype)
        for number, (source, form) in enumerate(zip(rows, forms, strict=True)):
            if form.lead == lead and all(map(same_size, fake_value(source).shape, sizes)):
                return RowsIn(lead, like=number, width=width, dtype=value.dtype)
        if lead == 1:
            return RowsIn(lead, width=width, dtype=value.dtype)
        raise LeftWholeError(f"the sizes of {node.name} are known at run time only")

    def _body(
        self,
        ops: RowOps,
        known: Sequence[RowOp],
        rows: Sequence[fx.Node],
        whole: Sequence[fx.Node],
        outs: Sequence[fx.Node],
        results: Sequence[RowsIn | SumOut],
        size: int | None,
    ) -> fx.GraphModule:
        body = _Body(ops, fake_mode_of((*rows, *whole)[0]))
        body.begin(rows, whole, [r for r in results if isinstance(r, SumOut) and r.inside], size)
        totals = [node for node, result in zip(outs, results, strict=True) if isinstance(result, SumOut) and result.inside]
        for op in known:
            body.repeat(op, totals)
        gm = body.finish(outs)
        return self._bodies.setdefault((size, structure(gm)), gm)


class _Body:
    """The graph of a slice while it is made."""

    def __init__(self, ops: RowOps, mode: Any) -> None:
        self._ops = ops
        self._mode = mode
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._sums: list[fx.Node] = []
        self._rows: Any = 0

    def begin(self, rows: Sequence[fx.Node], whole: Sequence[fx.Node], sums: Sequence[SumOut], size: int | None) -> None:
        """Write the inputs."""
        for number, node in enumerate(rows):
            self._copies[node] = self._graph.placeholder(f"rows_{number}")
        for number, node in enumerate(whole):
            self._copies[node] = self._graph.placeholder(f"whole_{number}")
            self._copies[node].meta["val"] = node.meta["val"]
        self._sums = [self._graph.placeholder(f"sum_{number}") for number in range(len(sums))]
        self._rows = size
        if size is None:
            self._rows = self._graph.placeholder("size")
            self._rows.meta["val"] = 8  # any number of rows
        for node in rows:
            value = fake_value(node)
            shape = [each.meta["val"] if isinstance(each, fx.Node) else each for each in self._shape(node)]
            self._copies[node].meta["val"] = self._empty(shape, value)
        for total, made in zip(self._sums, sums, strict=True):
            total.meta["val"] = self._empty(made.shape, fake_value((*rows, *whole)[0]), made.summed_in)

    def repeat(self, op: RowOp, totals: Sequence[fx.Node]) -> None:
        """Write an operator; `totals` are the products that are added to a sum so far, the inputs of these in order."""
        node = op.node
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._copies.get(n, n))
        if op.product and op.sums:
            turned = node.args[0]
            assert isinstance(turned, fx.Node)
            a = self._emit(turned.target, (self._copies[op.rows[0]], *turned.args[1:]))
            args = (a, args[1])
            if node in totals:
                self._copies[node] = self._emit(aten.addmm_.default, (self._sums[totals.index(node)], *args))
                return
        elif node.target in SAME_ORDER:
            self._copies[node] = self._view(self._copies[op.rows[0]], self._shape(node))
            return
        elif node.target in SIZED:
            place = SIZED[node.target]
            args = (*args[:place], self._shape(node), *args[place + 1 :])
        self._copies[node] = self._emit(node.target, args, kwargs)

    def finish(self, outs: Sequence[fx.Node]) -> fx.GraphModule:
        """Return the graph, with the slice's part of each result."""
        self._graph.output(tuple(self._copies[node] for node in outs))
        self._graph.eliminate_dead_code()
        return fx.GraphModule(torch.nn.Module(), self._graph)

    def _shape(self, node: fx.Node) -> list[Any]:
        """Return the sizes of a slice's part of a value with rows."""
        shape = fake_value(node).shape
        lead = self._ops.lead(shape)
        return [*[1] * (lead - 1), self._rows, *shape[lead:]]

    def _view(self, source: fx.Node, shape: list[Any]) -> fx.Node:
        try:
            return self._emit(aten.view.default, (source, shape))
        except RuntimeError:  # its strides forbid it
            self._graph.erase_node(next(reversed(self._graph.nodes)))
        copy = self._emit(aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
        return self._emit(aten.view.default, (copy, shape))

    def _emit(self, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        name = target.__name__.split(".")[0].strip("_") if hasattr(target, "__name__") else None
        return new_node(self._graph, self._mode, target, args, kwargs or {}, name)

    def _empty(self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        with self._mode:
            return torch.empty(list(shape), dtype=dtype or like.dtype, device=like.device)
