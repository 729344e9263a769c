"""Backward runs on a thread of the device: what PyTorch keeps for each thread, and what ours lock, is right there too."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import late
import pytest
import torch
from late_training import PLACEMENTS, Options, Training, on_drives, same
from models import Mlp, vectors
from places import on
from rank_late import LONGEST_S, check
from tiers import compiled
from torch import nn
from twin_models import Twins

import zinf_compile
from zinf_compile.backend import run_graph
from zinf_compile.optim.deferred_step import DeferredStep

OFF_DEVICE = {name: PLACEMENTS[name] for name in ("host", "drive")}


@pytest.fixture(params=OFF_DEVICE)
def options(request: pytest.FixtureRequest, tmp_path: Path) -> Options:
    torch.compiler.reset()
    zinf_compile.reset()
    return on_drives(OFF_DEVICE[request.param], tmp_path)


def test_schedules_of_backwards_run_there(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does the first backward, which is compiled where it runs, and with the threads and modes of who asked for it."""
    seen: list[tuple[str, bool, int, bool, bool]] = []
    execute = run_graph.execute

    def noted(program: Any, *others: Any, **rest: Any) -> Any:
        here = threading.current_thread() is threading.main_thread()
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        seen.append((program.name, here, torch.get_num_threads(), *modes))
        return execute(program, *others, **rest)

    monkeypatch.setattr(run_graph, "execute", noted)
    training = Training("late", options)
    for step in range(2):
        training.step(training.batches(step, 1))
    assert [here for _, here, *_ in seen] == [True, False, True, False]
    assert {threads for _, _, threads, *_ in seen} == {torch.get_num_threads()}
    assert not any(inference for *_, inference in seen)


@pytest.mark.parametrize("within", [True, False], ids=["within autocast", "after autocast"])
def test_autocast_is_that_of_the_forward(within: bool, options: Options) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("late", torch.bfloat16):
            loss = model(*vectors(0))
            if within:
                loss.backward()
        if not within:
            loss.backward()
        assert not torch.is_autocast_enabled("late")
        optimizer.step()
        return loss

    with on("late"), late.delays(LONGEST_S, seed=2, chance=0.3):
        pair = Twins(Mlp, lambda model: compiled(model, options))
        for _ in range(3):
            pair.each(step)
    check()


def test_a_backward_is_compiled_there_while_a_step_is_deferred(tmp_path: Path) -> None:
    """Compiling takes PyTorch's lock, for which the deferred step waits, and the backward for that step's parameters."""
    torch.compiler.reset()
    zinf_compile.reset()
    host, there = Training("cpu", None), Training("late", on_drives(PLACEMENTS["drive"], tmp_path))
    losses = []
    for training in (host, there):
        with late.delays(LONGEST_S, seed=3):
            found = []
            for step, rows in enumerate((8, 8, 5, 7, 8)):  # other sizes are compiled for anew
                found += training.step(training.batches(step, 2)[:, :rows], clipped=False)
            losses.append([loss.cpu() for loss in found])
    assert same(*losses)
    torch.accelerator.synchronize()
    check()


def test_a_deferred_step_computes_with_the_threads_of_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    zinf_compile.reset()
    seen: list[tuple[int, int]] = []
    update = DeferredStep._update

    def noted(self: DeferredStep, *others: Any) -> Any:
        seen.append((torch.get_num_threads(), torch.accelerator.current_stream().stream_id))
        return update(self, *others)

    monkeypatch.setattr(DeferredStep, "_update", noted)
    before, stream = torch.get_num_threads(), torch.Stream(device="late")
    training = Training("late", {**on_drives(PLACEMENTS["drive"], tmp_path), "compute_shape": {"piece_numel": 4096}})
    batches = [training.batches(step, 1) for step in range(3)]  # the first step isn't deferred
    torch.accelerator.synchronize()
    try:
        for threads, batch in zip((before, before, before + 1), batches, strict=True):
            torch.set_num_threads(threads)
            with stream:
                training.step(batch)
                zinf_compile.synchronize()
    finally:
        torch.set_num_threads(before)
    assert [threads for threads, _ in seen] == [before, before + 1]
    own = {number for _, number in seen}
    assert len(own) == 1, "each step is issued to the same stream"
    assert not own & {stream.stream_id, torch.accelerator.current_stream().stream_id}, "beside compute"


def test_a_backward_and_another_models_forward_at_the_same_time(options: Options) -> None:
    """Lanes, ledgers and buffers are shared by both threads."""
    host = Training("cpu", None)
    alone = [loss for step in range(4) for loss in _steps(host, step)]
    with late.delays(LONGEST_S, seed=4, chance=0.3):
        pair = [Training("late", options) for _ in range(2)]
        found: list[list[torch.Tensor]] = [[], []]
        for number, training in enumerate(pair):  # compiled one after the other
            found[number] += _steps(training, 0)
        for step in range(1, 4):
            threads = [
                threading.Thread(target=lambda n=number, t=training, s=step: found[n].extend(_steps(t, s)))
                for number, training in enumerate(pair)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        both = [[loss.cpu() for loss in losses] for losses in found]
        torch.accelerator.synchronize()
    assert same(both[0], alone)
    assert same(both[1], alone)
    check()


def _steps(training: Training, step: int) -> list[torch.Tensor]:
    return training.step(training.batches(step, 2))
