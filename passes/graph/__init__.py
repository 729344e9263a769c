"""What passes share: facts about nodes, aliasing, new nodes, graphs as text.

alias — Which values share memory, read from operator schemas.
build_nodes — Write operators into a graph whose values are fake, one call each.
concat — What a concatenation consists of.
emit — New operators of a graph, with what they make of fake tensors.
node_facts — What is known about a node, behind typed accessors: the only place that knows how `node.meta` is spelled.
"""
