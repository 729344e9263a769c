"""The pass that computes a loss over classes in chunks of tokens.

_find — Find the losses over classes in a graph: from the head's product through log-softmax to what reads it, and back.
_gradient_terms — The gradient of log-probabilities as autograd writes it: a sum of parts that reach all classes alike, or
    the target alone.
_head_tiles — The tiles of a head, for a loss that goes through them one by one.
_loop — The loop over token chunks and vocabulary tiles, written out: what a loss and its gradients need of each part of the
    logits.
_loop_tiles — The loop for a head in several tiles: no chunk ever has all its classes at once.
_read_backward — Read the way back from a log-softmax to the gradients of hidden states, weight and bias.
_read_logits — Read where the numbers that a log-softmax is taken of come from: a linear head, and what is done to its
    product.
_rewrite — Put the loop over chunks in the place of one loss of a graph, and its gradients in the place of the backward's.
_row_ops — Operators between a head's product and its loss that treat each token by itself, and the same operators on hidden
    states.
_token_values — The numbers of a loss that are one for each token, and small: its gradients for a tangent of 1, and the loss
    itself.
_unit_tangent — The gradients of a loss for a tangent of one: what the forward can compute of the backward before its
    tangent is known.
chunk_loss — Compute a loss over classes, and its gradients, a chunk of tokens at a time: the logits never exist whole.
"""
