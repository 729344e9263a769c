"""Models made partitioned, beside the same built whole; on one process or on one of several ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES
from torch import nn
from training import BACKEND, adamw, assert_same, plain_step
from transformer_models import gpt2, llama

import zinf_compile
from zinf_compile.errors import CheckpointError, RankMismatchError, StoreWarning
from zinf_compile.init import parallel_random
from zinf_compile.init.parallel_random import Fill
from zinf_compile.runtime.comm.shard_ranges import shard_range
from zinf_compile.sharded.parameter import ShardedParameter

SEED = 3


class Tied(nn.Module):
    """Its embedding has its head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"embedding": nn.Embedding(11, 4)})
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)
        self.embedding.weight = self.head.weight
        self.parts.embedding.weight = self.embedding.weight


REBUILT: dict[str, Callable[[], nn.Module]] = {
    name: CASES[name].build for name in ("mlp", "tied", "frozen", "lora", "attention", "blocks")
} | {
    "norm with statistics": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LSTM(5, 6, 2)),
    "padded": lambda: nn.Sequential(nn.Embedding(9, 5, padding_idx=2), nn.Bilinear(3, 4, 5), nn.PReLU(3)),
    "adaptive": lambda: nn.AdaptiveLogSoftmaxWithLoss(32, 20, [4, 9]),
    "tied the other way round": Tied,
    "one module in two places": lambda: nn.Sequential(layer := nn.Linear(4, 4), nn.ReLU(), layer),
}
"""Models whose constructors do nothing that initialisers can't do again."""


def built_whole(build: Callable[[], nn.Module], **_: Any) -> Any:
    """Build on the CPU."""
    torch.manual_seed(SEED)
    return build()


def made_on_meta(build: Callable[[], nn.Module], **options: Any) -> Any:
    """Build on meta, then partition."""
    with torch.device("meta"):
        model = build()
    torch.manual_seed(SEED)
    return zinf_compile.partition(model, **options)


def built_inside(build: Callable[[], nn.Module], **options: Any) -> Any:
    """Build inside `partitioned`."""
    torch.manual_seed(SEED)
    with zinf_compile.partitioned(**options):
        return build()


def assert_born(build: Callable[[], nn.Module], birth: Callable[..., Any]) -> tuple[Any, Any]:
    """Compare parameters, buffers, their order and the random state afterwards; return both models."""
    whole = built_whole(build)
    random = torch.get_rng_state()
    ours = birth(build)
    assert torch.equal(torch.get_rng_state(), random)
    assert {type(p) for p in ours.parameters()} == {ShardedParameter}
    for (name, expected), (found_name, parameter) in zip(whole.named_parameters(), ours.named_parameters(), strict=True):
        assert (name, expected.requires_grad) == (found_name, parameter.requires_grad)
    compare(whole, ours)
    for (name, expected), (found_name, found) in zip(whole.named_buffers(), ours.named_buffers(), strict=True):
        assert name == found_name
        assert_same(name, expected, found)
    return whole, ours


def compare(whole: nn.Module, ours: nn.Module) -> None:
    """Compare what both would save; on several ranks, rank 0 does."""
    expected, found = whole.state_dict(), zinf_compile.full_state_dict(ours)
    if found:
        assert list(found) == list(expected)
    for name in found:
        assert_same(name, expected[name], found[name])


def born_on_ranks(rank: int, size: int, folder: str) -> bool:
    """Check all ways on these ranks, which have drawn different numbers before."""
    warnings.filterwarnings("ignore", category=StoreWarning)
    torch.manual_seed(SEED)
    started = torch.get_rng_state()
    away = {"params": "nvme", "nvme": folder, "timeout_s": 60}
    for build, options in (
        (CASES["tied"].build, {"timeout_s": 60}),
        (CASES["attention"].build, away),
        (llama, away),
        (gpt2, away),
    ):
        whole = built_whole(build)
        random = torch.get_rng_state()
        for inside in (False, True):
            torch.set_rng_state(started)
            torch.rand(rank)  # rank 0's numbers count
            if inside:
                with zinf_compile.partitioned(**options):
                    ours = build()
            else:
                with torch.device("meta"):
                    ours = build()
                zinf_compile.partition(ours, **options)
            assert torch.equal(torch.get_rng_state(), random)
            assert {type(p) for p in ours.parameters()} == {ShardedParameter}
            compare(whole, ours)
    _load(rank, folder, away)
    _fail(rank, away)
    if size == 2:
        _train(rank, away)
    return True


def _load(rank: int, folder: str, options: dict[str, Any]) -> None:
    path = Path(folder) / "saved"
    whole: Any = built_whole(gpt2)
    if rank == 0:
        whole.save_pretrained(path, max_shard_size="20KB")
    torch.distributed.barrier()
    with torch.device("meta"):
        ours = gpt2()
    zinf_compile.partition(ours, checkpoint=path, **options)
    compare(whole, ours)
    with torch.device("meta"):
        ours = gpt2()
    with pytest.raises(CheckpointError, match=r"(named on rank 1: )?cannot open .*nowhere: No such file") as refusal:
        zinf_compile.partition(ours, checkpoint=path if rank == 0 else path / "nowhere", **options)
    assert ("named on rank 1" in str(refusal.value)) == (rank == 0), "each rank says what is wrong, and where"
    assert {p.device.type for p in ours.parameters()} == {"meta"}


def _fail(rank: int, options: dict[str, Any]) -> None:
    with torch.device("meta"):
        ours = nn.Linear(4, 4)
    with pytest.raises(RankMismatchError, match="weight"):
        zinf_compile.partition(ours, init=lambda module: nn.init.constant_(module.weight, rank), **options)
    assert {type(p) for p in ours.parameters()} == {nn.Parameter}


def _train(rank: int, options: dict[str, Any]) -> None:
    """The same as partitioned at the first call."""
    case, losses = CASES["tied"], []
    for birth in (built_whole, made_on_meta, built_inside):
        torch.compiler.reset()
        model = birth(case.build, **options)
        model.compile(backend=BACKEND, options=options)
        optimizer = adamw(model.parameters())
        losses.append([plain_step(model, optimizer, case.batch(step, rank)).item() for step in range(3)])
    assert losses[0] == losses[1] == losses[2]


@contextlib.contextmanager
def noticing_small_ones() -> Iterator[None]:
    """Let values that are drawn be noted, though they are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_random, "_LEAST_NUMEL", 100)
        yield


def deferred_on_ranks(rank: int, size: int, folder: str) -> bool:
    """Check values that are noted to be drawn on these ranks: which, how many of them here, and that the ranks agree."""
    warnings.filterwarnings("ignore", category=StoreWarning)
    away = {"params": "nvme", "nvme": folder, "timeout_s": 60, "compute_shape": {"piece_numel": 300}}
    with noticing_small_ones():
        for build in (CASES["attention"].build, CASES["tied"].build, llama, gpt2):
            for options in ({"timeout_s": 60}, away, {**away, "tile": "512 B"}):
                whole = built_whole(build)
                random = torch.get_rng_state()
                compare(whole, made_on_meta(build, **options))
                assert torch.equal(torch.get_rng_state(), random)
        _make_own_part(rank, size, away)
        _differ(rank, away)
        _draw_in_different_ways(rank, away)
    return True


def _make_own_part(rank: int, size: int, options: dict[str, Any]) -> None:
    drawn: list[int] = []
    make = Fill._make

    def counting(self: Fill, stream: Any, start: int, into: torch.Tensor) -> None:
        drawn.append(into.numel())
        make(self, stream, start, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fill, "_make", counting)
        made_on_meta(lambda: nn.Linear(100, 500, bias=False), **options)
    start, end = shard_range(50_000, size, rank)
    assert sum(drawn) == end - start


def _differ(rank: int, options: dict[str, Any]) -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1.0 + rank)

    with torch.device("meta"):
        model = nn.Linear(30, 30)
    with pytest.raises(RankMismatchError, match="weight"):
        zinf_compile.partition(model, init=initialise, **options)


def _draw_in_different_ways(rank: int, options: dict[str, Any]) -> None:
    """On rank 0 alone ranges are PyTorch's numbers: then nobody notes anything, as who reads a value asks the others."""

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.add_(1)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 30))

    whole = built_whole(build).apply(initialise)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_random, "_parts_agree", lambda func, dtype: rank == 0)
        compare(whole, made_on_meta(build, init=initialise, **options))
