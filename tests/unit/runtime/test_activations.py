"""What graphs handed out and somebody still holds."""

from __future__ import annotations

import torch

from zinf_compile.runtime.memory.activations import Activations, storages_of

CPU = torch.device("cpu")


def tensor(numel: int = 1024) -> torch.Tensor:
    return torch.zeros(numel)


def test_results_that_nobody_else_needs_are_told_by_their_maker() -> None:
    held, loss, both, saved = Activations(), tensor(1), tensor(2), tensor(4)
    held.add([loss, both, saved, both], CPU, results=2, maker="graph")
    assert held.held() == 28
    assert held.returned_by("graph") == 4, "a backward needs what is saved as well"
    assert held.returned_by("graph", given=storages_of([loss])) == 0
    assert held.returned_by("other") == held.returned_by(None) == 0
    del loss
    assert held.returned_by("graph") == 0


def test_leaves_count_until_they_are_gone_whatever_takes_their_address() -> None:
    held = Activations()
    for _ in range(100):
        result = tensor()
        held.add([result], CPU)
        assert held.leaves([result]) == 0, "of another result, before"
        assert held.leaves([result.requires_grad_()]) == result.nbytes
        assert held.leaves([]) == result.nbytes, "as inputs of an earlier graph"
        del result
        result = tensor()
        held.add([result], CPU)
        assert held.leaves([]) == 0
        del result


def test_what_a_graph_reads_says_which_backwards_come_after_its_own() -> None:
    held, first, second, other = Activations(), tensor(), tensor(), tensor()
    held.add([first], CPU, reservations=frozenset({1, 2}))
    held.add([second], CPU, given=storages_of([first]), reservations=frozenset({3}))
    held.add([other], CPU, reservations=frozenset({4}))
    assert held.behind(storages_of([first])) == {1, 2}
    assert held.behind(storages_of([second, tensor()])) == {1, 2, 3}
    assert held.behind(storages_of([other])) == {4}
    del first
    assert held.behind(storages_of([second])) == {1, 2, 3}
