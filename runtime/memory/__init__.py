"""Arenas, the ledger of what is held, and what graphs have reserved.

aligned_buffers — Aligned host memory for direct I/O: pinned where a GPU copies from it, reused, counted and capped.
arena — Host memory for gathered units, used again: new memory costs a page fault per 4 KiB, as much time as to copy what
    comes in.
ledger — The runtime's own account of what it holds, in bytes.
rank_memory — The memory of one rank: what is held, what may be, and buffers for what is gathered and staged.
reservations — What the graphs and optimizers of some ranks may hold at once, and what each of them has claimed of it.
"""
