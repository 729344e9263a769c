"""Damage to the files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path


def damage_a_state(folder: Path) -> None:
    """Change a bit of a partitioned parameter's first moment in each file, which is read after others were replaced."""
    for path in folder.glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        places = [row["data_offsets"] for key, row in header.items() if key.endswith(".exp_avg")]
        if places:
            start, _ = max(places, key=lambda offsets: offsets[1] - offsets[0])
            content[begin + start] ^= 1
            path.write_bytes(content)
