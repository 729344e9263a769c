"""A register of the collections that belong to the process as a whole, so that `zinf_compile.reset()` empties them all.

Modules of the runtime and above call this once, at import. Nothing here knows what the collections hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar


class _Clearable(Protocol):
    def clear(self) -> None:
        """Forget everything."""


_C = TypeVar("_C", bound=_Clearable)

_known: list[_Clearable] = []
_forgetting: list[Callable[[], None]] = []


def process_wide(collection: _C) -> _C:
    """Return the collection, which `forget_all` empties from now on.

    _warned: set[str] = process_wide(set())
    """
    _known.append(collection)
    return collection


def when_forgetting(forget: Callable[[], None]) -> None:
    """Have `forget_all` call this as well: for what is no collection."""
    _forgetting.append(forget)


def is_process_wide(collection: object) -> bool:
    """Say whether `forget_all` empties this very collection."""
    return any(collection is known for known in _known)


def forget_all() -> None:
    """Empty every collection that was made by `process_wide`."""
    for collection in _known:
        collection.clear()
    for forget in _forgetting:
        forget()
