"""Save a partitioned model as safetensors, as transformers lays them out, with never more than one file's tensors in memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from .checkpoint import agree_on_units, on_first_rank, partitioned_parameters, plain, state_names
from .config import parse_bytes
from .errors import PartitionedParameterError
from .parameter import ShardedParameter
from .runtime.context import Context
from .tensor_files import INDEX

_SAVED = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Names of files that a save writes."""


def save_safetensors(model: nn.Module, folder: str | os.PathLike[str], *, file_bytes: int | str = "1GiB") -> list[str]:
    """Write parameters and buffers as `model.safetensors`, or beyond `file_bytes` as several files with an index.

    A collective operation; rank 0 writes, and needs memory for the tensors of one file. A tensor larger than `file_bytes` has a
    file to itself. Names, shapes and types are those of the plain model's `state_dict()`; tied tensors are written once, under
    their first name. The folder is made where it is missing; files of an earlier save are replaced only once all new ones are
    complete. Returns the names of the files. Raises `OSError`, on all ranks `PartitionedParameterError`, where writing fails.
    """
    model = plain(model)
    context = agree_on_units(partitioned_parameters(model), "saving the model as safetensors", "")
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state_names(model).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    plan = plan_files(tensors, parse_bytes(file_bytes, option="file_bytes"))
    target, first = Path(folder), context is None or context.rank == 0
    drafts = {file: target / f".{file}.{os.getpid()}.partial" for file in plan} if first else {}

    def replace() -> None:
        for file, draft in drafts.items():
            draft.replace(target / file)
        _write_index(target, plan, tensors)

    try:
        _on_first_rank(context, partial(target.mkdir, parents=True, exist_ok=True))
        for file, names in plan.items():
            whole = _bring({name: tensors[name] for name in names}, first=first)
            _on_first_rank(context, partial(_write, whole, drafts, file))
        _on_first_rank(context, replace)
    finally:
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
    return list(plan)


def plan_files(tensors: Mapping[str, torch.Tensor], file_bytes: int) -> dict[str, list[str]]:
    """Return the files and the names of the tensors in each: in order, each file as full as it can be."""
    groups: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if not groups or size > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) <= 1:
        return {"model.safetensors": groups[0] if groups else []}
    return {f"model-{n:05}-of-{len(groups):05}.safetensors": names for n, names in enumerate(groups, start=1)}


def _bring(tensors: Mapping[str, torch.Tensor], *, first: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of one file, whole, on rank 0; nothing on the others."""
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, ShardedParameter):
            full = on_first_rank(tensor._zinf_unit)
            if full is not None:
                whole[name] = full.to("cpu").contiguous()
        elif first:
            whole[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return whole


def _write(tensors: dict[str, torch.Tensor], drafts: Mapping[str, Path], file: str) -> None:
    save_file(tensors, drafts[file], metadata={"format": "pt"})


def _on_first_rank(context: Context | None, act: Callable[[], object]) -> None:
    """Do something on rank 0; where it fails there it is an error everywhere."""
    failed = True
    try:
        if context is None or context.rank == 0:
            act()
        failed = False
    finally:
        everyone = [float(failed)]
        if context is not None:
            everyone = context.agree(["saving the model: is a file written"], what="saving the model", value=float(failed))
    if any(everyone):
        raise PartitionedParameterError("writing the model failed on rank 0, see there")


def _write_index(target: Path, plan: Mapping[str, Sequence[str]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the index of several files, and remove what an earlier save of another layout left."""
    if len(plan) > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, names in plan.items() for name in names},
        }
        draft = target / f".{INDEX}.{os.getpid()}.partial"
        draft.write_text(json.dumps(index, indent=2) + "\n")
        draft.replace(target / INDEX)
    else:
        (target / INDEX).unlink(missing_ok=True)
    for old in target.iterdir():
        if _SAVED.fullmatch(old.name) and old.name not in plan:
            old.unlink()
