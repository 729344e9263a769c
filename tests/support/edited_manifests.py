"""Manifests of checkpoints that are edited by hand, with the checksums that the reader compares."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zinf_compile.checkpoint.manifest import as_json, with_checksum
from zinf_compile.runtime.storage.engine import crc32c


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change the content of the manifest of a checkpoint, or of a rank's, of which the other one has the checksum then."""
    content = json.loads(path.read_text())
    change(content)
    if path.name == "manifest.json":
        content.pop("crc32c", None)
        path.write_bytes(with_checksum(as_json(content)))
    else:
        path.write_bytes(as_json(content))
        ranks = [crc32c(each.read_bytes()) for each in sorted(path.parent.glob("rank-*.json"))]
        edit(path.parent / "manifest.json", lambda whole: whole.update(ranks=ranks))
