"""Arenas, the ledger of what is held, and what graphs have reserved.

activations — What graphs have handed out and autograd or the caller still holds, by storages.
aligned_buffers — Aligned host memory for direct I/O: pinned where an accelerator copies from it, reused, counted and capped.
arena — An arena of host memory for gathered units.
cast_order — The order in which units that have arrived together are cast: several at a time, where that takes no more
    memory.
device_arena — An arena of a device's own memory for gathers and swaps: after the first steps nothing of theirs is allocated
    any more.
full_copies — Full units that stay on the device until their values change, so that a step gathers each once:
    `reshard_after_backward=False`.
handed_on — What a forward leaves on the device for its backward: full units, or shards on several ranks.
inflight — Limits of what transfers under way may hold.
leaving_norms — Norms of gradients that leave their device, taken there before they do: for who asks for them behind each
    backward.
ledger — The account of the bytes that the runtime holds, by kind.
named_caps — The caps that refusals name, by the options that set them: `device_memory` is of one rank, `host_memory` of all
    of a node.
own_storage — Tensors of the same memory as others, with a storage of their own that begins where the values do.
pending_gradients — Gradients in memory that deferred steps have still to apply: there beside the next forward, but never
    beside a backward.
ranges — Free ranges of an arena, taken from its beginning on: first fit, and neighbours join when they come back.
rank_memory — The memory of one rank: its ledgers, caps and buffers.
reservations — The bytes that graphs and optimizers of a rank may hold at once.
"""
