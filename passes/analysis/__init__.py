"""What a scheduled graph needs and moves, read without changing it.

blocks — Where a graph may be cut: at the borders of the model's blocks. Decided from names, order and sizes of units alone.
memory_needs — The least memory of the device in which a graph's schedule can run.
traffic — What a scheduled graph moves and holds, in bytes per rank.
transfer_graph — What waits for what in a scheduled graph: transfers, waits, releases and stretches of compute as a networkx
    graph.
"""
