"""One rank of test_gradients_on_ranks: gradients on the host, accumulated and clipped, as on the CPU with as many ranks."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import late
import late.process_group
import torch
import torch.distributed as dist
from gradient_cases import train

from zinf_compile.runtime.context import all_contexts

_RANK, _SIZE, _STORE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

faulthandler.dump_traceback_later(250, exit=True)


def losses(device: str, placement: dict[str, str], micro_batches: int) -> list[torch.Tensor]:
    store = dist.FileStore(f"{_STORE}-{device}-{len(placement)}-{micro_batches}", _SIZE)
    dist.init_process_group("late" if device == "late" else "gloo", rank=_RANK, world_size=_SIZE, store=store)
    trained = train(device, placement, micro_batches=micro_batches)  # held: what gathers keep goes with the last unit
    if device == "late":
        (context,) = all_contexts()
        assert context.memory.gather_memory.held_bytes() > 0
        assert late.defects() == [], late.defects()
    dist.destroy_process_group()
    return trained.losses


for placement in ({"grads": "host"}, {"params": "host", "grads": "host", "optimizer": "host"}):
    for micro_batches in (2, 1):  # norms of one that nothing is added to are taken before it leaves
        expected = losses("cpu", placement, micro_batches)
        with late.delays(0.001, seed=_RANK):
            found = losses("late", placement, micro_batches)
        assert all(map(torch.equal, found, expected)), (found, expected)
print("done")
