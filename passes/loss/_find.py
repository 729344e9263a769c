"""Pattern matching of losses over classes: from the head's product through log-softmax to its readers, and back.

`chunk_loss` calls `find_losses`, which changes no graph.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from zinf_compile.passes.graph.alias import ALIASES, VIEWS
from zinf_compile.passes.graph.node_facts import fake_value

from ._gradient_terms import NLL_BACKWARD, class_weights, is_number
from ._read_backward import Backward, read_backward
from ._read_logits import Logits, comes_from_product, read_logits
from ._row_ops import UnknownLogitsError, axis_after

aten = torch.ops.aten

NLL = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
SUMS = frozenset({aten.sum.dim_IntList, aten.mean.dim})


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """A forward operator that reads the log-probabilities."""

    node: fx.Node
    """nll_loss_forward, gather, or a sum or mean over classes."""
    weights: fx.Node | None = None
    """Class weights of a sum; None for equal weights."""
    scale: float = 1.0
    """Factor of the log-probabilities in front of the operator."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeadLoss:
    """One loss that can be computed in chunks."""

    logits: Logits
    readers: tuple[Reader, ...]
    backward: Backward | None


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedLoss:
    """One loss that can't be computed in chunks, with the reason."""

    softmax: fx.Node
    reason: str
    node: fx.Node
    """The operator that doesn't match."""


def find_losses(graph: fx.Graph) -> tuple[list[HeadLoss], list[SkippedLoss]]:
    """Return the losses that match, and those that don't."""
    found: list[HeadLoss] = []
    skipped: list[SkippedLoss] = []
    for node in graph.nodes:
        if node.target is aten._log_softmax.default:
            try:
                found.append(_read_loss(node))
            except UnknownLogitsError as error:
                skipped.append(SkippedLoss(node, error.reason, error.node))
        elif node.target is aten.logsumexp.default and comes_from_product(node):
            skipped.append(SkippedLoss(node, "it is written with logsumexp, not log_softmax or cross_entropy", node))
    return found, skipped


def _read_loss(softmax: fx.Node) -> HeadLoss:
    logits = read_logits(softmax)
    readers, roots = _readers(logits)
    _require_private(logits)
    if len(roots) > 1:
        raise UnknownLogitsError("it has several gradients", roots[1])
    if not readers:
        raise UnknownLogitsError("nothing is made of its log-probabilities", softmax)
    return HeadLoss(logits, tuple(readers), read_backward(logits, roots[0]) if roots else None)


def _readers(logits: Logits) -> tuple[list[Reader], list[fx.Node]]:
    """Return the forward operators that read the log-probabilities, and the log-softmax backwards."""
    readers, roots = [], []
    stack: list[tuple[fx.Node, int, fx.Node | None, float]] = [(logits.softmax, logits.axis, None, 1.0)]
    while stack:
        source, axis, weights, scale = stack.pop()
        for user in source.users:
            plain, first = weights is None, bool(user.args) and user.args[0] is source
            if plain and (user.target in ALIASES or user.target in VIEWS):
                stack.append((user, axis_after(user, axis), None, scale))
            elif plain and user.target is aten.neg.default:
                stack.append((user, axis, None, -scale))
            elif plain and scale == 1 and first and user.target in NLL:
                readers.append(Reader(user))
            elif plain and first and user.target is aten.gather.default and _is_of_one_class(user, axis):
                readers.append(Reader(user, scale=scale))
            elif user.target in SUMS and _dims(user) == [axis]:
                readers.append(Reader(user, weights, scale / logits.classes if user.target is aten.mean.dim else scale))
            elif plain and user.target is aten.mul.Tensor and (other := class_weights(user, source, axis)) is not None:
                stack.append((user, axis, other, scale))
            elif plain and user.target is aten.mul.Tensor and is_number(user.args[1]):
                stack.append((user, axis, None, scale * float(user.args[1])))  # type: ignore[arg-type]
            elif user.target is aten._log_softmax_backward_data.default and user.args[1] is source:
                roots.append(user)
            elif user.target not in NLL_BACKWARD:
                what = "its log-probabilities are returned" if user.op == "output" else "its log-probabilities are used"
                raise UnknownLogitsError(what, source if user.op == "output" else user)
    return readers, roots


def _dims(reduction: fx.Node) -> list[int]:
    rank = fake_value(reduction.all_input_nodes[0]).dim()
    dims = reduction.args[1] if len(reduction.args) > 1 else None
    return [int(d) % rank for d in dims] if isinstance(dims, (list, tuple)) else []


def _is_of_one_class(gather: fx.Node, axis: int) -> bool:
    source, index = gather.all_input_nodes
    whole, picked = list(fake_value(source).shape), list(fake_value(index).shape)
    return int(gather.args[1]) % len(whole) == axis and picked == [*whole[:axis], 1, *whole[axis + 1 :]]  # type: ignore[arg-type]


def _require_private(logits: Logits) -> None:
    """Raise unless this loss alone reads the logits."""
    chain = {logits.product, *(step for step, _ in logits.rows), *logits.pointwise}
    stack = [(node, user) for node in chain for user in node.users]
    while stack:
        node, user = stack.pop()
        if user.op == "output":
            raise UnknownLogitsError("its logits are returned", node)
        if user in chain or user is logits.softmax or user.target is aten.tanh_backward.default:
            continue
        if user.target not in ALIASES:
            raise UnknownLogitsError("its logits are used elsewhere", user)
        stack += [(user, reader) for reader in user.users]
