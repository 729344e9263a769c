"""What is done to a model after it was partitioned: each refusal says what to do and leaves the model training as before."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, vectors
from programs import run_program
from torch import nn
from torch.optim import Optimizer
from training import BACKEND, adamw, assert_same, assert_same_models, plain_step, wrapped
from twin_models import Twins
from versions import needs_guard_of_requires_grad

from zinf_compile import PartitionedParameterError, UnsupportedModelError, UnsupportedOptimizerError, full_state_dict, gathered
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = pytest.mark.keeps_graphs


class Pair(Twins):
    """An eager model and an equal partitioned one, each with its optimizer, one step into their training."""

    def __init__(self, build: Callable[[], nn.Module] = Mlp) -> None:
        super().__init__(build, wrapped)
        self.train()

    def train(self) -> None:
        """Take one step on both; they must agree bit by bit."""
        self.optimizers[0].zero_grad()
        self.step(vectors(1))
        assert {type(p) for p in self.ours.parameters()} == {ShardedParameter}


class ByHand(Optimizer):
    """Gradient descent whose step is divided by what a test gives."""

    def __init__(self, parameters: Iterable[nn.Parameter], divisor: Callable[[torch.Tensor], Any], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.divisor = divisor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad / self.divisor(parameter.grad), alpha=-group["lr"])


class OwnList(ByHand):
    """Ignores its groups in favour of a list of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter], divisor: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(parameters, divisor)
        self.mine = {"list": list(self.param_groups[0]["params"])}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.mine["list"]:
            parameter.add_(parameter.grad, alpha=-0.1)


OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "Muon": (lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2]), "it raises ValueError: .* 2D matrix"),
    "Adafactor": (torch.optim.Adafactor, "a piece alone is updated differently"),
    "LBFGS": (torch.optim.LBFGS, "keeps the parameters in its attribute '_params'"),
    "norm": (lambda ps: ByHand(ps, torch.Tensor.norm), "a piece alone is updated differently"),
    "row norm": (lambda ps: ByHand(ps, lambda g: g.norm(dim=-1, keepdim=True)), "a piece alone is updated differently"),
    "clips large norms": (lambda ps: ByHand(ps, lambda g: g.norm().clamp(min=100)), "a piece alone is updated differently"),
    "norm in warm-up": (lambda ps: ByHand(ps, torch.Tensor.norm, lr=0.0), "a piece alone is updated differently"),
    "own list": (lambda ps: OwnList(ps, torch.Tensor.norm), "keeps the parameters in its attribute 'mine'"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_needs_whole_matrices_is_refused_by_name(name: str) -> None:
    pair = Pair()
    make, reason = OPTIMIZERS[name]
    optimizer = make(pair.ours.parameters())
    with pytest.raises(UnsupportedOptimizerError, match=rf"\w+ doesn't update element by element .*{reason}.*") as raised:
        optimizer.step(lambda: pair.call(*vectors(2)))
    message = str(raised.value)
    assert message.startswith(type(optimizer).__name__)
    assert "first.weight" in message
    assert "Supported: SGD, Adam, AdamW" in message
    assert isinstance(raised.value, TypeError)
    assert not optimizer.state
    assert_same_models(pair.eager, pair.ours)
    pair.train()


def test_an_optimizer_that_clips_by_value_is_accepted() -> None:
    pair = Pair()
    for model in (pair.eager, pair.ours):
        ByHand(model.parameters(), lambda g: g.abs().clamp(min=1.0)).step()
    assert_same_models(pair.eager, pair.ours)


@needs_guard_of_requires_grad
@pytest.mark.parametrize("grad", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("learns", [True, False], ids=["frozen", "unfrozen"])
def test_requires_grad_changed_after_the_first_call(learns: bool, grad: bool) -> None:
    def build() -> nn.Module:
        model = Mlp()
        model.first.weight.requires_grad_(learns)
        return model

    pair = Pair(build)
    for now in (not learns, learns, not learns):
        for model in (pair.eager, pair.ours):
            model.first.weight.requires_grad_(now)
        if grad:
            pair.train()
            assert (pair.ours.first.weight.grad is not None) == now
        with torch.no_grad():
            assert_same("loss", pair.eager(*vectors(2)), pair.call(*vectors(2)))


@pytest.mark.parametrize("grad", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("learns", [True, False], ids=["frozen", "unfrozen"])
def test_requires_grad_changed_behind_a_stale_graph(learns: bool, grad: bool) -> None:
    """PyTorch 2.11 runs the graph of before the change, as 2.13 does when it is told to skip its guards."""
    model = Mlp()
    model.first.weight.requires_grad_(learns)
    compiled = wrapped(model)
    with torch.set_grad_enabled(grad):
        torch.compiler.reset()
        expected = compiled(*vectors(1))
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            model.first.weight.requires_grad_(not learns)
            message = f"first.weight changed after it was compiled: .*requires_grad={learns}, found .*requires_grad={not learns}"
            with pytest.raises(PartitionedParameterError, match=message + r".*torch.compiler.reset\(\)"):
                compiled(*vectors(1))
            model.first.weight.requires_grad_(learns)
            assert_same("loss", expected, compiled(*vectors(1)))


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "half": (lambda m: m.half(), r"torch.float32 on cpu; assigning its data \(\[13, 7\] torch.float16.*before its first"),
    "bfloat16": (lambda m: m.to(torch.bfloat16), "torch.bfloat16 on cpu.*or use autocast"),
    "double": (lambda m: m.double(), "torch.float64 on cpu.*or use autocast"),
    "type": (lambda m: m.type(torch.float64), "torch.float64 on cpu.*or use autocast"),
    "meta": (lambda m: m.to("meta"), "torch.float32 on meta.*move the model before its first compiled call"),
    "empty": (lambda m: m.to_empty(device="meta"), "torch.float32 on meta.*move the model before its first compiled call"),
    "data": (lambda m: setattr(m.first.weight, "data", torch.zeros(3)), r"data of shape \[3\] is not possible. Resize it"),
    "pickle": (pickle.dumps, r"can't be pickled: save zinf_compile.full_state_dict\(model\)"),
    "save": (lambda m: torch.save(m, io.BytesIO()), "can't be pickled"),
    "save a parameter": (lambda m: torch.save(m.first.weight, io.BytesIO()), "can't be pickled"),
    "share": (lambda m: m.share_memory(), "can't be moved to shared memory"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_whole_model_is_refused_and_leaves_it_training(name: str) -> None:
    pair = Pair()
    change, message = CHANGES[name]
    with pytest.raises(PartitionedParameterError, match=rf"parameter first.weight is partitioned.*{message}"):
        change(pair.ours)
    assert_same_models(pair.eager, pair.ours)
    pair.train()


def test_a_converted_parameter_is_refused_when_gathered_ends() -> None:
    for change, found in [(lambda m: m.half(), "float16"), (lambda m: setattr(m.first.weight, "data", torch.ones(2)), r"\[2\]")]:
        pair = Pair()
        with (
            pytest.raises(PartitionedParameterError, match=rf"nothing was changed.*first.weight became .*{found}"),
            gathered(pair.ours, write=True),
        ):
            change(pair.ours)
        assert_same_models(pair.eager, pair.ours)
        pair.train()


def test_gathered_inside_gathered_reads_and_does_not_write() -> None:
    pair = Pair()
    with gathered(pair.ours, write=True):
        with gathered(pair.ours):
            pair.ours.first.bias.data.fill_(2.0)
        assert type(pair.ours.first.bias) is nn.Parameter
        with pytest.raises(PartitionedParameterError, match=r"holds first.weight whole already: give write=True to the outer"):
            gathered(pair.ours, write=True).__enter__()
    pair.eager.first.bias.data.fill_(2.0)
    pair.train()


def test_a_parametrization_is_registered_inside_gathered() -> None:
    pair = Pair()
    with pytest.raises(PartitionedParameterError, match=r"nn.Parameter\(\) reads parameter first.weight.* inside `with zin"):
        nn.utils.parametrizations.weight_norm(pair.ours.first)
    pair.train()
    with gathered(pair.ours, write=True):
        for model in pair.models:
            nn.utils.parametrizations.weight_norm(model.first)
    pair.optimizers[:] = [adamw(model.parameters()) for model in pair.models]
    pair.train()


def test_the_compiled_model_is_refused_inside_gathered_and_runs_after() -> None:
    pair = Pair()
    with gathered(pair.ours), pytest.raises(PartitionedParameterError, match=r"first.weight is gathered: leave `with zinf_comp"):
        pair.call(*vectors(1))
    pair.train()


def test_loaded_optimizer_state_of_a_wrong_shape_is_refused_by_name() -> None:
    pair = Pair()
    optimizer = pair.optimizers[1]
    good = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(good)
    bad["state"][0]["exp_avg"] = torch.zeros(3, 3)
    optimizer.load_state_dict(bad)
    with pytest.raises(
        UnsupportedOptimizerError, match=r"'exp_avg' of AdamW for parameter first.weight has shape \[3, 3\].*13, 7"
    ):
        optimizer.step()
    assert_same_models(pair.eager, pair.ours)
    optimizer.load_state_dict(good)
    pair.train()


@pytest.mark.parametrize("of", ["input", "parameters", "grad"])
def test_double_backward_is_refused(of: str) -> None:
    """By name, and only where somebody differentiates a gradient."""
    pair = Pair()
    x, y = vectors(2)
    loss = pair.call(x.requires_grad_(), y)
    inputs = [x] if of == "input" else list(pair.ours.parameters())
    if of == "grad":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a cycle, which PyTorch warns of
            loss.backward(create_graph=True)
        grads: Any = [p.grad for p in inputs]
    else:
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
    with pytest.raises(UnsupportedModelError, match=r"double backward: .* create_graph=True .* train this model uncompiled"):
        sum(g.square().sum() for g in grads).backward()
    pair.ours.zero_grad()
    pair.train()


def test_what_was_taken_from_the_model_before_its_first_call_stays_readable() -> None:
    model = Mlp()
    weight = model.first.weight
    state = model.state_dict()
    views = [weight.detach(), weight.data, weight.detach().t().t(), weight.detach().view(-1).view_as(weight)]
    expected = copy.deepcopy(state)
    plain_step(wrapped(model), adamw(model.parameters()), vectors(0))
    assert not torch.equal(model.first.weight.detach(), expected["first.weight"])
    for name, value in expected.items():
        assert_same(name, value, state[name])
    for view in views:
        assert_same("view", expected["first.weight"], view)


def test_a_partitioned_value_is_not_assigned_to_a_whole_parameter(tmp_path: Path) -> None:
    """As the first updates of a momentum encoder do it; PyTorch asks neither side, and the parameter has no memory."""
    model, momentum = Mlp(), Mlp().requires_grad_(False)
    for each in (model, momentum):
        each.compile(backend=BACKEND, options={"params": "nvme", "nvme": str(tmp_path)})
    plain_step(model, adamw(model.parameters()), vectors(0))
    weight = momentum.first.weight.detach().clone()
    with torch.no_grad():
        momentum.first.weight.data = model.first.weight.data * 0.1
    with pytest.raises(PartitionedParameterError, match=r"first\.weight has no memory: .* instead, on all ranks: `par"):
        momentum(*vectors(0))
    momentum.first.weight = nn.Parameter(weight, requires_grad=False)
    with torch.no_grad():
        momentum.first.weight.data.copy_(weight * 0.9 + model.first.weight.data * 0.1)
    momentum(*vectors(0))


def test_a_state_dict_sent_to_another_process_does_not_stop_the_training() -> None:
    pair = Pair()
    for value in pair.ours.state_dict().values():
        value.share_memory_()  # as multiprocessing does with what it sends
    pair.train()
    pair.train()


class Counted(Mlp):
    """Dynamo compiles its forward anew for each number."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: int = 1) -> torch.Tensor:
        return super().forward(x, y) * number


def test_the_recompile_limit_with_fullgraph_is_dynamos_error() -> None:
    compiled = torch.compile(Counted(), backend=BACKEND, dynamic=False, fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=2):
        compiled(*vectors(0), 1)
        compiled(*vectors(0), 2)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit, match="fullgraph=True"):
            compiled(*vectors(0), 3)


def norm(weight: torch.Tensor) -> torch.Tensor:
    return weight.norm()


@pytest.mark.parametrize("backend", ["eager", BACKEND])
def test_a_compiled_function_takes_a_partitioned_parameter(backend: str) -> None:
    pair = Pair()
    assert_same("norm", norm(pair.eager.first.weight), torch.compile(norm, backend=backend)(pair.ours.first.weight))


def test_a_trace_of_a_partitioned_model_is_refused_by_name(tmp_path: Path) -> None:
    """It would hold the way to the values; a plain copy is traced."""
    model, batch = Mlp(), vectors(0)
    torch.compile(model, backend=BACKEND, options={"compute": "fx"})(*batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch 2.13 that it is deprecated
        with pytest.raises(PartitionedParameterError, match=r"torch.jit.trace reads parameter first.weight.*trace a plain copy"):
            torch.jit.trace(model, batch)
        plain = Mlp()
        plain.load_state_dict(full_state_dict(model))
        traced = torch.jit.trace(plain, batch)
    assert_same("loss", model(*batch).detach(), traced(*batch).detach())


RISKY = """
import torch
from models import Mlp, vectors
model = Mlp()
model.compile(backend="zero_infinity", options={"compute": "fx", "params": "device"})
model(*vectors(0)).backward()
weight, grad = model.first.weight, model.first.weight.grad
for name, act in {
    "share": model.share_memory,
    "share grad": grad.share_memory_,
    "grad by dlpack": lambda: torch.from_dlpack(grad).sum().item(),
    "as_subclass": lambda: weight.as_subclass(torch.Tensor).sum().item(),
    "is_nonzero": lambda: weight.is_nonzero(),
    "storage": lambda: weight.untyped_storage()[0],
    "grad's storage": lambda: grad.untyped_storage()[0],
}.items():
    try:
        print(name, "gave", act())
    except Exception as error:
        print(name, "raised", type(error).__name__)
"""


def test_reads_past_torch_function_do_not_kill_the_process() -> None:
    run = run_program(RISKY)
    assert run.returncode == 0, run.stderr
    outcome = dict(line.split(" raised ") if " raised " in line else line.split(" gave ") for line in run.stdout.splitlines())
    sums = {name: float(outcome.pop(name)) for name in ("grad by dlpack", "as_subclass")}
    assert all(map(functools.partial(torch.isfinite), map(torch.tensor, sums.values())))
    assert outcome == {
        "share": "PartitionedParameterError",
        "share grad": "PartitionedParameterError",
        "is_nonzero": "RuntimeError",
        "storage": "IndexError",
        "grad's storage": "RuntimeError",
    }
