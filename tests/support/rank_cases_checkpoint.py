"""What several ranks do with whole values: reading, writing, saving, loading; groups of ranks; the account of memory."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, Mlp, TiedWords, tokens, vectors
from rank_compare import Ranks, adamw, assert_equal, compare_training, compare_values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zinf_compile


def partitioned(ranks: Ranks, build: Any = Mlp) -> tuple[Any, nn.Module]:
    """Return a partitioned model and its eager copy, equal on all ranks."""
    torch.manual_seed(7)
    model = build()
    eager = copy.deepcopy(model)
    with torch.no_grad():
        ranks.compile(model)(*(tokens(0) if build is TiedWords else vectors(0)))
    return model, eager


def gathered_to_read(ranks: Ranks) -> None:
    """Whole inside, changes dropped; partitioned again outside."""
    model, eager = partitioned(ranks)
    with zinf_compile.gathered(model) as inside:
        assert inside is model
        assert_equal(model.first.weight.detach(), eager.get_parameter("first.weight").detach(), "first.weight")
        with torch.no_grad():
            model.first.weight.zero_()
    compare_values(model, eager, "after a change that is dropped")


def gathered_to_write(ranks: Ranks) -> None:
    """Rank 0's changes are kept, other ranks' are not; the compiled model computes with them."""
    model, eager = partitioned(ranks)
    with zinf_compile.gathered(model, write=True), torch.no_grad():
        model.first.weight.add_(1.0 + ranks.rank)
    with torch.no_grad():
        eager.get_parameter("first.weight").add_(1.0)
        compare_values(model, eager, "after rank 0's change")
        assert_equal(ranks.compile(model)(*vectors(1)), eager(*vectors(1)), "loss")


def gathered_and_raising(ranks: Ranks) -> None:
    """An exception inside leaves the model partitioned and usable."""
    model, eager = partitioned(ranks)
    try:
        with zinf_compile.gathered(model):
            raise KeyError("mine")
    except KeyError:
        pass
    compare_values(model, eager, "after an exception")


def called_while_gathered(ranks: Ranks) -> None:
    model, _ = partitioned(ranks)
    with (
        zinf_compile.gathered(model),
        pytest.raises(zinf_compile.PartitionedParameterError, match=r"first\.weight is gathered: leave"),
    ):
        ranks.compile(model)(*vectors(0))


def eager_reads(ranks: Ranks) -> None:
    """Reads that need all ranks raise before any of them communicates: each rank alone here, one after the other."""
    model, _ = partitioned(ranks)
    weight = model.first.weight
    reads = (
        lambda: weight[0], lambda: weight @ torch.ones(7), weight.tolist, lambda: weight.data[0],
        lambda: model(*vectors(0)), lambda: pickle.dumps(weight), model.state_dict, model.double,
    )  # fmt: skip
    for turn in range(ranks.size):
        if turn == ranks.rank:
            for read in reads:
                with pytest.raises(
                    zinf_compile.PartitionedParameterError, match=r"(?s)first\.weight.*(gathered|full_state_dict)"
                ):
                    read()
        dist.barrier()
    with pytest.raises(RuntimeError, match=r"first\.weight.*load_full_state_dict"):  # torch's list of what went wrong
        model.load_state_dict({name: torch.zeros(p.shape) for name, p in model.named_parameters()})


def saved_and_loaded_whole(ranks: Ranks) -> None:
    """`full_state_dict` is eager's on rank 0 and empty elsewhere; loading it brings the values back."""
    for build in (TiedWords, CASES["mutated_buffers"].build, CASES["odd_shapes"].build):
        torch.compiler.reset()
        model, eager = partitioned(ranks, build)
        with torch.no_grad():
            eager(*(tokens(0) if build is TiedWords else vectors(0)))  # moves the buffers
        state = zinf_compile.full_state_dict(model)
        wanted = eager.state_dict()
        assert list(state) == (list(wanted) if ranks.rank == 0 else [])
        for name, value in state.items():
            assert_equal(value, wanted[name], name)
        with torch.no_grad():
            changed = {name: value + 1 for name, value in wanted.items()}
        zinf_compile.load_full_state_dict(model, changed if ranks.rank == 0 else None)
        eager.load_state_dict(changed)
        compare_values(model, eager, "after loading")


def loading_what_does_not_fit(ranks: Ranks) -> None:
    """All ranks raise, and nothing is changed."""
    model, eager = partitioned(ranks)
    good = {name: value + 1 for name, value in eager.state_dict().items()}
    bad: dict[str, Any] = {
        "missing: norm.bias": {name: value for name, value in good.items() if name != "norm.bias"},
        "unexpected: third.weight": {**good, "third.weight": torch.zeros(2)},
        "shape of first.weight": {**good, "first.weight": torch.zeros(7, 13)},
        "first.weight": {**good, "first.weight": 3.0},
        "rank 0 was given no state": None,
    }
    for problem, state in bad.items():
        named = problem if ranks.rank == 0 else "1 mismatch.*named on rank 0"
        with pytest.raises(zinf_compile.UnsupportedModelError, match=f"nothing was changed.*{named}"):
            zinf_compile.load_full_state_dict(model, state if ranks.rank == 0 else None)
        compare_values(model, eager, problem)


def mesh_of_all(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (ranks.size,))
    over = Ranks(ranks.rank, ranks.size, {"mesh": mesh, "timeout_s": 20})
    compare_training(over, Mlp, lambda model, rank, step: model(*vectors(step, rank)))


def mesh_sliced(ranks: Ranks) -> None:
    """On 4 ranks: two halves train two different models, each partitioned over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    half, within = divmod(ranks.rank, 2)
    over = Ranks(within, 2, {"mesh": mesh["shard"], "timeout_s": 20})
    compare_training(over, Mlp, lambda model, rank, step: model(*vectors(step, rank + 2 * half)))


def some_ranks_idle(ranks: Ranks) -> None:
    """On 3 ranks: ranks 0 and 1 train and rank 2 does nothing; then ranks 1 and 2 do and rank 0 doesn't."""
    for members in ([0, 1], [1, 2], [0, 2]):
        group = dist.new_group(members)
        if ranks.rank in members:
            within = Ranks(members.index(ranks.rank), 2, {"process_group": group, "timeout_s": 20})
            model = compare_training(within, Mlp, lambda model, rank, step: model(*vectors(step, rank)))
            state = zinf_compile.full_state_dict(model)
            assert bool(state) == (within.rank == 0)
            zinf_compile.load_full_state_dict(model, state)
        torch.compiler.reset()


def other_groups_beside(ranks: Ranks) -> None:
    """A process group that only one rank is in, made before, is no obstacle."""
    dist.new_group([0])
    default_group(ranks)


def default_group(ranks: Ranks) -> None:
    """All ranks, when no group is named."""
    compare_training(Ranks(ranks.rank, ranks.size, {"timeout_s": 20}), Mlp, lambda model, rank, step: model(*vectors(step, rank)))


def account_of_memory(ranks: Ranks) -> None:
    """Exactly 4, 4 and 8 bytes for each element of the padded shards, and nothing gathered between steps."""
    torch.manual_seed(7)
    case = CASES["odd_shapes"]
    model = case.build()
    assert zinf_compile.memory(model) == {"now": {}, "peak": {}}
    compiled, optimizer = ranks.compile(model), adamw(model)
    shards = sum(-(-p.numel() // ranks.size) for p in model.parameters())
    for step in range(3):
        compiled(*vectors(step, ranks.rank)).backward()
        optimizer.step()
        now = zinf_compile.memory(model)["now"]
        held = {"params": 4 * shards, "grads": 4 * shards, "states": 8 * shards}
        assert now == {**held, "gathered": 0, "activations": 0, "staging": 0, "bounce": 0}, now
        optimizer.zero_grad()
        assert zinf_compile.memory(model)["now"]["grads"] == 0
    whole = 4 * sum(p.numel() for p in model.parameters())
    assert 0 < zinf_compile.memory(model)["peak"]["gathered"] <= whole
