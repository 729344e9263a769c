"""Bytes of states are counted by `StateFormat` and nowhere else."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

NO_STATES = {
    "ir/formats.py": "counts them",
    "ir/value_spans.py": "places saved values within a memory",
    "passes/analysis/saved_memories.py": "places saved values within a memory",
    "runtime/transfer/saved_value.py": "places saved values within a memory",
    "runtime/transfer/value_memory.py": "places saved values within a memory",
    "checkpoint/file_layout.py": "orders the tensors of a file",
    "checkpoint/foreign.py": "bounds what it takes out of a file",
    "checkpoint/parts_writer.py": "finds elements within a file",
    "checkpoint/torch_archive.py": "finds elements within a file",
    "checkpoint/safetensors_header.py": "checks the sizes that a file names",
    "checkpoint/safetensors_reader.py": "finds elements within a file",
    "checkpoint/safetensors_writer.py": "orders the tensors of a file",
    "runtime/storage/block_checksums.py": "sizes arrays of numbers of its own",
}
"""Files that read the size of an element, and why that is no state's."""


def _reads_of_sizes(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("itemsize", "element_size"):
            yield f"{path}:{node.lineno}"


def test_no_bytes_of_states_are_counted_elsewhere() -> None:
    package = ROOT / "zinf_compile"
    found: dict[str, list[str]] = {}
    for folder, _, files in os.walk(package, followlinks=True):
        for file in files:
            path = Path(folder) / file
            if file.endswith(".py") and (reads := list(_reads_of_sizes(path))):
                found[str(path.relative_to(package))] = reads
    assert found.keys() == NO_STATES.keys(), "count bytes of states by StateFormat.bytes"
