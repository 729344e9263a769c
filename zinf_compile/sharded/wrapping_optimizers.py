"""Optimizers that work through others, which they keep: the steps of those have hooks of their own."""

from __future__ import annotations

from torch.optim import Optimizer

from zinf_compile._torch import tree_leaves

_OF_EVERY_ONE = ("defaults", "param_groups", "state")
"""Attributes of every optimizer."""


def is_wrapper(optimizer: Optimizer) -> bool:
    """Say whether an optimizer with a step of its own keeps another one, in an attribute or in a collection there.

    PyTorch's own step no others. It steps as it is: what it changes besides are parameters, as code of the user's would by hand.
    A stand-in or a trial of it would have the optimizers that it keeps, and step them.
    """
    if f"{getattr(type(optimizer).step, '__module__', '')}.".startswith("torch.optim."):
        return False
    kept = (value for name, value in vars(optimizer).items() if name not in _OF_EVERY_ONE and not name.startswith("_optimizer_"))
    return any(isinstance(leaf, Optimizer) and leaf is not optimizer for value in kept for leaf in tree_leaves(value))
