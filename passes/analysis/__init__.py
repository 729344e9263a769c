"""What a scheduled graph needs and moves, read without changing it.

blocks — Where a graph may be cut: at the borders of the model's blocks. Decided from names, order and sizes of units alone.
fold_blocks — Write what repeats from block to block of a model once.
gather_stages — The stages of a schedule: groups of gathers that stand together, and when each group is released.
memory_needs — The least memory of the device in which a graph's schedule can run.
print_graph — A graph as text, one operator a line.
summary — A scheduled graph in short, for a person to read: its transfers line by line, what is computed between them in
    one.
traffic — What a scheduled graph moves and holds, in bytes per rank.
transfer_graph — What waits for what in a scheduled graph: transfers, waits, releases and stretches of compute as a networkx
    graph.
"""
