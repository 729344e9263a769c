"""Real ranks over gloo against eager PyTorch: 2 ranks bitwise, 3 and 4 within 4 eps of the summed magnitudes.

The cases are functions of `rank_cases` and of the modules that it names.
"""

from __future__ import annotations

import pytest
from marks import more
from models import CASES
from rank_cases import KEEPS_GRAPHS, run_cases
from rank_memory import gather_memory_bytes, training_bytes
from ranks import run_ranks

pytestmark = pytest.mark.distributed

ON_TWO = [
    *(f"train {name}" for name in CASES if name != "returns_parameters"),
    "sgd_momentum", "autocast", "returned", "compiled_by_block", "two_of_one_class",
    "one_function_two_models", "train_eval_train", "batches_differ_where_only_buffers_are", "lengths_differ", "seeds_differ",
    "several_models", "default_group", "mesh_of_all", "other_groups_beside", "accumulation", "accumulation_onto_zeros",
    "backward_twice", "clip_by_global_norm", "clip_norm_that_is_not_finite", "clip_by_value", "scaler_finds_inf_on_one_rank",
    "hooks", "gradients_without_backward", "closures", "fused_adamw", "eager_optimizer_state_loaded",
    "own_optimizer_state_loaded", "model_beside_that_is_not_compiled", "gathered_to_read", "gathered_to_write",
    "gathered_and_raising", "called_while_gathered", "eager_reads", "saved_and_loaded_whole", "loading_what_does_not_fit",
    "account_of_memory", "autocast_gpt", "autocast_halves_what_travels", "collectives_cast_on_the_way",
]  # fmt: skip
ON_THREE = [
    "train odd_shapes", "train tied", "sgd_momentum", "seeds_differ", "some_ranks_idle", "clip_by_global_norm",
    "scaler_finds_inf_on_one_rank", "saved_and_loaded_whole", "account_of_memory", "autocast_gpt",
    "autocast_halves_what_travels", "collectives_cast_on_the_way",
]  # fmt: skip
ON_FOUR = [
    "train odd_shapes",
    "train mutated_buffers",
    "default_group",
    "mesh_sliced",
    "clip_by_global_norm",
    "account_of_memory",
]
SLOW = {
    "train frozen", "train lora", "train used_twice", "train blocks", "train checkpoint_reentrant", "train attention",
    "train breaks_inside_unrolled_blocks", "train breaks_between_blocks", "train dropout", "mesh_of_all", "clip_by_value",
    "fused_adamw", "several_models", "one_function_two_models", "sgd_momentum", "train breaks_inside_blocks",
    "train tied", "default_group", "gathered_and_raising", "closures",
}  # fmt: skip
"""Cases that another one nearly covers."""


def cases(names: list[str]) -> list[object]:
    """Mark the slow ones of the cases."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


def run_on(size: int, names: list[str]) -> dict[str, str]:
    """Run cases on ranks; return what the ranks say of those that failed, else nothing, by case."""
    by_rank = run_ranks(run_cases, size, names)
    said = {name: [f"rank {rank}:\n{outcome[name]}" for rank, outcome in enumerate(by_rank) if outcome[name]] for name in names}
    return {name: "\n".join(lines) for name, lines in said.items()}


class Outcomes:
    """What came of the cases of one number of ranks: those that keep graphs run together, each other one by itself."""

    def __init__(self, items: list[pytest.Item]) -> None:
        self._items = items
        self._known: dict[tuple[int, str], str] = {}

    def failures(self, size: int, case: str) -> str:
        """Return what the ranks say of a case; nothing where it passed."""
        if case not in KEEPS_GRAPHS:
            return run_on(size, [case])[case]
        if (size, case) not in self._known:
            mine = [i for i in self._items if isinstance(i, pytest.Function) and i.originalname == f"test_{size}_ranks"]
            names = [name for item in mine if (name := item.callspec.params["case"]) in KEEPS_GRAPHS]
            self._known.update({(size, name): said for name, said in run_on(size, names).items()})
        return self._known[size, case]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    return Outcomes(request.session.items)


@pytest.mark.parametrize("case", cases(ON_TWO))
def test_2_ranks(outcomes: Outcomes, case: str) -> None:
    assert not (said := outcomes.failures(2, case)), said


@pytest.mark.thorough
@pytest.mark.parametrize("case", cases(ON_THREE))
def test_3_ranks(outcomes: Outcomes, case: str) -> None:
    assert not (said := outcomes.failures(3, case)), said


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_FOUR)
def test_4_ranks(outcomes: Outcomes, case: str) -> None:
    assert not (said := outcomes.failures(4, case)), said


@pytest.mark.slow
@pytest.mark.parametrize("case", [more("lengths_differ_gpt2"), more("lengths_differ_llama")])
def test_transformers_with_lengths_that_differ(case: str) -> None:
    assert not (said := run_on(2, [case])[case]), said


@pytest.mark.slow
def test_the_memory_of_a_process_shrinks() -> None:
    """16 bytes a parameter in eager, half of that on each of two ranks, beside at most three buckets for gathers."""
    for (eager, _), (partitioned, for_gathers) in zip(
        run_ranks(training_bytes, 2, "eager", alone=True), run_ranks(training_bytes, 2, "zero_infinity", alone=True), strict=True
    ):
        assert eager > 16 * 49_000_000
        assert 0 < for_gathers <= 3 * 32 * 2**20
        assert partitioned - for_gathers < eager / 2 + 16 * 2**20, (eager, partitioned, for_gathers)


@pytest.mark.slow
def test_memory_for_gathers_goes_with_the_model() -> None:
    for during, after in run_ranks(gather_memory_bytes, 2):
        assert 0 < during <= 5 * 100 * 100 * 4 + 10 * 4096
        assert after == 0
