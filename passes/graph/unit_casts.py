"""Views and casts of a unit, and the data type in which it is gathered for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import fx

from zinf_compile.ir.formats import is_narrower

from .alias import METADATA_OPS, aliased_inputs, is_cast, is_view
from .node_facts import data_types, fake_value

WIRE_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Data types that a gather may be narrowed to: those that every transport supports."""


@dataclasses.dataclass(frozen=True, slots=True)
class UnitUses:
    """The users of a unit."""

    views: tuple[fx.Node, ...]
    """Views of it, and views of these."""
    casts: tuple[fx.Node, ...]
    """Of it or of its views."""
    others: tuple[fx.Node, ...]
    """All other operators that have it or a view of it as an input, but for those that read its sizes alone."""


def find_unit_uses(root: fx.Node) -> UnitUses:
    """Return the users of a unit, given the node of its full value."""
    views: dict[fx.Node, None] = {}
    casts: dict[fx.Node, None] = {}
    others: dict[fx.Node, None] = {}
    stack = [root]
    while stack:
        source = stack.pop()
        for user in source.users:
            if is_cast(user):
                casts[user] = None
            elif is_view(user) and source in aliased_inputs(user) and data_types(user) == data_types(root):
                if user not in views:
                    views[user] = None
                    stack.append(user)
            elif user.target not in METADATA_OPS:
                others[user] = None
    return UnitUses(tuple(views), tuple(casts), tuple(others))


def narrower_type(held: torch.dtype, casts: Iterable[fx.Node]) -> torch.dtype | None:
    """Return the data type in which to gather a unit that is only cast; None for its own."""
    used = {fake_value(cast).dtype for cast in casts}
    if len(used) != 1:
        return None
    (dtype,) = used
    narrower = dtype in WIRE_TYPES and held.is_floating_point and is_narrower(dtype, held)
    return dtype if narrower else None
