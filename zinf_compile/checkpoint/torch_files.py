"""Plain files of `torch.save`: a model's state dict, alone or beside those of its optimizers.

Read like `torch.load(..., weights_only=True)` allows, and stricter: see `pickled`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zinf_compile.errors import CheckpointError
from zinf_compile.optim.state_layout import LAYOUT

from .foreign import ForeignCheckpoint, ForeignOptimizer, plain, whole_of
from .torch_archive import ArchivedTensor

MODELS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optimizers", "optimizer_states")


def open_torch_file(path: Path) -> ForeignCheckpoint:
    """Open a file. Raises `CheckpointError` where it has no state dict of a model."""
    found = ForeignCheckpoint(path, {})
    try:
        value = found.open(path)
        model, optimizers, rest = _sort(value if isinstance(value, dict) else {})
        found.tensors = {name: whole_of(tensor) for name, tensor in model.items() if isinstance(tensor, ArchivedTensor)}
        if not found.tensors:
            raise CheckpointError(
                f"{path} has no state dict of a model; accepted: a dict of tensors by name, alone or under {', '.join(MODELS)}"
            )
        found.optimizers = [_optimizer(path, each) for each in optimizers]
        found.extra = plain(rest)
        found.check()
    except BaseException:
        found.close()
        raise
    return found


def _sort(value: dict[Any, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], dict[Any, Any]]:
    """Return the state dict of the model, those of the optimizers, and the rest."""
    under = next((key for key in MODELS if isinstance(value.get(key), dict)), None)
    if under is None:
        return {name: tensor for name, tensor in value.items() if isinstance(name, str)}, [], {}
    of_optimizers = next((key for key in OPTIMIZERS if key in value), None)
    given = value.get(of_optimizers) if of_optimizers else []
    optimizers = [given] if isinstance(given, dict) else given if isinstance(given, list) else []
    rest = {key: item for key, item in value.items() if key not in (under, of_optimizers)}
    return value[under], [each for each in optimizers if isinstance(each, dict)], rest


def _optimizer(path: Path, state: dict[str, Any]) -> ForeignOptimizer:
    entries, groups = state.get("state"), state.get("param_groups")
    if not isinstance(entries, dict) or not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        raise CheckpointError(f"{path} has no state dict of an optimizer: a dict with state and param_groups is one")
    if any(LAYOUT in own for own in entries.values() if isinstance(own, dict)):
        raise CheckpointError(
            f"{path} has one rank's own shards of an optimizer's states ({LAYOUT}): load it by optimizer.load_state_dict on that "
            "rank, or save zinf_compile.full_optimizer_state_dict(optimizer) instead"
        )
    names = [[str(each) for each in group.get("params") or []] for group in groups]
    large: dict[str, dict[str, Any]] = {}
    small: dict[str, dict[str, Any]] = {}
    for key, own in entries.items():
        if isinstance(own, dict):
            tensors = {s: v for s, v in own.items() if isinstance(v, ArchivedTensor) and v.shape}
            large[str(key)] = {state: whole_of(tensor) for state, tensor in tensors.items()}
            small[str(key)] = plain({s: v for s, v in own.items() if s not in tensors})
    settings = [plain({k: v for k, v in group.items() if k != "params"}) for group in groups]
    numbered = all(name.isdecimal() for group in names for name in group)
    return ForeignOptimizer(large, small, settings, names, numbered=numbered)
