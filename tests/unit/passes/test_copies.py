"""Copies of graphs that passes try things out on: nobody runs them, and no code is generated for them."""

from __future__ import annotations

from unittest import mock

import torch
from torch import fx

from zinf_compile.backend.kept_graphs import copy_of
from zinf_compile.passes import copied


def test_the_code_of_a_copy_is_generated_when_it_runs() -> None:
    gm = fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()))
    gm.meta["noted"] = "here"
    with mock.patch.object(fx.GraphModule, "recompile", autospec=True) as generate:
        copies = [copied(gm), copy_of(gm.graph)]
    generate.assert_not_called()
    x = torch.ones(4, 3)
    for found in copies:
        assert found.graph is not gm.graph
        assert found.meta["noted"] == "here"
        assert torch.equal(found(x), gm(x))
        assert found.code == gm.code
