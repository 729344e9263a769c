"""compute="inductor" on models that do one thing each: near eager in fp32, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import more
from models import CASES, IN, OUT, tokens, vectors
from near import assert_near, train_near_eager
from rank_inductor import NAMES, compare_on_a_rank
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from training import twins, whole_gradient

pytestmark = pytest.mark.slow

BUCKET = 512
"""Bytes: several regions in each of these models."""


@pytest.mark.parametrize("name", CASES)
def test_training_is_near_eager(name: str) -> None:
    case = CASES[name]
    train_near_eager(case.build, [case.batch(step, 0) for step in range(2)], bucket=BUCKET)


@pytest.mark.distributed
def test_on_two_ranks() -> None:
    for found in run_ranks(compare_on_a_rank, 2, NAMES):
        assert found == dict.fromkeys(NAMES, "")


@pytest.mark.parametrize("name", ["mutated_buffers", more("attention"), "checkpoint", "returns_parameters"])
def test_batches_of_other_sizes_and_lengths_are_near_eager(name: str) -> None:
    sizes = ((3, 11), (5, 8), (4, 17))
    batches = [tokens(0, rows=r, length=n) if name == "attention" else vectors(0, rows=r) for r, n in sizes]
    train_near_eager(CASES[name].build, batches, dynamic=True, bucket=BUCKET)


class Convolutions(nn.Module):
    """Convolutions and batch statistics, channels last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 7, 2, stride=2), nn.BatchNorm2d(7, momentum=None)
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.head = nn.Linear(7, OUT)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.layers(pictures.to(memory_format=torch.channels_last))
        return self.head(x.relu().permute(0, 2, 3, 1)).square().mean()


def pictures(seed: int, rows: int = 4) -> tuple[torch.Tensor]:
    return (torch.randn(rows, 3, 9, 8, generator=torch.Generator().manual_seed(seed)),)


@pytest.mark.parametrize("dynamic", [False, more(True)], ids=["static", "dynamic"])
def test_channels_last_and_running_statistics(dynamic: bool) -> None:
    rows = (4, 6, 3) if dynamic else (4, 4, 4)
    batches = [pictures(seed, rows[seed]) for seed in range(3)]
    eager, ours = train_near_eager(Convolutions, batches, dynamic=dynamic, bucket=BUCKET)
    assert ours.get_buffer("layers.1.num_batches_tracked") == 3
    for model in (eager, ours):
        model.eval()
    with torch.no_grad():
        assert_near("evaluation", ours(*pictures(9, rows[2])), eager(*pictures(9, rows[2])))


class Permuted(nn.Module):
    """Hands permuted, expanded and strided values from layer to layer, and keeps them for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, 6) for size in (IN, 4, 6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.layers
        x = torch.tanh(first(x)).transpose(1, 2)  # [rows, 6, 4]
        x = torch.tanh(second(x)).permute(1, 2, 0)  # [6, 6, rows]
        scale = x.mean(dim=(0, 1), keepdim=True).expand(6, 6, -1)
        x = third((x * scale).permute(2, 1, 0))[:, ::2]  # [rows, 3, 6]
        return fourth(torch.sigmoid(x).mT).square().sum()


@pytest.mark.parametrize("dynamic", [False, more(True)], ids=["static", "dynamic"])
def test_permuted_and_strided_values_between_regions(dynamic: bool) -> None:
    rows = (5, 3, 2) if dynamic else (5, 5, 5)
    batches = [(torch.randn(r, 4, IN, generator=torch.Generator().manual_seed(r)),) for r in rows]
    train_near_eager(Permuted, batches, dynamic=dynamic, bucket=BUCKET)


class Views(nn.Module):
    """Returns views of one value that a layer made, of another's, and of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(IN, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.tanh(self.first(x))
        out = self.last(hidden)
        return out.view(-1), out.t(), out[1:], hidden.unsqueeze(0), hidden.transpose(0, 1)[::2], x[:2], x.t()


@pytest.mark.parametrize("dynamic", [more(False), True], ids=["static", "dynamic"])
def test_views_that_are_returned_have_eagers_form_and_share_memory_as_there(dynamic: bool) -> None:
    eager, ours = twins(Views)
    ours.compile(backend="zero_infinity", dynamic=dynamic, options={"compute": "inductor", "bucket": BUCKET})
    for rows in (5, 3) if dynamic else (5, 5):
        results = []
        for model in (eager, ours):
            x = torch.randn(rows, IN, generator=torch.Generator().manual_seed(rows), requires_grad=True)
            results.append(model(x))
            model.zero_grad()
            sum((t.sin() * (i + 1)).sum() for i, t in enumerate(results[-1])).backward()
            results[-1] += (x.grad,)
        for number, (expected, found) in enumerate(zip(*results, strict=True)):
            assert_near(f"output {number}", found, expected)
            assert found.stride() == expected.stride()
        sharing = [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a in r for b in r] for r in results]
        assert sharing[0] == sharing[1]
        for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
            assert_near("gradient", whole_gradient(other), one.grad)


class Sizes(nn.Module):
    """Computes with the sizes of its input, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(IN, 6), nn.Linear(6, OUT)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        rows, length = x.shape[:2]
        hidden = self.first(x).reshape(rows * length, 6) / length
        hidden = F.pad(hidden, (0, 0, 0, rows)) + torch.arange(rows * length + rows).unsqueeze(1) / rows
        return self.last(hidden).view(rows, length + 1, OUT).square().mean(), rows * length


def test_sizes_are_computed_with_and_returned() -> None:
    eager, ours = twins(Sizes)
    ours.compile(backend="zero_infinity", dynamic=True, options={"compute": "inductor", "bucket": BUCKET})
    for rows, length in ((3, 4), (5, 2), (2, 9)):
        (expected, size), (found, ours_size) = (model(torch.ones(rows, length, IN)) for model in (eager, ours))
        assert size == ours_size == rows * length
        assert_near("loss", found, expected)
        for model, loss in ((eager, expected), (ours, found)):
            model.zero_grad()
            loss.backward()
        for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
            assert_near("gradient", whole_gradient(other), one.grad)


def test_a_graph_cut_into_other_regions_is_near_too() -> None:
    make: Callable[[], Any] = CASES["blocks"].build
    for bucket in (1, 2048, "32MiB"):
        torch.compiler.reset()
        train_near_eager(make, [vectors(0), vectors(1)], bucket=bucket)
