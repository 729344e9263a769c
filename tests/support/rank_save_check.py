"""What several ranks are told of `state_dict()`."""

from __future__ import annotations

import logging

from models import TiedWords, tokens
from training import BACKEND, adamw, plain_step

from zinf_compile.errors import PartitionedParameterError


def save_check(rank: int, size: int) -> tuple[list[str], str]:
    """Train two steps; return the warnings of the logger, and what `state_dict()` raises."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zinf_compile").addHandler(handler)
    model = TiedWords()
    model.compile(backend=BACKEND)
    optimizer = adamw(model.parameters())
    for step in range(2):
        plain_step(model, optimizer, tokens(step, rank))
    try:
        model.state_dict()
    except PartitionedParameterError as error:
        return said, str(error)
    return said, ""
