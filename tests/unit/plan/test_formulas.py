"""The papers' numbers, and the code's own accounts."""

from __future__ import annotations

import pytest
import torch

from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Placement, Topology
from zinf_compile.plan import formulas
from zinf_compile.plan.formulas import evaluate
from zinf_compile.plan.memory_model import model_memory

ADAM = {"v": 2, "K": 12}


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_of_7_5_billion_parameters_on_64_ranks(stage: int, gigabytes: float) -> None:
    numbers = {"Psi": 7.5e9, **ADAM, **({"N": 64} if stage else {})}
    assert round(evaluate(formulas.MODEL_STATES[stage], **numbers) / 1e9, 1) == gigabytes


def test_stage_3_moves_half_as_much_again() -> None:
    psi = formulas.PARAMETERS
    assert [formulas.VOLUME[stage] / psi for stage in range(4)] == [2, 2, 2, 3]
    assert evaluate(formulas.MOVED[3], Psi=8, N=4) == 18


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_stage_3_is_what_the_memory_model_counts(ranks: int) -> None:
    numel = 64 * 100
    device = torch.device("cpu")
    slot = ParameterSlot(
        index=0, name="w", shape=(64, 100), stride=(100, 1), dtype=torch.bfloat16, device=device, requires_grad=True
    )
    placement = Placement(master=torch.float32, reduce_dtype=torch.bfloat16)
    model = model_memory([slot], placement, size=ranks, topology=Topology(host_apart=True))
    counted = model.shards.device + model.gradients.device + model.states.device
    assert counted == evaluate(formulas.MODEL_STATES[3], Psi=numel, N=ranks, **ADAM)


def test_efficiency_at_the_papers_bandwidths() -> None:
    """[I], figure 3: 70 TFLOP/s, sequences of 1,024 tokens."""
    peak = 70e12
    params = evaluate(formulas.INTENSITIES["parameters and gradients"], b=1, s=1024)
    assert evaluate(formulas.EFFICIENCY, ait=params, bw=70e9, peak=peak) > 0.5
    states = evaluate(formulas.INTENSITIES["optimizer states"], b=2, s=1024)
    assert evaluate(formulas.EFFICIENCY, ait=states, bw=1.5e12, peak=peak) > 0.9
    checkpoints = evaluate(formulas.INTENSITIES["activation checkpoints"], h=2048, c=1)
    assert evaluate(formulas.EFFICIENCY, ait=checkpoints, bw=2e9, peak=peak) > 0.5
    half = formulas.bandwidth_for(0.5)
    assert evaluate(half, ait=params, peak=peak) == pytest.approx(peak / 1024)


def test_working_memory_by_tile() -> None:
    """[I], table in figure 2a: a hidden size of 8 Ki needs 1 GiB or so for one operator, sixteen tiles a sixteenth."""
    whole = evaluate(formulas.WORKING["parameters"], h=8192)
    assert whole == 16 * 8192**2 == 2**30
    assert evaluate(formulas.TILED, h=8192, T=16) == 2**26


def test_parameters_of_a_transformer() -> None:
    assert evaluate(formulas.PARAMETERS_OF, L=96, h=12288) == pytest.approx(174e9, rel=0.01)


def test_wrong_symbols_are_named() -> None:
    with pytest.raises(ValueError, match="needs N, Psi"):
        evaluate(formulas.MODEL_STATES[3], v=2, K=12)
    with pytest.raises(ValueError, match="has no x; it has T, h"):
        evaluate(formulas.TILED, h=1, T=1, x=1)
