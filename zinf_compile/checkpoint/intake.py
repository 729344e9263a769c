"""Renaming and conversion of a checkpoint's tensors as they are loaded (`rename=`, `dtype=`), checked as a whole.

Called by whatever opens a checkpoint, before anything is read; reads nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zinf_compile.errors import CheckpointError

Rename = Mapping[str, str] | Callable[[str], str]
"""Name in the model by name in the checkpoint."""
DType = torch.dtype | Mapping[str, torch.dtype]
"""Of all floating-point tensors, or of some tensors by their name in the model."""


@dataclasses.dataclass(frozen=True)
class Intake:
    """What becomes of the tensors of a checkpoint."""

    names: dict[str, str]
    """Name in the model by name in the checkpoint, of all."""
    dtypes: dict[str, torch.dtype | str]
    """By name in the model."""


def plan_intake(
    stored: Mapping[str, torch.dtype | str],
    rename: Rename | None,
    dtype: DType | None,
    where: object,
    *,
    others: Iterable[str] = (),
) -> Intake:
    """Return names and types for tensors given by name and type; `others`: further names, such as those of tied tensors.

    Raises `CheckpointError`, for the checkpoint `where`, naming every name that a mapping has and the checkpoint has not, all
    tensors that get the same name, and all conversions that lose more than digits behind the point; and for what is no `dtype`.
    """
    for given in dtype.values() if isinstance(dtype, Mapping) else [dtype]:
        if given is not None and not isinstance(given, torch.dtype):
            raise CheckpointError(
                f"dtype={given!r} is a {type(given).__name__}; accepted: a torch.dtype, as torch.bfloat16, or a mapping from "
                "names to such types. Nothing was changed"
            )
    if not (rename is None or isinstance(rename, Mapping) or callable(rename)):
        raise CheckpointError(
            f"rename={rename!r} is a {type(rename).__name__}; accepted: a mapping from names in the checkpoint to names in the "
            "model, or a function from one to the other. Nothing was changed"
        )
    problems: list[str] = []
    names = {name: _renamed(name, rename, problems) for name in [*stored, *others]}
    if isinstance(rename, Mapping):
        problems += [f"rename has {name}, which the checkpoint has not" for name in rename if name not in names]
    sources: dict[str, list[str]] = {}
    for name, new in names.items():
        sources.setdefault(new, []).append(name)
    problems += [f"{' and '.join(sorted(found))} would both be {new}" for new, found in sources.items() if len(found) > 1]
    if isinstance(dtype, Mapping):
        problems += [f"dtype has {name}, a name that no tensor of the checkpoint gets" for name in dtype if name not in sources]
    dtypes: dict[str, torch.dtype | str] = {}
    for name, found in stored.items():
        new = names[name]
        dtypes[new] = _type_of(new, found, dtype)
        if problem := lossy(found, dtypes[new]):
            problems.append(f"{new} can't go from {found} to {dtypes[new]}: {problem}")
    if problems:
        raise CheckpointError(f"{where} can't be taken in as asked; nothing was changed. {'; '.join(problems)}")
    return Intake(names, dtypes)


def lossy(found: torch.dtype | str, wanted: torch.dtype | str) -> str:
    """Say what a conversion would lose beside digits behind the point; "" where it is fine."""
    if found == wanted:
        return ""
    if isinstance(found, str) or isinstance(wanted, str):
        return "PyTorch has no such type"
    if found.is_floating_point and wanted.is_floating_point:
        return ""
    if found.is_complex or wanted.is_complex:
        return "" if found.is_complex and wanted.is_complex else "one is complex, the other is not"
    if found.is_floating_point:
        return "fractions would be lost"
    low, high = (0, 1) if found == torch.bool else (torch.iinfo(found).min, torch.iinfo(found).max)
    if wanted == torch.bool:
        return "other numbers than 0 and 1 would be lost"
    if wanted.is_floating_point:
        exact = round(2 / torch.finfo(wanted).eps)  # whole numbers up to this one
        return "" if max(-low, high) <= exact else f"whole numbers beyond {exact:,} would be rounded"
    inside = torch.iinfo(wanted).min <= low and high <= torch.iinfo(wanted).max
    return "" if inside else "numbers out of its range would be lost"


def _renamed(name: str, rename: Rename | None, problems: list[str]) -> str:
    new: Any = name
    if isinstance(rename, Mapping):
        new = rename.get(name, name)
    elif rename is not None:
        new = rename(name)
    if isinstance(new, str) and new:
        return new
    problems.append(f"rename makes {new!r} of {name}; accepted: a name")
    return name


def _type_of(name: str, found: torch.dtype | str, dtype: DType | None) -> torch.dtype | str:
    if isinstance(dtype, Mapping):
        return dtype.get(name, found)
    floating = isinstance(found, torch.dtype) and found.is_floating_point
    return dtype if dtype is not None and floating else found
