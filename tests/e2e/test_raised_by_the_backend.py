"""Errors of a graph's compilation: what the user sees of them."""

from __future__ import annotations

import pickle
import traceback

import pytest
import torch
from torch import nn
from training import BACKEND

from zinf_compile.errors import BudgetError, OptionError, ZinfError


def refused(model: nn.Module, options: dict[str, object], kind: type[ZinfError]) -> ZinfError:
    compiled = torch.compile(model, backend=BACKEND, options=options)
    with pytest.raises(kind) as raised:
        compiled(torch.zeros(2, 4))
    return raised.value


@pytest.mark.parametrize(
    ("options", "kind"), [({"parms": "host"}, OptionError), ({"bucket": -1}, OptionError), ({"device_memory": 10}, BudgetError)]
)
def test_an_error_has_its_own_text_and_frames(options: dict[str, object], kind: type[ZinfError]) -> None:
    error = refused(nn.Linear(4, 4), options, kind)
    shown = "".join(traceback.format_exception(error))
    assert "reporting a bug to PyTorch" not in shown
    assert "convert_frame" not in shown
    assert "output_graph" not in shown
    assert "backend/entry.py" in shown  # where it was raised
    assert str(error) == str(error).rstrip()


def test_a_verbose_dynamo_shows_its_frames() -> None:
    with torch._dynamo.config.patch(verbose=True):
        error = refused(nn.Linear(4, 4), {"parms": "host"}, OptionError)
    assert "convert_frame" in "".join(traceback.format_exception(error))


def test_behind_a_graph_break_as_well() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return self.linear(x)  # type: ignore[no-any-return]

    assert "reporting a bug" not in str(refused(Broken(), {"device_memory": 10}, BudgetError))


def test_it_can_be_sent_to_another_process() -> None:
    error = refused(nn.Linear(4, 4), {"parms": "host"}, OptionError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is OptionError
    assert str(again) == str(error)
