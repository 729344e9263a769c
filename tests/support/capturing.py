"""A backend that keeps the programs it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from zinf_compile.backend.graph_compiler import Compiled, GraphCompiler
from zinf_compile.config import Config
from zinf_compile.ir.program import Program


class Capturing(GraphCompiler):
    """Compiles as the product does, and notes each program."""

    def __init__(self, config: Config, programs: list[Program]) -> None:
        super().__init__(config)
        self._programs = programs

    def schedule(self, graph: fx.GraphModule, kind: str) -> Program:
        program = super().schedule(graph, kind)
        self._programs.append(program)
        return program


def capturing_backend(
    programs: list[Program], options: Mapping[str, Any] | None = None
) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
    """Return a backend for torch.compile that appends each program it compiles to `programs`."""

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        return Capturing(Config.from_options({"compute": "fx", **(options or {})}), programs).compile(gm, inputs)

    return backend
