from __future__ import annotations

import mmap
import threading

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from zinf_compile.runtime.memory.arena import GatherMemory

PAGE = mmap.PAGESIZE


def test_memory_is_used_again_after_the_last_view_of_it() -> None:
    memory = GatherMemory()
    first = memory.lend(PAGE, torch.float32)
    view, address = first[5:].as_strided((2, 3), (3, 1)), first.data_ptr()
    del first
    second = memory.lend(PAGE, torch.float32)
    assert second.data_ptr() != address, "a view of it is still there"
    del view, second
    assert memory.lend(2 * PAGE, torch.bfloat16).numel() == 2 * PAGE
    grown = memory.lend(2 * PAGE, torch.float32)
    assert memory.held_bytes() == 8 * PAGE, "both together, once needed at a time"
    del grown


def test_different_sizes_share_the_memory() -> None:
    memory = GatherMemory()
    whole = memory.lend(8 * PAGE, torch.uint8)
    start = whole.data_ptr()
    del whole
    parts = [memory.lend(n * PAGE, torch.uint8) for n in (3, 1, 4)]
    assert [part.data_ptr() - start for part in parts] == [0, 3 * PAGE, 4 * PAGE]
    del parts[1], parts[0]  # next to each other, in the other order
    assert memory.lend(4 * PAGE, torch.uint8).data_ptr() == start
    parts.clear()
    assert memory.held_bytes() == 8 * PAGE


def test_what_does_not_fit_is_kept_for_nobody() -> None:
    memory = GatherMemory()
    kept = [memory.lend(PAGE, torch.uint8) for _ in range(3)]
    assert memory.held_bytes() == 3 * PAGE
    del kept[1]
    assert memory.held_bytes() == 2 * PAGE
    kept.clear()
    assert memory.held_bytes() == PAGE, "the arena, made for the first"
    again = memory.lend(PAGE, torch.uint8)
    assert memory.held_bytes() == 3 * PAGE, "as much as was needed at a time"
    del again


def test_clear_lets_go_of_what_is_not_lent() -> None:
    memory = GatherMemory()
    lent = memory.lend(8 * PAGE, torch.uint8)
    lent.fill_(7)
    memory.clear()
    assert bool((lent == 7).all())
    del lent
    memory.clear()
    assert memory.held_bytes() == 0


def test_less_than_a_page_is_not_worth_it() -> None:
    memory = GatherMemory()
    assert memory.lend(0, torch.float32).numel() == 0
    assert memory.lend(3, torch.float64).shape == (3,)
    assert memory.held_bytes() == 0


def same(tensor: torch.Tensor, expected: int) -> bool:
    return bool((tensor == expected).all())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4 * PAGE)), max_size=60))
@example([(0, 12289), (0, 1), (0, 8193), (1, 4097)])
def test_nothing_is_lent_twice(steps: list[tuple[int, int]]) -> None:
    memory = GatherMemory()
    held: dict[int, tuple[torch.Tensor, int]] = {}
    most = 0
    for value, (name, size) in enumerate(steps):
        if name in held:
            assert same(*held.pop(name)), "someone else wrote into it"
        else:
            held[name] = memory.lend(size, torch.uint8).fill_(value), value
        lent = sum(-(-tensor.numel() // PAGE) * PAGE for tensor, _ in held.values() if tensor.numel() >= PAGE)
        most = max(most, lent)
        assert lent <= memory.held_bytes() <= most + lent
    while held:  # no name may keep one alive
        assert same(*held.popitem()[1]), "someone else wrote into it"
    assert memory.held_bytes() <= most


def test_threads_may_lend_and_drop() -> None:
    memory, wrong = GatherMemory(), []

    def work(value: int) -> None:
        for i in range(300):
            tensor = memory.lend(PAGE * (1 + (i + value) % 3), torch.uint8).fill_(value)
            if not bool((tensor == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert memory.held_bytes() <= 4 * 3 * PAGE
