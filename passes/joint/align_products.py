"""Pad products of 16-bit matrices on a GPU whose rows don't begin at multiples of 16 bytes, which take three times as long."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_compile.ir import ops
from zinf_compile.ir.formats import format_of
from zinf_compile.passes.graph.alias import MOVES, aliased_inputs, derived_from
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import fake_value, parameters, recompute

aten = torch.ops.aten

ROW_BYTES = 16
"""What the fast kernels of cuBLAS want the distance between two rows to be a multiple of."""

WORTH = 128
"""Multiplications for each element of the three matrices from which on padding is worth the copies that it may need."""

_FACTORS: dict[Any, int] = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
"""Products, with the position of their first factor."""


def align_products(gm: fx.GraphModule, *, devices: Collection[str] = ("cuda",), worth: int = WORTH) -> fx.GraphModule:
    """Pad the matrices of products whose rows are not aligned with zeros, and take the part of the result that was asked for.

        before:  t = t(w);  y = mm(x, t);  a = relu(y)
        after:   pad = constant_pad_nd(w, [0, 0, 0, 5]);  pad_t = permute(pad, [1, 0]);  product = mm(x, pad_t)
                 y = slice(product, 1, 0, 11);  a = relu(y)

    Runs on a joint graph before partitioning, once views of parameters are marked, or on an inference graph. Inductor writes the
    zeros with the operator that makes the matrix, where it compiles both. A product stays as it is where the graph returns its
    result, which has other strides then; where its sizes are only known at run time; and with a tile of a parameter.

    Note: the vocabulary of GPT-2
        50,257 is odd. For 8,192 tokens of width 1,024 in bf16 two of the three products of the last layer took 8.7 and 6.7 ms on
        an H100, of 69 ms of all kernels of a step. Padded they take a millisecond each, as where Inductor pads them.
    """
    tiles = [node for node in gm.graph.nodes if node.target is ops.tile]
    apart = {*tiles, *derived_from(tiles)}
    units = [node for node, _ in parameters(gm.graph)]
    of_units = {*units, *derived_from(units)}
    padded = _Padded(of_units)
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _FACTORS or apart & set(node.all_input_nodes):
            continue
        sizes = _Sizes.of(node, devices)
        if sizes is not None and sizes.pads and sizes.intensity >= worth:
            _pad(node, sizes, padded)
    if padded.made:
        gm.graph.eliminate_dead_code()
    return gm


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Sizes of a product [m, k] x [k, n], and how many zeros each gets."""

    m: int
    k: int
    n: int
    pads: dict[str, int]

    @classmethod
    def of(cls, node: fx.Node, devices: Collection[str]) -> _Sizes | None:
        """Return those of a product of 16-bit matrices on one of the devices, all known; None for any other.

        Also for batches that share a matrix: padded, each would have its own.
        """
        first, second, result = (fake_value(n) for n in (*_factors(node), node))
        if first.device.type not in devices or first.dtype not in (torch.bfloat16, torch.float16) or second.dtype != first.dtype:
            return None
        numbers = (*first.shape, *first.stride(), *second.shape, *second.stride(), *result.shape)
        if not all(isinstance(number, int) for number in numbers) or _is_expanded(first) or _is_expanded(second):
            return None
        (m, k), n = first.shape[-2:], second.shape[-1]
        step = format_of(first.dtype).numel_within(ROW_BYTES)
        named = {"m": m, "k": k, "n": n}
        long = {_rows(first, "k", "m"), _rows(second, "n", "k"), "n"}
        return cls(m, k, n, {name: -size % step for name, size in named.items() if name in long and size % step and size > step})

    @property
    def intensity(self) -> float:
        """Multiplications for each element."""
        elements = self.m * self.k + self.k * self.n + self.m * self.n
        return self.m * self.k * self.n / elements if elements else 0.0


class _Padded:
    """Padded matrices, each made once in the forward, once in the backward, and once in each checkpointed region."""

    def __init__(self, of_units: set[fx.Node]) -> None:
        self._of_units = of_units
        self.made: dict[tuple[Any, ...], fx.Node] = {}
        """By what it is made of, the stage, and what was done to it."""

    def matrix(self, build: NodeBuilder, source: fx.Node, rows: int, columns: int, stage: tuple[Any, ...]) -> fx.Node:
        """Return a matrix with more rows and columns, in the order in memory in which it is."""
        if not rows and not columns:
            return source
        turned = _is_turned(fake_value(source))
        base, swapped = _turned_from(source) if turned else None, _swapped(fake_value(source).dim())
        if turned:
            rows, columns = columns, rows
            base = self._once(build, source, stage, "turned", aten.permute.default, swapped) if base is None else base
        padded = self._once(build, base or source, stage, (rows, columns), aten.constant_pad_nd.default, [0, columns, 0, rows])
        return self._once(build, padded, stage, "back", aten.permute.default, swapped) if turned else padded

    def bias(self, build: NodeBuilder, source: fx.Node, sizes: _Sizes, stage: tuple[Any, ...]) -> fx.Node:
        """Return what is added to a product, with as many rows and columns as that gets; what is broadcast stays so."""
        shape = fake_value(source).shape
        columns = sizes.pads.get("n", 0) if shape and shape[-1] != 1 else 0
        rows = sizes.pads.get("m", 0) if len(shape) > 1 and shape[-2] != 1 else 0
        if not rows and not columns:
            return source
        pads = [0, columns, 0, rows] if rows else [0, columns]
        return self._once(build, source, stage, (rows, columns), aten.constant_pad_nd.default, pads)

    def _once(self, build: NodeBuilder, source: fx.Node, stage: tuple[Any, ...], key: object, target: Any, *args: Any) -> fx.Node:
        made = self.made.get((source, stage, key))
        if made is None:
            made = self.made[source, stage, key] = build(target, source, *args)
            if source in self._of_units:
                self._of_units.add(made)
            if made in self._of_units:
                recompute(made)  # what is made of a gathered unit is not saved for the backward
            else:
                _leave_open(made)
        return made


def _pad(node: fx.Node, sizes: _Sizes, padded: _Padded) -> None:
    place, pads = _FACTORS[node.target], sizes.pads
    stage = tuple(node.meta.get(key) for key in ("partitioner_tag", "recompute", "ac_graph_id"))
    m, k, n = (pads.get(name, 0) for name in "mkn")
    build = NodeBuilder(node.graph, node)
    first, second = _factors(node)
    args = [padded.matrix(build, first, m, k, stage), padded.matrix(build, second, k, n, stage), *node.args[place + 2 :]]
    if place:
        args.insert(0, padded.bias(build, _node(node.args[0]), sizes, stage))
    product = result = build(node.target, *args, kwargs=node.kwargs)
    dims = fake_value(product).dim()
    for pad, dim, size in ((m, dims - 2, sizes.m), (n, dims - 1, sizes.n)):
        if pad:
            result = build(aten.slice.Tensor, result, dim, 0, size)
            _leave_open(result)
    changed = _strides_behind(node, fake_value(result))
    if changed is None:
        return  # what was made is dead code
    for user, value in changed.items():
        user.meta["val"] = value
    node.replace_all_uses_with(result)


def _leave_open(node: fx.Node) -> None:
    """Let the partitioner decide about what a product needs that is to be saved; what runs again does as the product does."""
    if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
        del node.meta["recompute"]


def _strides_behind(node: fx.Node, value: torch.Tensor) -> dict[fx.Node, torch.Tensor] | None:
    """Return the values behind a node that are laid out in another way if its value is; None where that can't be.

    It can't where the graph returns one of them, where an operator refuses it, reads memory by addresses, or is not PyTorch's.
    """
    if fake_value(node).stride() == value.stride():
        return {}
    changed: dict[fx.Node, torch.Tensor] = {}
    values, shared = {node: value}, {node}
    mode = value.fake_mode  # type: ignore[attr-defined]
    user = node.next
    while user.op != "root":
        if shared.intersection(user.all_input_nodes):
            found = None if _reads_addresses(user) else _evaluated(user, values, mode)
            if found is None:
                return None
            if found.stride() != fake_value(user).stride():
                changed[user] = values[user] = found
                shared.add(user)
            elif shared.intersection(aliased_inputs(user)):
                shared.add(user)
        user = user.next
    return changed


def _reads_addresses(node: fx.Node) -> bool:
    """Say whether an operator may depend on where its inputs' elements lie, other than by their strides."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return True
    return node.target.namespace not in ("aten", "prims") or "as_strided" in node.target.name()


def _evaluated(node: fx.Node, values: Mapping[fx.Node, torch.Tensor], mode: Any) -> torch.Tensor | None:
    """Return the fake result of an operator, given `values` in the place of some of its inputs'; None where it has none."""
    known = node.meta.get("val")
    if not isinstance(known, torch.Tensor) or any(not isinstance(stride, int) for stride in known.stride()):
        return None
    if any("val" not in source.meta for source in node.all_input_nodes):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values.get(n, n.meta["val"]))
    try:
        with mode:
            found = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # whatever the operator says: the product stays as it is
        return None
    return found if isinstance(found, torch.Tensor) else None


def _is_expanded(matrix: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(matrix.shape, matrix.stride(), strict=True))


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    place = _FACTORS[node.target]
    return _node(node.args[place]), _node(node.args[place + 1])


def _node(argument: object) -> fx.Node:
    assert isinstance(argument, fx.Node), "products are of tensors"
    return argument


def _is_turned(matrix: torch.Tensor) -> bool:
    """Say whether a matrix lies in memory column by column."""
    return matrix.stride(-1) != 1 and matrix.stride(-2) == 1


def _rows(matrix: torch.Tensor, row: str, column: str) -> str:
    """Return which of two sizes is the length of what lies together in memory."""
    return column if _is_turned(matrix) else row


def _turned_from(source: fx.Node) -> fx.Node | None:
    """Return the matrix of which another is the transposed, if an operator says so."""
    if source.op != "call_function" or source.target not in MOVES:
        return None
    dims = fake_value(source).dim()
    order = list(range(dims))
    if source.target is aten.permute.default:
        given: Any = source.args[1]
        order = [dim % dims for dim in given]
    else:
        one, other = (-1, -2) if source.target is aten.t.default else source.args[1:3]
        order[one], order[other] = order[other], order[one]  # type: ignore[index]
    return _node(source.args[0]) if dims > 1 and order == _swapped(dims) else None


def _swapped(dims: int) -> list[int]:
    return [*range(dims - 2), dims - 1, dims - 2]
