"""Which folder may import which, as one table, and which libraries: every file is read, with imports inside functions and for
type checkers only."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import os
import re
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest
from paths import ROOT

PACKAGE = ROOT / "zinf_compile"

BASE = ("errors", "_torch", "_frames", "_csrc")
MAY: dict[str, tuple[str, ...]] = {
    "errors": (),
    "_torch": ("errors",),
    "_inductor": (),
    "_frames": (),
    "ir": BASE,
    "option_checks": ("errors",),
    "config": (*BASE, "ir", "option_checks"),
    "plan": ("errors", "ir", "config"),
    "passes": (*BASE, "ir", "plan"),
    "runtime": (*BASE, "ir", "config"),
    "sharded": (*BASE, "ir", "config", "plan", "passes", "runtime"),
    "stats": (*BASE, "ir", "runtime", "sharded"),
    "reset": (*BASE, "runtime", "sharded", "optim", "checkpoint", "init"),
    "timeline": ("errors", "ir", "plan", "runtime", "sharded", "backend"),
    "optim": (*BASE, "ir", "config", "runtime", "sharded", "stats"),
    "checkpoint": (*BASE, "ir", "config", "runtime", "sharded", "optim"),
    "init": (*BASE, "ir", "config", "runtime", "sharded", "optim", "checkpoint"),
    "backend": (*BASE, "_inductor", "ir", "config", "plan", "passes", "runtime", "sharded", "optim", "checkpoint"),
    "hf": (*BASE, "ir", "config", "runtime", "sharded", "stats", "optim", "checkpoint", "init"),
    "cli": (
        *BASE,
        "ir",
        "config",
        "plan",
        "passes",
        "runtime",
        "sharded",
        "stats",
        "reset",
        "optim",
        "checkpoint",
        "init",
        "backend",
    ),
    "__main__": ("cli",),
    "": ("errors", "stats", "timeline", "reset", "optim", "checkpoint", "init"),
}
"""What each folder or file of the package may import beside itself; the package's own name is the empty one."""

WITHIN: dict[str, tuple[tuple[str, ...], ...]] = {
    "runtime": (
        ("system", "lanes", "comm"),
        ("memory",),
        ("device", "storage"),
        ("context",),
        ("close_context",),
        ("transfer",),
        ("units",),
        ("handles", "run"),
        ("gather_steps", "swap_steps", "value_steps"),
        ("executor",),
    ),
    "passes": (
        ("graph",),
        ("analysis", "verify"),
        ("joint", "schedule", "tiling", "loss", "tokens", "activations"),
        ("lower",),
        ("",),
    ),
}
"""Folders within these, from the bottom: each may import those beside it and below."""

MOST_LINES = 400

PASSES = ("joint", "schedule", "tiling", "loss", "tokens", "activations")
"""Folders in which every public file is a pass."""


def _modules() -> dict[str, Path]:
    found = {}
    for folder, _, files in os.walk(PACKAGE, followlinks=True):
        for file in files:
            if file.endswith(".py"):
                path = Path(folder) / file
                parts = path.relative_to(PACKAGE).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


@functools.cache
def _nodes(module: str) -> tuple[ast.Import | ast.ImportFrom | ast.Attribute, ...]:
    """Return what a file imports and every attribute that it names, wherever in the file."""
    tree = ast.parse(MODULES[module].read_text())
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute))


def _imported(module: str) -> Iterator[str]:
    """Yield the dotted names of everything a file imports; relative ones from the package's own name."""
    parts = ["zinf_compile", *(module.split(".") if module else [])]
    package = parts if MODULES[module].name == "__init__.py" else parts[:-1]
    for node in _nodes(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*(package[: len(package) - node.level + 1] if node.level else []), *filter(None, [node.module])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


@functools.cache
def imports() -> dict[str, list[str]]:
    """Return what each file imports. Not known where this file is collected: then the tests may run elsewhere, or not at all."""
    return {module: sorted(set(_imported(module))) for module in MODULES}


def _module_of(name: str) -> str | None:
    """Return the module of the package behind an imported name, None for one of another library."""
    house, _, rest = name.partition(".")
    if house != "zinf_compile":
        return None
    return rest if rest in MODULES or rest == "_csrc" else rest.rpartition(".")[0]


@functools.cache
def arrows() -> list[tuple[str, str]]:
    """Return each file of the package with each other one that it imports."""
    return [
        (module, target)
        for module, names in imports().items()
        for target in dict.fromkeys(map(_module_of, names))
        if target is not None and target != module
    ]


def _dotted(node: ast.expr) -> str:
    """Return an attribute as it is written where it is one of a name, else its last part after a point."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _top(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def _floor(module: str) -> int:
    """Return on which floor of its house a module is."""
    house, *rest = module.split(".")
    room = rest[0] if rest else ""
    return next(number for number, rooms in enumerate(WITHIN[house]) if room in rooms)


def test_every_arrow_is_in_the_table() -> None:
    assert {_top(module) for module in MODULES} == MAY.keys()
    wrong = [(a, b) for a, b in arrows() if _top(a) != _top(b) and _top(b) not in MAY[_top(a)]]
    assert not wrong


@pytest.mark.parametrize("house", WITHIN)
def test_arrows_within_a_house_point_down(house: str) -> None:
    inside = [(a, b) for a, b in arrows() if _top(a) == _top(b) == house and house not in (a, b)]
    assert inside
    assert not [(a, b) for a, b in inside if _floor(a) < _floor(b)]


def test_passes_know_of_plans_as_values_only() -> None:
    targets = {b for a, b in arrows() if _top(a) == "passes" and _top(b) == "plan"}
    assert targets <= {"plan.plan", "plan.graph_plan", "plan.compute_memory", "plan.problem", "plan.problem_parts"}


def test_no_module_imports_itself_by_way_of_others() -> None:
    circles = [set(c) for c in nx.strongly_connected_components(nx.DiGraph(arrows())) if len(c) > 1]
    assert not circles


def test_no_file_is_long() -> None:
    long = {module for module, path in MODULES.items() if len(path.read_text().splitlines()) > MOST_LINES}
    assert not long


@pytest.mark.parametrize("folder", PASSES)
def test_every_public_file_of_passes_is_a_pass_that_shows_what_it_does(folder: str) -> None:
    files = [path for path in (ROOT / "passes" / folder).glob("*.py") if not path.name.startswith("_")]
    assert files
    for path in files:
        functions = {
            n.name: ast.get_docstring(n) or "" for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)
        }
        assert path.stem in functions, path
        assert "before:" in functions[path.stem], path
        assert "after:" in functions[path.stem], path


def test_every_folder_has_a_map_of_its_files() -> None:
    for module, path in MODULES.items():
        if path.name == "__init__.py" and module not in ("", "hf", "passes", "runtime"):
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            named = {line.split(" — ")[0] for line in text.splitlines() if " — " in line}
            assert named == {other.stem for other in path.parent.glob("*.py")} - {"__init__"}, path


def test_private_modules_of_torch_are_imported_in_two_files() -> None:
    for module, names in imports().items():
        private = [name for name in names if re.match(r"torch\.(.*\.)?_", name)]
        assert not private or module in ("_torch", "_inductor"), f"{module} imports {private}"


def test_what_only_one_accelerator_has_is_called_in_one_file() -> None:
    """All else goes by `torch.accelerator`; memory across streams is kept by events."""
    for module in MODULES:
        named = {_dotted(node) for node in _nodes(module) if isinstance(node, ast.Attribute)}
        own = {name for name in named if re.match(r"torch\.(cuda|xpu|mps)\b", name)}
        assert not own or module == "runtime.system.page_locked", f"{module} uses {own}"
        assert not [name for name in named if name.endswith(".record_stream")], module


def test_the_runtime_knows_nothing_of_fx() -> None:
    for module, names in imports().items():
        if _top(module) == "runtime" or module == "ir.program":
            assert not [name for name in names if re.match(r"torch\.fx\b", name)], module


def test_the_io_engine_knows_nothing_of_torch() -> None:
    sources = [f for f in (ROOT / "csrc").rglob("*") if f.suffix in (".cpp", ".hpp", ".h", ".cc")]
    assert sources
    for path in sources:
        included = re.findall(r"#\s*include\s*[<\"]([^>\"]+)", path.read_text())
        assert not [i for i in included if re.match(r"(torch|ATen|c10|caffe2)\b", i)], path


def test_the_functorch_of_pypi_is_no_dependency() -> None:
    required = {re.split(r"[^\w-]", line)[0].lower() for line in importlib.metadata.requires("zinf-compile") or ()}
    assert "torch" in required
    assert "functorch" not in required
