"""What passes share: facts about nodes, aliasing, new nodes, graphs as text.

alias — Which values share memory, and which are made element by element: read from operator schemas and tags.
build_nodes — Write operators into a graph whose values are fake, each with the fake value of its result.
concat — What a concatenation consists of.
node_facts — What is known about a node, behind typed accessors: the only place that knows how `node.meta` is spelled.
"""
