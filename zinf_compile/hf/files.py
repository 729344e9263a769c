"""Checkpoints of transformers and accelerate: saves and loads weights and optimizer states of a partitioned model.

Rank 0 writes and reads; the others take part in gathers and scatters. States on drives each rank writes and reads itself. Each
function is a collective operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.checkpoint.gathered import load_full_state_dict, partitioned_parameters, state_names
from zinf_compile.checkpoint.load_optimizer_state import load_full_optimizer_state_dict, load_plain
from zinf_compile.checkpoint.safetensors_index import INDEX
from zinf_compile.checkpoint.safetensors_reader import TensorFiles
from zinf_compile.checkpoint.save_optimizer_state import full_optimizer_state_dict, units_of
from zinf_compile.errors import CheckpointError
from zinf_compile.optim.state_dict_hooks import drive_bytes
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.context import Context
from zinf_compile.sharded.arguments import plain

from .states_beside import NamedStates, failing_together, load_beside, named_by, remove_others, save_beside, write_file

SAFETENSORS = ("model.safetensors", INDEX)
PICKLED = "pytorch_model.bin"


def context_of(model: nn.Module) -> Context | None:
    """Return the context of a partitioned model, None for one that isn't."""
    found = partitioned_parameters(plain(model))
    return next((parameter._zinf_unit.context for parameter in found.values()), None)


class _Weights(Mapping[str, torch.Tensor]):
    """Tensors of safetensors files by name, each read when asked for. Tied ones are also found by their other names."""

    def __init__(self, files: TensorFiles, model: nn.Module) -> None:
        self._files = files
        self._stored = {name: name for name in files.tensors}
        names = state_names(model)
        by_tensor = {id(tensor): name for name, tensor in names.items() if name in files.tensors}
        self._stored |= {name: by_tensor[id(tensor)] for name, tensor in names.items() if id(tensor) in by_tensor}

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self._files.tensors[self._stored[name]]
        if not isinstance(stored.dtype, torch.dtype):
            raise CheckpointError(f"{name} in {stored.path} is of type {stored.dtype}, which PyTorch doesn't have")
        value = torch.empty(stored.shape, dtype=stored.dtype)
        self._files.read(self._stored[name], value.view(-1))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def has_weights(folder: Path) -> bool:
    """Return whether a folder has the weights of a full model in a format of `load_weights`."""
    return any((folder / name).is_file() for name in (*SAFETENSORS, PICKLED))


def load_weights(model: nn.Module, folder: Path, context: Context | None) -> None:
    """Load a folder's weights, one parameter at a time. Ranks of a model that isn't partitioned yet each read the files.

    Raises `UnsupportedModelError` on all ranks if they don't fit the model; nothing is changed then.
    """
    model = plain(model)
    weights: Mapping[str, Any] | None = None
    files: TensorFiles | None = None
    try:
        reads = context is None or context.rank == 0
        with failing_together(None if context is None else context.ranks, f"reading the weights in {folder}"):
            if reads and any((folder / name).is_file() for name in SAFETENSORS):
                files = TensorFiles(folder)
                weights = _Weights(files, model)
            elif reads:
                weights = torch.load(folder / PICKLED, map_location="cpu", weights_only=True, mmap=True)
        load_full_state_dict(model, weights)
    finally:
        if files is not None:
            files.close()


def states_folder(file: Path) -> Path:
    """Return the folder beside a file that has the states on drives: `optimizer` for `optimizer.pt`."""
    return file.with_suffix("")


def has_optimizer(file: Path) -> bool:
    """Return whether there are an optimizer's states, or states that no file names, which `load_optimizer` refuses."""
    return file.is_file() or states_folder(file).is_dir()


def is_ours(file: Path) -> bool:
    """Return whether `load_optimizer` alone can read an optimizer's states, whatever the optimizer is."""
    return _named(file) is not None if file.is_file() else states_folder(file).is_dir()


def _named(file: Path) -> NamedStates | None:
    """Return what a file names in the place of states; None for anything else, which PyTorch alone is to read or refuse."""
    try:
        return named_by(file)
    except CheckpointError:
        return None


def save_optimizer(optimizer: Optimizer, file: Path, models: Sequence[nn.Module], *, writes: bool) -> None:
    """Write an optimizer's states, all of them or, if the process is killed, none.

    Where they are on drives, they fit into no memory: each rank writes its own by `save`, with `models`, to
    `states_folder(file)`, and the file names them. Elsewhere rank 0 writes full states in the format of eager's `state_dict()`;
    with no partitioned parameter, where `writes`.
    """
    context = units_of(optimizer)[1]
    ranks = None if context is None else context.ranks
    new: NamedStates | None = None
    if _on_drives(optimizer, ranks):
        new = save_beside(file, states_folder(file), together(models), optimizer, ranks)
        state = None if new is None else new.as_plain()
    else:
        state = full_optimizer_state_dict(optimizer)
    with failing_together(ranks, f"writing {file}"):
        if writes if ranks is None else ranks.rank == 0:
            write_file(file, state)
            remove_others(file, states_folder(file), new)


def load_optimizer(optimizer: Optimizer, file: Path, models: Sequence[nn.Module]) -> None:
    """Load what `save_optimizer` wrote, on any ranks and tiers; `models` too, where it wrote them.

    Raises `CheckpointError` on all ranks for states of a save that didn't come to its end.
    """
    context = units_of(optimizer)[1]
    ranks = None if context is None else context.ranks
    named: NamedStates | None = None
    with failing_together(ranks, f"reading {file}"):
        if ranks is None or ranks.rank == 0:
            if not file.exists() and states_folder(file).is_dir():
                raise CheckpointError(
                    f"{states_folder(file)} has states that belong to no {file.name}: the save didn't come to its end. Go back "
                    "to another checkpoint"
                )
            named = _named(file) if context is None else named_by(file)
    if ranks is not None:
        named = ranks.share(named, what="finding an optimizer's states")
    if named is not None:
        load_beside(file, states_folder(file), named, together(models), optimizer, ranks)
        return
    if context is None:
        load_plain(optimizer, torch.load(file, map_location="cpu", weights_only=True))
        return
    with context.ranks.fail_together(f"reading {file}"):
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True) if context.rank == 0 else None
    load_full_optimizer_state_dict(optimizer, state)


def _on_drives(optimizer: Optimizer, ranks: Ranks | None) -> bool:
    """Return whether any rank has states on drives."""
    mine = torch.tensor([drive_bytes(optimizer)], dtype=torch.float64)
    return bool(mine.any() if ranks is None else ranks.exchange(mine, what="saving an optimizer's states").any())


def together(models: Sequence[nn.Module]) -> nn.Module:
    """Return one module with all of them."""
    return plain(models[0]) if len(models) == 1 else nn.ModuleList(plain(model) for model in models)


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer that accelerate wraps, itself an `Optimizer`, or the optimizer given."""
    while hasattr(optimizer, "accelerator_state"):
        optimizer = optimizer.optimizer
    assert isinstance(optimizer, Optimizer)
    return optimizer
