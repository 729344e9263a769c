"""Draw which folder of the package imports which: import-graph.svg beside this file, from the code.

    python docs/import_graph.py

Each file is parsed, imports inside functions and for type checkers included. The same code gives the same picture, byte for byte.
"""

from __future__ import annotations

import ast
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "zinf_compile"
PICTURE = Path(__file__).with_name("import-graph.svg")

INSIDE = ("passes", "runtime")
"""Folders of which the picture shows the inside too."""

_COLUMN, _ROW, _BOX, _LETTER, _GAP, _TITLE = 330, 54, 26, 7.3, 22, 44


def read_imports(root: Path = ROOT / PACKAGE) -> list[tuple[str, str]]:
    """Return pairs (module, imported module) of the package under `root`, by names inside it; its own name is the empty one."""
    modules = {}
    for folder, _, files in os.walk(root, followlinks=True):
        for path in (Path(folder) / file for file in files if file.endswith((".py", ".pyi"))):
            parts = path.relative_to(root).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return sorted({(m, t) for m, path in modules.items() for t in _targets(m, path, modules) if t != m})


def folder_graph(imports: list[tuple[str, str]], within: str = "") -> nx.DiGraph:
    """Return the folders and files directly `within` a folder and which imports which, without arrows that follow from others.

    Folders that import each other are one node.
    """
    depth = len(within.split(".")) if within else 0
    own = "__init__" if within else PACKAGE
    graph = nx.DiGraph()
    for pair in imports:
        inside = [name.split(".") for name in pair if not within or name == within or name.startswith(f"{within}.")]
        graph.add_nodes_from(parts[depth] for parts in inside if len(parts) > depth and parts[depth])
        if len(inside) == len(pair):
            a, b = (parts[depth] if len(parts) > depth and parts[depth] else own for parts in inside)
            if b not in (a, own):
                graph.add_edge(a, b)
    merged = nx.condensation(graph)
    names = {number: " ↔ ".join(sorted(merged.nodes[number]["members"])) for number in merged}
    return nx.relabel_nodes(nx.transitive_reduction(merged), names)


def draw(imports: list[tuple[str, str]]) -> str:
    """Return the picture as SVG."""
    parts, height, shown = [], 0, ("", *INSIDE)
    for number, within in enumerate(shown):
        middle = (number + 0.5) * _COLUMN
        title = f"inside {within}" if within else PACKAGE
        parts.append(f'<text x="{middle:.0f}" y="26" class="title">{title}</text>')
        lines, rows = _panel(folder_graph(imports, within), middle)
        parts += lines
        height = max(height, _TITLE + rows * _ROW)
    style = (
        "text{font:12px monospace;text-anchor:middle;fill:#1a1a1a}.title{font-weight:bold;font-size:15px}"
        "rect{fill:#eef3fb;stroke:#4a6fa5}path{fill:none;stroke:#7a7a7a;marker-end:url(#head)}"
    )
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<polygon points="0,0 8,4 0,8" fill="#7a7a7a"/></marker>'
    )
    width = _COLUMN * len(shown)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    ground = f'<rect width="{width}" height="{height}" style="fill:#ffffff;stroke:none"/>'
    opening = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{style}</style><defs>{head}</defs>", ground]
    return "\n".join([*opening, *parts, "</svg>\n"])


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(draw(read_imports()))
    print(PICTURE)


def _targets(module: str, path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    parts = module.split(".") if module else []
    package = parts if path.stem == "__init__" else parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (".".join(name[1:]) for name in names if name[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = package[: len(package) - node.level + 1] + base
            elif base[:1] == [PACKAGE]:
                base = base[1:]
            else:
                continue
            for alias in node.names:
                full = ".".join([*base, alias.name])
                yield full if full in modules else ".".join(base)


def _panel(graph: nx.DiGraph, middle: float) -> tuple[list[str], int]:
    """Return the lines that draw a graph around `middle`, importers above what they import, and the number of its rows."""
    rows, chains = _rows(graph)
    place = {}
    for number, row in enumerate(rows):
        widths = [_box_width(name) for name in row]
        left = middle - (sum(widths) + _GAP * (len(row) - 1)) / 2
        for name, width in zip(row, widths, strict=True):
            place[name] = (left + width / 2, _TITLE + number * _ROW + _BOX / 2)
            left += width + _GAP
    lines = [_curve([place[name] for name in chain]) for chain in chains]
    for name in sorted(graph):
        x, y = place[name]
        width = _box_width(name)
        lines.append(f'<rect x="{x - width / 2:.1f}" y="{y - _BOX / 2:.1f}" width="{width:.1f}" height="{_BOX}" rx="4"/>')
        lines.append(f'<text x="{x:.1f}" y="{y + 4:.1f}">{name}</text>')
    return lines, len(rows)


def _rows(graph: nx.DiGraph) -> tuple[list[list[str]], list[list[str]]]:
    """Return the names in each row, and each arrow as a chain of names.

    A row is a folder's longest way up to one that nobody imports. An arrow over several rows has a name of its own in each.
    """
    level = dict.fromkeys(graph, 0)
    for name in nx.lexicographical_topological_sort(graph):
        for imported in graph.successors(name):
            level[imported] = max(level[imported], level[name] + 1)
    rows: list[list[str]] = [sorted(n for n in graph if level[n] == i) for i in range(max(level.values(), default=-1) + 1)]
    chains = []
    for a, b in sorted(graph.edges):
        between = [f"{a}>{b}>{i}" for i in range(level[a] + 1, level[b])]
        for i, name in enumerate(between, level[a] + 1):
            rows[i].append(name)
        chains.append([a, *between, b])
    beside: dict[str, list[str]] = {name: [] for row in rows for name in row}
    for chain in chains:
        for upper, lower in itertools.pairwise(chain):
            beside[upper].append(lower)
            beside[lower].append(upper)
    for _ in range(8):  # each name near the middle of those it is joined to, row by row, down and up
        for row in (*rows, *reversed(rows)):
            spot = {name: (i + 0.5) / len(r) for r in rows for i, name in enumerate(r)}
            row.sort(key=lambda n: (sum(spot[o] for o in beside[n]) / len(beside[n]) if beside[n] else spot[n], n))
    return rows, chains


def _box_width(name: str) -> float:
    return 4.0 if ">" in name else len(name) * _LETTER + 18


def _curve(points: list[tuple[float, float]]) -> str:
    """Return a line from the lower edge of the first box to the upper edge of the last, vertical at both."""
    (x, y), *between, (end_x, end_y) = points
    text = f"M{x:.1f},{y + _BOX / 2:.1f}"
    y += _BOX / 2
    for next_x, next_y in (*between, (end_x, end_y - _BOX / 2)):
        middle = (y + next_y) / 2
        text += f" C{x:.1f},{middle:.1f} {next_x:.1f},{middle:.1f} {next_x:.1f},{next_y:.1f}"
        x, y = next_x, next_y
    return f'<path d="{text}"/>'


if __name__ == "__main__":
    main()
