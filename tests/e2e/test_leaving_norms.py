"""Norms of gradients that leave the device are taken before that, once somebody asks: with the bits of reading them back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import context_of
from torch import nn
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.memory.leaving_norms import LeavingNorms, Norms
from zinf_compile.runtime.units.offloaded_gradient import OffloadedGradient
from zinf_compile.sharded.gradient import ShardedGradient

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

LAYERS, WIDTH, STEPS = 3, 32, 4
HOST = dict.fromkeys(("params", "grads", "optimizer"), "host")
PLACES: dict[str, tuple[bool, dict[str, Any]]] = {
    "host": (True, HOST),
    "tiles": (True, HOST | {"tile": "2KiB"}),
    "device, gradients on the drive": (True, HOST | {"grads": "nvme"}),
    "drive": (False, dict.fromkeys(HOST, "nvme")),
    "master": (True, HOST | {"master": "float32", "reduce_dtype": "float32"}),
    "rounded": (True, HOST | {"reduce_dtype": "bfloat16"}),
}
"""Whether a device has memory of its own, and the options."""


class Clipped:
    """A model whose gradients are clipped in each step."""

    def __init__(self, place: str, folder: Path) -> None:
        torch.compiler.reset()
        zinf_compile.reset()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
        self.model.to(torch.bfloat16 if place == "master" else torch.float32)
        _, options = PLACES[place]
        drive = {"nvme": str(folder)} if "nvme" in options.values() else {}
        self.call = torch.compile(self.model, backend=BACKEND, options={"compute": "fx", **drive, **options})
        self.optimizer = adamw(self.model.parameters())
        self.seen: list[float] = []
        """Losses and norms."""

    def backward(self, number: int = 0) -> None:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to(next(self.model.parameters()).dtype)
        loss = self.call(x).square().mean()
        loss.backward()
        self.seen.append(loss.item())

    def clip(self, kind: float = 2.0) -> None:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3, norm_type=kind)
        self.seen.append(norm.item())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int = STEPS) -> list[float]:
        for number in range(steps):
            self.backward(number)
            self.clip()
            self.step()
        zinf_compile.synchronize()
        values = [v.double().sum().item() for v in zinf_compile.full_state_dict(self.model).values()]
        return self.seen + values


@contextlib.contextmanager
def on(place: str) -> Iterator[None]:
    with simulating(SimulatedDevice()) if PLACES[place][0] else contextlib.nullcontext():
        yield


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that tells of each question whether the norm was known."""
    found, norms_of = list[bool](), OffloadedGradient.norms_of

    def noted(self: OffloadedGradient, key: Any) -> list[torch.Tensor] | None:
        norms = norms_of(self, key)
        found.append(norms is not None)
        return norms

    monkeypatch.setattr(OffloadedGradient, "norms_of", noted)
    return found


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no norm taken before a gradient leaves."""
    monkeypatch.setattr(LeavingNorms, "are_wanted", False)


@pytest.mark.parametrize("place", PLACES)
def test_from_the_second_step_on_no_gradient_is_read_back(
    place: str, tmp_path: Path, answers: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    with on(place):
        found = Clipped(place, tmp_path).train()
        asked = len(answers) // STEPS
        assert not any(answers[:asked])
        known = answers[asked:]
        without(monkeypatch)
        assert found == Clipped(place, tmp_path).train()
    expected = place != "rounded"  # there a parameter's norm is of a type in which the gradient is not
    assert known == [expected] * (2 * LAYERS * (STEPS - 1))


def test_what_reads_a_drive_reads_nothing_to_clip(tmp_path: Path) -> None:
    run = Clipped("drive", tmp_path)
    run.train(2)
    engine = context_of(run.model).engine
    run.backward()
    for parameter in run.model.parameters():
        assert isinstance(parameter.grad, ShardedGradient)
        assert parameter.grad.offloaded is not None
        parameter.grad.offloaded.wait_written()
    before = engine.bytes_read
    run.clip()
    assert engine.bytes_read == before
    run.step()


@pytest.mark.parametrize("kind", [1.0, float("inf")])
def test_other_norms_and_the_operator_for_many(kind: float, tmp_path: Path, answers: list[bool]) -> None:
    with on("host"):
        run = Clipped("host", tmp_path)
        for number in range(3):
            run.backward(number)
            grads = [p.grad for p in run.model.parameters()]
            answers.clear()
            many = torch._foreach_norm(grads, kind)
            assert all(answers) == (number > 0)
            run.clip(kind)
            assert all(answers) == (number > 0)
            read = [torch.linalg.vector_norm(grad.full_tensor(), kind) for grad in grads]  # type: ignore[union-attr]
            coefficient = min(1.0, 1e-3 / (torch.linalg.vector_norm(torch.stack(many), kind).item() + 1e-6))
            torch.testing.assert_close(torch.stack(many) * coefficient, torch.stack(read), rtol=1e-5, atol=0.0)
            run.step()


@pytest.mark.parametrize("given", [(2, torch.float64), (float("inf"),)])
def test_a_type_that_is_given_is_that_of_the_norm(given: tuple[Any, ...], tmp_path: Path, answers: list[bool]) -> None:
    """Of gradients in bf16, by the operator for many and for one."""
    with on("host"):
        run = Clipped("host", tmp_path)
        run.model.to(torch.bfloat16)
        found = []
        for number in range(2):
            run.backward(0)
            grads = [p.grad for p in run.model.parameters()]
            answers.clear()
            many = torch._foreach_norm(grads, *given)
            one = [torch.linalg.vector_norm(grad, given[0], dtype=torch.float32) for grad in grads]  # type: ignore[arg-type]
            assert all(answers) == (number > 0)
            found.append([*many, *one])
            run.optimizer.zero_grad()
    assert found[0][0].dtype == (torch.float64 if len(given) > 1 else torch.bfloat16)
    for before, after in zip(*found, strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


@pytest.mark.parametrize("place", ["host", "drive"])
def test_a_gradient_that_was_changed_is_read(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a second backward, or by hand."""

    def train() -> list[float]:
        run = Clipped(place, tmp_path)
        run.train(1)
        run.backward(1)
        run.backward(2)
        run.clip()
        run.step()
        run.backward(3)
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(3.0)
        run.clip()
        run.clip()
        return run.train(1)

    with on(place):
        found = train()
        without(monkeypatch)
        assert found == train()


def test_a_step_without_a_question_ends_it(tmp_path: Path) -> None:
    with on("host"):
        run = Clipped("host", tmp_path)
        run.train(2)
        norms = context_of(run.model).leaving_norms
        assert norms.are_wanted
        run.backward()
        run.step()
        assert not norms.are_wanted
        run.backward()
        assert not any(p.grad.offloaded.norms_of(None) for p in run.model.parameters())  # type: ignore[union-attr]


def test_without_memory_for_it_a_norm_is_read(tmp_path: Path, answers: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Norms, *given: Any) -> None:
        raise torch.OutOfMemoryError("no memory for a norm")

    with on("host"):
        expected = Clipped("host", tmp_path).train()
        want = LeavingNorms.want
        monkeypatch.setattr(
            LeavingNorms,
            "want",
            lambda self, norms: want(self, Norms(norms.key, norms.dtype_of, fail)),  # type: ignore[arg-type]
        )
        answers.clear()
        assert Clipped("host", tmp_path).train() == expected
        assert not any(answers)


def test_a_scaler_unscales_before_it_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> list[float]:
        run = Clipped("host", tmp_path)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for number in range(3):
            loss = run.call(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(run.optimizer)
            run.clip()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
        return run.seen

    with on("host"):
        found = train()
        without(monkeypatch)
        assert found == train()
