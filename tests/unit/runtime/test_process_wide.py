"""What belongs to the process as a whole, and is forgotten with `zinf_compile.reset()`."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

from zinf_compile.runtime.system import process_wide as module
from zinf_compile.runtime.system.process_wide import forget_all, is_process_wide, process_wide

STAYS = {
    "_active",  # open `partitioned()` blocks: reset refuses inside one
    "_simulated",  # open blocks, too: simulated devices
    "_LIVE",  # stores: reset closes them
    "_installed",  # optimizer hooks, which know nothing
    "_preparations",  # of first updates, which know nothing either
    "_ROWS",  # the table of tiers
    "SPECS", "SCHEDULE_OPS", "_positions",  # the table of operators
    "_unit_of_memory", "_storages", "_refusals",  # by objects that are there, for as long as they are
    "_known", "_forgetting",  # of `process_wide` itself, and the norms' that is made by it
}  # fmt: skip
"""Collections that reset leaves alone, and why."""


def _empty_collections(path: Path) -> Iterator[str]:
    """Yield the names that a module gives to empty collections, which only what the process does can fill."""
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        text = ast.unparse(node.value)
        if text in ("{}", "[]", "set()", "dict()", "list()") or text.startswith(("weakref.Weak", "collections.defaultdict")):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield ast.unparse(target)


def test_all_that_a_process_collects_is_forgotten_with_it() -> None:
    found = {
        (Path(folder) / file).relative_to(ROOT).as_posix(): names
        for folder, _, files in os.walk(ROOT / "zinf_compile", followlinks=True)
        for file in files
        if file.endswith(".py") and (names := set(_empty_collections(Path(folder) / file)) - STAYS)
    }
    assert not found, "make them by process_wide(), or say in STAYS why they stay"


def test_what_is_forgotten() -> None:
    before = len(module._known)
    collection = process_wide({1: 2})
    other = {1: 2}
    try:
        assert is_process_wide(collection)
        assert not is_process_wide(other)
        module._known[:], kept = [collection], module._known[:]  # type: ignore[list-item]
        forget_all()
        assert (collection, other) == ({}, {1: 2})
    finally:
        module._known[:] = kept[:before]
