"""What ranks do in test_eager_frames_on_ranks.py."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from layerdrop import Encoder, trained, values_of
from training import BACKEND

import zinf_compile


def train(rank: int, world: int, options: dict[str, Any], reentrant: bool | None) -> tuple[list[float], list[float]]:
    """Train on the same batches on all ranks, beside eager; return both losses and compare the values."""
    losses, model = trained(options, evaluate=True, reentrant=reentrant)
    expected, eager = trained(None, evaluate=True, reentrant=reentrant)
    full = zinf_compile.full_state_dict(model)
    for (name, value), wanted in zip(full.items(), values_of(eager) if rank == 0 else [], strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6, msg=name)
    return losses, expected


def draw_otherwise(rank: int, world: int) -> str:
    """Train with draws of each rank's own; return the error."""
    try:
        trained({"timeout_s": 20}, evaluate=True, draws=10 * rank)
    except zinf_compile.RankMismatchError as error:
        return str(error)
    return ""


def read_alone(rank: int, world: int) -> str:
    """Read a whole value outside of a forward; return the error."""
    _, model = trained({}, evaluate=True)
    encoder = model.encoder
    assert isinstance(encoder, Encoder)
    try:
        torch.linalg.qr(encoder.layers[0].get_parameter("up.weight"))
    except zinf_compile.PartitionedParameterError as error:
        return str(error)
    return ""


def call_a_copy(rank: int, world: int) -> tuple[str, str]:
    """Call a deep copy, and the model's own encoder, both uncompiled; return the errors. Then call the copy compiled."""
    _, model = trained({}, evaluate=True)
    twin, x, errors = copy.deepcopy(model).eval(), torch.ones(4, 8), []
    for uncompiled in (lambda: twin(x), lambda: model.encoder(torch.ones(4, 16))):
        with pytest.raises(zinf_compile.PartitionedParameterError) as caught:
            uncompiled()
        errors.append(str(caught.value))
    twin.compile(backend=BACKEND)
    assert twin(x).item() == model.eval()(x).item()
    return errors[0], errors[1]


def without_room(rank: int, world: int) -> str:
    """Use a layer in eager code while one rank's cap has no room for its value; return the error, without numbers."""
    _, model = trained({}, evaluate=True)
    encoder = model.encoder
    assert isinstance(encoder, Encoder)
    memory = encoder.norm.weight._zinf_unit.context.memory  # type: ignore[union-attr]
    before = memory.reservations.device_cap
    memory.reservations.device_cap = 1 if rank == 1 else before
    try:
        torch.manual_seed(1)
        model.train()
        model(torch.ones(4, 8))
    except zinf_compile.BudgetError as error:
        return re.sub(r"\d+", "N", str(error))
    finally:
        memory.reservations.device_cap = before
    return ""
