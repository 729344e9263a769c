"""What Python's garbage collector looks through: 0.2 s each time, where nothing of what is imported is left alone."""

from __future__ import annotations

import gc


def settle() -> None:
    """Collect, and leave alone from now on what is left: modules, and what libraries keep. For when no test's object lives."""
    gc.collect()
    gc.freeze()


def collect_less() -> None:
    """Look less often at what is made."""
    gc.set_threshold(10_000, 20, 10)
