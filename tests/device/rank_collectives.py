"""One rank of test_process_group: each collective on the device, late, against what it must give."""

from __future__ import annotations

import faulthandler
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import late
import late.process_group
import torch
import torch.distributed as dist

# Renamed in PyTorch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_RANK, _SIZE, _STORE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def _mine(count: int = 4) -> torch.Tensor:
    return torch.arange(count, device="late", dtype=torch.float32) + 100 * _RANK


def _of(rank: int, count: int = 4) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 100 * rank


_SUM = sum(_of(rank) for rank in range(_SIZE))
_PARTS = torch.cat([_of(rank) for rank in range(_SIZE)])


def _collectives() -> None:
    gathered = torch.empty(4 * _SIZE, device="late")
    _all_gather(gathered, _mine())
    assert gathered.cpu().equal(_PARTS)

    shard = torch.empty(4, device="late")
    _reduce_scatter(shard, _mine(4 * _SIZE))
    assert shard.cpu().equal(sum(_of(rank, 4 * _SIZE) for rank in range(_SIZE)).chunk(_SIZE)[_RANK])

    reduced = _mine()
    dist.all_reduce(reduced)
    assert reduced.cpu().equal(_SUM)

    shared = _mine()
    dist.broadcast(shared, 1)
    assert shared.cpu().equal(_of(1))

    listed = [torch.empty(4, device="late") for _ in range(_SIZE)]
    dist.all_gather(listed, _mine())
    assert torch.cat(listed).cpu().equal(_PARTS)

    exchanged = torch.empty(_SIZE * 2, device="late")
    dist.all_to_all_single(exchanged, _mine(_SIZE * 2))
    assert exchanged.cpu().equal(torch.cat([_of(rank, _SIZE * 2).chunk(_SIZE)[_RANK] for rank in range(_SIZE)]))

    received = [torch.empty(_RANK + 1, device="late") for _ in range(_SIZE)]
    dist.all_to_all(received, [torch.full((rank + 1,), float(_RANK), device="late") for rank in range(_SIZE)])
    assert all(part.eq(rank).all() for rank, part in enumerate(received))

    gathers = [torch.empty(4, device="late") for _ in range(_SIZE)] if _RANK == 0 else None
    dist.gather(_mine(), gathers, 0)
    assert gathers is None or torch.cat(gathers).cpu().equal(_PARTS)

    scattered = torch.empty(4, device="late")
    dist.scatter(scattered, [_mine() + rank for rank in range(_SIZE)] if _RANK == 0 else None, 0)
    assert scattered.cpu().equal(_of(0) + _RANK)

    ring = torch.empty(4, device="late")
    works = [dist.isend(_mine(), (_RANK + 1) % _SIZE), dist.irecv(ring, (_RANK - 1) % _SIZE)]
    for work in works:
        work.wait()
    assert ring.cpu().equal(_of((_RANK - 1) % _SIZE))

    host = torch.full((3,), float(_RANK))
    dist.all_reduce(host)
    assert host.eq(sum(range(_SIZE))).all()
    dist.barrier()
    objects = [None] * _SIZE
    dist.all_gather_object(objects, {"rank": _RANK})
    assert objects == [{"rank": rank} for rank in range(_SIZE)]


def _functional() -> None:
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    assert ops.wait_tensor(ops.all_reduce(_mine(), "sum", name)).cpu().equal(_SUM)
    assert ops.wait_tensor(ops.all_gather_into_tensor(_mine(), _SIZE, name)).cpu().equal(_PARTS)
    assert (
        ops.wait_tensor(ops.reduce_scatter_tensor(_mine(_SIZE), "sum", _SIZE, name))
        .cpu()
        .equal(sum(_of(r, _SIZE) for r in range(_SIZE))[_RANK : _RANK + 1])
    )


def _order() -> None:
    """The host goes on, and only a wait orders the result."""
    late.clear()
    gathered = torch.empty(4 * _SIZE, device="late")
    with late.held():
        work = _all_gather(gathered, _mine(), async_op=True)
        assert not work.is_completed()
        work.wait()
        doubled = gathered * 2
    assert doubled.cpu().equal(_PARTS * 2)
    assert late.counters()["host waits"] == 1  # the copy to the host
    assert not late.defects()
    group = dist.group.WORLD
    assert [logged.name for logged in late.log(group.stream)] == ["all_gather_into_tensor"]

    for over in (False, True):  # what is wrong is found however soon the collective ends
        late.clear()
        work = _all_gather(gathered, _mine(), async_op=True)
        while over and not late.log(group.stream):
            time.sleep(0.001)
        early = gathered * 2
        work.wait()
        found = late.defects()
        assert [defect.kind for defect in found] == ["unordered accesses"], found
        assert "reads what all_gather_into_tensor on stream" in found[0].detail
        torch.accelerator.synchronize()
        del early


faulthandler.dump_traceback_later(250, exit=True)
store = dist.FileStore(_STORE, _SIZE)
dist.init_process_group("late", rank=_RANK, world_size=_SIZE, store=store, timeout=timedelta(seconds=200))
with late.delays(0.002, seed=_RANK):
    _collectives()
    _functional()
    assert not late.defects(), late.defects()
_order()
subgroup = dist.new_group([0, 1])
if _RANK < 2:
    total = torch.ones(2, device="late")
    dist.all_reduce(total, group=subgroup)
    assert total.eq(2).all()
dist.destroy_process_group()
print("done")
