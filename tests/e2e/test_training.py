"""What models do, trained on one process: bitwise eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capturing import capturing_backend
from models import CASES, NOT_COMPILED, Case, ReturnsParameters, generator, vectors
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import Optimizer
from training import BACKEND, MOST_VARIANTS, train_both, wrapped

import zinf_compile
from zinf_compile.cli.models import GPT
from zinf_compile.ir.program import Program
from zinf_compile.ir.steps import Gather
from zinf_compile.runtime.memory.ledger import Kind, Ledger


@pytest.mark.parametrize("name", CASES)
def test_training_is_bitwise_eager(name: str) -> None:
    train_both(CASES[name], whole=NOT_COMPILED.get(name, ()))


@pytest.mark.parametrize("name", ["tied", "mutated_buffers", "breaks_inside_unrolled_blocks"])
def test_torch_compile_trains_as_model_compile_does(name: str) -> None:
    train_both(CASES[name], compiled=wrapped)


@pytest.mark.parametrize(("name", "graphs"), [("blocks", 1), ("breaks_inside_blocks", 2), ("breaks_inside_unrolled_blocks", 4)])
def test_graph_breaks_make_graphs_that_blocks_share(name: str, graphs: int) -> None:
    counter = CompileCounterWithBackend(BACKEND)
    train_both(CASES[name], compiled=lambda model: torch.compile(model, backend=counter), whole=NOT_COMPILED.get(name, ()))
    assert graphs <= counter.frame_count <= MOST_VARIANTS * graphs


def half_step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
    """Take one step whose forward runs under autocast."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*batch)
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("name", ["mlp", "tied", "used_twice", "frozen", "checkpoint", "attention"])
def test_autocast_is_bitwise_aot_eager(name: str) -> None:
    """Eager keeps one bfloat16 copy of a weight for all its uses and adds their gradients in it: compiled graphs don't."""
    train_both(CASES[name], step=half_step, reference=lambda model: torch.compile(model, backend="aot_eager"))


def test_autocast_of_a_gpt_is_bitwise_eager_on_weights_cast_as_they_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[Program] = []
    counted: list[torch.dtype] = []
    track = Ledger.track

    def note(self: Ledger, kind: Kind, *tensors: torch.Tensor) -> None:
        counted.extend(tensor.dtype for tensor in tensors if kind == "gathered")
        track(self, kind, *tensors)

    monkeypatch.setattr(Ledger, "track", note)
    case = Case(
        lambda: GPT(layers=2, width=20, heads=2, vocabulary=67, length=17),
        lambda step, rank: torch.randint(67, (2, 3, 17), generator=generator(step, rank)).unbind(),
    )
    backend = capturing_backend(programs, {"bucket": "4KiB"})
    _, ours = train_both(case, step=half_step, compiled=lambda model: torch.compile(model, backend=backend))
    assert len(programs) == 2
    for program in programs:
        gathers = [step for step in program.steps if isinstance(step, Gather)]
        found = {(program.slots[unit].name, step.dtype) for step in gathers for unit, _ in step.members}
        assert {dtype for name, dtype in found if "ln_" in name} == {torch.float32}
        assert {dtype for name, dtype in found if name.startswith("h.") and "ln_" not in name} == {torch.bfloat16}
        assert ("wte.weight", torch.bfloat16) in found  # the head's use
        assert (("wte.weight", torch.float32) in found) == program.name.startswith("forward")  # the embedding's
    assert set(counted) == {torch.bfloat16}  # on one rank the others take no memory
    assert zinf_compile.memory(ours)["now"]["gathered"] == 0


def test_a_parameter_returned_whole_is_the_parameter_and_takes_part_in_the_loss() -> None:
    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        optimizer.zero_grad()
        loss, weight, *_ = model(*batch)
        assert weight is model.layer.weight
        loss = loss + weight.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    train_both(CASES["returns_parameters"], step=step)


def test_a_detached_parameter_handed_out_keeps_its_value_through_a_step() -> None:
    model = ReturnsParameters()
    model.compile(backend=BACKEND)
    before = model.layer.weight.detach().clone()
    loss, _, detached, *_ = model(*vectors(0))
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(detached, before)
    assert not torch.equal(model.layer.weight.detach(), before)
