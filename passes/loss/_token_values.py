"""Values of a loss with one number per token: the gradients of its log-probabilities, and the loss itself."""

from __future__ import annotations

import operator

import torch
from torch import fx

from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import fake_value

from ._gradient_terms import Term

aten = torch.ops.aten

NONE, MEAN = 0, 1
"""Reductions of nll_loss."""

_IGNORED = -100


class TokenValues:
    """Writes these values, given the tokens' targets and the mask of those that aren't ignored."""

    def __init__(
        self,
        insert: NodeBuilder,
        *,
        tokens: int,
        classes: int,
        dtype: torch.dtype,
        targets: fx.Node | None,
        valid: fx.Node | None,
    ) -> None:
        self._insert = insert
        self._tokens = tokens
        self._classes = classes
        self._dtype = dtype
        self._targets = targets
        self._valid = valid

    def coefficients(
        self, terms: list[tuple[Term, fx.Node]], weights: dict[fx.Node | None, fx.Node | None]
    ) -> tuple[fx.Node | None, dict[fx.Node | None, fx.Node], fx.Node | None]:
        """Return gradients of log-probabilities: at the target; at all classes, by class weights; the negated sum of all."""
        insert = self._insert
        at_target: fx.Node | None = None
        at_all: dict[fx.Node | None, fx.Node] = {}
        total: fx.Node | None = None
        for term, given in terms:
            grad = insert.cast(given, self._dtype)
            grad = grad if term.scale == 1 else insert(aten.mul.Tensor, grad, term.scale)
            if term.nll is not None:
                part = grad = self._nll_gradient(term.nll, grad)
            else:
                part = grad = insert.view(grad, [self._tokens])
            if term.targets is not None:
                at_target = self._sum(at_target, grad)
            else:
                at_all[term.weights] = self._sum(at_all.get(term.weights), grad)
                of_classes = weights[term.weights]
                part = insert(
                    aten.mul.Tensor, grad, self._classes if of_classes is None else insert(aten.sum.default, of_classes)
                )
            total = self._sum(total, part)
        return at_target, at_all, None if total is None else insert(aten.neg.default, total)

    def nll(self, picked: fx.Node, weights: fx.Node | None, reduction: int) -> fx.Node:
        """Return the loss of nll_loss_forward. Without class weights PyTorch's own kernel sums it, for the same bits."""
        insert = self._insert
        assert self._valid is not None
        if weights is None:
            device = fake_value(picked).device
            choices = [insert(aten.full.default, [], n, dtype=torch.int64, device=device) for n in (0, _IGNORED)]
            only_class = insert(aten.where.self, self._valid, *choices)
            column = insert(aten.unsqueeze.default, picked, 1)
            both = insert(aten.nll_loss_forward.default, column, only_class, None, reduction, _IGNORED)
            return insert(operator.getitem, both, 0)
        chosen = self._target_weights(weights)
        each = insert(aten.neg.default, insert(aten.mul.Tensor, picked, chosen))
        each = insert(aten.where.self, self._valid, each, self._zero())
        if reduction == NONE:
            return each
        value = insert(aten.sum.default, each)
        return insert(aten.div.Tensor, value, self._total(chosen)) if reduction == MEAN else value

    def _nll_gradient(self, nll: fx.Node, grad: fx.Node) -> fx.Node:
        insert = self._insert
        assert self._valid is not None
        weights, reduction = nll.args[3:5]
        assert weights is None or isinstance(weights, fx.Node)
        if reduction == NONE:
            grad = insert.view(grad, [self._tokens])
        grad = insert(aten.neg.default, grad)
        chosen = None if weights is None else self._target_weights(weights)
        if chosen is not None:
            grad = insert(aten.mul.Tensor, grad, chosen)
        if reduction == MEAN:
            grad = insert(aten.div.Tensor, grad, self._total(chosen))
        if fake_value(grad).dim() == 0:
            grad = insert(aten.expand.default, grad, [self._tokens])
        return insert(aten.where.self, self._valid, grad, self._zero())

    def _target_weights(self, weights: fx.Node) -> fx.Node:
        """Return the class weight of each token's target, 0 for ignored tokens."""
        insert = self._insert
        assert self._valid is not None
        chosen = insert(aten.index.Tensor, insert.cast(weights, self._dtype), [self._targets])
        return insert(aten.where.self, self._valid, chosen, self._zero())

    def _total(self, chosen: fx.Node | None) -> fx.Node:
        """Return the divisor of a mean: the sum of the targets' weights, or the number of tokens that aren't ignored."""
        if chosen is not None:
            return self._insert(aten.sum.default, chosen)
        return self._insert.cast(self._insert(aten.sum.default, self._valid), self._dtype)

    def _sum(self, one: fx.Node | None, other: fx.Node) -> fx.Node:
        return other if one is None else self._insert(aten.add.Tensor, one, other)

    def _zero(self) -> fx.Node:
        assert self._valid is not None
        return self._insert.zeros([], self._valid, self._dtype)
