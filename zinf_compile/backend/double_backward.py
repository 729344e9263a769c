"""Rejects double backward, which AOTAutograd doesn't support for compiled graphs, with an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from zinf_compile.errors import UnsupportedModelError


def reject_double_backward(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled graph with a check: differentiating its gradients raises `UnsupportedModelError`.

    A backward with `create_graph=True` alone is accepted.
    """

    def run(*args: Any) -> Any:
        results = compiled(*args)
        for result in results if torch.is_grad_enabled() and isinstance(results, list | tuple) else ():
            node = result.grad_fn if isinstance(result, torch.Tensor) else None
            if node is not None and node.name() == "CompiledFunctionBackward":
                node.register_hook(_after_backward)
                break
        return results

    return run


def _after_backward(grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> None:
    if torch.is_grad_enabled():  # create_graph=True
        for node in {g.grad_fn for g in grad_inputs if isinstance(g, torch.Tensor) and g.grad_fn is not None}:
            node.register_prehook(_refuse)


def _refuse(grad_outputs: Sequence[Any]) -> NoReturn:
    raise UnsupportedModelError(
        "double backward: something differentiates gradients that a compiled graph computed with create_graph=True (a gradient "
        'penalty, a Hessian); graphs compiled with backend="zero_infinity" support first gradients only. Omit create_graph, '
        "approximate by finite differences of first gradients, or train this model uncompiled"
    )
