"""Full units that stay: one copy of each, present values only."""

from __future__ import annotations

import gc

import torch

from zinf_compile.runtime.memory.full_copies import FullCopies


class Unit:
    """What copies need to know."""

    def __init__(self, serial: int) -> None:
        self.serial = serial


def test_a_copy_is_found_in_its_type_until_it_is_dropped() -> None:
    copies, unit, other = FullCopies(), Unit(3), Unit(1)
    assert not copies
    full = torch.ones(2, 3, dtype=torch.bfloat16)
    copies.keep(unit, full)
    copies.keep(other, torch.ones(4))
    assert copies.find(unit, torch.bfloat16) is full
    assert copies.find(unit, torch.float32) is None, "another type is gathered, and not kept"
    copies.keep(unit, torch.ones(2, 3))
    assert copies.find(unit, torch.bfloat16) is full
    assert copies.bytes == 28
    copies.drop(unit)
    copies.drop(unit)
    assert not copies.holds(unit)
    assert copies.holds(other)


def test_what_others_may_change_unseen_has_none() -> None:
    copies, unit = FullCopies(), Unit(0)
    copies.keep(unit, torch.ones(1))
    copies.hand_out(unit)
    assert not copies.holds(unit)
    copies.keep(unit, torch.ones(1))
    assert not copies


def test_a_digest_tells_which_of_some_units_have_one() -> None:
    copies, units = FullCopies(), [Unit(number) for number in range(4)]
    assert copies.digest(units) == 0
    for unit in units[1:]:
        copies.keep(unit, torch.ones(1))
    assert copies.digest(units[:1]) == 0
    assert copies.digest(units[:2]) == copies.digest([units[1], units[0], units[1]]) != 0, "as ranks bind them, in any order"
    found = {copies.digest(units[:count]) for count in range(1, 5)}
    assert len(found) == 4
    assert max(found) < 1 << 32


def test_a_copy_goes_with_its_unit() -> None:
    copies, unit = FullCopies(), Unit(0)
    copies.keep(unit, torch.ones(1))
    del unit
    gc.collect()
    assert not copies


def test_what_is_handed_on_is_taken_once() -> None:
    copies, unit, other = FullCopies(), Unit(0), Unit(1)
    full = torch.ones(3)
    copies.hand_on(unit, full)
    copies.hand_on(other, torch.ones(2))
    assert copies.find(unit, torch.bfloat16) is None, "another type is brought, and this one is still there"
    assert copies.find(unit, torch.float32) is full
    assert copies.find(unit, torch.float32) is None
    copies.end_handed_on(lambda: [unit])
    assert not copies


def test_a_graph_ends_what_was_handed_to_another_one() -> None:
    copies, mine, another, kept = FullCopies(), Unit(0), Unit(1), Unit(2)
    copies.keep(kept, torch.ones(1))
    for unit in (mine, another, kept):
        copies.hand_on(unit, torch.ones(1))
    copies.end_handed_on(lambda: [mine])
    assert (copies.holds(mine), copies.holds(another), copies.holds(kept)) == (True, False, True)
    assert (copies.handed_on_bytes, copies.bytes) == (4, 8)
    copies.end_handed_on()
    assert (copies.holds(mine), copies.holds(kept)) == (False, True), "a copy that stays is no graph's"
    assert copies.find(kept, torch.float32) is copies.find(kept, torch.float32)


def test_a_change_of_a_unit_ends_its_tiles() -> None:
    copies, unit, other = FullCopies(), Unit(0), Unit(1)
    tiles, another = [Unit(2), Unit(3)], Unit(4)
    for tile in tiles:
        copies.hand_on(unit, torch.ones(2), tile=tile)
    copies.hand_on(other, torch.ones(1), tile=another)
    assert copies.handed_on_bytes == 20
    assert copies.find(tiles[0], torch.float32) is not None
    copies.drop(unit)
    assert copies.find(tiles[1], torch.float32) is None
    assert copies.find(another, torch.float32) is not None
    copies.hand_out(unit)
    copies.hand_on(unit, torch.ones(2), tile=tiles[0])
    assert not copies, "others may change it unseen"


def test_a_change_ends_what_was_handed_on() -> None:
    copies, unit = FullCopies(), Unit(0)
    copies.hand_on(unit, torch.ones(1))
    copies.drop(unit)
    assert copies.find(unit, torch.float32) is None
    copies.hand_out(unit)
    copies.hand_on(unit, torch.ones(1))
    assert not copies


def test_a_shard_that_is_handed_on_is_no_full_copy() -> None:
    copies, unit, other, tile = FullCopies(), Unit(0), Unit(1), Unit(2)
    shard = torch.ones(3)
    copies.hand_on_shard(unit, shard)
    copies.hand_on_shard(other, torch.ones(2), tile=tile)
    assert copies
    assert (copies.holds(unit), copies.find(unit, torch.float32), copies.digest([unit])) == (False, None, 0)
    assert (copies.handed_on_bytes, copies.bytes) == (20, 20)
    assert copies.take_shard(unit, torch.bfloat16) is None
    assert copies.take_shard(unit, torch.float32) is shard
    assert copies.take_shard(unit, torch.float32) is None
    copies.drop(other)
    assert copies.take_shard(tile, torch.float32) is None, "the unit changes"
    copies.hand_on_shard(unit, shard)
    copies.end_handed_on()
    assert not copies
    copies.hand_out(unit)
    copies.hand_on_shard(unit, shard)
    assert not copies, "others may change it unseen"
