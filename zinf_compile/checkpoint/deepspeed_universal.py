"""DeepSpeed's universal checkpoints, read without DeepSpeed: a folder for each parameter, a file for each of its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zinf_compile.errors import CheckpointError

from .deepspeed_files import is_deepspeed, open_deepspeed, settings_of, states_of, steps_of
from .foreign import ForeignCheckpoint, ForeignOptimizer, ForeignTensor, plain, whole_of
from .torch_archive import ArchivedTensor

LATEST = "latest_universal"
_FOLDER, _VALUE, _SETTINGS = "zero", "fp32.pt", "optimizer_state.pt"


def is_universal(folder: Path) -> bool:
    """Say whether a folder is a universal checkpoint."""
    return (folder / _FOLDER).is_dir() and any((folder / _FOLDER).glob(f"*/{_VALUE}"))


def open_universal(folder: Path) -> ForeignCheckpoint:
    """Open the files of one. Raises `CheckpointError` where one is damaged."""
    found = open_deepspeed(folder, values_beside=True) if is_deepspeed(folder) else ForeignCheckpoint(folder, {})
    try:
        _read(found, folder)
        found.check()
    except BaseException:
        found.close()
        raise
    return found


def _read(found: ForeignCheckpoint, folder: Path) -> None:
    """Add the values of the parameters; buffers and frozen ones may be among the states of the model beside them."""
    states: dict[str, dict[str, ForeignTensor]] = {}
    small: dict[str, dict[str, Any]] = {}
    for own in sorted(path for path in (folder / _FOLDER).iterdir() if path.is_dir()):
        name = own.name
        if name in found.aliases or not (own / _VALUE).exists():
            continue
        values = {path.stem: _value(found.open(path)) for path in sorted(own.glob("*.pt"))}
        tensor = values.pop("fp32")
        if not isinstance(tensor, ArchivedTensor):
            raise CheckpointError(f"{own / _VALUE} has a {type(tensor).__name__}, not a tensor")
        shape = next((group[name] for group in found.groups if name in group), tensor.shape)  # those of ZeRO-3 are flat
        found.masters[name] = whole_of(tensor, shape)
        if not values:
            found.tensors.setdefault(name, found.masters.pop(name))  # a buffer or a frozen parameter
            continue
        large = {s: v for s, v in values.items() if isinstance(v, ArchivedTensor) and v.shape == tensor.shape and s != "step"}
        states[name] = {state: whole_of(value, shape) for state, value in large.items()}
        small[name] = {state: plain(value) for state, value in values.items() if state not in large}
    groups = _groups(found, states)
    settings: list[dict[str, Any]] = []
    path = folder / _FOLDER / _SETTINGS
    if groups is not None and path.exists():
        beside = found.open(path)
        base = states_of(beside) if isinstance(beside, dict) else {}
        settings = settings_of({"optimizer_state_dict": beside}) or settings_of(beside)
        steps = steps_of(base, settings)
        for number, names in enumerate(groups):
            for name in names if steps else ():
                small[name].setdefault("step", steps[min(number, len(steps) - 1)])  # ZeRO-3 has no files of it
    if states:
        found.optimizers = [ForeignOptimizer(states, small, settings, groups)]


def _groups(found: ForeignCheckpoint, states: dict[str, Any]) -> list[list[str]] | None:
    """Return the names by group, as the model's states beside have them; None where they are not known."""
    names = [list(group) for group in found.groups]
    return names if {name for group in names for name in group} == states.keys() else None


def _value(value: Any) -> Any:
    return value.get("param") if isinstance(value, dict) else value
