"""Over which ranks a unit is cut: the value, and what a unit takes from it."""

from __future__ import annotations

import pytest
import torch

from zinf_compile.init.value_stores import part_of_unit
from zinf_compile.ir.tiers import Placement
from zinf_compile.runtime.comm.shard_group import REPLICATE, SHARD, TENSOR, MeshAxis, ShardGroup
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.create import make_units, shard_group_of
from zinf_compile.runtime.units.unit import Unit


def test_all_ranks_without_copies() -> None:
    group = ShardGroup.over([4, 5, 7], me=7)
    assert (group.rank, group.size, group.mesh_size) == (2, 3, 3)
    assert group.replicas == (7,)
    assert [(axis.name, axis.size) for axis in group.axes] == [(REPLICATE, 1), (SHARD, 3), (TENSOR, 1)]


def test_copies_and_tensor_parallelism_are_values() -> None:
    group = ShardGroup(1, (0, 1), (1, 5), (MeshAxis(REPLICATE, 2), MeshAxis(SHARD, 2), MeshAxis(TENSOR, 2)))
    assert (group.rank, group.size, group.mesh_size) == (1, 2, 8)


def test_equal_ones_are_one_key() -> None:
    assert {ShardGroup.over([0, 1], 0): 1}[ShardGroup.over((0, 1), 0)] == 1
    assert ShardGroup.over([0, 1], 0) != ShardGroup.over([0, 1], 1)
    assert ShardGroup.over([0, 1], 0) != ShardGroup.over([1, 0], 0)  # rank 1 has shard 0


@pytest.mark.parametrize(
    ("partition", "replicas", "axes", "text"),
    [
        ((1, 2), (0,), (MeshAxis(SHARD, 2),), r"partition \[1, 2\] of rank 0"),
        ((0, 0), (0,), (MeshAxis(SHARD, 2),), "different ranks"),
        ((0, 1), (4,), (MeshAxis(SHARD, 2),), r"replicas \[4\] of rank 0"),
        ((0, 1), (0,), (MeshAxis(SHARD, 3),), "of 2 ranks with shards"),
        ((0, 1), (0, 2), (MeshAxis(SHARD, 2),), "2 with copies"),
        ((0, 1), (0,), (MeshAxis("data", 2),), "accepted: replicate, shard and tensor"),
    ],
)
def test_what_is_no_group(partition: tuple[int, ...], replicas: tuple[int, ...], axes: tuple[MeshAxis, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ShardGroup(0, partition, replicas, axes)


def test_a_unit_takes_its_shard_from_its_own_group() -> None:
    context = Context(None, torch.device("cpu"), timeout_s=1)
    whole = torch.arange(10.0)
    alone = Unit(whole, whole.clone(), name="alone", context=context)
    assert alone.shard_group == context.ranks.shard_group
    assert alone.ranks is context.ranks
    assert (alone.shard_numel, alone.held, alone.at_hand) == (10, [(0, 10)], True)
    third = Unit(whole, torch.empty(4), name="third", context=context, shard_group=ShardGroup.over([8, 3, 0], 0))
    assert (third.shard_numel, third.held, third.at_hand) == (4, [(8, 10)], False)
    assert third.local_part(whole).tolist() == [8.0, 9.0, 0.0, 0.0]
    assert (third.layout["rank"], third.layout["ranks"]) == (2, 3)


def test_new_units_are_cut_over_the_group_that_is_given() -> None:
    context = Context(None, torch.device("cpu"), timeout_s=1)
    group = ShardGroup.over([8, 3, 0], 0)
    whole = torch.arange(90.0).view(9, 10)
    made = make_units([(whole, "w"), (torch.ones(4), "b")], context, Placement(tile=240), group=group)
    alone = make_units([(whole, "w"), (torch.ones(4), "b")], context, Placement(tile=240))
    assert [(unit.shard_group.size, unit.shard_numel) for unit in made] == [(3, 30), (3, 2)]
    assert [(unit.shard_group.size, unit.shard_numel) for unit in alone] == [(1, 90), (1, 4)]
    assert made[0].shard.numel() == 30
    tiles = made[0].tiles
    assert len(tiles) > 1
    assert all(span.ranks == 3 for span in made[0].spans)
    part = part_of_unit(whole.view(-1), made[0].blank(), made[0])
    expected = torch.cat([whole.view(-1)[start:end] for start, end in made[0].held])
    assert part[: expected.numel()].equal(expected)
    assert shard_group_of(made, context) == group
    assert shard_group_of([], context) == context.ranks.shard_group
