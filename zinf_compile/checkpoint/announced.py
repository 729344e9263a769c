"""Folders that were announced for checkpoints (option `checkpoint`): before the first step a dry run of a save, and space.

Note: Dry run
    Before the first update of an optimizer whose parameters belong to an announced folder, all ranks do what `save` does before
    its first byte: the folder is made, locked and tried by each rank, names and sizes of all tensors follow from the models and
    optimizers with this folder, and space is reserved. States that don't exist yet are those that the probe of the optimizer has
    found. Models are the outermost modules that hold the parameters; their optimizers are looked up among the objects of the
    process. Averages and `extra` are known from the first save on, which makes the reservation as large as they need.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.errors import CheckpointError
from zinf_compile.ir.checkpoint_folder import CheckpointFolder
from zinf_compile.ir.formats import format_of
from zinf_compile.optim.closure_step import hollow_of
from zinf_compile.optim.record import State, all_records
from zinf_compile.optim.states_to_come import states_to_come
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.arguments import plain
from zinf_compile.sharded.unpartitioned import models_of

from .accumulated_gradients import add_gradients
from .background import one_at_a_time, saving_together, wait_for_save
from .fit import named_optimizers
from .gathered import state_names
from .local_buffers import add_any_buffers
from .manifest import as_json, saves_in
from .notices import notify
from .random_states import add_random_states
from .rank_contents import RankContents
from .rank_files import SPARE_BYTES, RankFiles, free_bytes
from .reserved_space import ReservedSpace, space_in
from .save import description
from .save_folder import SaveFolder

_SPARE_BYTES = 4096
"""Beside the manifest of each rank."""

_rehearsed: weakref.WeakKeyDictionary[Optimizer, set[CheckpointFolder]] = process_wide(weakref.WeakKeyDictionary())
"""The folders of which an optimizer's states were part of a dry run."""


def rehearse(optimizer: Optimizer) -> None:
    """Make the dry run of a save for each folder that was announced for parameters of an optimizer. A collective operation.

    Waits for a save under way, and raises its error. Raises what the save would raise, on all ranks, and `OSError` where there is
    too little space for all checkpoints that are kept and one more; nothing is updated then, and nothing is left in the folder.
    """
    hollow = hollow_of(optimizer)
    first: dict[CheckpointFolder, Unit] = {}
    for unit in [p._zinf_unit for p in hollow]:
        if unit.checkpoint is not None:
            first.setdefault(unit.checkpoint, unit)
    for folder, unit in first.items():
        if folder not in _rehearsed.get(optimizer, ()):
            with one_at_a_time():
                wait_for_save()  # whose files in that folder would be taken for those of a dead job
                _Rehearsal(unit, folder).run(optimizer)


class _Rehearsal:
    """The dry run of a save to one folder, by the ranks that save a model's first unit there."""

    def __init__(self, unit: Unit, folder: CheckpointFolder) -> None:
        self._context, self._announced = unit.context, folder
        self._ranks, self._folder = unit.ranks, Path(folder.path)
        self._rank, self._size = self._ranks.rank, self._ranks.size

    def run(self, optimizer: Optimizer) -> None:
        """Check everything, and reserve space; say what it takes."""
        with self._together():
            models, optimizers = self._saved_together(optimizer)
            contents, gradients = self._contents(models, optimizers)
            files = RankFiles(self._folder, contents, self._rank)
        self._try_folder()
        rest = files.manifest_bytes + _SPARE_BYTES
        if self._rank == 0:
            rest += len(as_json(description(contents, self._size))) + SPARE_BYTES
        space = space_in(self._folder, keep=self._announced.keep)
        space.grow(files.sizes, rest)
        size, needed, of_gradients = (self._sum(value) for value in (space.bytes, space.lacking, gradients))
        with self._together():
            if self._rank == 0:
                self._check_space(size, needed)
        with self._together(space.close):
            space.fill()
        supported = self._sum(space.supported) == self._size
        if self._rank == 0:
            names = [type(plain(model)).__name__ for model in models] + [type(each).__name__ for each in optimizers]
            notify(self._line(space, names, size, of_gradients, supported=supported))
        for each in optimizers:
            _rehearsed.setdefault(each, set()).add(self._announced)

    def _saved_together(self, optimizer: Optimizer) -> tuple[list[nn.Module], list[Optimizer]]:
        """Return the models and optimizers of the folder, in an order that all ranks share."""
        gc.collect()  # what is only waiting for it is not saved
        units = [unit for unit in self._context.units if unit.checkpoint == self._announced]
        serials = {id(p): unit.serial for unit in units if (p := unit.parameter()) is not None}
        optimizers = _optimizers_of(serials.keys(), optimizer)
        parameters = [p for unit in units if (p := unit.parameter()) is not None]
        parameters += [p for each in optimizers for group in each.param_groups for p in group["params"]]
        models = models_of(parameters)
        held = {id(p) for model in models for p in model.parameters()}
        rest = {id(p): p for p in parameters if id(p) not in held}
        if rest and gc.get_freeze_count():  # the program has hidden its modules from all who look for them
            models.append(nn.ParameterList(rest.values()))

        def first(held: Iterable[Any]) -> int:
            return min((serials[id(p)] for p in held if id(p) in serials), default=len(serials))

        models.sort(key=lambda model: first(model.parameters()))
        optimizers.sort(key=lambda each: first(p for group in each.param_groups for p in group["params"]))
        return models, optimizers

    def _contents(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> tuple[RankContents, int]:
        """Return what a save would write now, if the first step were done, and the bytes of gradients among it."""
        model = plain(models[0]) if len(models) == 1 else nn.ModuleList(map(plain, models))
        contents = RankContents(self._rank, self._size)
        names = contents.add_model(model)
        for prefix, each in named_optimizers(optimizers):
            contents.describe_optimizer(prefix, each, names, states_to_come(each))
        targets = state_names(model)
        add_gradients(contents, targets)
        add_any_buffers(contents, targets, self._size)
        add_random_states(contents, self._size, {tensor.device.type for tensor in targets.values()}, numpy=True)
        contents.add_plain("extra", {})
        gradients = [t for key, t in contents.tensors.items() if key.startswith("gradient.")]
        size = sum(format_of(tensor.dtype).bytes(part.rectangle.numel) for tensor in gradients for part in tensor.parts)
        contents.release()
        return contents, size

    def _try_folder(self) -> None:
        """Make and lock the folder; let each rank write to it and find what rank 0 has written."""
        place = SaveFolder(self._folder, keep=self._announced.keep)
        trial = f".save-00000000-{secrets.token_hex(8)}.partial"
        with contextlib.ExitStack() as ending:
            with self._together():
                if self._rank == 0:
                    place.prepare()
                    (self._folder / trial).mkdir()
                    ending.callback(_remove_trial, self._folder / trial)
            trial = self._ranks.share(trial, what="trying a folder for checkpoints")
            own = self._folder / trial / f"rank-{self._rank:05}"
            with self._together():
                if not own.parent.is_dir():
                    raise CheckpointError(
                        f"rank {self._rank} doesn't find in {self._folder} what rank 0 has made there; accepted for option "
                        "checkpoint: one folder that all ranks see, on a filesystem that their nodes share"
                    )
                own.touch(exist_ok=False)
            with self._together():
                own.unlink()

    def _check_space(self, size: int, needed: int) -> None:
        free, keep = free_bytes(self._folder), self._announced.keep
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"{os.strerror(errno.ENOSPC)}: {self._kept()}, {size:,} bytes each, need {needed:,} bytes more, and {free:,} are "
                f"free. Nothing is updated yet: free {needed - free:,} bytes more, "
                + ("lower option checkpoint_keep, " if keep > 1 else "")
                + "or name a folder on another drive by option checkpoint",
                os.fspath(self._folder),
            )

    def _kept(self) -> str:
        keep = self._announced.keep
        return f"{keep} checkpoint{'s' if keep > 1 else ''} to keep and one that is written"

    def _line(self, space: ReservedSpace, names: Sequence[str], size: int, gradients: int, *, supported: bool) -> str:
        count, free = len(saves_in(self._folder)), free_bytes(self._folder)
        of_gradients = f", {gradients:,} of them for gradients that no step has applied yet" if gradients else ""
        there = f"{count} of them there" if count else "none of them there"
        text = (
            f"checkpoints of {', '.join(names)} in {self._folder}: {self._kept()} take {(space.keep + 1) * size:,} bytes of the "
            f"drive, {size:,} each{of_gradients}; {there}, "
        )
        if not supported:
            return f"{text}and this filesystem can't reserve space: leave {space.wanted * size:,} of the {free:,} free bytes free"
        return f"{text}{space.wanted * size:,} bytes reserved for the rest, {free:,} still free"

    @contextlib.contextmanager
    def _together(self, undo: Callable[[], object] = bool) -> Iterator[None]:
        try:
            with saving_together(self._ranks, self._folder):
                yield
        except BaseException:
            undo()
            raise

    def _sum(self, value: float) -> int:
        what = "space for checkpoints"
        return int(self._ranks.exchange(torch.tensor([value], dtype=torch.float64), what=what).sum())


def _remove_trial(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _optimizers_of(parameters: Iterable[int], stepping: Optimizer) -> list[Optimizer]:
    """Return the optimizers of this process that have any of the parameters, given by id: first the one that is stepping.

    Of several with the same parameter, as where an older one is still referred to, only the first found counts.
    """
    wanted, taken, found = set(parameters), set[int](), list[Optimizer]()
    hidden = {id(each) for each, record in all_records() if record.state is State.STAND_IN}
    living: list[Any] = [item for item in gc.get_objects() if issubclass(type(item), Optimizer)]
    for each in [stepping, *living]:
        if (each is stepping and found) or id(each) in hidden or not {"param_groups", "state"} <= vars(each).keys():
            continue
        own = {id(p) for group in each.param_groups for p in group["params"]}
        if own & wanted and not own & taken:
            found.append(each)
            taken |= own
    return found
