"""What may import which libraries, and that dependencies are those declared."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

FX_FREE = ["runtime", "zinf_compile/ir/program.py"]
"""What knows nothing of FX."""


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names of everything a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def files_of(*places: str) -> list[Path]:
    found = [f for place in places for f in (sorted((ROOT / place).rglob("*.py")) if (ROOT / place).is_dir() else [ROOT / place])]
    assert found
    return found


def test_private_modules_of_torch_are_imported_in_one_file() -> None:
    for path in files_of("passes", "runtime", "zinf_compile"):
        private = [name for name in imported(path) if re.match(r"torch\.(.*\.)?_", name)]
        assert not private or path.name == "_torch.py", f"{path.relative_to(ROOT)} imports {private}"


def test_the_runtime_knows_nothing_of_fx() -> None:
    for path in files_of(*FX_FREE):
        assert not [n for n in imported(path) if n.startswith("torch.fx") or n == "torch.fx"], path


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
