"""What can't be made partitioned: clear errors, and nothing half-built left behind."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import failing
from models import CASES, Mlp
from rank_from_meta import assert_born, built_inside, built_whole, compare, made_on_meta
from tiers import context_of
from torch import nn
from torch.nn.modules import module as modules
from transformer_models import vit

import zinf_compile
from zinf_compile.errors import BudgetError, OptionError, StoreError, UnsupportedModelError

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


class WithScale(nn.Module):
    """Has a parameter that no initialiser touches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))


class Drawing(WithScale):
    """Initialises itself."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(lambda module: None)


class Constant(nn.Module):
    """Has a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.constant = torch.ones(3)


class Forgetful(nn.Linear):
    """Initialises half of its weight."""

    def reset_parameters(self) -> None:
        self.weight.data[:2] = 1.0
        nn.init.zeros_(self.bias)


class Failing(nn.Linear):
    """Fails while it is initialised, but on meta."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)
        if self.weight.device.type != "meta":
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: nn.Sequential(WithScale()),
            r"module 0 \(.*WithScale\) has no initialiser for scale.*init=.*checkpoint=.*",
        ),
        (Drawing, r"module \(the model\) \(.*Drawing\) gives values in its constructor \(apply\).*partitioned"),
        (vit, r"module vit.embeddings \(.*ViTEmbeddings\) gives values in its constructor \(randn\)"),
        (Constant, r"attribute constant of module \(the model\) is a tensor on the meta device.*register_buffer"),
        (lambda: nn.Sequential(nn.Linear(3, 4), Forgetful(3, 4)), r"no initialiser gave 1\.weight a value; the model is on meta"),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(4)), r"parameter 1\.weight of a lazy module has no shape yet"),
        (nn.ReLU, "the model has no parameters"),
        (CASES["mutated_buffers"].build, "no initialiser for average, count"),
        (lambda: nn.Linear(3, 4, dtype=torch.complex64), r"weight, shape \[4, 3\], is complex"),
    ],
    ids=lambda value: None if callable(value) else value[:20],
)
def test_models_that_say_too_little(build: Callable[[], nn.Module], message: str) -> None:
    assert_refused(build, UnsupportedModelError, message)


def test_with_init_what_constructors_do_is_the_users_business() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, WithScale):
            nn.init.ones_(module.scale)

    with torch.device("meta"):
        model = Drawing()
    zinf_compile.partition(model, init=init)
    assert bool((zinf_compile.full_state_dict(model)["scale"] == 1).all())


def test_what_fails_in_an_initialiser_leaves_the_model_and_the_random_numbers() -> None:
    random = torch.get_rng_state()
    build = lambda: nn.Sequential(nn.Linear(3, 4), Failing(3, 4), tied := nn.Linear(4, 4), tied)  # noqa: E731
    assert_refused(build, ZeroDivisionError, "^$", again=False)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_model_partly_on_meta() -> None:
    with torch.device("meta"):
        model = Mlp()
    model.second = nn.Linear(13, 5)
    before = dict(model.named_parameters())
    with pytest.raises(UnsupportedModelError, match=r"second.weight is on cpu; partition\(\) takes a model .* as a whole"):
        zinf_compile.partition(model)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


@pytest.mark.parametrize("birth", [made_on_meta, built_inside])
def test_a_second_partition(birth: Callable[..., Any]) -> None:
    model = birth(Mlp)
    with pytest.raises(UnsupportedModelError, match=r"first.weight is partitioned already.*load_full_state_dict"):
        zinf_compile.partition(model)
    compare(built_whole(Mlp), model)


def test_options(tmp_path: Path) -> None:
    assert_refused(Mlp, OptionError, "unknown option 'param'.*did you mean 'params'", param="nvme")
    assert_refused(Mlp, OptionError, "needs a drive", params="nvme")
    assert_refused(Mlp, BudgetError, "parameters and gradients that stay there.*the smallest that works is", device_memory="200B")
    assert_refused(Mlp, UnsupportedModelError, "omit one", init=print, checkpoint=tmp_path)
    with pytest.raises(OptionError, match="unknown option"), zinf_compile.partitioned(param="nvme"):
        pass


def test_hooks_on_parameters_on_meta() -> None:
    with torch.device("meta"):
        model = Mlp()
    model.first.weight.register_hook(print)
    with pytest.raises(UnsupportedModelError, match=r"first.weight has hooks.*register them after"):
        zinf_compile.partition(model)


def test_an_initialiser_that_wants_another_type() -> None:
    def init(module: nn.Module) -> None:
        module.bfloat16()

    assert_refused(
        Mlp, UnsupportedModelError, r"first.weight, \[13, 7\] torch.float32, .* makes it \[13, 7\] torch.bfloat16", init=init
    )


def test_a_full_drive_is_an_error_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StoreError(errno.ENOSPC, "cannot reserve space")

    monkeypatch.setattr("zinf_compile.runtime.storage.extent_store.check_room", full)
    seen: list[nn.Module] = []
    assert_refused(Mlp, StoreError, "cannot reserve space", init=seen.append, params="nvme", nvme=tmp_path, again=False)
    assert not seen


def test_a_drive_that_fails_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zinf_compile.runtime.units.backing import NvmeBacking  # noqa: PLC0415

    written: list[Any] = []
    write = NvmeBacking.write

    def fails(self: NvmeBacking, source: torch.Tensor, start: int = 0) -> Any:
        written.append(source.numel())
        if len(written) == 3:
            raise StoreError(errno.EIO, "failed")
        return write(self, source, start)

    monkeypatch.setattr(NvmeBacking, "write", fails)
    assert_refused(Mlp, StoreError, "failed", params="nvme", nvme=tmp_path)


def test_an_error_inside_partitioned_leaves_no_hooks_and_no_values() -> None:
    left: list[nn.Module] = []

    def build() -> nn.Module:
        left.append(Mlp())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        built_inside(build)
    assert not modules._global_parameter_registration_hooks
    assert not modules._global_module_registration_hooks
    with pytest.raises(UnsupportedModelError, match=r"Linear.weight was being partitioned when an error ended that"):
        left[0].first.weight.sum()
    assert {type(p) for p in Mlp().parameters()} == {nn.Parameter}


def test_partitioned_inside_partitioned() -> None:
    with (
        pytest.raises(UnsupportedModelError, match="one block is enough"),
        zinf_compile.partitioned(),
        zinf_compile.partitioned(),
    ):
        pass


def test_meta_and_lazy_parameters_inside_partitioned() -> None:
    with pytest.raises(UnsupportedModelError, match=r"weight is on the meta device and got no value inside partitioned"):
        built_inside(lambda: nn.Linear(3, 4, device="meta"))
    with pytest.raises(UnsupportedModelError, match="lazy module has no shape yet"):
        built_inside(lambda: nn.LazyLinear(3))


def test_pickling_inside_partitioned() -> None:
    with zinf_compile.partitioned():
        model = Mlp()
        with pytest.raises(UnsupportedModelError, match=r"Linear.weight is being partitioned and can't be pickled"):
            pickle.dumps(model)


def test_forward_inside_partitioned_and_eager_reads_afterwards(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = Mlp()
        with torch.no_grad():
            model.second.bias.fill_(model(*CASES["mlp"].batch(0, 0)).item())
        return model

    _, ours = assert_born(build, built_inside)
    assert torch.isfinite(ours.first.weight).all()
    away = built_inside(build, params="nvme", nvme=tmp_path)
    assert torch.equal(away.first.weight[0], ours.first.weight[0])


def assert_refused(
    build: Callable[[], nn.Module], error: type[BaseException], message: str, *, again: bool = True, **arguments: Any
) -> None:
    """The model is what it was on meta, its room is given back, and another may be partitioned."""
    with torch.device("meta"):
        model = build()
    before = list(model.named_parameters(remove_duplicate=False))
    buffers = list(model.named_buffers())
    attributes = [dict(vars(p)) for _, p in before]
    with pytest.raises(error, match=message):
        zinf_compile.partition(model, **arguments)
    for (name, then), (now_name, now) in zip(before, model.named_parameters(remove_duplicate=False), strict=True):
        assert name == now_name
        assert now is then
    for (name, then), (now_name, now) in zip(buffers, model.named_buffers(), strict=True):
        assert name == now_name
        assert now is then
    assert {(type(p), p.device.type) for _, p in before} <= {
        (nn.Parameter, "meta"),
        (nn.UninitializedParameter, "meta"),
    }
    assert [dict(vars(p)) for _, p in before] == attributes
    if again:
        made_on_meta(Mlp)


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_drive_that_fails_while_values_are_on_their_way_to_it_leaves_the_model_on_meta(number: int, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20), nn.Linear(20, 10))

    engine = context_of(made_on_meta(CASES["mlp"].build)).engine
    with torch.device("meta"):
        model = build()
    parameters = list(model.parameters())
    with failing(engine, "write", number) as began, pytest.raises(StoreError, match="cannot write bytes") as raised:
        zinf_compile.partition(model, params="nvme", nvme=tmp_path)
    assert raised.value.errno == errno.EIO
    assert began[-1] >= number
    for before, after in zip(parameters, model.parameters(), strict=True):
        assert before is after
        assert type(after) is nn.Parameter
        assert after.is_meta
    zinf_compile.partition(model, params="nvme", nvme=tmp_path)  # nothing is in the way
