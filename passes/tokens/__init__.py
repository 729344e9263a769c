"""The pass that computes MLPs a slice of tokens at a time, and its helpers: matching, planning, writing.

_bodies — The graph of one slice, and the loop over it: operators of a stretch repeated on the rows of a slice.
_row_ops — Operators that compute each token's row from the same token's rows, and those that sum over all tokens.
_stretches — Stretches of row operators that make wide values and return narrow ones, such as an MLP, and what reads them in
    the backward.
tile_tokens — Compute MLPs a slice of tokens at a time, so that their wide values never exist as a whole.
"""
