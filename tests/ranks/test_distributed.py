"""Real ranks over gloo against eager PyTorch: 2 ranks bitwise, 3 and 4 within 4 eps of the summed magnitudes.

The cases are functions of `rank_cases` and of the modules that it names.
"""

from __future__ import annotations

import pytest
from marks import more
from models import CASES
from rank_cases import run_cases
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


def run_on(size: int, case: str) -> None:
    """Run a case on ranks; fail with what each of them says."""
    by_rank = run_ranks(run_cases, size, [case])
    failures = "\n".join(f"rank {rank}:\n{outcome[case]}" for rank, outcome in enumerate(by_rank) if outcome[case])
    assert not failures, failures


@pytest.mark.parametrize("case", cases(ON_TWO))
def test_2_ranks(case: str) -> None:
    run_on(2, case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", cases(ON_THREE))
def test_3_ranks(case: str) -> None:
    run_on(3, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_FOUR)
def test_4_ranks(case: str) -> None:
    run_on(4, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [more("lengths_differ_gpt2"), more("lengths_differ_llama")])
def test_transformers_with_lengths_that_differ(case: str) -> None:
    run_on(2, case)


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
