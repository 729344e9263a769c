"""What is saved beside parameters and states: accumulated gradients on every tier, companions of parameters, and generators."""

from __future__ import annotations

import contextlib
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from edited_manifests import edit
from torch import nn
from training import BACKEND, whole_gradient

import zinf_compile
from zinf_compile.checkpoint import random_states
from zinf_compile.errors import CheckpointError
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.sharded.gradient import ShardedGradient
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.tensor import ShardedTensor

AWAY = dict.fromkeys(("params", "grads", "optimizer"), "nvme")
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"params": "host", "grads": "host", "optimizer": "host"},
    "nvme": AWAY,
    "in tiles": {**AWAY, "tile": 256},
}


class Small(nn.Module):
    """A tied weight, a frozen one, a number, and one parameter that no graph uses."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words, self.down = nn.Embedding(23, 40, dtype=dtype), nn.Linear(40, 13, dtype=dtype)
        self.frozen = nn.Parameter(torch.ones(13, 3, dtype=dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.unused = nn.Parameter(torch.ones(5, dtype=dtype))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        y = torch.tanh(self.down(x)) @ self.frozen * self.scale
        return (x @ self.words.weight.t()).float().square().mean() + y.float().square().mean()


def build(place: str, folder: Path, dtype: torch.dtype = torch.float32, reduced: torch.dtype | None = None) -> Any:
    """Return a model, after one step."""
    torch.compiler.reset()
    torch.manual_seed(0)
    options: dict[str, Any] = {**PLACES[place], "reduce_dtype": reduced, "compute_shape": {"piece_numel": 96}}
    options |= {"master": "float32"} if dtype == torch.bfloat16 else {}
    options |= {"nvme": str(folder)} if "nvme" in PLACES[place].values() else {}
    model = Small(dtype)
    compiled = torch.compile(model, backend=BACKEND, options=options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=True)
    accumulate(compiled, 1)
    optimizer.step()
    optimizer.zero_grad()
    return model, compiled, optimizer


def accumulate(compiled: Any, count: int) -> None:
    for _ in range(count):
        compiled(torch.randint(23, (4, 6))).backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return whole gradients in the type in which they are kept."""
    found = {}
    for name, p in model.named_parameters():
        kept = p.grad.to(p.grad.kept_dtype) if isinstance(p.grad, ShardedGradient) else p.grad
        whole = kept.full_tensor() if isinstance(kept, ShardedGradient) else kept
        found[name] = None if whole is None else whole.clone()
    return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("before", "after", "dtype", "reduced", "apart"),
    [
        ("device", "in tiles", torch.float32, None, False),
        ("in tiles", "host", torch.float32, None, True),
        ("host", "nvme", torch.bfloat16, torch.float32, True),
        ("nvme", "device", torch.bfloat16, torch.float32, False),
        ("in tiles", "in tiles", torch.bfloat16, torch.float32, False),
    ],
)
def test_gradients_come_back_on_every_tier(
    before: str, after: str, dtype: torch.dtype, reduced: torch.dtype | None, apart: bool, drive: Path, tmp_path: Path
) -> None:
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        model, compiled, optimizer = build(before, drive, dtype, reduced)
        model.unused.grad = torch.arange(5.0).to(dtype)
        accumulate(compiled, 2)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.75)  # noted where it is on a drive
        expected = gradients(model)
        assert {expected[name].dtype for name in ("words.weight", "scale")} == {reduced or dtype}  # type: ignore[union-attr]
        assert expected["frozen"] is None
        zinf_compile.save(tmp_path / "saved", model, optimizer)
        same(gradients(model), expected)

        other, its_compiled, its = build(after, drive, dtype, reduced)
        accumulate(its_compiled, 1)
        zinf_compile.load(tmp_path / "saved", other, its)
        same(gradients(other), expected)
        grad = other.words.weight.grad
        assert isinstance(grad, ShardedGradient)
        assert (grad.offloaded is not None) == (after in ("nvme", "in tiles") or (apart and after == "host"))
        if PLACES[before].get("tile") != PLACES[after].get("tile"):
            return  # products of other shapes
        for each, optimizer_of_each in ((compiled, optimizer), (its_compiled, its)):
            torch.manual_seed(5)
            accumulate(each, 1)  # on top of what was loaded
            optimizer_of_each.step()
        same(gradients(other), gradients(model))
        same(zinf_compile.full_state_dict(other), zinf_compile.full_state_dict(model))


def test_a_checkpoint_without_gradients_clears_them(drive: Path, tmp_path: Path) -> None:
    model, compiled, optimizer = build("nvme", drive)
    zinf_compile.save(tmp_path / "saved", model, optimizer)
    accumulate(compiled, 1)
    model.unused.grad = torch.ones(5)
    zinf_compile.load(tmp_path / "saved", model, optimizer)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_come_from_and_to_plain_pytorch(drive: Path, tmp_path: Path) -> None:
    model, compiled, _ = build("in tiles", drive)
    accumulate(compiled, 2)
    zinf_compile.save(tmp_path / "saved", model)
    whole = Small(torch.float32)
    zinf_compile.load(tmp_path / "saved", whole)
    same({n: p.grad for n, p in whole.named_parameters()}, gradients(model))
    zinf_compile.save(tmp_path / "plain", whole)
    model.zero_grad()
    zinf_compile.load(tmp_path / "plain", model)
    same({n: whole_gradient(p) for n, p in model.named_parameters()}, {n: p.grad for n, p in whole.named_parameters()})


@pytest.mark.parametrize("place", ["nvme", "in tiles"])
def test_companions_in_buffers_come_back(place: str, drive: Path, tmp_path: Path) -> None:
    """Averages that are buffers, made after the first call and partitioned like these."""
    model, compiled, optimizer = build(place, drive)
    with torch.no_grad():
        averages = {"words": model.words.weight.detach() * 0.5, "squares": model.down.weight.detach().square()}
    for name, average in averages.items():
        assert isinstance(average, ShardedTensor)
        assert not isinstance(average, ShardedParameter)
        model.register_buffer(name + "_average", average)
    expected = {name: average.full_tensor().clone() for name, average in averages.items()}
    zinf_compile.save(tmp_path / "saved", model, optimizer)
    for average in averages.values():
        average.mul_(3.0)
    zinf_compile.load(tmp_path / "saved", model, optimizer)
    same({name: average.full_tensor() for name, average in averages.items()}, expected)
    whole = Small(torch.float32)
    whole.register_buffer("words_average", torch.zeros(23, 40))
    whole.register_buffer("squares_average", torch.zeros(13, 40))
    zinf_compile.load(tmp_path / "saved", whole)
    same({"words": whole.words_average, "squares": whole.squares_average}, expected)
    assert compiled is not None


def test_generators_come_back(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    random.seed(3)
    np.random.seed(3)
    random.gauss(0, 1)  # of which a second one is at hand
    np.random.standard_normal()  # likewise
    torch.randn(5)
    zinf_compile.save(tmp_path, model)

    def drawn() -> tuple[Any, ...]:
        return (
            torch.randn(7).tolist(),
            random.gauss(0, 1),
            random.random(),
            np.random.standard_normal(),
            np.random.rand(700).tolist(),
        )

    expected = drawn()
    assert drawn() != expected
    zinf_compile.load(tmp_path, model)
    assert drawn() == expected


def test_a_program_without_numpys_generator_saves_none_and_one_with_it_gets_it(tmp_path: Path) -> None:
    with mock.patch.dict(sys.modules):
        sys.modules.pop("numpy.random", None)
        zinf_compile.save(tmp_path / "without", nn.Linear(3, 3))
    np.random.seed(5)
    zinf_compile.save(tmp_path / "with", nn.Linear(3, 3))
    expected = np.random.rand(3).tolist()
    zinf_compile.load(tmp_path / "without", nn.Linear(3, 3))
    assert np.random.rand(3).tolist() != expected, "it goes on from where it was"
    zinf_compile.load(tmp_path / "with", nn.Linear(3, 3))
    assert np.random.rand(3).tolist() == expected


def test_another_generator_in_numpys_place_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "zinf_compile")
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        zinf_compile.save(tmp_path, nn.Linear(3, 3))
        assert "numpy's global generator is a PCG64 and not saved; accepted: MT19937" in caplog.text
        expected = np.random.PCG64(7).random_raw(2).tolist()
        zinf_compile.load(tmp_path, nn.Linear(3, 3))
        assert np.random.get_bit_generator().random_raw(2).tolist() == expected
        np.random.set_bit_generator(before)
        zinf_compile.save(tmp_path, nn.Linear(3, 3))
        np.random.set_bit_generator(np.random.PCG64(7))
        zinf_compile.load(tmp_path, nn.Linear(3, 3))
        assert np.random.get_bit_generator().random_raw(2).tolist() == expected
        assert "numpy's global generator is a PCG64 and not restored; accepted: MT19937" in caplog.text
    finally:
        np.random.set_bit_generator(before)


def test_damaged_numbers_of_numpy_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    np.random.seed(3)
    with mock.patch.object(random_states, "_numpy_state", return_value=torch.full((628,), 1 << 40)):
        zinf_compile.save(tmp_path, model)
    state = np.random.get_state()
    with pytest.raises(CheckpointError, match=r"random\.0\.numpy is the state of no random generator known here"):
        zinf_compile.load(tmp_path, model)
    assert np.array_equal(np.random.get_state()[1], state[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "3"}, "says of random generators"),
        ({"ranks": 1 << 60}, "says of random generators"),
        ({"kinds": ["cpu", "other"]}, "says of random generators"),
    ],
)
def test_edited_manifests_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    file = zinf_compile.save(tmp_path, model) / "manifest.json"
    edit(file, lambda content: content["settings"]["random"].update(change))
    before, state = model.weight.detach().clone(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message):
        zinf_compile.load(tmp_path, model)
    assert torch.equal(model.weight, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    model.weight.grad = torch.ones(4, 3)
    file = zinf_compile.save(tmp_path, model) / "manifest.json"
    edit(file, lambda content: content["tensors"]["gradient.weight"]["shape"].append(1))
    with pytest.raises(CheckpointError, match=r"gradient\.weight"):
        zinf_compile.load(tmp_path, model)
