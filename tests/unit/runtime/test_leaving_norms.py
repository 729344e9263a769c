"""Which norms are taken of what leaves: those for which somebody has asked since the last step but one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zinf_compile.runtime.lanes.lanes import Done
from zinf_compile.runtime.memory import leaving_norms
from zinf_compile.runtime.memory.leaving_norms import LeavingNorms, Norms

UNIT: Any = object()


def norms(key: object, scale: float = 1.0, dtype: torch.dtype | None = torch.float32) -> Norms:
    def take(unit: object, shard: torch.Tensor, out: torch.Tensor) -> None:
        assert unit is UNIT
        out.copy_(shard.norm() * scale)

    return Norms(key, lambda unit, kept: dtype, take)


def taken(of: LeavingNorms, shard: torch.Tensor) -> dict[object, float]:
    taking = of.begin([(UNIT, shard)])
    if taking is not None:
        taking.take()
        taking.behind(Done())
    values = [(norm.key, norm.get()) for norm in of.of(shard)]
    return {key: value.item() for key, value in values if value is not None}


def test_a_question_holds_until_a_step_without_it() -> None:
    of = LeavingNorms()
    assert not of.are_wanted
    of.want(norms("a"))
    of.end_step()
    of.want(norms("b", 2.0))
    assert taken(of, torch.ones(4)) == {"a": 2.0, "b": 4.0}
    of.end_step()
    assert taken(of, torch.ones(4)) == {"b": 4.0}
    of.end_step()
    assert not of.are_wanted
    assert of.begin([(UNIT, torch.ones(4))]) is None


def test_no_more_questions_are_remembered_than_a_few() -> None:
    of = LeavingNorms()
    for number in range(2 * leaving_norms.MOST):
        of.want(norms(number))
    assert taken(of, torch.ones(1)).keys() == set(range(leaving_norms.MOST))


def test_some_are_not_taken_and_types_keep_apart() -> None:
    of = LeavingNorms()
    for key, dtype in (("no", None), ("single", torch.float32), ("double", torch.float64)):
        of.want(norms(key, dtype=dtype))
    shard = torch.ones(9)
    assert taken(of, shard) == {"single": 3.0, "double": 3.0}
    assert [norm.get().dtype for norm in of.of(shard)] == [torch.float32, torch.float64]  # type: ignore[union-attr]


def test_a_shard_is_known_by_itself_as_long_as_it_is_there() -> None:
    of = LeavingNorms()
    of.want(norms("a"))
    shard = torch.ones(4)
    assert taken(of, shard) == {"a": 2.0}
    assert of.of(torch.ones(4)) == of.of(shard.view(-1)) == ()
    del shard
    assert len(of._by_shard) == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError])
def test_without_memory_there_is_none_and_other_errors_are_raised(error: type[Exception]) -> None:
    def fail(*given: object) -> None:
        raise error("for a norm")

    of, shard = LeavingNorms(), torch.ones(4)
    of.want(Norms("a", lambda unit, kept: kept, fail))
    if error is ValueError:
        with pytest.raises(ValueError, match="for a norm"):
            taken(of, shard)
    else:
        assert taken(of, shard) == {}


def test_norms_of_many_shards_take_few_pieces_of_memory() -> None:
    """Which go with them, or with the step."""
    of, shards = LeavingNorms(), [torch.ones(4) for _ in range(leaving_norms.TOGETHER + 1)]
    of.want(norms("a"))
    for shard in shards:
        assert taken(of, shard) == {"a": 2.0}
    values = [norm.value for shard in shards for norm in of.of(shard)]
    assert len({value.untyped_storage().data_ptr() for value in values if value is not None}) == 2
    of.end_step()
    assert of._places == {}
