"""Rewriting of one matched loss: the loop over chunks replaces the forward, its gradients replace the backward's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_compile.ir.compute_ops import class_targets, take_scaled
from zinf_compile.passes.graph.alias import MOVES, is_cast
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import fake_value, mark_region, positions

from ._find import NLL, SUMS, HeadLoss
from ._loop import AllClasses, LoopInputs, LoopResults, Tile, loop_over_chunks
from ._loop_tiles import loop_over_tiles
from ._read_backward import Backward
from ._row_ops import UnknownLogitsError, is_class_sum, replay, rows_back, rows_last
from ._token_values import TokenValues
from ._unit_tangent import at_unit_tangent, find_tangent, inputs_of

aten = torch.ops.aten

MakeTiles = Callable[[NodeBuilder, fx.Node, fx.Node | None], Sequence[Tile]]
"""Returns the tiles of a head, given its weight and bias."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossPlan:
    """Facts of a loss that are decided before the graph changes."""

    targets: fx.Node | None
    ignore_index: int | None
    """Of nll_loss; None if other operators read the targets, which ignore nothing."""
    weights: tuple[fx.Node | None, ...]
    """Distinct class weights of the sums over classes; None for equal weights."""
    tangent: fx.Node | None
    """The scalar that multiplies the gradients for a tangent of 1; None if no gradient is wanted."""


def plan_loss(graph: fx.Graph, loss: HeadLoss) -> LossPlan:
    """Collect the facts of a loss; raise `UnknownLogitsError` if it can't be chunked."""
    logits, terms = loss.logits, loss.backward.terms if loss.backward else ()
    targets = {r.node.args[1 if r.node.target in NLL else 2] for r in loss.readers if r.node.target not in SUMS}
    targets |= {term.targets for term in terms if term.targets is not None}
    ignored = {r.node.args[4] for r in loss.readers if r.node.target in NLL}
    ignored |= {term.nll.args[5] for term in terms if term.nll is not None}
    if len(targets) > 1 or len(ignored) > 1:
        raise UnknownLogitsError("it is compared with several targets", logits.softmax)
    target, ignore_index = next(iter(targets), None), next(iter(ignored), None)
    assert target is None or isinstance(target, fx.Node)
    assert ignore_index is None or isinstance(ignore_index, int)
    if target is not None and (fake_value(target).dtype != torch.int64 or fake_value(target).numel() != logits.tokens):
        raise UnknownLogitsError("its targets are not one class for each token", target)
    weights = [r.weights for r in loss.readers if r.node.target in SUMS]
    weights += [term.weights for term in terms if term.targets is None]
    tangent = None if loss.backward is None else find_tangent(graph, [t.grad for t in terms], _descendants(logits.softmax))
    return LossPlan(targets=target, ignore_index=ignore_index, weights=tuple(dict.fromkeys(weights)), tangent=tangent)


def rewrite_loss(
    graph: fx.Graph, loss: HeadLoss, plan: LossPlan, *, bounds: Sequence[tuple[int, int]], make_tiles: MakeTiles
) -> None:
    """Write the loop in front of the log-softmax and replace the loss and its gradients by the loop's results."""
    logits = loss.logits
    _hoist(graph, loss, plan)
    insert = NodeBuilder(graph, logits.softmax, stage="is_forward")
    dtype = torch.promote_types(fake_value(logits.softmax).dtype, torch.float32)
    rows = replay(insert, logits.rows, logits.hidden, fake_value(logits.hidden).shape[1])
    targets = valid = None
    if plan.targets is not None:
        targets = insert.view(plan.targets, [logits.tokens])
        if plan.ignore_index is not None:
            valid = insert(aten.ne.Scalar, targets, plan.ignore_index, name="valid")
            targets = insert(class_targets, targets, logits.classes, plan.ignore_index, name="targets")
    weights = {w: None if w is None else insert.cast(insert.view(w, [logits.classes]), dtype) for w in plan.weights}
    values = TokenValues(
        insert, tokens=logits.tokens, classes=logits.classes, dtype=dtype, targets=targets, valid=valid
    )  # fmt: skip
    terms = loss.backward.terms if loss.backward else ()
    grads = at_unit_tangent(insert, [t.grad for t in terms], plan.tangent) if plan.tangent else []
    target_grad, other_grads, total_grad = values.coefficients(list(zip(terms, grads, strict=True)), weights)
    loop = LoopInputs(
        hidden=rows_last(insert, rows, logits.axis),
        tiles=make_tiles(insert, logits.weight, logits.bias),
        bounds=bounds,
        pointwise=logits.pointwise,
        class_terms={
            step: insert.view(step.all_input_nodes[1], [logits.classes]) for step in logits.pointwise if is_class_sum(step)
        },
        dtype=dtype,
        targets=targets,
        target_grad=target_grad,
        others=[AllClasses(weights[w], other_grads.get(w)) for w in plan.weights],
        total_grad=total_grad,
        wants=frozenset(n for n in ("hidden", "weight", "bias") if loss.backward and getattr(loss.backward, n) is not None),
    )
    results = (loop_over_chunks if len(loop.tiles) == 1 else loop_over_tiles)(insert, loop)
    insert.first = None
    replaced = _replace_readers(insert, loss, plan, values, results)
    if loss.backward is not None and plan.tangent is not None:
        replaced += _replace_gradients(graph, insert, loss, loss.backward, plan.tangent, results)
    if insert.first is not None:
        mark_region(insert.first)
    _erase_dead(graph, replaced)


def _replace_readers(
    insert: NodeBuilder, loss: HeadLoss, plan: LossPlan, values: TokenValues, results: LoopResults
) -> list[fx.Node]:
    picked = _whole(insert, results.picked)
    sums = [_whole(insert, [part[i] for part in results.sums]) for i in range(len(plan.weights))]
    replaced: list[fx.Node] = []
    for reader in loss.readers:
        if reader.node.target in NLL:
            assert picked is not None
            weights, reduction = reader.node.args[2:4]
            # output 1, the total weight, is read by the backward alone
            for user in [user for user in reader.node.users if user.args[1] == 0]:
                value = values.nll(picked, weights, reduction)  # type: ignore[arg-type]
                _replace(user, _in_form_of(insert, user, value), replaced)
        else:
            whole = sums[plan.weights.index(reader.weights)] if reader.node.target in SUMS else picked
            assert whole is not None
            value = whole if reader.scale == 1 else insert(aten.mul.Tensor, whole, reader.scale)
            _replace(reader.node, _in_form_of(insert, reader.node, value), replaced)
    return replaced


def _replace_gradients(
    graph: fx.Graph, insert: NodeBuilder, loss: HeadLoss, back: Backward, tangent: fx.Node, results: LoopResults
) -> list[fx.Node]:
    replaced: list[fx.Node] = []
    if back.hidden is not None:
        hidden = _whole(insert, results.hidden)
        assert hidden is not None
        hidden = _saved(insert.cast(hidden, fake_value(back.hidden).dtype))
        emit = NodeBuilder(graph, back.hidden, stage="is_backward")
        rows = emit(aten.mul.Tensor, hidden, emit.view(tangent, []))
        rows = rows_back(emit, rows, fake_value(back.root).shape, loss.logits.axis)
        _replace(back.hidden, replay(emit, back.steps, rows, fake_value(back.hidden).shape[1]), replaced)
    if back.weight is not None:
        node, transposed = _end_of_weight(back.weight, back.transposed)
        weight = _whole(insert, results.weight)
        assert weight is not None
        weight = _saved(insert.cast(weight, fake_value(node).dtype))
        emit = NodeBuilder(graph, node, stage="is_backward")
        scaled = emit(take_scaled, weight, emit.view(tangent, []))
        _replace(node, emit(aten.permute.default, scaled, [1, 0]) if transposed else scaled, replaced)
    if back.bias is not None:
        bias = _whole(insert, results.bias)
        assert bias is not None
        emit = NodeBuilder(graph, back.bias, stage="is_backward")
        scaled = emit(aten.mul.Tensor, _saved(bias), emit.view(tangent, []))
        _replace(back.bias, _in_form_of(emit, back.bias, scaled), replaced)
    return replaced


def _hoist(graph: fx.Graph, loss: HeadLoss, plan: LossPlan) -> None:
    """Move operators behind the log-softmax that the loop reads in front of it. None of them depends on the loss."""
    softmax, terms = loss.logits.softmax, loss.backward.terms if loss.backward else ()
    needed: set[object] = {plan.targets, *plan.weights, *(r.node.args[2] for r in loss.readers if r.node.target in NLL)}
    if plan.tangent is not None:
        needed |= {t.nll.args[3] for t in terms if t.nll is not None} | inputs_of([t.grad for t in terms], plan.tangent)
    place = positions(graph)
    moved: set[fx.Node] = set()
    stack = [node for node in needed if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in moved and place[node] > place[softmax]:
            moved.add(node)
            stack += node.all_input_nodes
    for node in sorted(moved, key=place.__getitem__):
        softmax.prepend(node)


def _descendants(node: fx.Node) -> set[fx.Node]:
    found, stack = {node}, [node]
    while stack:
        fresh = set(stack.pop().users) - found
        found |= fresh
        stack += fresh
    return found


def _end_of_weight(product: fx.Node, transposed: bool) -> tuple[fx.Node, bool]:
    """Follow a weight's gradient through transpositions and casts: return the last one, and whether it is transposed there."""
    node = product
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target in MOVES and fake_value(user).dim() == 2:
            transposed = not transposed
        elif not is_cast(user):
            break
        node = user
    return node, transposed


def _whole(insert: NodeBuilder, parts: Sequence[fx.Node]) -> fx.Node | None:
    return None if not parts else parts[0] if len(parts) == 1 else insert(aten.cat.default, list(parts))


def _in_form_of(insert: NodeBuilder, old: fx.Node, new: fx.Node) -> fx.Node:
    return insert.cast(insert.view(new, list(fake_value(old).shape)), fake_value(old).dtype)


def _saved(node: fx.Node) -> fx.Node:
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return node


def _replace(old: fx.Node, new: fx.Node, replaced: list[fx.Node]) -> None:
    old.replace_all_uses_with(new)
    new.meta.setdefault("desc", old.meta.get("desc"))
    replaced.append(old)


def _erase_dead(graph: fx.Graph, replaced: Sequence[fx.Node]) -> None:
    """Erase the replaced operators and all that have no users left."""
    place = positions(graph)
    erased: set[fx.Node] = set()
    stack = sorted(replaced, key=place.__getitem__)
    while stack:
        node = stack.pop()
        if node not in erased and not node.users and node.op == "call_function":
            stack += node.all_input_nodes
            graph.erase_node(node)
            erased.add(node)
