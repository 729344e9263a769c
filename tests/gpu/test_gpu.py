"""On an accelerator. A run that passes is recorded in the README by conftest.py."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import zinf_compile
from zinf_compile import passes
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


@pytest.mark.parametrize("partitioned", [True, False], ids=["partitioned", "ordinary"])
def test_training_on_the_device_equals_eager_bitwise(partitioned: bool) -> None:
    eager, model = _gpt(), _gpt()
    options = {"compute": "fx", **({"params": "device"} if partitioned else {})}
    compiled = torch.compile(model, backend="zero_infinity", options=options)
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
    held = sum(p.numel() * 4 for p in eager.parameters())
    assert zinf_compile.memory(model)["now"].get("params", 0) == (held if partitioned else 0)


def test_gradients_are_sharded_on_the_device() -> None:
    model = _gpt()
    torch.compile(model, backend="zero_infinity", options={"params": "device"})(_batch(0), _batch(1)).backward()
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


def test_products_with_an_odd_vocabulary_are_padded_and_near_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large enough to be worth it: 1,023 words, 512 tokens of width 512."""
    padded, align = [], passes.align_products

    def align_products(gm: fx.GraphModule) -> fx.GraphModule:
        padded.extend(align(gm).graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default))
        return gm

    monkeypatch.setattr(passes, "align_products", align_products)
    torch.manual_seed(3)
    eager = GPT(layers=1, width=512, heads=8, vocabulary=1023, length=128).cuda()
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="zero_infinity", options={"on_refusal": "error"})
    tokens = torch.randint(1023, (2, 4, 128), generator=torch.Generator().manual_seed(0)).cuda()
    losses = []
    with torch.autocast("cuda", torch.bfloat16):
        for call in (eager, compiled):
            losses.append(call(*tokens))
            losses[-1].backward()
    assert padded
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=2**-7)
    for one, other in zip(eager.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert isinstance(other.grad, ShardedGradient)
        assert (other.grad.full_tensor() - one.grad).norm() <= 2**-5 * one.grad.norm()
