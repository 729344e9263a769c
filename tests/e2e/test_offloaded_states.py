"""Optimizer states on a drive, in chunks so small that each parameter meets several: the numbers of eager, bit by bit."""

from __future__ import annotations

import copy
import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, NOT_COMPILED, OddShapes, TiedWords, loss_of, tokens, vectors
from optimizers import OPTIMIZERS, assert_same_states
from rank_offloaded_states import switch_momentum_on, train_on_ranks
from ranks import run_ranks
from torch import nn
from torch.optim import Optimizer
from training import BACKEND, Step, accumulating_step, adamw, plain_step, train_both, train_step_on, twins
from twin_models import Twins

import zinf_compile
from zinf_compile.errors import BudgetError, StepFailedError, UnsupportedOptimizerError
from zinf_compile.ir.sizes import CHUNK_BUFFERS
from zinf_compile.optim import state_dict_hooks
from zinf_compile.optim.chunk_step import ChunkStep
from zinf_compile.optim.offloaded_states import OffloadedStates
from zinf_compile.optim.state_entry import in_memory
from zinf_compile.runtime.device.link import HostIsDevice
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.memory.arena import GatherMemory
from zinf_compile.runtime.system import host_limits

pytestmark = pytest.mark.keeps_graphs

STATEFUL = [name for name in OPTIMIZERS if name != "sgd"]


@pytest.fixture(autouse=True)
def stores(monkeypatch: pytest.MonkeyPatch) -> list[OffloadedStates]:
    """Cut pieces of 128 elements, each a chunk; return what keeps them."""
    made: list[OffloadedStates] = []

    class Noted(OffloadedStates):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(self)

    monkeypatch.setattr(state_dict_hooks, "OffloadedStates", Noted)
    return made


def on_drive(folder: Path) -> Callable[[nn.Module], nn.Module]:
    def compiled(model: nn.Module) -> nn.Module:
        model.compile(backend=BACKEND, options={"optimizer": "nvme", "nvme": folder, "compute_shape": {"piece_numel": 128}})
        return model

    return compiled


def both(
    build: Callable[[], nn.Module], make: Callable[..., Optimizer], folder: Path
) -> tuple[list[tuple[nn.Module, Optimizer]], list[nn.Module]]:
    """Return an eager model and its twin with states on a drive, each with its optimizer, as `train_step_on` wants them."""
    trained = Twins(build, on_drive(folder), make)
    return trained.sides, [*trained.models]


def closure_step(model: nn.Module, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(model(*batch))
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert len(calls) == 1
    assert isinstance(loss, torch.Tensor)
    return loss


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, drive: Path, stores: list[OffloadedStates]) -> None:
    sides, models = both(TiedWords, OPTIMIZERS[name], drive)
    for number in range(4):
        train_step_on(sides, models, plain_step, tokens(number), number)
        assert_same_states(sides[0][1], sides[1][1])
    assert len(stores) == (name != "sgd")
    assert os.listdir(drive) == []


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_model(name: str, drive: Path) -> None:
    train_both(CASES[name], compiled=on_drive(drive), steps=4, whole=NOT_COMPILED.get(name, ()))


@pytest.mark.parametrize("step", [accumulating_step, closure_step])
def test_kinds_of_steps(step: Step, drive: Path) -> None:
    train_both(CASES["tied"], compiled=on_drive(drive), step=step, steps=4)


def test_most_chunks_are_read_and_the_last_ones_first(drive: Path, stores: list[OffloadedStates]) -> None:
    sides, models = both(TiedWords, adamw, drive)
    for number in range(2):
        train_step_on(sides, models, plain_step, tokens(number), number)
    (states,) = stores
    reads: list[str] = []
    assert states.transfers.store is not None
    really_read = states.transfers.store.read

    def read(key: str, into: torch.Tensor) -> Any:
        reads.append(key)
        return really_read(key, into)

    states.transfers.store.read = read  # type: ignore[method-assign,assignment]
    count = len(states.chunks)
    assert count > 5
    for number in range(2, 4):
        reads.clear()
        train_step_on(sides, models, plain_step, tokens(number), number)
        assert len(reads) == 2 * (count - 3), "three chunks of the last step are still in memory"
    assert states.transfers.buffers.host_bytes == 3 * 2 * 4096 * 4, "three chunks of two states, of the least size"
    held = zinf_compile.memory(models[1])["now"]["states"]
    sides.clear()
    gc.collect()
    freed = held - zinf_compile.memory(models[1])["now"]["states"]
    assert freed == states.transfers.buffers.host_bytes, "no states but the chunks in memory"


def test_parameters_come_and_go(drive: Path) -> None:
    """Branches: one of two layers has a gradient in a step; a third, added to the optimizer later, had none before."""
    case = CASES["branches"]
    sides, models = both(case.build, lambda parameters: adamw(list(parameters)[2:]), drive)
    for number in range(6):
        if number == 3:
            for model, optimizer in sides:
                optimizer.add_param_group({"params": list(model.parameters())[:2], "lr": 0.001})
        train_step_on(sides, models, plain_step, case.batch(number, 0), number)
        assert_same_states(sides[0][1], sides[1][1])


def test_groups_schedules_and_hooks(drive: Path) -> None:
    def grouped(parameters: Any) -> Optimizer:
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first], "weight_decay": 0.0}, {"params": rest}], lr=0.01, fused=True)

    sides, models = both(OddShapes, grouped, drive)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for _, optimizer in sides]
    calls: list[int] = []
    sides[1][1].register_step_pre_hook(lambda *_: calls.append(1))
    sides[1][1].register_step_post_hook(lambda *_: calls.append(2))
    for number in range(3):
        train_step_on(sides, models, plain_step, vectors(number), number)
        for schedule in schedules:
            schedule.step()
    assert calls == [1, 2] * 3
    assert_same_states(sides[0][1], sides[1][1])


@pytest.mark.parametrize("name", STATEFUL)
def test_an_eager_run_goes_on_and_back(name: str, drive: Path) -> None:
    (_, first), (model, second) = (sides := both(TiedWords, OPTIMIZERS[name], drive)[0])
    eager = sides[0][0]
    for number in range(2):
        plain_step(eager, first, tokens(number))
    model.load_state_dict(eager.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for number in range(2, 4):
        train_step_on(sides, [eager, model], plain_step, tokens(number), number)
    again = OPTIMIZERS[name](eager.parameters())
    again.load_state_dict(copy.deepcopy(second.state_dict()))
    assert not any(
        t.numel() > 1 for state in second.state.values() for t in in_memory(state).values() if isinstance(t, torch.Tensor)
    )
    sides[0] = (eager, again)
    train_step_on(sides, [eager, model], plain_step, tokens(4), 4)
    assert_same_states(again, second)


def test_states_in_memory_loaded_in_another_order_of_dimensions_are_updated(drive: Path) -> None:
    eager, ours = twins(TiedWords)
    ours.compile(backend=BACKEND, options={"grads": "nvme", "nvme": drive})
    sides = [(model, adamw(model.parameters())) for model in (eager, ours)]
    train_step_on(sides, [eager, ours], plain_step, tokens(0), 0)
    saved = copy.deepcopy(sides[1][1].state_dict())
    for state in saved["state"].values():
        state.update({name: value.mT.contiguous().mT for name, value in state.items() if value.dim() == 2})
    sides[1][1].load_state_dict(saved)
    for number in range(1, 4):
        train_step_on(sides, [eager, ours], plain_step, tokens(number), number)
    assert_same_states(sides[0][1], sides[1][1])


def failing(states: OffloadedStates, number: int) -> None:
    """Flip a bit of a chunk that the next step doesn't read first."""
    key = f"exp_avg of {states.chunks[number].name}"
    assert states.transfers.store is not None
    block = states.transfers.store.layout.find(key).blocks[0]
    fd = os.open(f"/proc/self/fd/{states.transfers.store.files[0].fd}", os.O_RDWR)
    try:
        byte = os.pread(fd, 1, block.offset + 5)
        os.pwrite(fd, bytes([byte[0] ^ 8]), block.offset + 5)
        os.fsync(fd)
    finally:
        os.close(fd)


def test_a_flipped_bit_ends_the_step_and_says_what_is_left(drive: Path, stores: list[OffloadedStates]) -> None:
    sides, models = both(TiedWords, adamw, drive)
    for number in range(2):
        train_step_on(sides, models, plain_step, tokens(number), number)
    model, optimizer = sides[1]
    saved = copy.deepcopy((zinf_compile.full_state_dict(model), optimizer.state_dict()))
    stores[0].transfers.drain()
    failing(stores[0], 3)
    with pytest.raises(StepFailedError, match=r"some parameters and states are updated.*Load a checkpoint.*exp_avg of .*chunk 3"):
        plain_step(model, optimizer, tokens(2))
    with pytest.raises(StepFailedError, match="ended in the middle"):
        plain_step(model, optimizer, tokens(2))
    zinf_compile.load_full_state_dict(model, saved[0])
    optimizer.load_state_dict(saved[1])
    for number in range(2, 4):
        train_step_on(sides, models, plain_step, tokens(number), number)
    assert_same_states(sides[0][1], optimizer)


def test_an_error_before_the_first_update_changes_nothing(drive: Path, stores: list[OffloadedStates]) -> None:
    sides, models = both(TiedWords, adamw, drive)
    train_step_on(sides, models, plain_step, tokens(0), 0)
    model, optimizer = sides[1]
    before = copy.deepcopy((zinf_compile.full_state_dict(model), optimizer.state_dict()))

    def closure() -> torch.Tensor:
        raise KeyError("bad batch")

    with pytest.raises(KeyError, match="bad batch"):
        optimizer.step(closure)
    after = zinf_compile.full_state_dict(model), optimizer.state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    train_step_on(sides, models, plain_step, tokens(1), 1)


BEYOND = r"AdamW.state_dict\(\) would take [\d,]+ bytes .*; {} bytes are available\. .*save the model alone"


def test_states_larger_than_memory_are_not_brought_together(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the node has a rank has its part, less a tenth, within its rlimits."""
    sides, models = both(TiedWords, adamw, drive)
    train_step_on(sides, models, plain_step, tokens(0), 0)
    optimizer = sides[1][1]
    needed = 2 * 4 * sum(p.numel() for p in models[1].parameters())
    with monkeypatch.context() as patch:
        patch.setattr(host_limits, "available_memory_bytes", lambda: 2 * needed)
        optimizer.state_dict()
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        with pytest.raises(BudgetError, match=BEYOND.format(f"{int(0.9 * needed):,}")):
            optimizer.state_dict()
        patch.delenv("LOCAL_WORLD_SIZE")
        patch.setattr(host_limits, "_used_bytes", lambda: (0, 0))
        patch.setattr(resource, "getrlimit", lambda limit: (1000, 1000))
        with pytest.raises(BudgetError, match=BEYOND.format("900")):
            optimizer.state_dict()
    train_step_on(sides, models, plain_step, tokens(1), 1)


@pytest.mark.parametrize("own_memory", [True, False])
def test_states_beyond_a_declared_cap_are_not_brought_together(own_memory: bool, tmp_path: Path) -> None:
    with simulating(SimulatedDevice() if own_memory else HostIsDevice(GatherMemory())):
        model = TiedWords()
        model.compile(backend=BACKEND, options={"compute": "fx", "optimizer": "nvme", "nvme": tmp_path, "host_memory": "1MiB"})
        optimizer = adamw(model.parameters())
        loss_of(model(*tokens(0))).backward()
        optimizer.step()
        context = next(iter(model.parameters()))._zinf_unit.context  # type: ignore[attr-defined]
        ledger = context.memory.host_ledger
        states, held = 2 * sum(p.numel() * 4 for p in model.parameters()), ledger.total()[0] - ledger.now()["bounce"]
        optimizer.state_dict()
        context.memory.reservations.declare(device=None, host=held + states - 1)
        with pytest.raises(BudgetError, match=BEYOND.format(f"{states - 1:,}")):
            optimizer.state_dict()
        context.memory.reservations.declare(device=None, host=held + states)
        optimizer.state_dict()


def test_a_full_drive_is_an_error_before_the_first_update(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zinf_compile.runtime.storage import scratch_file  # noqa: PLC0415

    sides, _ = both(TiedWords, adamw, drive)
    model, optimizer = sides[1]
    before = copy.deepcopy(model.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(scratch_file, "fallocate", lambda fd, size: 28)
        with pytest.raises(StepFailedError, match=r"nothing is updated yet.* bytes needed, .* the disk is full"):
            plain_step(model, optimizer, tokens(0))
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    optimizer.step()


def test_flags_that_add_a_state_are_refused(drive: Path) -> None:
    sides, models = both(TiedWords, adamw, drive)
    train_step_on(sides, models, plain_step, tokens(0), 0)
    model, optimizer = sides[1]
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises((KeyError, StepFailedError, UnsupportedOptimizerError)):
        plain_step(model, optimizer, tokens(1))


@pytest.mark.slow
def test_ranks_stream_their_own_shards(tmp_path: Path) -> None:
    """Bitwise the same as with states in memory, on two ranks; also where steps end during the next forward."""
    for train in (train_on_ranks, switch_momentum_on):
        for in_ram, on_the_drive, all_on_the_drive in run_ranks(train, 2, str(tmp_path)):
            assert on_the_drive == in_ram
            assert all_on_the_drive == in_ram


def test_while_a_chunk_is_updated_the_next_is_read_and_the_last_one_written(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are begun, and nobody has waited for them, when a chunk has its new values. The first ones are still in memory."""
    updated: list[int] = []
    seen: list[int] = []
    finish = ChunkStep.finish

    def noting(self: ChunkStep, *arguments: Any) -> None:
        under_way = {slot.chunk for slot in self._owner.transfers.buffers._buffers if slot.under_way}
        if CHUNK_BUFFERS <= len(updated) < len(self._owner.chunks) - 1:
            seen.append(self._number)
            assert len(under_way) == 2, "one is read, one is written"
            assert updated[-1] in under_way, "the last one is written"
            assert not under_way & {self._number, *updated[:-1]}, "the other one is yet to come"
        updated.append(self._number)
        finish(self, *arguments)

    sides, models = both(TiedWords, adamw, drive)
    for number in range(2):
        train_step_on(sides, models, plain_step, tokens(number), number)
    monkeypatch.setattr(ChunkStep, "finish", noting)
    train_step_on(sides, models, plain_step, tokens(2), 2)
    assert seen
