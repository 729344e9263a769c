"""What user code gives as a model, an optimizer and a folder: anything else is named before something is done with it."""

from __future__ import annotations

from pathlib import Path

from torch import nn


def plain(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(model)` wraps, whose names are the user's; raise `TypeError` for what is no model."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, nn.Module):
        raise TypeError(f"a {type(inner).__name__} is given as the model; accepted: an nn.Module, as it is or compiled")
    return inner


def check_optimizer(given: object) -> None:
    """Raise `TypeError` for what is no optimizer, nor a wrapper around one."""
    if not hasattr(given, "param_groups"):
        raise TypeError(f"a {type(given).__name__} is given as an optimizer; accepted: an Optimizer of torch.optim, or several")


def path_of(given: object) -> Path:
    """Return the path that a string or an `os.PathLike` is; raise `TypeError` for what is neither."""
    try:
        path = Path(given)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"a {type(given).__name__} is given as the folder; accepted: a str or a pathlib.Path") from None
    if "\0" in str(path):
        raise ValueError(f"the folder {str(path)!r} has a null character in its name; accepted: a name without one")
    return path
