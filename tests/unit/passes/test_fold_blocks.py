"""Lines that repeat from block to block are printed once; no other line is missing."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.passes.analysis.fold_blocks import Entry, fold


def entries(*lines: str) -> list[Entry]:
    """Make entries of lines `operator(name)`; `region(name)` is computed."""
    found = []
    for line in lines:
        match = re.fullmatch(r"(\w+)\((.*)\)", line)
        assert match is not None
        found.append(Entry(line, key=(match[1],), names=(match[2],) if match[2] else ()))
    return found


def blocks(numbers: range, *lines: str) -> list[str]:
    return [line.replace("#", str(number)) for number in numbers for line in lines]


def test_blocks_of_equal_structure_are_written_once() -> None:
    body = blocks(range(12), "wait(h.#.w)", "region(h.#)", "release(h.#.w)")
    assert fold(entries("wait(wte)", *body, "wait(head)")) == [
        "wait(wte)", "wait(h.0.w)", "region(h.0)", "release(h.0.w)", "# h.1 … h.11 as h.0: 33 lines", "wait(head)",
    ]  # fmt: skip


def test_a_backward_counts_down() -> None:
    assert fold(entries(*blocks(range(3, -1, -1), "region(h.#)"))) == ["region(h.3)", "# h.2 … h.0 as h.3: 3 lines"]


def test_the_next_block_may_be_fetched_meanwhile() -> None:
    lines = [line for n in range(5) for line in (f"gather(h.{n + 1}.w)", f"region(h.{n})")]
    assert fold(entries(*lines)) == ["gather(h.1.w)", "region(h.0)", "# h.1 … h.4 as h.0: 8 lines"]


def test_the_number_that_counts_may_be_any_of_a_name() -> None:
    lines = blocks(range(4), "region(layers.2.experts.#)")
    assert fold(entries(*lines)) == [
        "region(layers.2.experts.0)",
        "# layers.2.experts.1 … layers.2.experts.3 as layers.2.experts.0: 3 lines",
    ]


def test_what_differs_is_written_out() -> None:
    for lines in (
        ["region(h.0)", "region(h.1)"],  # a line less would be no gain
        ["region(h.0)", "region(h.2)", "region(h.4)"],
        ["region(h.1)", "region(h.1)", "region(h.1)"],
        ["region(h.0)", "mul(h.1)", "region(h.2)", "mul(h.3)", "mul(h.4)"],
        ["wait(a)", "wait(b)", "wait(c)"],
    ):
        assert fold(entries(*lines)) == lines


@given(st.lists(st.tuples(st.sampled_from(["wait", "region"]), st.integers(0, 4)), max_size=30))
def test_every_line_is_written_or_counted(rows: list[tuple[str, int]]) -> None:
    lines = [f"{operator}(h.{number}.w)" for operator, number in rows]
    folded = fold(entries(*lines))
    counted = sum(int(line.rsplit(" ", 2)[1]) for line in folded if line.startswith("#"))
    written = [line for line in folded if not line.startswith("#")]
    assert len(written) + counted == len(lines)
    left = iter(lines)
    assert all(line in left for line in written)  # in their order
