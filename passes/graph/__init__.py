"""What passes share: facts about nodes, aliasing, new nodes, graphs as text.

alias — Which values share memory, read from operator schemas.
build_nodes — Write operators into a graph whose values are fake, one call each.
concat — What a concatenation consists of.
emit — New operators of a graph, with what they make of fake tensors.
fold_blocks — Write what repeats from block to block of a model once.
node_facts — What is known about a node, behind typed accessors: the only place that knows how `node.meta` is spelled.
print_graph — A graph as text, one operator a line.
summary — A scheduled graph in short, for a person to read: its transfers line by line, what is computed between them in
    one.
"""
