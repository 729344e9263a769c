"""Which saved values are made again, by structure alone."""

from __future__ import annotations

import dataclasses

from zinf_compile.ir.forward_compute import Compute, Remake
from zinf_compile.plan.recompute import Outcome, best_share, choose_remake, first_blocks, may_be_best, shares, worst_of


def block(name: str, number: int, *, repeatable: bool = True) -> Compute:
    """Return compute that reads `x{n}`, and makes `x{n + 1}` and `h{n}`, of which `v{n}` is a view."""
    reads = frozenset({f"x{number}"} if number else ())
    makes = frozenset({f"x{number + 1}", f"h{number}", f"v{number}"})
    return Compute(unit=f"{name}.w", reads=reads, makes=makes, repeatable=repeatable)


def saved_of(count: int) -> dict[str, int]:
    """Return what `count` blocks save, which the backward reads in the opposite order."""
    return {f"{kind}{number}": count - number for number in range(count) for kind in "hvx" if kind != "x" or number}


MEMORY = {f"v{number}": f"h{number}" for number in range(9)}


def chosen(*blocks: Compute) -> Remake:
    return choose_remake(blocks, saved_of(len(blocks)), MEMORY)


def test_block_inputs_are_kept_and_all_else_of_each_block_but_the_last_is_made_again() -> None:
    found = chosen(*(block(f"layers.{number}", number) for number in range(4)))
    assert found.blocks == ((0,), (1,), (2,))
    assert found.kept == {"x1", "x2"}
    assert found.dropped == {"h0", "v0", "h1", "v1", "h2", "v2"}


def test_compute_of_a_block_that_makes_nothing_again_runs_once() -> None:
    """The product that hands on to the next block, and one that nothing reads."""
    blocks = []
    for n in range(3):
        unit = f"layers.{n}.w"
        blocks += [
            Compute(unit=unit, reads=frozenset({f"x{n}"} if n else ()), makes=frozenset({f"a{n}", f"other{n}"})),
            Compute(unit=unit, reads=frozenset({f"other{n}"}), makes=frozenset({f"unread{n}"})),
            Compute(unit=unit, reads=frozenset({f"a{n}"}), makes=frozenset({f"b{n}"})),
            Compute(unit=unit, reads=frozenset({f"b{n}", f"a{n}"}), makes=frozenset({f"x{n + 1}"})),
        ]
    found = choose_remake(blocks, {f"{kind}{n}": 3 - n for n in range(3) for kind in "xb" if kind != "x" or n}, {})
    assert found.dropped == {"b0", "b1"}
    assert found.blocks == ((0, 2), (4, 6)), "a0 is made again for b0"
    assert found.kept == {"x1"}


def test_each_passage_through_a_block_is_one_by_itself() -> None:
    passages = [block(f"layers.{number // 2}", number) for number in range(6)]
    assert chosen(*passages).blocks == ((0, 1), (2, 3)), "a parameter that is read twice begins nothing"
    found = chosen(*(dataclasses.replace(each, reads_others=True) for each in passages))
    assert found.blocks == ((0,), (1,), (2,), (3,), (4,))


def test_what_is_not_repeatable_is_kept() -> None:
    found = chosen(*(block(f"layers.{number}", number, repeatable=number != 1) for number in range(4)))
    assert found.blocks == ((0,), (2,))
    assert found.dropped == {"h0", "v0", "h2", "v2"}


def test_a_value_whose_memory_is_kept_stays() -> None:
    reads_a_view = Compute(unit="layers.1.w", reads=frozenset({"x1", "v0"}), makes=frozenset({"x2", "h1"}))
    blocks = [block("layers.0", 0), reads_a_view, block("layers.2", 2), block("layers.3", 3)]
    found = chosen(*blocks)
    assert found.blocks == ((1,), (2,)), "what the first block makes is kept, so it isn't made again"
    assert found.kept == {"x1", "v0", "x2"}


def test_blocks_have_as_many_numbers_in_their_names_as_keep_the_fewest_values() -> None:
    """Layers of one product each save nothing but each other's inputs; the block around them does, and runs but for its last."""
    names = ["0.layers.0.a.0", "0.layers.0.a.1", "0.layers.1.a.0", "0.layers.1.a.1", "0.layers.2.a.0", "0.layers.2.a.1"]
    lone = [
        Compute(unit=f"{name}.w", reads=frozenset({f"x{n}"} if n else ()), makes=frozenset({f"x{n + 1}"}))
        for n, name in enumerate(names)
    ]
    found = choose_remake(lone, {f"x{n}": 6 - n for n in range(1, 6)}, {})
    assert found.blocks == ((0,), (2,))
    assert found.kept == {"x2"}
    assert found.dropped == {"x1", "x3"}


def test_what_the_backward_reads_before_later_blocks_is_kept() -> None:
    """Else its block would run again, and be there, from the backward's begin on."""
    blocks = [block(f"layers.{number}", number) for number in range(4)]
    found = choose_remake(blocks, {**saved_of(4), "h0": 0, "x1": 0}, MEMORY)
    assert found.blocks == ((1,), (2,))


def test_nothing_to_drop() -> None:
    assert chosen(block("layers.0", 0)) == Remake()
    assert choose_remake([], {}, {}) == Remake()


def test_a_share_is_of_the_first_blocks() -> None:
    blocks = [block(f"layers.{number}", number) for number in range(4)]
    found = first_blocks(chosen(*blocks), blocks, 2)
    assert found.blocks == ((0,), (1,))
    assert found.kept == {"x1"}
    assert found.dropped == {"h0", "v0", "h1", "v1"}
    assert first_blocks(chosen(*blocks), blocks, 3) == chosen(*blocks)
    assert first_blocks(chosen(*blocks), blocks, 0) == Remake()


def test_shares_are_even_and_end_with_all() -> None:
    assert shares(0) == ()
    assert shares(1) == (1,)
    assert shares(3) == (1, 2, 3)
    assert shares(79) == (16, 32, 48, 64, 79)


def test_ranks_take_the_share_that_fits_on_all_and_takes_least_where_it_takes_longest() -> None:
    quick = [Outcome(0, 1.0, 0.0), Outcome(0, 2.0, 0.0), Outcome(0, 3.0, 0.0)]
    short = [Outcome(9, 1.0, 0.0), Outcome(0, 2.5, 0.0), Outcome(0, 2.2, 0.0)]
    assert best_share(quick) == 0
    assert best_share(short) == 2
    assert best_share(worst_of([quick, short])) == 1
    apart = [[Outcome(5, 1.0, 0.0), Outcome(3, 9.0, 0.0)], [Outcome(0, 1.0, 0.0), Outcome(4, 1.0, 0.0)]]
    assert best_share(worst_of(apart)) == 1
    assert best_share([Outcome(0, 1.0, 5.0), Outcome(0, 1.0, 4.0), Outcome(0, 1.0, 4.0)]) == 1, "that moves least"


def test_a_share_that_takes_longer_than_the_best_by_its_compute_alone_is_not_the_best() -> None:
    found = [Outcome(9, 1.0, 0.0), Outcome(0, 3.0, 1.0), Outcome(0, 2.0, 1.0)]
    assert may_be_best(Outcome(0, 1.9, 0.0), found)
    assert may_be_best(Outcome(0, 2.0, 0.0), found), "it may move less"
    assert not may_be_best(Outcome(0, 2.1, 0.0), found)
    assert may_be_best(Outcome(0, 99.0, 0.0), found[:1]), "what lacks no bytes is better than what does"
