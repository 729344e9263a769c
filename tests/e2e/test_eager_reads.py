"""Eager code that reads parameters and gradients: what works, what is printed, and how refusals name what was called."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, OddShapes, vectors
from rank_eager_reads import EXACT, REFUSED, ROUNDED, TwoSteps, closure_of, lbfgs_on_drives, optimizers_and_limit, read_gradients
from ranks import run_ranks
from torch import nn
from training import BACKEND, adamw, assert_same, assert_same_models, in_place, plain_step, twins

from zinf_compile import PartitionedParameterError, UnsupportedOptimizerError, full_state_dict, gathered
from zinf_compile.sharded.parameter import ShardedParameter

ON_NVME = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}
LBFGS = r"UnsupportedOptimizerError: LBFGS doesn't update element by element \(it keeps the parameters in its attribute '_params'"


def test_what_is_at_hand_is_printed_as_in_eager() -> None:
    eager, ours = twins(OddShapes)
    in_place(ours)
    for model in (eager, ours):
        model.scalar.requires_grad_(False)
        model(*vectors(0)).backward()
    for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
        assert isinstance(other, ShardedParameter)
        assert (repr(one), str(one), f"{one}") == (repr(other), str(other), f"{other}")
        assert (repr(one.grad), str(one.grad), f"{one.grad}") == (repr(other.grad), str(other.grad), f"{other.grad}")


def test_what_is_elsewhere_is_printed_without_its_value_and_named_in_errors(tmp_path: Path) -> None:
    model: Any = Mlp()
    model.compile(backend=BACKEND, options={**ON_NVME, "nvme": str(tmp_path)})
    model(*vectors(0)).backward()
    weight = model.first.weight
    text = "ShardedParameter(first.weight, shape=[13, 7], dtype=torch.float32, rank 0 of 1)"
    assert (repr(weight), str(weight), f"{weight}") == (text, text, text)
    assert repr(weight.grad).startswith("ShardedGradient(first.weight")
    for read, name in {
        (lambda: setattr(weight, "data", torch.ones(1)), "assigning data of shape [1] is not possible"),
        (lambda: weight.__setitem__(0, 1.0), "parameter[...] = value"),
    }:
        with pytest.raises(PartitionedParameterError, match=re.escape(name)):
            read()
    with pytest.raises(PartitionedParameterError, match=r"^indexing, grad\[...\], needs the whole gradient of first.weight"):
        weight.grad[:2]
    value = full_state_dict(model)["first.weight"]
    assert torch.equal(weight[0].detach(), value[0])
    assert weight[1, 2].item() == float(value[1, 2])


def test_numbers_of_gradients_on_nvme_are_eagers(tmp_path: Path) -> None:
    eager, ours = twins(Mlp)
    ours.compile(backend=BACKEND, options={**ON_NVME, "nvme": str(tmp_path)})
    for model in (eager, ours):
        model(*vectors(0)).backward()
    for name, act in {**EXACT, **ROUNDED}.items():
        assert_same(name, *(torch.as_tensor(act(model.first.weight.grad)) for model in (eager, ours)))


@pytest.mark.parametrize("options", [{}, ON_NVME], ids=["memory", "NVMe"])
@pytest.mark.parametrize("when", ["first call", "later"])
def test_lbfgs_is_refused_by_name_and_changes_nothing(when: str, options: dict[str, str], tmp_path: Path) -> None:
    eager, ours = twins(Mlp)
    ours.compile(backend=BACKEND, options={**options, **({"nvme": str(tmp_path)} if options else {})})
    optimizers = [adamw(model.parameters()) for model in (eager, ours)]
    lbfgs = torch.optim.LBFGS(ours.parameters())
    for number in range(2):
        if when == "first call" or number:
            with pytest.raises(UnsupportedOptimizerError, match=LBFGS.removeprefix("UnsupportedOptimizerError: ")):
                lbfgs.step(closure_of(ours, 0))
            ours.zero_grad()
            if number == 0:
                assert {type(p) for p in ours.parameters()} == {nn.Parameter}
        for model, optimizer in zip((eager, ours), optimizers, strict=True):
            plain_step(model, optimizer, vectors(number))
        with gathered(ours):
            assert_same_models(eager, ours)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2])])
def test_others_are_refused_inside_their_first_closure_too(make: Any) -> None:
    model = in_place(Mlp())
    with pytest.raises(UnsupportedOptimizerError, match="doesn't update element by element"):
        make(model.parameters()).step(closure_of(model, 0))
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_a_first_closure_of_an_elementwise_optimizer_in_memory_is_eagers() -> None:
    eager, ours = twins(Mlp)
    in_place(ours)
    for model in (eager, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.step(closure_of(model, 0))
    assert_same_models(eager, ours)


def test_an_optimizers_own_methods_change_parameters_where_they_are(tmp_path: Path) -> None:
    eager, ours = twins(Mlp)
    ours.compile(backend=BACKEND, options={**ON_NVME, "nvme": str(tmp_path)})
    for model in (eager, ours):
        model(*vectors(0)).backward()
        with torch.no_grad():
            TwoSteps(model.parameters(), lr=0.1).first_step()
    for name, value in eager.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_read_numbers_of_gradients(tmp_path: Path) -> None:
    for world, options in [(2, {}), (3, {"grads": "nvme", "nvme": str(tmp_path)})]:
        for found in run_ranks(read_gradients, world, options):
            assert list(found) == list(REFUSED)
            for name, (_, called) in REFUSED.items():
                start = f"PartitionedParameterError: {called} needs the whole gradient of first.weight, of which "
                assert found[name].startswith(start), (name, found[name])
                assert "full_tensor() on all ranks" in found[name]


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_use_optimizers_that_need_more_and_many_variants() -> None:
    for found in run_ranks(optimizers_and_limit, 2):
        for name in ("LBFGS first", "LBFGS later", "LBFGS made later"):
            assert re.match(LBFGS, found[name]), (name, found[name])
        assert found["read in a closure"].startswith("gave tensor"), found  # on shards
        assert found["read in a method"].startswith("RuntimeError: a leaf Variable that requires grad"), found  # eager's


@pytest.mark.distributed
def test_ranks_with_all_on_nvme_refuse_lbfgs_by_name(tmp_path: Path) -> None:
    for found in run_ranks(lbfgs_on_drives, 2, str(tmp_path)):
        assert list(found) == ["LBFGS first", "LBFGS later", "LBFGS made later"]
        for said in found.values():
            assert re.match(LBFGS, said), said
