"""After each region and each release of a program, no live value lies in a full unit's memory that was released."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from models import CASES
from torch import fx, nn
from training import adamw, plain_step

from zinf_compile.backend.graph_compiler import Compiled, GraphCompiler
from zinf_compile.config import Config
from zinf_compile.ir.program import Program
from zinf_compile.ir.steps import Gather, Reduce, Region, Release, Step, Wait
from zinf_compile.sharded.gradient import ShardedGradient


class Watch:
    """Looks at the values that a program's registers hold, between its steps; the real executor runs it."""

    def __init__(self) -> None:
        self.checks = 0
        self.releases = 0
        self._released: dict[int, torch.UntypedStorage] = {}
        """By address; held, so that nothing else is put there meanwhile."""

    def watched(self, program: Program) -> Program:
        """Return the program with regions in between that look at the live registers and return nothing."""
        live = {*range(program.inputs), *program.constants}
        steps: list[Step] = [Region(self._start, (), ())]
        frees: list[tuple[int, ...]] = [()]

        def look(at: Callable[[list[Any]], tuple[()]], registers: Sequence[int]) -> None:
            steps.append(Region(at, tuple(registers), ()))
            frees.append(())

        for step, freed in zip(program.steps, program.frees, strict=True):
            if isinstance(step, Release):
                look(self._release, [step.full])
            steps.append(step)
            frees.append(freed)
            live = (live | written(step)) - set(freed)
            if isinstance(step, Wait):
                look(self._gather, [step.out])
            elif isinstance(step, Region | Release):
                look(lambda values: self._check(program.name, values), sorted(live))
        look(lambda values: self._check(program.name, values), sorted(live))
        return dataclasses.replace(program, steps=tuple(steps), frees=tuple(frees))

    def _start(self, _: list[Any]) -> tuple[()]:
        self._released.clear()
        return ()

    def _release(self, values: list[Any]) -> tuple[()]:
        storage = values.pop().untyped_storage()
        if storage.nbytes():
            self._released[storage.data_ptr()] = storage
            self.releases += 1
        return ()

    def _gather(self, values: list[Any]) -> tuple[()]:
        self._released.pop(values.pop().untyped_storage().data_ptr(), None)  # one process has the same memory again
        return ()

    def _check(self, name: str, values: list[Any]) -> tuple[()]:
        self.checks += 1
        for value in values:
            if not isinstance(value, torch.Tensor) or isinstance(value, ShardedGradient):
                continue
            start, size = value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()
            for address, storage in self._released.items():
                apart = start + size <= address or address + storage.nbytes() <= start
                assert not size or apart, f"in the {name}, a live value of shape {list(value.shape)} lies in a released unit"
        values.clear()
        return ()


def written(step: Step) -> set[int]:
    """Return the registers that a step fills."""
    match step:
        case Gather(_, members):
            return {out for _, out in members}
        case Wait(_, out):
            return {out}
        case Reduce(_, members):
            return {out for _, _, out, _ in members}
        case Region(_, _, outputs):
            return set(outputs)
    return set()


def released_early(program: Program) -> Program:
    """Move the first release of the program in front of its region, as a defect of a pass might."""
    steps, frees = list(program.steps), list(program.frees)
    place = next(i for i, step in enumerate(steps) if isinstance(step, Release))
    release = steps[place]
    assert isinstance(release, Release)
    steps[place] = Region(lambda values: (), (), ())  # the register is still freed here
    before = max(i for i in range(place) if isinstance(steps[i], Region))
    steps.insert(before, release)
    frees.insert(before, ())
    return dataclasses.replace(program, steps=tuple(steps), frees=tuple(frees))


def watching_backend(
    watch: Watch, options: Mapping[str, Any], *, change: Callable[[Program], Program] = lambda program: program
) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
    """Return a backend for torch.compile whose programs, changed by `change`, are watched."""

    class Watching(GraphCompiler):
        def schedule(self, graph: fx.GraphModule, kind: str) -> Program:
            return watch.watched(change(super().schedule(graph, kind)))

    return lambda gm, inputs: Watching(Config.from_options(options)).compile(gm, inputs)


def train_watched(
    build: Callable[[], nn.Module],
    batch: Callable[[int, int], tuple[Any, ...]],
    options: Mapping[str, Any],
    *,
    rank: int = 0,
    change: Callable[[Program], Program] = lambda program: program,
) -> Watch:
    """Train two steps and evaluate once; raise if a live value lies in released memory."""
    watch, model = Watch(), build()
    compiled = torch.compile(model, backend=watching_backend(watch, options, change=change))
    optimizer = adamw(model.parameters())
    for step in range(2):
        plain_step(compiled, optimizer, batch(step, rank))
    with torch.no_grad():
        compiled(*batch(2, rank))
    return watch


def watch_on_a_rank(rank: int, size: int, names: Sequence[str], compute: str) -> list[int]:
    """Train cases of `models.CASES` on one of several ranks; return the number of releases in each."""
    options = {"compute": compute, "bucket": 512 if compute == "fx" else "4KiB", "timeout_s": 60}
    return [train_watched(CASES[name].build, CASES[name].batch, options, rank=rank).releases for name in names]
