"""`state_dict()` of a model whose parameters live off the device of its only rank: values that are brought when they are read."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from marks import more
from models import Mlp, vectors
from offloaded_twins import saved, trained, value_at
from tiers import Meter, context_of, sundry
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from training import BACKEND, assert_same, assert_same_models

import zinf_compile
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.sharded.offloaded_value import OffloadedValue

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


READS: list[Callable[[torch.Tensor], Any]] = [
    lambda v: v.clone(),
    lambda v: v.cpu().clone(),
    lambda v: v.to(torch.bfloat16),
    lambda v: v.double(),
    lambda v: v.float() + 1,
    lambda v: v[0].sum(),
    lambda v: v.reshape(-1)[1:-1] * 2,
    lambda v: torch.stack(list(v)),
    lambda v: v.view(torch.int32),
    lambda v: v.t() @ v,
    lambda v: torch.cat([v, v]).norm(),
    lambda v: v.mean().item(),
    lambda v: v.tolist(),
    lambda v: v.numpy().sum(),
    lambda v: v.data.detach().contiguous().clone(),
    repr,
    lambda v: f"{v[0, 0]} {v[1]}",
    lambda v: v.unbind(1)[1].max(),
    copy.copy,
    lambda v: pickle.loads(pickle.dumps(v)),
    lambda v: saved(v[1:].t()),
    lambda v: saved(v, _use_new_zipfile_serialization=False),
    lambda v: torch.load(io.BytesIO(_bytes(v.view(torch.int32))), weights_only=True),
]


LAZY = (8, 18)
"""Of these, those that give the value itself: a view, and a shallow copy."""


def _bytes(value: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def assert_reads(ours: torch.Tensor, eager: torch.Tensor) -> None:
    """Compare what reads give."""
    for number, read in enumerate(READS):
        found, expected = read(ours), read(eager)
        if isinstance(expected, torch.Tensor):
            assert_same(f"read {number}", expected, found)
            assert not isinstance(found, OffloadedValue) or number in LAZY, f"read {number} is of its own"
        else:
            assert found == expected, f"read {number}"


@pytest.mark.parametrize("variant", ["nvme", more("tiles"), more("host of a device"), "nvme of a device"])
def test_values_are_eagers_and_what_is_written_in_place_is_kept(variant: str, tmp_path: Path) -> None:
    with trained(tmp_path, variant) as twins:
        ours, eager = twins.ours, twins.eager
        state, expected = ours.state_dict(), eager.state_dict()
        meter = Meter(None)
        meter.read(ours)
        for name, value in expected.items():
            mine = state[name]
            assert (mine.shape, mine.stride(), mine.dtype, mine.device) == (
                value.shape,
                value.stride(),
                value.dtype,
                value.device,
            )
            assert (mine.numel(), mine.nbytes, len(mine.shape)) == (value.numel(), value.nbytes, value.dim())
            assert mine.untyped_storage().nbytes() == value.untyped_storage().nbytes()
            assert isinstance(mine, OffloadedValue) == (value.dim() > 0)
            assert not mine.requires_grad
        assert meter.read(ours).read == 0, "metadata is free"
        twins.check(state)
        assert_reads(state["up.weight"], expected["up.weight"])
        with torch.inference_mode():
            assert_reads(ours.state_dict()["down.weight"], expected["down.weight"])
        assert_same("between processes", expected["up.weight"], pickle.loads(ForkingPickler.dumps(state["up.weight"])))
        twins.check(pickle.loads(pickle.dumps(state)))
        for copied in (saved(state), copy.deepcopy(state)):
            twins.check(copied)
            assert {type(value) for value in copied.values()} == {torch.Tensor}
            assert copied["head.weight"].data_ptr() == copied["embedding.weight"].data_ptr() != copied["up.weight"].data_ptr()
        average = {name: value.clone() for name, value in state.items()}
        for model in (ours, eager):
            change(model)
        twins.check(state)
        twins.check(ours.state_dict())
        twins.step()
        twins.check(state)  # it aliases the parameters, also while a step is deferred
        assert all(type(value) is torch.Tensor for value in average.values())
        for model in (ours, eager):
            model.load_state_dict(average)
            model.load_state_dict(model.state_dict())
        twins.check(average)
        twins.step()
        twins.check(state)
        plain = sundry()
        plain.load_state_dict(state)
        assert_same_models(eager, plain)


def change(model: nn.Module) -> None:
    """Change parameters in all ways in place."""
    state = model.state_dict()
    state["up.weight"].mul_(2)
    state["up.weight"][3].add_(1)
    state["up.weight"].t()[1:3, 2:].copy_(torch.ones(2, 17))
    state["down.weight"].copy_(state["up.weight"].t())
    state["down.weight"].view(-1)[::7] = 0.5
    state["down.bias"].zero_()
    state["embedding.weight"].copy_(state["head.weight"])
    torch.add(state["frozen.bias"], 1.0, out=state["frozen.bias"])
    torch._foreach_mul_([value for name, value in state.items() if name != "head.weight"], 0.5)
    with torch.no_grad():
        model.get_parameter("frozen.weight").copy_(torch.eye(9))
    model.get_parameter("down.bias").data.sub_(0.1)
    model.get_parameter("up.bias").detach()[2:].clamp_(min=0.0)


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """A process group, without which `async_save` refuses to work."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("variant", ["nvme", "nvme of a device"])
def test_async_save_copies_values_while_training_goes_on(variant: str, shared: bool, tmp_path: Path, group_of_one: None) -> None:
    stager = StateDictStager(share_memory=shared)
    with trained(tmp_path, variant) as pair:
        state = pair.ours.state_dict()
        for name in ("first", "second"):
            copied = stager.stage({"model": state, "optimizer": pair.optimizers[0].state_dict()})
            wanted = {key: value.clone() for key, value in pair.eager.state_dict().items()}
            assert all(item is None for value in copied["model"].values() for item in vars(value).values())  # and no second copy
            dcp.save(copied, checkpoint_id=tmp_path / name)
            pair.step()
            found = {"model": {key: torch.zeros_like(value) for key, value in wanted.items()}}
            dcp.load(found, checkpoint_id=tmp_path / name)
            for key, value in wanted.items():
                assert_same(f"{name} {key}", value, found["model"][key])
        dcp.async_save({"model": state}, checkpoint_id=tmp_path / "third").result()
        dcp.load(found, checkpoint_id=tmp_path / "third")
        pair.check(found["model"])


def test_what_would_be_lost_is_refused_by_name(tmp_path: Path) -> None:
    with trained(tmp_path) as twins:
        value = twins.ours.state_dict()["up.weight"]
        for change in (
            lambda: value.untyped_storage().fill_(0),
            lambda: value.untyped_storage().copy_(torch.zeros(171).untyped_storage()),
            lambda: value.untyped_storage().__setitem__(0, 1),
            lambda: value.untyped_storage().resize_(0),
            lambda: torch.save(value.storage(), io.BytesIO()),
            value.share_memory_,
            lambda: torch.from_dlpack(value),
            lambda: value.as_subclass(torch.Tensor),
            lambda: value.resize_(3),
            value.t_,
            lambda: value.set_(torch.zeros(3)),
        ):
            with pytest.raises(PartitionedParameterError, match=r"up.weight is off the device"):
                change()
        with pytest.raises(ValueError, match="read-only"):
            value.numpy()[0, 0] = 1
        with pytest.raises(ValueError, match="read-only"):
            value[2:].numpy()[0, 0] = 1
        twins.check(twins.ours.state_dict())


def test_a_pointer_is_good_while_a_value_lives_and_follows_the_parameter(tmp_path: Path) -> None:
    with trained(tmp_path) as twins:
        state = twins.ours.state_dict()
        value = state["up.weight"]
        where = value.data_ptr()
        assert value[2].data_ptr() == where + 2 * value.stride(0) * 4
        assert value.untyped_storage().data_ptr() == twins.ours.state_dict()["up.weight"].data_ptr() == where
        tied, other = (state[name].untyped_storage() for name in ("head.weight", "embedding.weight"))
        assert tied.data_ptr() == other.data_ptr() != where
        assert tied._cdata == other._cdata != value.untyped_storage()._cdata
        for _ in range(2):
            assert value.data_ptr() == where
            twins.check({**state, "up.weight": value_at(where, value)})
            value.mul_(2)
            twins.eager.state_dict()["up.weight"].mul_(2)
            twins.check({**state, "up.weight": value_at(where, value)})
            twins.step()
        zinf_compile.synchronize()
        ledger = context_of(twins.ours).memory.ledger
        before, size = ledger.now()["staging"], twins.eager.up.weight.nbytes + twins.eager.embedding.weight.nbytes
        assert before >= size
        del state, value, tied, other
        gc.collect()
        assert ledger.now()["staging"] == before - size, "nobody holds it"


def test_what_shards_cannot_answer_brings_the_whole_value(tmp_path: Path) -> None:
    """Outside `state_dict` element-wise operators work piece by piece; the rest reads the value, also for autograd."""
    torch.manual_seed(0)
    eager = Mlp()
    ours = copy.deepcopy(eager)
    ours.compile(backend=BACKEND, options={"params": "nvme", "nvme": tmp_path})
    ours(*vectors(0)).backward()
    mine, theirs = ours.first.weight, eager.first.weight
    x = torch.randn(mine.shape[1])
    for read in (
        lambda p: p.detach()[1:3, ::2],
        lambda p: p.detach() @ x,
        lambda p: p.detach().t() @ p.detach(),
        lambda p: torch.from_numpy(p.detach().numpy().copy()),
        lambda p: torch.tensor(p.data.tolist()),
        lambda p: p.data.flatten()[3],
        lambda p: torch.quantile(p.detach(), 0.5),
        lambda p: p.detach().sum(0),
        lambda p: p.data.norm(dim=1),
        lambda p: p.detach().mean(1, keepdim=True),
        lambda p: torch.linalg.vector_norm(p.detach(), dim=0),
    ):
        torch.testing.assert_close(read(mine), read(theirs))
    for model in (eager, ours):
        model.first.weight.detach()[0].zero_()
        model.first.weight.data[1:, 1] += 1.0
    assert torch.equal(ours.state_dict()["first.weight"], theirs)
    mine.grad = None
    mine[0].sum().backward()
    theirs[0].sum().backward()
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)  # type: ignore[attr-defined]
