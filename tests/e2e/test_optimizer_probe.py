"""Optimizers that can't work on shards are refused by name at their first step, whenever their rule begins; others train."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import TiedWords, tokens
from optimizers import assert_same_states
from tiers import compiled, options_for
from torch import nn
from torch.optim import Optimizer
from training import BACKEND, assert_same_models, plain_step, train_step_on, twins

from zinf_compile.errors import UnsupportedOptimizerError

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]


class Rule(Optimizer):
    """Descends by what `rule(self, group, state, p)` returns."""

    def __init__(self, parameters: Any, rule: Callable[..., torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    p.add_(self.rule(self, group, state, p), alpha=-group["lr"])


def clips_from(first: int) -> Callable[..., torch.Tensor]:
    """Normalise gradients from a step on."""
    return lambda _, __, state, p: p.grad / p.grad.norm() if state["count"] >= first else p.grad


def every_thousand(_: Any, __: Any, state: dict[str, Any], p: torch.Tensor) -> Any:
    return p.grad / p.grad.norm() if state["count"] % 1000 == 0 else p.grad


def measures(_: Any, group: dict[str, Any], __: Any, p: Any) -> torch.Tensor:
    """Keep a norm, as Prodigy does long before its updates depend on it."""
    group["seen"] = max(group.get("seen", 0.0), float(p.grad.norm()))
    return p.grad * (1 + 1e-12 * group["seen"])


def projects(_: Any, __: Any, ___: Any, p: Any) -> torch.Tensor:
    """Take the part along the weights off where gradients are across them, as AdamP does for matrices."""
    if p.dim() > 1 and torch.cosine_similarity(p.grad, p.detach(), dim=1).abs().max() < 0.03:
        return p.grad + p.detach()
    return p.grad


class OwnKind(torch.Tensor):
    """A tensor class."""


def of_its_own_kind(_: Any, __: Any, state: dict[str, Any], p: Any) -> torch.Tensor:
    if "average" not in state:
        average = torch.zeros_like(p)
        state["average"] = average.as_subclass(OwnKind) if p.numel() >= 4096 else average
    return state["average"].add_(p.grad)


def blockwise(_: Any, __: Any, state: dict[str, Any], p: Any) -> torch.Tensor:
    if p.numel() >= 4096:
        state["scales"] = p.grad.reshape(-1)[: p.numel() // 64].abs()
    return p.grad


REFUSED: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "begins at step 9": (clips_from(9), "a piece alone is updated differently, from some step on"),
    "begins at step 5000": (clips_from(5000), "a piece alone is updated differently, from some step on"),
    "every thousandth step": (every_thousand, "a piece alone is updated differently, from some step on"),
    "a norm in its settings": (measures, "its setting 'seen' depends on more than one element"),
    "projections": (projects, "a piece alone is updated differently"),
    "a tensor class": (of_its_own_kind, "its state 'average' is a OwnKind, a tensor class of its own"),
    "a number for each block": (blockwise, r"its state 'scales', shape \[256\], isn't one number for each element"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rules_that_a_few_steps_on_few_elements_do_not_show(name: str) -> None:
    rule, reason = REFUSED[name]
    eager, ours = twins(TiedWords)
    ours.compile(backend=BACKEND)
    refused(ours, Rule(ours.parameters(), rule), rf"^Rule doesn't update element by element \({reason}")
    assert_same_models(eager, ours)


def test_a_rule_for_matrices_is_refused_before_a_large_one_is_tried() -> None:
    """An SVD of as many rows as a flat piece of the large matrix has takes minutes, and gigabytes, in Shampoo."""
    stepped: list[int] = []

    def preconditions(_: Any, __: Any, state: dict[str, Any], p: Any) -> torch.Tensor:
        stepped.append(p.numel())
        state["rows"] = state.get("rows", 0) + p.grad.flatten(1) @ p.grad.flatten(1).t() if p.dim() > 1 else p.grad.outer(p.grad)
        return p.grad

    _, ours = twins(TiedWords)
    ours.compile(backend=BACKEND)
    refused(ours, Rule(ours.parameters(), preconditions), r"its state 'rows', shape \[4, 4\], isn't one number for each element")
    assert max(stepped) == 64


def test_a_power_that_rounds_otherwise_behind_full_vectors_is_a_rule_for_elements() -> None:
    """As MADGRAD's cube root: it was refused where vectors are of 16 elements, as 24 have half of one left."""

    def cube_root(_: Any, __: Any, state: dict[str, Any], p: Any) -> torch.Tensor:
        state["squares"] = state.get("squares", torch.zeros_like(p)).addcmul_(p.grad, p.grad)
        return p.grad / state["squares"].pow(1 / 3).add_(1e-6)

    _, ours = twins(TiedWords)
    ours.compile(backend=BACKEND)
    plain_step(ours, Rule(ours.parameters(), cube_root), tokens(0))


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "Prodigy"])
def test_optimizers_of_pypi_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kinds = pytest.importorskip("prodigyopt" if name == "Prodigy" else "torchao.optim")
    for options in ({}, options_for(("nvme",) * 3, tmp_path)):
        eager, ours = twins(TiedWords)
        compiled(ours, options)
        reason = "its setting 'd'" if name == "Prodigy" else "its state 'exp_avg' is a OptimState"
        optimizer = getattr(kinds, name)(ours.parameters())
        refused(ours, optimizer, rf"^{name} doesn't update element by element \({reason}.* Supported: SGD, Adam, AdamW")
        assert not optimizer.state
    assert_same_models(eager, ours) if not options else None


def refused(model: nn.Module, optimizer: Optimizer, message: str) -> None:
    """Take a first step, which must be refused; the gradients go."""
    with pytest.raises(UnsupportedOptimizerError, match=message):
        plain_step(model, optimizer, tokens(0))
    optimizer.zero_grad()


class Lookahead(torch.optim.SGD):
    """Slow weights that are made at the fifth step, as those of timm's and others' Lookahead; and a count in a tensor [1]."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["seen"] = state.get("seen", torch.zeros(1)) + 1
                    if state["seen"] % 5 == 0:
                        if "slow" not in state:
                            state["slow"] = p.detach().clone()
                        state["slow"].lerp_(p.detach(), 0.5)
                        p.copy_(state["slow"])
        return loss


class Times(torch.optim.SGD):
    """Keeps what two equal runs don't agree on."""

    seen = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.seen = float(torch.rand(()))
        return super().step(closure)


@pytest.mark.parametrize("on_nvme", [False, True])
def test_rules_that_begin_late_and_work_on_elements(on_nvme: bool, tmp_path: Path) -> None:
    eager, ours = twins(TiedWords)
    compiled(ours, options_for(("device", "device", "nvme"), tmp_path, piece=128) if on_nvme else {})
    sides: list[tuple[Any, Optimizer]] = [
        (model, Lookahead(model.parameters(), lr=0.05, momentum=0.9)) for model in (eager, ours)
    ]
    for number in range(12):
        train_step_on(sides, [eager, ours], plain_step, tokens(number), number)
    assert_same_states(*(optimizer for _, optimizer in sides))
    assert "slow" in sides[1][1].state_dict()["state"][0]
    Times(ours.parameters(), lr=0.1).step()


def test_states_that_are_collections_are_refused_where_parameters_are_updated_in_pieces(tmp_path: Path) -> None:
    def nested(_: Any, __: Any, state: dict[str, Any], p: Any) -> torch.Tensor:
        state["history"] = [*state.get("history", [])[-1:], p.grad.clone()]
        return sum(state["history"])  # type: ignore[no-any-return]

    _, ours = twins(TiedWords)
    compiled(ours, options_for(("device", "device", "nvme"), tmp_path))
    with pytest.raises(UnsupportedOptimizerError, match=r"state 'history' of Rule is a collection of tensors: parameter .*"):
        plain_step(ours, Rule(ours.parameters(), nested), tokens(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.ASGD], ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:all .* parameters are torch")
def test_optimizers_of_pytorch_take_parameters_of_16_bits(make: Any, dtype: torch.dtype) -> None:
    """Some processors round the last elements of a tensor in another way, and so those of the pieces that are tried."""
    eager, ours = (TiedWords().to(dtype) for _ in range(2))
    ours.load_state_dict(eager.state_dict())
    compiled(ours, {})
    for number in range(2):
        for model in (eager, ours):
            plain_step(model, make(model.parameters(), lr=0.01), tokens(number))
    assert_same_models(eager, ours)


def test_a_rule_that_is_not_of_elements_is_refused_in_bfloat16() -> None:
    ours = TiedWords().bfloat16()
    compiled(ours, {})
    refused(ours, Rule(ours.parameters(), clips_from(1)), "^Rule doesn't update element by element")
