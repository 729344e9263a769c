"""How losses of one captured graph are computed: settings of the passes that chunk them, and what AOTAutograd keeps whole.

Called by `graph_compiler`; the ranks' choices are in `choices`.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from zinf_compile.ir.compute_shape import ComputeShape
from zinf_compile.passes.graph.node_facts import fake_value
from zinf_compile.passes.joint.decompose_kept_ops import WHOLE
from zinf_compile.passes.loss.chunk_loss import has_loss, logits_bytes, may_chunk

from .choices import Choices
from .regions import decompositions


class Losses:
    """The losses of one captured graph, by its compute shape and what all ranks chose."""

    def __init__(self, shape: ComputeShape, choices: Choices, *, ranks: int) -> None:
        """Several `ranks` exchange sizes to decide which losses are chunked, where no word says it."""
        self._shape, self._choices, self._ranks = shape, choices, ranks
        self._together = shape.chunk_loss is None and ranks > 1
        self._rules: dict[Any, Any] = {}
        """Decompositions of operators that AOTAutograd keeps for `chunk_loss` to match."""

    def are_chunked(self, gm: fx.GraphModule) -> bool:
        """Say whether other ranks may chunk a loss of this graph that Dynamo captured: then this one does, whatever its sizes."""
        if self._together:
            return self._choices.any_chunks
        return self._ranks > 1 and bool(self._shape.chunk_loss) and has_loss(gm)

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `joint_passes` and `inference_passes`."""
        return {
            "chunk": self._shape.chunk_loss,
            "chunk_bytes": self._shape.chunk_bytes,
            "worth": self._choices.chunks
            if self._together
            else (lambda logits: logits_bytes(fake_value(logits.product)) > self._shape.worth_bytes),
            "rows": self._choices.rows,
            "rules": self._rules,
            "token_tile": self._shape.token_tile,
            "small": self._choices.several,
            "align": self._shape.compute == "inductor",
        }

    def decide(self, graph: fx.GraphModule) -> None:
        """Make the open choices for losses and lookups of this graph, a collective operation."""
        self._choices.decide(graph.graph, losses=self._together, worth_bytes=self._shape.worth_bytes)

    def decompositions(self, gm: fx.GraphModule) -> dict[Any, Any] | None:
        """Return AOTAutograd's decompositions, without the operators that `chunk_loss` matches if it may run."""
        if self._shape.compute != "inductor":
            return None
        shape = self._shape
        if not (self._choices.may_chunk if self._together else may_chunk(gm, shape.chunk_loss, shape.worth_bytes)):
            return decompositions()
        self._rules = decompositions()
        return {op: rule for op, rule in self._rules.items() if op not in WHOLE}
