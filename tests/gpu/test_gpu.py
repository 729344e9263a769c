"""On an accelerator. A run that passes is recorded in the README by conftest.py."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zinf_compile
from zinf_compile.cli.models import GPT
from zinf_compile.runtime.comm.collectives import DeviceCollectives
from zinf_compile.runtime.lanes.lanes import MOST_UNDER_WAY
from zinf_compile.runtime.lanes.stream_lane import StreamLane
from zinf_compile.sharded.gradient import ShardedGradient

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator; selected by `pytest -m gpu` only"),
]


def _gpt() -> GPT:
    torch.manual_seed(3)
    return GPT(layers=3, width=48, heads=3, vocabulary=101, length=33).cuda()


def _batch(seed: int) -> torch.Tensor:
    return torch.randint(101, (4, 33), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.fixture
def nccl_group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, timeout=datetime.timedelta(seconds=60)
    )
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


def test_training_on_the_device_equals_eager_bitwise() -> None:
    eager, model = _gpt(), _gpt()
    compiled = torch.compile(model, backend="zero_infinity", options={"compute": "fx"})
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (eager, model)]
    for step in range(3):
        losses = []
        for call, parameters, optimizer in zip((eager, compiled), (eager, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = call(_batch(step), _batch(step + 1))
            loss.backward()
            nn.utils.clip_grad_norm_(parameters.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    for expected, found in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, found.detach())
    assert zinf_compile.memory(model)["now"]["params"] == sum(p.numel() * 4 for p in eager.parameters())


def test_gradients_are_sharded_on_the_device() -> None:
    model = _gpt()
    torch.compile(model, backend="zero_infinity")(_batch(0), _batch(1)).backward()
    for parameter in model.parameters():
        assert isinstance(parameter.grad, ShardedGradient)
        assert parameter.grad.device.type == "cuda"


def test_collectives_fill_padded_buffers(nccl_group: dist.ProcessGroup) -> None:
    collectives = DeviceCollectives(nccl_group)
    device = torch.device("cuda")
    shards = [torch.arange(n, dtype=torch.float32, device=device) for n in (7, 12)]
    fulls = [collectives.full_buffer(n, torch.float32, device) for n in (7, 12)]
    collectives.all_gather(shards, fulls)
    assert all(torch.equal(full, shard) for full, shard in zip(fulls, shards, strict=True))
    reduced = [torch.empty_like(shard) for shard in shards]
    collectives.reduce_scatter(fulls, reduced)
    assert all(torch.equal(mean, shard) for mean, shard in zip(reduced, shards, strict=True))
    halves = [collectives.full_buffer(n, torch.bfloat16, device) for n in (7, 12)]
    collectives.all_gather(shards, halves)
    assert all(torch.equal(half, shard.bfloat16()) for half, shard in zip(halves, shards, strict=True))
    scattered = torch.empty(7, device=device)
    collectives.scatter(shards[0], scattered, 7)
    assert torch.equal(scattered, shards[0])


def test_memory_is_not_handed_out_under_a_transfer() -> None:
    device = torch.device("cuda")
    lane = StreamLane(device, "test")
    size = 1 << 22
    for round_ in range(4 * MOST_UNDER_WAY):
        source = torch.full((size,), float(round_), device=device)
        target = torch.empty(size, device=device)

        def slow_copy(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            torch.cuda._sleep(2_000_000)
            target.copy_(source)

        pending = lane.submit(slow_copy)
        del source, slow_copy
        torch.full((size,), -1.0, device=device)  # would reuse the source's memory, were it free already
        pending.wait()
        assert (target == round_).all()
