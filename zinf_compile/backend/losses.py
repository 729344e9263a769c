"""How losses of one captured graph are computed: settings of the passes that chunk them, and what AOTAutograd keeps whole.

Called by `graph_compiler`; the ranks' choices are in `choices`.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from zinf_compile.ir.compute_shape import ComputeShape
from zinf_compile.passes.graph.node_facts import fake_value
from zinf_compile.passes.joint.decompose_kept_ops import WHOLE
from zinf_compile.passes.loss.chunk_loss import logits_bytes, may_chunk

from .choices import Choices
from .regions import decompositions


class Losses:
    """The losses of one captured graph, by its compute shape and what all ranks chose."""

    def __init__(self, shape: ComputeShape, choices: Choices, *, together: bool) -> None:
        """`together`: several ranks exchange sizes to decide which losses are chunked."""
        self._shape, self._choices, self._together = shape, choices, together
        self._rules: dict[Any, Any] = {}
        """Decompositions of operators that AOTAutograd keeps for `chunk_loss` to match."""

    @property
    def any_chunks(self) -> bool:
        """Whether a loss is chunked by an earlier choice of all ranks."""
        return self._together and self._choices.any_chunks

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
