"""Passes that compute with large parameters tile by tile.

_forms — Forms of a tiled parameter: values derived from it by views and casts, with the tiles they consist of.
_gradients — Tiles of a gradient, each computed from slices of the whole gradient's inputs. `tile_matmuls` calls it.
_pointwise_chains — Analysis for `tile_pointwise`: values between products with tiles that needn't exist as a whole. Changes
    no graph.
_uses — Rules for uses of a tiled parameter: matrix products and embeddings, computed from its tiles. `tile_matmuls` calls
    it.
accumulate_in_place — Accumulate products in the memory of their sum.
lift_tiles — Turn each tile of a parameter into an input of the graph.
reduce_tiles_in_place — Write the gradients of tiles into buffers of the runtime.
sink_tile_gradients — Move the gradient of each tile next to the last use of the tile.
tile_matmuls — Compute with large parameters tile by tile.
tile_pointwise — Compute element-wise operators between products with tiles in parts, so that their results never exist as a
    whole.
write_tiles_in_place — Write products with tiles directly into the matrix that they are parts of.
"""
