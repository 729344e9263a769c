"""Functions that Dynamo gives up: they go on eagerly where values are at hand; elsewhere the limit is larger, and an error."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import Blocks, TiedWords, tokens, vectors
from torch import nn
from training import BACKEND, adamw, assert_same, assert_same_models, plain_step, twins
from transformer_models import WORDS, causal, gpt2

from zinf_compile import PartitionedParameterError
from zinf_compile.backend import graph_compiler
from zinf_compile.sharded import recompile_limit
from zinf_compile.sharded.parameter import ShardedParameter


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    recompile_limit._told.clear()


class Counted(TiedWords):
    """Tied, with a frozen bias; Dynamo compiles its forward anew for each number."""

    def __init__(self) -> None:
        super().__init__()
        self.block.down.bias.requires_grad_(False)

    def forward(self, words: torch.Tensor, number: int = 1) -> torch.Tensor:
        return super().forward(words) * number


PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "gradients on NVMe": {"grads": "nvme", "optimizer": "nvme"},
}


@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on_eagerly_with_a_warning_and_the_same_bits(place: str, tmp_path: Path) -> None:
    options = {**PLACES[place], **({"nvme": str(tmp_path)} if "grads" in PLACES[place] else {})}
    eager, ours = twins(Counted)
    compiled = torch.compile(ours, backend=BACKEND, dynamic=False, options=options)
    optimizers = [adamw(model.parameters()) for model in (eager, ours)]

    def train(number: int) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(2):  # the second on top of the first one's gradients: compiled, eager, or one of each
            losses = [model(*tokens(number + micro), max(1, number + micro)) for model in (eager, compiled)]
            assert_same("loss", *(loss.detach() for loss in losses))
            for loss in losses:
                loss.backward()
        for model in (eager, ours):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_models(eager, ours, where=f"after step {number}")

    with torch._dynamo.config.patch(recompile_limit=2):
        train(1)
        with pytest.warns(UserWarning, match=r"forward \(.*runs eagerly.*recompile_limit = 2 .*gave up.*TORCH_LOGS") as said:
            train(2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in (3, 4, 0):
                train(number)
    assert len([w for w in said if "runs eagerly" in str(w.message)]) == 1
    assert all(isinstance(p, ShardedParameter) for p in ours.parameters())


@pytest.mark.filterwarnings("ignore:.*runs eagerly from now on")
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_hook_that_logs_a_norm_leaves_the_model_training() -> None:
    eager, ours = twins(Blocks)
    logs: list[list[float]] = [[], []]
    for model, log in zip((eager, ours), logs, strict=True):
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda module, _, __, log=log: log.append(float(module.weight.norm())))
    ours.compile(backend=BACKEND)
    optimizers = [adamw(model.parameters()) for model in (eager, ours)]
    with torch._dynamo.config.patch(recompile_limit=1):
        for number in range(4):
            pairs = zip((eager, ours), optimizers, strict=True)
            batch = vectors(number, rows=3 + number)
            assert_same("loss", *(plain_step(model, optimizer, batch).detach() for model, optimizer in pairs))
            assert_same_models(eager, ours)
    assert logs[0] == logs[1]
    assert len(logs[0]) == 4 * 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs eagerly from now on")
def test_generation_in_three_modes_leaves_the_model_training() -> None:
    eager, ours = twins(gpt2)
    ours.compile(backend=BACKEND)
    optimizers = [adamw(model.parameters()) for model in (eager, ours)]

    def train(number: int) -> None:
        losses = []
        for model, optimizer in zip((eager, ours), optimizers, strict=True):
            model.train()
            torch.manual_seed(number)
            optimizer.zero_grad()
            loss = model(**causal(number)[0]).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert_same("loss", *losses)
        assert_same_models(eager, ours)

    with torch._dynamo.config.patch(recompile_limit=1):
        train(0)
        for how in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 2, "do_sample": False}):
            found = []
            for model in (eager, ours):
                model.eval()
                torch.manual_seed(1)
                found.append(model.generate(torch.arange(1, 5)[None] % WORDS, max_new_tokens=4, pad_token_id=0, **how))
            assert_same(str(how), *found)
        train(1)


def test_values_off_the_device_have_a_larger_limit_and_the_users_stays(tmp_path: Path) -> None:
    eager, ours = twins(Counted)
    compiled = torch.compile(ours, backend=BACKEND, dynamic=False, options={"params": "nvme", "nvme": str(tmp_path)})
    with torch.no_grad():
        for number in range(1, 11):
            assert_same("loss", eager(*tokens(0), number), compiled(*tokens(0), number))
    assert torch._dynamo.config.recompile_limit >= recompile_limit.RECOMPILES
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for number in (1, 2):
            compiled(*tokens(0), number)
        for number in (3, 4):
            with pytest.raises(
                PartitionedParameterError, match=r"embedding.weight .* forward .*recompile_limit = 2 .*Raise torch"
            ):
                compiled(*tokens(0), number)
        assert_same("known variant", eager(*tokens(0), 1), compiled(*tokens(0), 1))


def test_the_limit_of_pytorch_stays_where_values_are_at_hand() -> None:
    with mock.patch.object(graph_compiler, "raise_limit") as raised:
        torch.compile(Counted(), backend=BACKEND)(*tokens(0)).backward()
    assert not raised.called
