"""Saves a partitioned model as safetensors in the layout of transformers, with the tensors of one file in memory at a time."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from zinf_compile.errors import PartitionedParameterError
from zinf_compile.ir.sizes import parse_bytes
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.sharded.arguments import path_of, plain
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.tensor import ShardedTensor

from .folder_update import FolderUpdate
from .gathered import agree_on_units, on_first_rank, partitioned_parameters, reject_hollow, state_names
from .safetensors_index import INDEX, SINGLE
from .safetensors_writer import new_file, save_file, write_all

_SAVED = re.compile(r"model((-[0-9a-f]{16})?-\d{5}-of-\d{5})?\.safetensors")
"""Names of the files that a save by this package or by transformers writes."""


def save_safetensors(model: nn.Module, folder: str | os.PathLike[str], *, file_bytes: int | str = "1GiB") -> list[str]:
    """Write parameters and buffers as `model.safetensors`, or beyond `file_bytes` as several files with an index.

    A collective operation; rank 0 writes, and needs memory for the tensors of one file. A tensor larger than `file_bytes` has a
    file to itself. Names, shapes and types are those of the plain model's `state_dict()`; tied tensors are written once, under
    their first name. The folder is made where it is missing. Several files have names unique to each save, and the index is
    renamed into place last: a process killed at any moment, or a full drive, leaves all old files or all new ones, for
    transformers and for `partition(checkpoint=)`. The next save removes leftovers of a killed process. Returns the names of the
    files. If writing fails it raises `OSError` with errno and path on rank 0, `PartitionedParameterError` on the others.
    """
    model = plain(model)
    unit = agree_on_units(partitioned_parameters(model), "saving the model as safetensors", "")
    ranks = None if unit is None else unit.ranks
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state_names(model).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    most = parse_bytes(file_bytes, option="file_bytes")
    tag = secrets.token_hex(8)
    plan = plan_files(tensors, most, tag=tag if ranks is None else ranks.share(tag, what="naming the files of a save"))
    first = ranks is None or ranks.rank == 0
    update = FolderUpdate(path_of(folder))
    _on_first_rank(ranks, lambda: reject_hollow(tensors))
    try:
        _on_first_rank(ranks, update.begin)
        for file, names in plan.items():
            whole = _gather_file({name: tensors[name] for name in names}, first=first)
            _on_first_rank(ranks, lambda file=file, whole=whole: _write(update, file, whole))  # type: ignore[misc]
            del whole
        _on_first_rank(ranks, lambda: replace_files(update, plan, sum(t.nbytes for t in tensors.values())))
    finally:
        update.end()
    return list(plan)


def plan_files(tensors: Mapping[str, torch.Tensor], file_bytes: int, *, tag: str = "") -> dict[str, list[str]]:
    """Return the files and the names of the tensors in each: in order, each file as full as possible.

    `tag`: makes the names of several files unique to a save. A later save by transformers into the same folder still recognises
    them as older shards, by the numbers at their end.
    """
    groups: list[list[str]] = []
    bytes_left = 0
    for name, tensor in tensors.items():
        size = tensor.nbytes
        if not groups or size > bytes_left:
            groups.append([])
            bytes_left = file_bytes
        groups[-1].append(name)
        bytes_left -= size
    if len(groups) <= 1:
        return {SINGLE: groups[0] if groups else []}
    stem = f"model-{tag}" if tag else "model"
    return {f"{stem}-{n:05}-of-{len(groups):05}.safetensors": names for n, names in enumerate(groups, start=1)}


def _gather_file(tensors: Mapping[str, torch.Tensor], *, first: bool) -> dict[str, torch.Tensor]:
    """Gather the tensors of one file on rank 0; return an empty mapping on the others."""
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, ShardedParameter):
            full = on_first_rank(tensor._zinf_unit)
            if full is not None:
                whole[name] = full.to("cpu").contiguous()
        elif isinstance(tensor, ShardedTensor):
            full = tensor.full_tensor()
            if first:
                whole[name] = full.to("cpu").contiguous()
        elif first:
            whole[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return whole


def _write(update: FolderUpdate, file: str, tensors: dict[str, torch.Tensor]) -> None:
    update.write(file, lambda path: save_file(tensors, path, metadata={"format": "pt"}))


def replace_files(update: FolderUpdate, plan: Mapping[str, Sequence[str]], total_bytes: int) -> None:
    """Commit the files. The order depends on transformers, which prefers a single file to an index."""
    if len(plan) == 1:
        update.replace(list(plan), last=SINGLE, stale=INDEX, stale_wins=False, old=_SAVED)
        return
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {name: file for file, names in plan.items() for name in names},
    }
    text = memoryview((json.dumps(index, indent=2) + "\n").encode())

    def write(path: Path) -> None:
        with new_file(path) as fd:
            write_all(fd, text)

    update.write(INDEX, write)
    update.replace(list(plan), last=INDEX, stale=SINGLE, stale_wins=True, old=_SAVED)


def _on_first_rank(ranks: Ranks | None, act: Callable[[], object]) -> None:
    """Call `act` on rank 0; raise on all ranks if it fails there."""
    if ranks is None:
        act()
        return
    with ranks.fail_together("saving the model: writing a file", elsewhere=PartitionedParameterError(_NOT_WRITTEN)):
        if ranks.rank == 0:
            act()


_NOT_WRITTEN = "writing the model failed on rank 0, see there"
