"""The ranks that share this node, and with it its host memory.

Note: who says how many
    `LOCAL_WORLD_SIZE`, which torchrun and most launchers set. Where nothing does, as with `torch.multiprocessing.spawn`, those
    ranks are counted that exchange the same `node_id`: processes of one kernel and one container.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from .process_wide import process_wide

_ID_BYTES = 6
"""Of a node's number: a double has it exactly."""

_counted: set[int] = process_wide(set())
"""The ranks of this node in each group that has compared their nodes."""


def ranks_of_node() -> int:
    """Return how many ranks share this node: as its launcher says, else as many as were counted."""
    declared = os.environ.get("LOCAL_WORLD_SIZE")
    return max(1, int(declared)) if declared else max(_counted, default=1)


def node_id() -> int:
    """Return a number that processes have in common which share a kernel and a container, and hardly any others."""
    found = [os.uname().nodename]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        found.append(str(Path("/proc/self/ns/pid").readlink()))
    digest = hashlib.blake2b("\n".join(found).encode(), digest_size=_ID_BYTES).digest()
    return int.from_bytes(digest, "little")


def count_ranks(nodes: Sequence[float]) -> None:
    """Count, for `ranks_of_node`, those ranks of a group that are on this node; `nodes`: the `node_id` of each."""
    _counted.add(list(nodes).count(node_id()))
