"""Passes that compute with large parameters tile by tile.

_forms — How a value derived from a tiled parameter lies to it: which tiles make it up, and how to derive its part from
    each.
_gradients — A gradient in tiles, each computed by itself from what the whole is computed from.
_pointwise_chains — Which values between products with tiles needn't exist as a whole: decided here, acted upon in
    `tile_pointwise`.
_uses — What reads a tiled parameter, tile by tile: matrix products and embeddings.
accumulate_in_place — Add products to a sum in the sum's own memory.
lift_tiles — Make each tile of a parameter an input, as a parameter is one.
reduce_tiles_in_place — Compute the gradients of tiles where their shards will be.
sink_tile_gradients — Compute the gradient of each tile where the tile itself is used, not all of them at once.
tile_matmuls — Compute with large parameters tile by tile.
tile_pointwise — Compute what lies between products with tiles part by part, where nobody needs it as a whole.
write_tiles_in_place — Write what the tiles of a matrix give where it belongs in the whole.
"""
