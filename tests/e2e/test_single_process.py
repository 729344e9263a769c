"""On one process a partitioned model answers as an ordinary one: read, write, save, load, convert, print."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import IN, OUT, Mlp, MutatedBuffers, OddShapes, TiedWords, tokens, vectors
from torch import nn
from training import BACKEND, adamw, assert_same, assert_same_models, in_place, plain_step, train_step_on, twins

import zinf_compile
from zinf_compile import PartitionedParameterError, UnsupportedModelError
from zinf_compile.sharded.parameter import ShardedParameter


@pytest.fixture(autouse=True, scope="module")
def _fresh_compiler() -> Iterator[None]:
    """Let the tests of this file share compiled graphs, in place of conftest's fixture."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


BATCHES: dict[type[nn.Module], Callable[[int], tuple[Any, ...]]] = {
    Mlp: vectors, TiedWords: tokens, MutatedBuffers: vectors, OddShapes: vectors,
}  # fmt: skip

every_model = pytest.mark.parametrize("build", BATCHES)


@every_model
def test_state_dict_has_eagers_keys_and_values(build: type[nn.Module]) -> None:
    eager, ours = trained(build)
    expected, found = eager.state_dict(), ours.state_dict()
    assert list(expected) == list(found)
    for name, value in expected.items():
        assert type(found[name]) is torch.Tensor
        assert found[name].stride() == value.stride()
        assert_same(name, value, found[name])


@every_model
def test_a_saved_state_dict_holds_each_tensors_own_bytes_and_loads_into_eager(build: type[nn.Module]) -> None:
    eager, ours = trained(build)
    sizes = []
    for model in (eager, ours):
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        sizes.append(file.tell())
    assert abs(sizes[1] - sizes[0]) < 64 * len(eager.state_dict()), f"eager's file has {sizes[0]} bytes, ours {sizes[1]}"
    file.seek(0)
    plain, _ = twins(build, seed=1)
    plain.load_state_dict(torch.load(file, weights_only=True))
    for name, value in plain.state_dict().items():
        assert_same(name, eager.state_dict()[name], value)


def test_one_tensor_of_the_state_dict_saves_its_own_bytes_only() -> None:
    _, ours = trained(Mlp)
    file = io.BytesIO()
    torch.save(ours.state_dict()["norm.bias"], file)
    assert file.tell() < 2000 < sum(p.numel() * 4 for p in nn.Linear(IN, 99).parameters())
    assert ours.state_dict()["norm.bias"].untyped_storage().nbytes() == 13 * 4


@every_model
def test_load_state_dict_takes_effect_in_the_next_step(build: type[nn.Module]) -> None:
    eager, ours = trained(build)
    other, _ = twins(build, seed=3)
    for model in (eager, ours):
        assert str(model.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    go_on(eager, ours, BATCHES[build])


def test_load_state_dict_with_assign_says_what_to_do() -> None:
    _, ours = trained(Mlp)
    before = ours.first.weight
    with pytest.raises((PartitionedParameterError, RuntimeError)):
        before.data = torch.zeros(2, 2)
    assert ours.first.weight is before


@every_model
def test_gathered_parameters_are_plain_and_whole(build: type[nn.Module]) -> None:
    eager, ours = trained(build)
    objects = list(ours.parameters())
    with zinf_compile.gathered(ours) as inside:
        assert inside is ours
        for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
            assert type(other) is nn.Parameter
            assert_same("parameter", one.detach(), other.detach())
            other.data.fill_(9)
    assert all(isinstance(p, ShardedParameter) and p is q for p, q in zip(ours.parameters(), objects, strict=True))
    assert_same_models(eager, ours, where="after a write without write=True")


@every_model
def test_gathered_with_write_keeps_changes(build: type[nn.Module]) -> None:
    eager, ours = trained(build)
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.mul_(0.5)
        with zinf_compile.gathered(ours, write=True):
            for parameter in ours.parameters():
                parameter.mul_(0.5)
    go_on(eager, ours, BATCHES[build])


def test_gathered_keeps_gradients_and_survives_an_exception() -> None:
    eager, ours = trained(Mlp)
    with pytest.raises(ArithmeticError), zinf_compile.gathered(ours):
        raise ArithmeticError
    assert_same_models(eager, ours)
    go_on(eager, ours, vectors)


def test_the_compiled_model_is_refused_inside_gathered() -> None:
    _, ours = trained(Mlp)
    with zinf_compile.gathered(ours), pytest.raises(PartitionedParameterError, match=r"leave `with zinf_compile\.gathered"):
        ours(*vectors(0))
    ours(*vectors(0)).backward()


@every_model
def test_full_state_dict_is_eagers_and_loads_back(build: type[nn.Module]) -> None:
    eager, ours = trained(build)
    state = zinf_compile.full_state_dict(ours)
    expected = eager.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert_same(name, value, state[name])
    other_eager, other = trained(build, seed=5)
    zinf_compile.load_full_state_dict(other, state)
    other_eager.load_state_dict(expected)
    go_on(other_eager, other, BATCHES[build])


def test_full_state_dict_is_a_copy_and_keeps_ties() -> None:
    eager, ours = trained(TiedWords)
    state = zinf_compile.full_state_dict(ours)
    assert state["embedding.weight"].data_ptr() == state["head.weight"].data_ptr()
    kept = {name: value.clone() for name, value in state.items()}
    go_on(eager, ours, tokens)
    for name, value in state.items():
        assert_same(name, kept[name], value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("first.bias"), "missing: first.bias"),
        (lambda state: state.update(stray=torch.ones(2)), "unexpected: stray"),
        (lambda state: state.update({"first.bias": torch.ones(2)}), r"shape of first.bias: \[2\] in the state, \[13\] in"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    eager, ours = trained(Mlp)
    state = {name: value + 1 for name, value in zinf_compile.full_state_dict(ours).items()}
    change(state)
    with pytest.raises(UnsupportedModelError, match=message):
        zinf_compile.load_full_state_dict(ours, state)
    assert_same_models(eager, ours)


def test_full_state_dict_of_a_model_that_never_ran() -> None:
    eager, ours = twins(MutatedBuffers)
    in_place(ours)
    for name, value in zinf_compile.full_state_dict(ours).items():
        assert_same(name, eager.state_dict()[name], value)
    zinf_compile.load_full_state_dict(ours, eager.state_dict())


@every_model
def test_conversions_that_change_nothing_return_the_same_parameters(build: type[nn.Module]) -> None:
    eager, ours = trained(build)
    objects = list(ours.parameters())
    assert ours.to("cpu").to(torch.float32).cpu().float() is ours
    assert all(p is q for p, q in zip(ours.parameters(), objects, strict=True))
    assert ours.get_parameter(next(iter(dict(ours.named_parameters())))).to("cpu") is objects[0]
    go_on(eager, ours, BATCHES[build])


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, nn.Module.bfloat16, lambda model: model.to(torch.half)])
def test_real_conversions_say_what_to_do(convert: Callable[[nn.Module], Any]) -> None:
    eager, ours = trained(Mlp)
    with pytest.raises(PartitionedParameterError, match=r"Convert or move the model before its first compiled call"):
        convert(ours)
    assert_same_models(eager, ours)


@pytest.mark.parametrize("duplicate", [copy.copy, lambda p: torch.save(p, io.BytesIO()), lambda p: p.share_memory_()])
def test_duplicates_of_a_parameter_say_what_to_do(duplicate: Callable[[Any], Any]) -> None:
    _, ours = trained(Mlp)
    message = r"parameter first.weight is partitioned and can't be .*zinf_compile\.full_state_dict\(model\)"
    with pytest.raises(PartitionedParameterError, match=message):
        duplicate(ours.first.weight)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "addition": lambda p: p + 1,
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "transpose": lambda p: p.T,
    "row": lambda p: p[1],
    "rows": lambda p: torch.stack(list(p)),
    "norm": lambda p: p.norm(),
    "product": lambda p: torch.ones(2, p.shape[0]) @ p,
    "clone": lambda p: p.clone(),
    "stack": lambda p: torch.stack([p, p]),
    "cat": lambda p: torch.cat([p, p.detach()]),
    "foreach": lambda p: torch._foreach_mul([p], 2.0)[0],
    "comparison": lambda p: p > 0,
    "list": lambda p: torch.tensor(p.tolist()),
    "array": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "item": lambda p: torch.tensor(p[0, 0].item()),
    "conversion": lambda p: p.double(),
}


@pytest.mark.parametrize("name", READS)
def test_an_eager_read_gives_the_value(name: str) -> None:
    results = [READS[name](model.first.weight) for model in trained(Mlp)]
    assert_same(name, results[0], results[1])
    assert results[0].requires_grad == results[1].requires_grad


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda p: p.mul_(2).add_(1),
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "row": lambda p: p.__setitem__(1, 3.0),
    "data": lambda p: setattr(p, "data", torch.ones(13, IN)),
    "data in place": lambda p: p.data.fill_(0.25),
    "init": nn.init.xavier_uniform_,
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "zero": lambda p: p.zero_(),
    "out": lambda p: torch.mul(p.detach(), 2, out=p.detach()),
}


@pytest.mark.parametrize("name", WRITES)
def test_an_eager_write_changes_the_value(name: str) -> None:
    eager, ours = trained(Mlp)
    for model in (eager, ours):
        torch.manual_seed(0)
        with torch.no_grad():
            WRITES[name](model.first.weight)
    go_on(eager, ours, vectors)


def test_an_eager_call_of_a_partitioned_model_gives_eagers_bits_and_gradients() -> None:
    eager, ours = trained(Mlp)
    for model in (eager, ours):
        model.zero_grad()
        model.forward(*vectors(5)).backward()
    assert_same_models(eager, ours)
    for model in (eager, ours):
        model.second(model.first(vectors(6)[0])).sum().backward()
    assert_same_models(eager, ours)
    go_on(eager, ours, vectors)


def test_parameters_and_model_are_printed() -> None:
    _, ours = trained(Mlp)
    assert repr(ours.first.weight).startswith("Parameter containing:\ntensor([[")
    assert f"Linear(in_features={IN}, out_features=13, bias=True)" in repr(ours)
    assert isinstance(ours.second.bias, nn.Parameter)
    assert ours.second.bias.shape == (OUT,)
    assert [name for name, _ in ours.named_parameters()] == list(Mlp().state_dict())


def test_a_plain_model_takes_the_place_of_a_partitioned_one() -> None:
    """`torch.compile`'s wrapper keeps its own keys, as in eager PyTorch."""
    eager, ours = twins(Mlp)
    compiled = torch.compile(ours, backend=BACKEND)
    compiled(*vectors(0)).backward()
    assert list(compiled.state_dict()) == [f"_orig_mod.{name}" for name in eager.state_dict()]
    assert list(ours.state_dict()) == list(eager.state_dict())


def trained(build: Callable[[], nn.Module], *, seed: int = 7) -> tuple[Any, Any]:
    """Return an eager and a compiled model after a step; their gradients are kept."""
    eager, ours = twins(build, seed=seed)
    in_place(ours)
    batch = next(batch for kind, batch in BATCHES.items() if isinstance(ours, kind))
    train_step_on([(m, adamw(m.parameters())) for m in (eager, ours)], [eager, ours], plain_step, batch(0), 0)
    assert all(isinstance(p, ShardedParameter) for p in ours.parameters())
    return eager, ours


def go_on(eager: nn.Module, ours: nn.Module, batch: Callable[[int], tuple[Any, ...]]) -> None:
    """Train both for three steps more."""
    sides = [(m, adamw(m.parameters())) for m in (eager, ours)]
    for number in range(1, 4):
        train_step_on(sides, [eager, ours], plain_step, batch(number), number)
