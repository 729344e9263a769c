"""The ranks over which a unit is cut into shards, and those with copies of the same shard: a plain value.

A unit refers to its `ShardGroup`; what these ranks compare and exchange goes through `Ranks.of(group)`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
"""Names of mesh axes: along one ranks hold copies of a shard, along one different shards, along one parts of matrix products."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeshAxis:
    """One dimension of the mesh that the ranks of a model form."""

    name: str
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class ShardGroup:
    """The ranks of one unit as one of them sees it, numbered as in the default process group. Hashable, equal by value."""

    me: int
    """The rank whose view this is; in `partition` and in `replicas`."""
    partition: tuple[int, ...]
    """The ranks that hold the unit's shards: the first has shard 0."""
    replicas: tuple[int, ...]
    """The ranks that hold the same shard as this one."""
    axes: tuple[MeshAxis, ...]
    """The mesh, the outermost axis first; `shard` is as long as `partition`, `replicate` as `replicas`."""

    def __post_init__(self) -> None:
        for name, ranks in (("partition", self.partition), ("replicas", self.replicas)):
            if self.me not in ranks or len(set(ranks)) != len(ranks):
                raise ValueError(f"{name} {list(ranks)} of rank {self.me}; accepted: different ranks, this one among them")
        sizes = {axis.name: axis.size for axis in self.axes}
        if len(sizes) != len(self.axes) or sizes.keys() - {REPLICATE, SHARD, TENSOR}:
            names = [axis.name for axis in self.axes]
            raise ValueError(f"mesh axes {names}; accepted: {REPLICATE}, {SHARD} and {TENSOR}, each once at most")
        if (sizes.get(SHARD, 1), sizes.get(REPLICATE, 1)) != (len(self.partition), len(self.replicas)):
            raise ValueError(f"mesh axes {sizes} of {len(self.partition)} ranks with shards and {len(self.replicas)} with copies")

    @classmethod
    def over(cls, ranks: Sequence[int], me: int) -> ShardGroup:
        """Return the group in which each of the ranks has a shard of its own: no copies, no tensor parallelism."""
        return cls(me, tuple(ranks), (me,), (MeshAxis(REPLICATE, 1), MeshAxis(SHARD, len(ranks)), MeshAxis(TENSOR, 1)))

    @property
    def size(self) -> int:
        """Number of shards of a unit."""
        return len(self.partition)

    @property
    def rank(self) -> int:
        """Number of this rank's shard."""
        return self.partition.index(self.me)

    @property
    def mesh_size(self) -> int:
        """Ranks of the mesh."""
        return math.prod(axis.size for axis in self.axes)
