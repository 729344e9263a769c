"""Graphs of a model's step with gathers just in time, from fake tensors: what `step_problem` makes a problem of."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import fx

from zinf_compile.config import Config
from zinf_compile.ir.program import NOTHING, Program
from zinf_compile.passes import region_passes, run_passes
from zinf_compile.passes.analysis.step_problem import Pair

from .target import Target
from .trace import Recorder, run_on_fakes


def trace_step(
    target: Target, *, options: Mapping[str, Any] | None = None, world_size: int = 1, device: str = "cpu"
) -> list[Pair]:
    """Return (forward, backward) of each captured graph in order; None for the backward of a graph that has none.

    As `trace`: no weight is allocated, nothing runs on a device, and memory is limited only by the options.
    """
    config = Config.from_options(options, check_folders=False)
    found: list[Pair] = []
    run_on_fakes(
        target, lambda number: _StepRecorder(config, number, found, world_size=world_size), world_size=world_size, device=device
    )
    return found


class _StepRecorder(Recorder):
    def __init__(self, config: Config, number: int, pairs: list[Pair], *, world_size: int) -> None:
        super().__init__(config, number, [], world_size=world_size, after=None)
        self._pairs = pairs

    def cut(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = super(Recorder, self).cut(joint, inputs, **kwargs)
        self._pairs.append((self._with_regions(forward), self._with_regions(backward)))
        return forward, backward

    def schedule(self, graph: fx.GraphModule, kind: str) -> Program:
        if kind == "inference":
            self._pairs.append((self._with_regions(graph), None))
        graph.recompile()
        self._graphs[kind] = graph
        return NOTHING

    def _with_regions(self, unscheduled: fx.GraphModule) -> fx.Graph:
        graph = fx.GraphModule(unscheduled, copy.deepcopy(unscheduled.graph))
        graph.meta.update(unscheduled.meta)
        return run_passes(graph, region_passes(bucket_bytes=self._bucket)).graph
