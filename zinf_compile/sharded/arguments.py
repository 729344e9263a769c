"""What user code gives as a model and as an optimizer: anything else is named before something is done with it."""

from __future__ import annotations

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
