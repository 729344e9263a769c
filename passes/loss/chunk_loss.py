"""Compute a loss over classes and its gradients in chunks of tokens, so that the logits never exist as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import fx

from zinf_compile.ir.compute_shape import CHUNK_BYTES, WORTH_BYTES
from zinf_compile.passes.graph.node_facts import fake_value, hinted_numel, note_skipped, user_line

from ._find import SkippedLoss, find_losses
from ._head_tiles import tiles_of_head
from ._read_logits import Logits
from ._rewrite import MakeTiles, plan_loss, rewrite_loss
from ._row_ops import UnknownLogitsError, input_of

ROWS = 64
"""Chunks are multiples of this many tokens, unless fewer fit in `chunk_bytes`."""

_log = logging.getLogger("zinf_compile")


def chunk_loss(
    gm: fx.GraphModule,
    *,
    enabled: bool | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    worth: Callable[[Logits], bool] | None = None,
    make_tiles: MakeTiles = tiles_of_head,
) -> fx.GraphModule:
    """Replace head and log-softmax by a loop over chunks of tokens that computes loss and gradients.

        before:  t = t(w);  z = mm(x, t);  l = _log_softmax(z, 1, False);  n = nll_loss_forward(l, y, None, 2, -100)
                 s = n[0];  return (s,)
        after:   valid = ne(y, -100);  targets = class_targets(y, 6, -100);  unsqueeze = unsqueeze(targets, 1)
                 slice_1 = slice(x, 0, 0, 2);  slice_2 = slice(unsqueeze, 0, 0, 2);  slice_3 = slice(x, 0, 2, 4)
                 slice_4 = slice(unsqueeze, 0, 2, 4);  alias = alias(slice_1);  permute = permute(w, [1, 0])
                 logits = mm(alias, permute);  log_probs = _log_softmax(logits, 1, False)
                 gather = gather(log_probs, 1, slice_2);  picked = squeeze(gather, 1);  alias_1 = alias(slice_3)
                 permute_1 = permute(w, [1, 0]);  logits_1 = mm(alias_1, permute_1)
                 log_probs_1 = _log_softmax(logits_1, 1, False);  gather_1 = gather(log_probs_1, 1, slice_4)
                 picked_1 = squeeze(gather_1, 1);  cat = cat([picked, picked_1])
                 full = full([], 0, dtype=torch.int64, device=cpu);  full_1 = full([], -100, dtype=torch.int64, device=cpu)
                 where = where(valid, full, full_1);  unsqueeze_1 = unsqueeze(cat, 1)
                 nll_loss_forward = nll_loss_forward(unsqueeze_1, where, None, 2, -100);  getitem = nll_loss_forward[0]
                 return (getitem,)

    The example has no backward, and chunks of two of four tokens. On a joint graph each chunk also computes its gradients of
    hidden states, weight and bias for a tangent of 1 (`_unit_tangent`), and the backward multiplies them by the tangent. The
    weight's gradient accumulates in place. Ignored targets, class weights and label smoothing are read from the graph (`_find`).
    A loss of unknown form stays as it is, with a note in the dump and the log.

    With `enabled=None` a loss is rewritten if `worth` returns True: by default, if its logits are large.

    Chunks follow from the numbers of tokens and classes alone, never from tiers. A head in several tiles takes two loops over the
    tiles (`_loop_tiles`).
    """
    if enabled is False:
        return gm
    worth = worth or (lambda logits: is_large(fake_value(logits.product)))
    losses, others = find_losses(gm.graph)
    skipped = [one for one in others if enabled or is_large(fake_value(input_of(one.softmax)))]
    for loss in losses:
        logits = loss.logits
        if enabled or worth(logits):
            try:
                plan = plan_loss(gm.graph, loss)
            except UnknownLogitsError as error:
                skipped.append(SkippedLoss(logits.softmax, error.reason, error.node))
                continue
            bounds = choose_chunks(logits.tokens, logits.classes, chunk_bytes=chunk_bytes)
            rewrite_loss(gm.graph, loss, plan, bounds=bounds, make_tiles=make_tiles)
    for one in skipped:
        _note(gm, one)
    return gm


def may_chunk(gm: fx.GraphModule, enabled: bool | None, worth_bytes: int = WORTH_BYTES) -> bool:
    """Return whether a graph captured by Dynamo may have a loss that `chunk_loss` would rewrite."""
    if enabled is not None:
        return enabled
    return any(logits_bytes(node.meta.get("example_value")) > worth_bytes for node in gm.graph.nodes)


def has_loss(gm: fx.GraphModule) -> bool:
    """Return whether a graph captured by Dynamo has a loss over classes, large or small."""
    names = (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "") for node in gm.graph.nodes)
    return any("log_softmax" in name or "cross_entropy" in name for name in names)


def is_large(logits: object) -> bool:
    """Return whether traced logits take more than `WORTH_BYTES` in fp32, the data type of the log-softmax."""
    return logits_bytes(logits) > WORTH_BYTES


def logits_bytes(logits: object) -> int:
    """Return the bytes of traced logits in fp32."""
    return 4 * hinted_numel(logits)


def choose_chunks(tokens: int, classes: int, *, chunk_bytes: int) -> list[tuple[int, int]]:
    """Return [start, end) of each chunk in tokens, so that its fp32 logits take at most `chunk_bytes`."""
    rows = max(1, chunk_bytes // (4 * classes))
    rows = rows // ROWS * ROWS or rows
    return [(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def _note(gm: fx.GraphModule, loss: SkippedLoss) -> None:
    what = f"chunk_loss leaves {loss.softmax.name} as it is: {loss.reason} ({loss.node.name})"
    note_skipped(gm, what)
    line = user_line(loss.node) or user_line(loss.softmax)
    _log.info("%s%s", what, f"\n{line}" if line else "")
