"""Models that can't be partitioned: where nothing moves, their parameters stay as they are, and train as PyTorch trains them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, vectors
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training import BACKEND, assert_same, assert_same_models, plain_step

from zinf_compile import UnsupportedModelError

FX = {"compute": "fx"}


def as_a_user(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="zero_infinity", options={**FX, **options})


def momentum(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Subclass(nn.Parameter):
    """A parameter of another class."""


class Words(nn.Module):
    """An embedding, and a layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(11, 4, **options), nn.Linear(4, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(words)).square().mean()


class Changing(Mlp):
    """Changes its weights in its forward, and keeps a moving average of them."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros_like(self.first.weight), requires_grad=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.first.weight.data.clamp_(-0.3, 0.3)
        with torch.no_grad():
            self.first.bias.clamp_(-0.01, 0.01)
            self.average.lerp_(self.first.weight, 0.1)
        return super().forward(x, y) + (self.average * self.first.weight).mean()


class Scaled(Mlp):
    """Its input is scaled by a parameter that is given."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.to(x.device)  # of nothing: each parameter is assigned to itself
        return super().forward((x * self.scale).real, y)


class Assigning(Mlp):
    """Assigns to the data of a tensor of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.register_buffer("counts", torch.ones(3))
        self.name = name

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        tensor = self.counts if self.name == "counts" else self.first.weight
        tensor.data = tensor.data * 2
        return super().forward(x, y) + self.counts.sum()


def words(step: int) -> tuple[torch.Tensor, ...]:
    return (torch.tensor([[3, 5, 3, step]]),)


BUILDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, ...]]]] = {
    "max_norm": (lambda: Words(max_norm=0.5), words),
    "changed in forward": (Changing, vectors),
    "complex": (lambda: Scaled(nn.Parameter(torch.randn(7, dtype=torch.complex64))), vectors),
    "subclass": (lambda: Scaled(Subclass(torch.randn(7))), vectors),
    "gapped": (lambda: Scaled(nn.Parameter(torch.randn(14)[::2])), vectors),
    "expanded": (lambda: Scaled(nn.Parameter(torch.randn(1).expand(7), requires_grad=False)), vectors),
}


@pytest.mark.parametrize("drive", [False, True])
@pytest.mark.parametrize("name", BUILDS)
def test_what_cannot_be_partitioned_trains_as_it_is(name: str, drive: bool, tmp_path: Path) -> None:
    """Also where there is a drive, and homes would be decided for what can be."""
    build, batch = BUILDS[name]
    torch.manual_seed(7)
    eager = build()
    ours = copy.deepcopy(eager)
    kinds = {key: type(parameter) for key, parameter in eager.named_parameters()}
    called = as_a_user(ours, **({"nvme": str(tmp_path)} if drive else {}))
    optimizers = (momentum(eager), momentum(ours))
    for step in range(3):
        losses = [plain_step(*side, batch(step)) for side in zip((eager, called), optimizers, strict=True)]
        assert_same("loss", *[loss.detach() for loss in losses])
        assert_same_models(eager, ours)
    with torch.no_grad():
        assert_same("evaluation", eager(*batch(3)), called(*batch(3)))
    assert_same_models(eager, ours)
    assert {key: type(parameter) for key, parameter in ours.named_parameters()} == kinds


def test_a_sparse_gradient_stays_sparse() -> None:
    torch.manual_seed(7)
    eager = Words(sparse=True)
    ours = copy.deepcopy(eager)
    called = as_a_user(ours)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, ours)]
    for step in range(2):
        for model, optimizer in zip((eager, called), optimizers, strict=True):
            plain_step(model, optimizer, words(step))
        found, expected = ours.embedding.weight.grad, eager.embedding.weight.grad
        assert found is not None
        assert expected is not None
        assert found.layout == torch.sparse_coo
        assert_same("gradient", expected.to_dense(), found.to_dense())
        assert_same("weight", eager.embedding.weight.detach(), ours.embedding.weight.detach())


def wrapped_in_ddp(model: nn.Module) -> Any:
    return as_a_user(DistributedDataParallel(model))


def inside_ddp(model: nn.Module) -> Any:
    return DistributedDataParallel(as_a_user(model))


def sharded(model: nn.Module) -> Any:
    return as_a_user(fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,))))


def flat(model: nn.Module) -> Any:
    whole = {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True}
    return as_a_user(FullyShardedDataParallel(model, device_id=torch.device("cpu"), **whole))


def in_parallel(model: nn.Module) -> Any:
    return as_a_user(parallelize_module(model, dist.init_device_mesh("cpu", (1,)), {"first": ColwiseParallel()}))


@pytest.mark.parametrize("wrap", [wrapped_in_ddp, inside_ddp, sharded, flat, in_parallel], ids=lambda wrap: wrap.__name__)
def test_wrappers_of_pytorch_stay_on_one_rank(wrap: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    torch.manual_seed(7)
    eager = Mlp()
    ours = copy.deepcopy(eager)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        called = wrap(ours)
        optimizers = (momentum(eager), momentum(ours))
        for step in range(2):
            losses = [plain_step(*side, vectors(step)) for side in zip((eager, called), optimizers, strict=True)]
            assert_same("loss", *[loss.detach() for loss in losses])
        for (name, expected), found in zip(eager.named_parameters(), ours.parameters(), strict=True):
            value = found.detach()
            assert_same(name, expected.detach(), value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value)
    finally:
        dist.destroy_process_group()


def test_an_evaluation_with_frozen_parameters() -> None:
    """Dynamo then attaches them to the graph."""
    torch.manual_seed(7)
    eager = Mlp()
    ours = copy.deepcopy(eager)
    called = as_a_user(ours)
    plain_step(eager, momentum(eager), vectors(0))
    plain_step(called, momentum(ours), vectors(0))
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        assert_same("evaluation", eager(*vectors(1)), called(*vectors(1)))
    plain_step(eager, momentum(eager), vectors(2))
    plain_step(called, momentum(ours), vectors(2))
    assert_same_models(eager, ours)


@pytest.mark.parametrize(
    ("name", "backend"), [("counts", "zero_infinity"), ("first.weight", "zero_infinity"), ("counts", BACKEND)]
)
def test_an_assignment_to_data_is_refused_with_the_users_line(name: str, backend: str) -> None:
    model = Assigning(name)
    twin = copy.deepcopy(model)
    message = rf"(?s)assigns to the data of {name} in its forward; accepted: in-place .*copy_.*test_ordinary_models.py"
    with pytest.raises(UnsupportedModelError, match=message):
        torch.compile(model, backend=backend, options=FX)(*vectors(0))
    assert_same_models(twin, model)


@pytest.mark.parametrize("name", BUILDS)
def test_an_option_that_partitions_refuses_it_then(name: str) -> None:
    build, batch = BUILDS[name]
    model = build()
    plain_step(as_a_user(model), momentum(model), batch(0))
    model.zero_grad()  # a deep copy has no gradients
    twin = copy.deepcopy(model)
    with pytest.raises(UnsupportedModelError):
        as_a_user(model, params="device")(*batch(1))
    assert_same_models(twin, model)
