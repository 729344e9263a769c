"""Helpers that all passes share: node metadata, aliasing, new nodes, concatenations. They import no pass.

alias — Aliasing of values and the one definition of element-wise, both read from operator schemas and tags.
boundary — Inputs and outputs of compute between two transfers, as it is compiled.
build_nodes — Insertion of operators into a traced graph, each with the fake value of its result.
concat — Parts of a concatenation.
found_units — Marks of gathers whose unit a backward finds on the device, because its forward has left it there.
node_facts — Typed accessors of nodes. Every pass reads metadata through them; keys of `node.meta` are known here alone, and in
    `found_units` and `remade`.
region_structure — A key of a graph's structure: regions with equal keys compile as one.
remade — What is dropped in a forward and made again in its backward, as both graphs carry it.
token_loop — The operator that computes a slice of tokens at a time: its target is the loop itself, with the slice's operators as
    a graph.
unit_casts — Views and casts of a unit, and the data type in which it is gathered for them.
"""
