"""Train two optimizer steps beside a reference, and hold that no part of the model fell back to eager PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from models import Case
from rank_saved_values import mixing
from torch import nn
from training import BACKEND, MakeOptimizer, adamw, assert_same, plain_step, twins, whole_gradient

from zinf_compile.sharded import parameter_calls
from zinf_compile.sharded.parameter import ShardedParameter

STEPS = 2
ROUNDING = 1e-4
"""Of a tensor's largest element: fp32 rounds at 6e-8, sums here have up to some hundred terms, models up to some ten layers."""

Tensors = dict[str, torch.Tensor | None]
Same = Callable[[str, torch.Tensor | None, torch.Tensor | None], None]


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """A model after a step."""

    loss: torch.Tensor
    random: torch.Tensor
    tensors: Tensors
    """Parameters and buffers by name; gradients as "gradient of NAME", None where there is none."""


def train_without_fallback(
    case: Case,
    *,
    as_aot_eager: bool = False,
    fullgraph: bool = True,
    compute: str = "fx",
    optimizer: MakeOptimizer = adamw,
    chunk_loss: bool = False,
    chunk_bytes: int | None = None,
    tile: int | None = None,
    activations: str = "keep",
    nvme: str | None = None,
    seed: int | None = None,
) -> float:
    """Train a model and its twin; loss, parameters, gradients and buffers are equal after each step.

    With `compute="fx"`, losses and parameters whole, bit by bit, else within rounding (`near`).

    `seed` draws a place for each saved value, small ones too, among the device and the drive at `nvme`.

    Raises where Dynamo reaches its recompile limit (`fullgraph` raises at each graph break too), where a parameter that got a
    gradient stayed whole, and where eager code computed with a partitioned parameter. Returns the share of gradients that are not
    zero: where it is small, little was tested.
    """
    reference, ours = twins(case.build)
    if as_aot_eager:
        reference.compile(backend="aot_eager")
    expected = train(reference, case, optimizer)
    torch.compiler.reset()
    options = {"compute": compute, "chunk_loss": chunk_loss, "tile": tile, "activations": activations}
    options |= {"compute_shape": {"chunk_bytes": chunk_bytes}} if chunk_bytes is not None else {}
    options |= {"nvme": nvme} if nvme is not None else {}
    if seed is None:
        ours.compile(backend=BACKEND, options=options, fullgraph=fullgraph)
    else:
        ours.compile(backend=mixing(options, seed), fullgraph=fullgraph)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), mock.patch.object(parameter_calls, "_Whole", _Refused):
        found = train(ours, case, optimizer)
    for number, (state, our_state) in enumerate(zip(expected, found, strict=True)):
        same = assert_same if compute == "fx" and not chunk_loss and tile is None else near(state)
        same(f"loss of step {number}", state.loss, our_state.loss)
        assert torch.equal(state.random, our_state.random), f"step {number} drew other random numbers"
        assert list(state.tensors) == list(our_state.tensors)
        for name, tensor in state.tensors.items():
            same(f"{name} after step {number}", tensor, our_state.tensors[name])
    trained = {name: p for name, p in ours.named_parameters() if p.grad is not None}
    assert trained, "no parameter got a gradient"
    assert not {name for name, p in trained.items() if not isinstance(p, ShardedParameter)}, "left to eager PyTorch"
    return sum(bool(whole_gradient(p).any()) for p in trained.values()) / len(trained)  # type: ignore[union-attr]


def train(model: nn.Module, case: Case, make: MakeOptimizer) -> list[State]:
    """Take the steps; return what the model is after each."""
    optimizer = make(model.parameters())
    states = []
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = plain_step(model, optimizer, case.batch(number, 0))
        states.append(State(loss.detach().clone(), torch.get_rng_state(), _tensors(model)))
    return states


def near(state: State) -> Same:
    """Return the comparison of two tensors of a model that allows for arithmetic rounded differently.

    A tensor may be pure rounding, as the gradient of an attention key's bias is: hence the share of the largest of them all.
    """
    floats = [t for t in state.tensors.values() if t is not None and t.is_floating_point() and t.numel()]
    largest = max(float(t.abs().max()) for t in floats)

    def same(what: str, expected: torch.Tensor | None, found: torch.Tensor | None) -> None:
        if expected is None or found is None or not expected.is_floating_point() or not expected.numel():
            assert_same(what, expected, found)
            return
        assert found.dtype == expected.dtype, what
        most = ROUNDING * float(expected.abs().max()) + torch.finfo(torch.float32).eps * largest
        torch.testing.assert_close(found, expected, rtol=0, atol=most, msg=lambda text: f"{what}: {text}")

    return same


def _tensors(model: nn.Module) -> Tensors:
    tensors: Tensors = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, p in model.named_parameters():
        grad = whole_gradient(p)
        tensors[name] = p.detach().clone()
        tensors[f"gradient of {name}"] = None if grad is None else grad.clone()
    return tensors


class _Refused:
    """Stands where eager code on one process reads a partitioned parameter with autograd."""

    @staticmethod
    def apply(read: ShardedParameter, unit: object) -> Any:
        raise AssertionError(f"eager code computes with {read._zinf_unit.name}")
