"""A reader of DOT."""

from __future__ import annotations

import re

STATEMENT = re.compile(
    r"""(?P<open>digraph\ \w+\ \{|subgraph\ cluster_\d+\ \{) | (?P<close>\})
    | (?:rankdir=LR|node\ \[shape=box,\ style=filled\]|label="(?:[^"\\]|\\.)*");
    | (?P<source>"(?:[^"\\]|\\.)*")\ ->\ (?P<target>"(?:[^"\\]|\\.)*")\ \[style=(?:solid|dashed)(?:,\ penwidth=3)?\];
    | (?P<node>"(?:[^"\\]|\\.)*")\ \[label="(?:[^"\\]|\\.)*",\ fillcolor=\w+(?:,\ penwidth=3)?\];""",
    re.VERBOSE,
)


def parsed(dot: str) -> tuple[list[str], list[tuple[str, str]], int]:
    """Return nodes, edges and the number of clusters; fails where a line is no DOT statement or a brace stands alone."""
    nodes, edges, depth, clusters = [], [], 0, 0
    for line in dot.splitlines():
        match = STATEMENT.fullmatch(line.strip())
        assert match, line
        assert depth > 0 or match["open"], line
        depth += bool(match["open"]) - bool(match["close"])
        clusters += (match["open"] or "").startswith("subgraph")
        nodes += [match["node"]] if match["node"] else []
        edges += [(match["source"], match["target"])] if match["source"] else []
    assert depth == 0
    return nodes, edges, clusters
