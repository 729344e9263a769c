"""What ranks do in test_bad_input_ranks.py."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from models import IN, WORDS, vectors
from models import Mlp as Plain
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from training import BACKEND, adamw, plain_step

import zinf_compile
from zinf_compile.sharded.parameter import ShardedParameter

Act = Callable[[Any], Any]
SHAPE = (13, IN)

READS: dict[str, Act] = {
    "allclose": lambda w: torch.allclose(w, w),
    "as_subclass": lambda w: w.as_subclass(torch.Tensor),
    "bool": bool,
    "contains": lambda w: 1.0 in w,
    "data_ptr": lambda w: w.data_ptr(),
    "embedding": lambda w: F.embedding(torch.tensor([1]), w),
    "float": float,
    "format": lambda w: f"{w:.3f}",
    "index": lambda w: w[0],
    "is_nonzero": lambda w: w.is_nonzero(),
    "item itself": lambda w: w.item(),
    "iteration": list,
    "linear": lambda w: F.linear(torch.zeros(2, IN), w),
    "matmul": lambda w: torch.zeros(2, 13) @ w,
    "numpy": lambda w: w.numpy(),
    "numpy array": np.asarray,
    "parameter": nn.Parameter,
    "parameters_to_vector": lambda w: nn.utils.parameters_to_vector([w]),
    "pickle": pickle.dumps,
    "save": lambda w: torch.save(w, io.BytesIO()),
    "share": lambda w: w.share_memory_(),
    "stack": lambda w: torch.stack([w, w]),
    "storage": lambda w: w.data.untyped_storage(),
    "sum": sum,
    "tolist": lambda w: w.tolist(),
}
LOCAL: dict[str, Act] = {
    "add": lambda w: w + 1,
    "add from the left": lambda w: 1 + w,
    "aten": lambda w: torch.ops.aten.mul.Tensor(w, w),
    "clone": lambda w: w.clone(),
    "comparison": lambda w: w > 0,
    "data": lambda w: w.data,
    "deepcopy of a parameter": copy.deepcopy,
    "detach": lambda w: w.detach(),
    "foreach add": lambda w: torch._foreach_add([w], 1),
    "half": lambda w: w.half(),
    "T": lambda w: w.T,
    "to": lambda w: w.to(torch.float64),
    "to a copy": lambda w: w.to("cpu", copy=True),
    "view": lambda w: w.view(-1),
}
"""What each rank does with its shard."""

WRITES: dict[str, Act] = {
    "data =": lambda w: setattr(w, "data", torch.zeros(SHAPE)),
    "init kaiming": nn.init.kaiming_uniform_,
    "init trunc_normal": nn.init.trunc_normal_,
    "init xavier": nn.init.xavier_normal_,
    "setitem": lambda w: w.__setitem__(0, 1.0),
    "vector_to_parameters": lambda w: nn.utils.vector_to_parameters(torch.zeros(13 * IN), [w]),
}
MODEL_READS: dict[str, Act] = {
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "eager forward": lambda m: m.forward(*vectors(0)),
    "functional_call": lambda m: torch.func.functional_call(m.first, dict(m.first.named_parameters()), torch.zeros(2, IN)),
    "half": lambda m: m.half(),
    "layer": lambda m: m.first(torch.zeros(2, IN)),
    "meta": lambda m: m.to("meta"),
    "pickle": pickle.dumps,
    "reset_parameters": lambda m: m.first.reset_parameters(),
    "save": lambda m: torch.save(m, io.BytesIO()),
    "state_dict": lambda m: m.state_dict(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "load_state_dict": lambda m: m.load_state_dict(Plain().state_dict()),
}
LOCAL_OF_MODELS: dict[str, Act] = {
    "average": torch.optim.swa_utils.AveragedModel,
    "deepcopy of a parameter": copy.deepcopy,
}
ANSWERS: dict[str, Act] = {
    "print": str,
    "repr": lambda m: repr(m.first.weight),
    "str": lambda m: str(m.first.weight),
    "format": lambda m: f"{m.first.weight}",
    "metadata": lambda m: (tuple(m.first.weight.shape), m.first.weight.dtype, m.first.weight.device.type, len(m.first.weight)),
    "count": lambda m: sum(p.numel() for p in m.parameters()),
    "no-op": lambda m: m.float().cpu() is m and m.to(torch.float32).train() is m,
    "no-op to a numbered CPU": lambda m: m.to("cpu:1") is m and m.to(torch.device("cpu", 0), non_blocking=True) is m,
    "zero_grad": lambda m: m.zero_grad(set_to_none=False),
    "like": lambda m: tuple(torch.zeros_like(m.first.weight).shape),
    "hash": lambda m: m.first.weight in {m.first.weight},
}


def outcome(act: Act, subject: Any) -> str:
    """Return "class: message" of what `act` raises, else "gave ..."."""
    try:
        return f"gave {act(subject)!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def partitioned() -> tuple[Any, torch.optim.Optimizer]:
    """Return a partitioned model, one step into its training."""
    model = Plain()
    model.compile(backend=BACKEND)
    optimizer = adamw(model.parameters())
    plain_step(model, optimizer, vectors(0))
    return model, optimizer


def one_rank_reads(rank: int, world: int) -> dict[str, str]:
    """Rank 0 alone reads and writes whole values, and computes with its shards; then all ranks train on with unchanged values."""
    model, optimizer = partitioned()
    before = zinf_compile.full_state_dict(model)
    found: dict[str, str] = {}
    if rank == 0:
        found |= {f"read {name}": outcome(act, model.first.weight) for name, act in READS.items()}
        with torch.no_grad():
            found |= {f"read {name} without grad": outcome(act, model.first.weight) for name, act in READS.items()}
            found |= {f"write {name}": outcome(act, model.first.weight) for name, act in WRITES.items()}
        found |= {f"answer {name}": outcome(act, model.first.weight) for name, act in LOCAL.items()}
        found |= {f"answer {name}": outcome(act, model) for name, act in LOCAL_OF_MODELS.items()}
        found |= {f"model {name}": outcome(act, model) for name, act in MODEL_READS.items()}
        found |= {f"answer {name}": outcome(act, model) for name, act in ANSWERS.items()}
    after = zinf_compile.full_state_dict(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert {type(p) for p in model.parameters()} == {ShardedParameter}
    plain_step(model, optimizer, vectors(1))
    return found


class Counted(Plain):
    """Dynamo compiles its forward anew for each number."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: int = 1) -> torch.Tensor:
        return super().forward(x, y) * number


class Words(nn.Module):
    """An embedding with a parameter of each kind that isn't accepted, as the test asks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 3, **options)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.embedding(words).square().mean()


def run_compiled(model: nn.Module) -> None:
    """Call a compiled model."""
    torch.compile(model, backend=BACKEND)(*vectors(0))


def fsdp1(model: nn.Module) -> nn.Module:
    """Wrap a model in FSDP of the first kind."""
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


WRAPPERS: dict[str, Act] = {"DDP": DistributedDataParallel, "FSDP": fsdp1, "fully_shard": fully_shard}


def refusals(rank: int, world: int) -> dict[str, str]:
    """Misuse on all ranks alike: what each is told, before and after the model is partitioned."""
    found = {}
    for name, value in {"max_norm": 1.0, "sparse": True}.items():
        words = Words(**{name: value})
        found[name] = outcome(torch.compile(words, backend=BACKEND), torch.arange(4))
        assert type(words.embedding.weight) is nn.Parameter

    for name, wrap in WRAPPERS.items():
        found[name] = outcome(run_compiled, wrap(Plain()))
        torch.compiler.reset()

    model, optimizer = partitioned()
    found |= {f"{name} after": outcome(wrap, model) for name, wrap in WRAPPERS.items()}
    model, optimizer = partitioned()
    with zinf_compile.gathered(model):
        found["nested"] = outcome(lambda m: zinf_compile.gathered(m, write=True).__enter__(), model)
        found["called"] = outcome(lambda m: m(*vectors(0)), model)
    before = zinf_compile.full_state_dict(model)
    found["converted"] = outcome(convert_on_rank_0, model)
    after = zinf_compile.full_state_dict(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    plain_step(model, optimizer, vectors(1))

    torch.compiler.reset()
    counted = Counted()
    compiled = torch.compile(counted, backend=BACKEND, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in (1, 2):
            compiled(*vectors(0), number)
        found["limit"] = outcome(lambda m: m(*vectors(0), 3), compiled)
        found["limit again"] = outcome(lambda m: m(*vectors(0), 4), compiled)
        compiled(*vectors(0), 1)
    dist.barrier()
    return found


def convert_on_rank_0(model: nn.Module) -> None:
    """Change a type inside gathered on rank 0 alone: all ranks must hear of it."""
    with zinf_compile.gathered(model, write=True):
        if dist.get_rank() == 0:
            model.half()
