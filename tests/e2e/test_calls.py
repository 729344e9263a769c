"""The ways a compiled model is called, on one process: bitwise eager whichever graph meets whichever parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, WORDS, Attention, Blocks, Case, Mlp, MutatedBuffers, TiedWords, tokens, vectors
from tiers import compiled as compiled_on
from tiers import options_for
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from training import (
    BACKEND,
    MOST_VARIANTS,
    adamw,
    assert_same,
    assert_same_models,
    in_place,
    plain_step,
    train_both,
    train_step_on,
    twins,
)


def compile_blocks(model: nn.Module) -> nn.Module:
    """Compile the blocks alone."""
    for block in model.get_submodule("blocks"):
        block.compile(backend=BACKEND)
    return model


def test_blocks_compiled_one_by_one_share_a_graph() -> None:
    counter = CompileCounterWithBackend(BACKEND)

    def compiled(model: nn.Module) -> nn.Module:
        for block in model.get_submodule("blocks"):
            block.compile(backend=counter)
        return model

    train_both(CASES["blocks"], compiled=compiled, whole={"first.weight", "first.bias", "last.weight", "last.bias"})
    assert counter.frame_count <= MOST_VARIANTS


def test_blocks_compiled_one_by_one_with_a_break_inside() -> None:
    whole = {"first.weight", "first.bias", "last.weight", "last.bias"}
    train_both(CASES["breaks_inside_blocks"], compiled=compile_blocks, whole=whole)


@pytest.mark.parametrize("entrance", ["model.compile", "torch.compile", "f(model, x)"])
def test_two_models_of_one_class_keep_their_own_weights(entrance: str) -> None:
    counter = CompileCounterWithBackend(BACKEND)
    function = torch.compile(lambda model, *batch: model(*batch), backend=counter)

    def compiled(model: nn.Module) -> Callable[..., Any]:
        if entrance == "f(model, x)":
            return lambda *batch: function(model, *batch)
        if entrance == "torch.compile":
            return torch.compile(model, backend=counter)
        model.compile(backend=counter)
        return model

    pairs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        eager, ours = twins(Mlp, seed=seed)
        sides = [(eager, adamw(eager.parameters())), (compiled(ours), adamw(ours.parameters()))]
        pairs.append((sides, [eager, ours]))
    for number in range(3):
        for offset, (sides, models) in enumerate(pairs):
            train_step_on(sides, models, plain_step, vectors(2 * number + offset), number)
    first, second = (models[1] for _, models in pairs)
    assert not torch.equal(first.first.weight.detach(), second.first.weight.detach())
    assert counter.frame_count <= MOST_VARIANTS


def test_several_models_in_one_process_take_turns() -> None:
    names = ["tied", "mlp", "dropout"]
    pairs = []
    for name in names:
        eager, ours = twins(CASES[name].build)
        sides = [(eager, adamw(eager.parameters())), (in_place(ours), adamw(ours.parameters()))]
        pairs.append((sides, [eager, ours], CASES[name].batch))
    for number in range(3):
        for sides, models, batch in pairs:
            train_step_on(sides, models, plain_step, batch(number, 0), number)


def test_one_optimizer_for_two_models() -> None:
    eager, ours = (nn.ModuleList(pair) for pair in zip(twins(Mlp, seed=1), twins(lambda: Mlp(11), seed=2), strict=True))
    for model in ours:
        model.compile(backend=BACKEND)

    def run(models: nn.ModuleList) -> Callable[..., Any]:
        return lambda *batch: models[0](*batch) + models[1](*batch)

    sides = [(run(eager), adamw(eager.parameters())), (run(ours), adamw(ours.parameters()))]
    for number in range(3):
        train_step_on(sides, [eager, ours], plain_step, vectors(number), number)


@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("first", ["train", "evaluate"])
def test_training_and_evaluation_alternate(without_grad: Callable[[], Any], first: str) -> None:
    eager, ours = twins(MutatedBuffers)
    sides = [(eager, adamw(eager.parameters())), (in_place(ours), adamw(ours.parameters()))]

    def evaluate(number: int) -> None:
        with without_grad():
            expected, found = (model.eval()(*vectors(50 + number)) for model in (eager, ours))
        assert_same("evaluation loss", expected, found)
        assert not found.requires_grad
        eager.train()
        ours.train()

    for number in range(3):
        if first == "evaluate":
            evaluate(number)
        train_step_on(sides, [eager, ours], plain_step, vectors(number), number)
        if first == "train":
            evaluate(number)
            assert_same_models(eager, ours, where="after evaluation")


@pytest.mark.parametrize("build", [TiedWords, Attention])
def test_other_lengths_and_batch_sizes_make_one_dynamic_graph(build: type[nn.Module]) -> None:
    counter = CompileCounterWithBackend(BACKEND)
    eager, ours = twins(build)
    ours.compile(backend=counter)
    sides = [(model, adamw(model.parameters())) for model in (eager, ours)]
    for number, (rows, length) in enumerate([(3, 11), (3, 13), (5, 13), (4, 17), (2, 6), (3, 11)]):
        train_step_on(sides, [eager, ours], plain_step, tokens(number, rows=rows, length=length), number)
    assert counter.frame_count <= MOST_VARIANTS + 2


def test_shapes_declared_dynamic_from_the_start() -> None:
    eager, ours = twins(TiedWords)
    ours.compile(backend=BACKEND, dynamic=True)
    sides = [(model, adamw(model.parameters())) for model in (eager, ours)]
    for number, (rows, length) in enumerate([(3, 11), (5, 7), (2, 19)]):
        train_step_on(sides, [eager, ours], plain_step, tokens(number, rows=rows, length=length), number)


def test_an_input_that_requires_grad_gets_its_gradient() -> None:
    eager, ours = twins(Mlp)
    in_place(ours)
    gradients = []
    for model in (eager, ours):
        x, y = vectors(0)
        model(x.requires_grad_(), y).backward()
        gradients.append(x.grad)
    assert_same("gradient of the input", *gradients)
    assert_same_models(eager, ours)


def test_evaluation_alone_returns_what_eager_does_and_draws_samples() -> None:
    eager, ours = twins(TiedWords)
    in_place(ours)
    with torch.no_grad():
        for length in (4, 5, 6):
            words = torch.arange(length)[None] % WORDS
            assert_same("loss", eager(words), ours(words))


def test_a_failing_forward_leaves_the_model_usable() -> None:
    eager, ours = twins(Blocks)
    in_place(ours)
    x, y = vectors(0)
    with pytest.raises(Exception, match=r"shape|size"):
        ours(x[:, :3], y)
    sides = [(model, adamw(model.parameters())) for model in (eager, ours)]
    for number in range(3):
        train_step_on(sides, [eager, ours], plain_step, vectors(number), number)


class Converting(Mlp):
    """Converts one of its layers, in each forward, to the data type that it has."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.first = self.first.to(x.dtype)
        return super().forward(x, y)


def test_a_layer_may_be_converted_to_what_it_is_inside_the_forward() -> None:
    train_both(Case(Converting, vectors))


USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "split": lambda weight: sum(part.sum() * number for number, part in enumerate(weight.split(3), 1)),
    "norm": lambda weight: weight.norm(),
    "unflatten": lambda weight: weight.unflatten(1, (-1, 1)).sum(0).norm(),
    "1 -": lambda weight: (1 - weight).mean(),
    "1 /": lambda weight: (1 / weight).tanh().mean(),
    "**": lambda weight: (weight**2).mean(),
    "2 **": lambda weight: (2**weight).mean(),
    "reversed": lambda weight: torch.stack(list(reversed(weight)))[0].sum(),
}


class Using(Mlp):
    """Scales its result by what it makes of a weight."""

    def __init__(self, use: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) * self.use(self.first.weight)


@pytest.mark.parametrize("use", USES)
def test_a_weight_is_used_by_what_tensor_defines_in_python(use: str) -> None:
    eager, ours = twins(lambda: Using(USES[use]))
    sides = [(eager, adamw(eager.parameters())), (in_place(ours), adamw(ours.parameters()))]
    for number, rows in enumerate([3, 5, 2]):
        train_step_on(sides, [eager, ours], plain_step, vectors(number, rows=rows), number)


@pytest.mark.parametrize("use", USES)
def test_so_is_one_off_the_device_in_one_graph(use: str, tmp_path: Path) -> None:
    """Also in a graph that is compiled again, for other rows, when the weight is partitioned: eager code hasn't it."""
    eager, ours = twins(lambda: Using(USES[use]))
    compiled_on(ours, options_for(("nvme", "device", "device"), tmp_path))
    sides = [(eager, adamw(eager.parameters())), (ours, adamw(ours.parameters()))]
    counters["graph_break"].clear()
    for number, rows in enumerate([3, 5, 2]):
        train_step_on(sides, [eager, ours], plain_step, vectors(number, rows=rows), number)
    assert not counters["graph_break"]
