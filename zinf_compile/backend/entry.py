"""The torch.compile backend, which Dynamo calls for each captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from zinf_compile.config import Config
from zinf_compile.errors import UnsupportedModelError, ZinfError
from zinf_compile.plan.profile import find_profile

from .graph_compiler import Compiled, GraphCompiler, NothingMovesError
from .ordinary_graph import OrdinaryCompiler, has_room, may_stay, nothing_moves
from .through_dynamo import raise_through_dynamo


def zero_infinity(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile one captured graph so that its parameters, their gradients and optimizer states are partitioned over the ranks.

    Registered as `torch.compile(..., backend="zero_infinity")`. Parameters become hollow once their graph is compiled; an
    error before that leaves them as they were. On one rank, where no option says where anything lives, or all was decided to live
    on the device, parameters stay ordinary ones.
    """
    return compile_captured(gm, example_inputs, options=options, mode=mode)


def compile_captured(
    gm: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None, mode: str | None, partition: bool = False
) -> Compiled:
    """Do what `zero_infinity` does; `partition`: also where nothing would move."""
    given = tuple(options or ())
    try:
        config = Config.from_options(options, mode=mode)
        stops = not partition and may_stay(config, given, inputs)
        if not (stops and nothing_moves(config, inputs)):
            try:
                return GraphCompiler(config, given=given, stops=stops).compile(gm, inputs)
            except NothingMovesError:
                pass
            except UnsupportedModelError:  # what can't be partitioned needn't be where it fits as it is
                if not (stops and has_room(inputs)):
                    raise
        if (machine := config.machine_name()) is not None:
            find_profile(machine)  # raises for one that isn't known, though nothing is decided by it
        return OrdinaryCompiler(config, given=given).compile(gm, inputs)
    except ZinfError as error:
        raise raise_through_dynamo(error) from error.__cause__
