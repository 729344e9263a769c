"""No file but `config` and `ir/tiers` decides anything by the word of a tier: they compare, index and ask rows of `Tier`."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

import pytest
from paths import ROOT

WORDS = {"device", "host", "nvme"}
MAY_DECIDE = {"config.py", "ir/tiers.py"}
PACKAGE = ROOT / "zinf_compile"


def _words(node: ast.expr) -> Iterator[str]:
    """Yield the tiers' words in an expression, or in a tuple, list or set of nothing else."""
    if isinstance(node, ast.Constant) and node.value in WORDS:
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        words = [word for element in node.elts for word in _words(element)]
        yield from words if len(words) == len(node.elts) else ()  # ("layout", "device", ...) are keywords of PyTorch's
    elif isinstance(node, ast.IfExp):
        yield from _words(node.body)
        yield from _words(node.orelse)


def decisions(source: str) -> list[tuple[int, str]]:
    """Return the line and the word of each literal of a tier that is compared, indexed, chosen, passed on or kept."""
    found = []
    for node in ast.walk(ast.parse(source)):
        looked: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            looked = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            looked = [node.slice]
        elif isinstance(node, ast.Call):
            getter = isinstance(node.func, ast.Attribute) and node.func.attr == "get"  # kwargs.get("device") is PyTorch's
            looked = [*(() if getter else node.args), *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.Return | ast.NamedExpr) and node.value is not None:
            looked = [node.value]
        elif isinstance(node, ast.For | ast.comprehension):
            looked = [node.iter]
        elif isinstance(node, ast.IfExp):
            looked = [node.body, node.orelse]
        elif isinstance(node, ast.Dict):
            looked = [
                key for key in node.keys if isinstance(key, ast.Constant) and key.value != "device"
            ]  # a keyword of PyTorch's
        elif isinstance(node, ast.MatchValue):
            looked = [node.value]
        elif isinstance(node, ast.arguments):
            looked = [default for default in (*node.defaults, *node.kw_defaults) if default is not None]
        found += [(expression.lineno, word) for expression in looked for word in _words(expression)]
    return sorted(set(found))


@pytest.mark.parametrize(
    "source",
    [
        "if tier == 'nvme': pass",
        "if tier in ('host', 'device'): pass",
        "sides = {'host': 0}",
        "total += sides['device']",
        "side = 'host' if apart else own",
        "needs('device')",
        "check(side='host')",
        "for side in ('device', 'host'): pass",
        "def f(tier='host'): pass",
        "match tier:\n  case 'nvme': pass",
    ],
)
def test_a_literal_that_decides_is_found(source: str) -> None:
    assert decisions(source)


def test_what_only_pytorch_reads_is_none() -> None:
    assert not decisions("options = {'device': device, 'dtype': dtype}\nwhere = kwargs.get('device')\n'''nvme'''")


def test_no_literal_of_a_tier_decides_anything() -> None:
    found = {}
    files = [PACKAGE.rglob("*.py"), (PACKAGE / "passes").rglob("*.py"), (PACKAGE / "runtime").rglob("*.py")]  # two are links
    for file in itertools.chain(*files):
        name = file.relative_to(PACKAGE).as_posix()
        if name not in MAY_DECIDE and (lines := decisions(file.read_text())):
            found[name] = lines
    assert found == {}
