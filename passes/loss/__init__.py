"""The pass that computes a loss over classes in chunks of tokens, and its helpers: matching, planning, writing.

_find — Pattern matching of losses over classes: from the head's product through log-softmax to its readers, and back.
_gradient_terms — Terms of a log-probability gradient as autograd writes it: each reaches all classes, or the target alone.
_head_tiles — Tiles of a head's weight and bias. `_loop_tiles` computes a loss with one of them at a time.
_loop — Operators of one chunk of a loss, and the loop over chunks for a head in one piece.
_loop_tiles — Loops of a loss whose head is in several tiles: logits exist for one chunk and one tile at a time.
_read_backward — Pattern matching of a loss's backward: from the log-softmax to the gradients of hidden states, weight and
    bias.
_read_logits — Pattern matching of logits: a linear head, and the operators between its product and the log-softmax.
_rewrite — Rewriting of one matched loss: the loop over chunks replaces the forward, its gradients replace the backward's.
_row_ops — Row operators: those between a head's product and its loss that keep each token's row intact, and their replay on
    other rows.
_token_values — Values of a loss with one number per token: the gradients of its log-probabilities, and the loss itself.
_unit_tangent — Gradients of a loss for a tangent of 1, which the forward can compute before the backward's tangent is
    known.
chunk_loss — Compute a loss over classes and its gradients in chunks of tokens, so that the logits never exist as a whole.
"""
