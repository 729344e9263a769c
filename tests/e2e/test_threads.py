"""A partitioned model in one thread while another one compiles: Dynamo's flags are those of the process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models import vectors
from stepped_pairs import Pair, step
from torch import nn
from training import assert_same
from twin_models import whole
from versions import compiling_is_known_to_other_threads

import zinf_compile

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_training_and_reading_beside_a_compilation(tier: str, drive: Path) -> None:
    pair = Pair(drive, tier=tier)
    pair.each(step)  # the second call compiles again, for partitioned parameters
    zinf_compile.synchronize()
    compiling, go_on = threading.Event(), threading.Event()

    def slow_backend(graph: Any, inputs: Any) -> Any:
        compiling.set()
        assert go_on.wait(60)
        return graph.forward

    other = torch.compile(nn.Linear(2, 2).forward, backend=slow_backend)
    thread = threading.Thread(target=lambda: other(torch.ones(2)))
    thread.start()
    try:
        assert compiling.wait(60)
        assert torch.compiler.is_compiling() == compiling_is_known_to_other_threads
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            model(*vectors(1)).backward()
            if tier == "device":  # a step that goes on in a thread of its own waits for the compilation
                optimizer.step()
            optimizer.zero_grad()
        for one, two in zip(*(model.parameters() for model in pair.models), strict=True):
            assert_same("parameter", (one + 1).detach(), whole((two + 1).detach()))
    finally:
        go_on.set()
        thread.join()
