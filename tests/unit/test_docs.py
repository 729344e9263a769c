"""README and docs/ tell the truth: links, commands, options, errors, tables, pictures and code."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import DOCS, PAGES, README, TEXTS, anchors, links
from paths import ROOT

import zinf_compile
from zinf_compile import errors
from zinf_compile.config import Config

MAKEFILE = (ROOT / "Makefile").read_text()
README_LINES = 200


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scripts of benchmarks/ import each other."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def _page(name: str) -> str:
    return TEXTS[ROOT / "docs" / f"{name}.md"]


def _named(text: str) -> set[str]:
    """Return the names in the first column of a page's tables."""
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_readme_is_short_enough_to_be_read() -> None:
    assert len(TEXTS[README].splitlines()) <= README_LINES


def test_readme_keeps_its_order() -> None:
    order = [
        "```python",
        "make train",
        "## What the compiler writes",
        "## Commands",
        "## How it works",
        "## Options",
        "## Limits",
    ]
    places = [TEXTS[README].index(f"\n{text}") for text in order]
    assert places == sorted(places)
    assert re.findall(r"^## .*", TEXTS[README], re.MULTILINE) == order[2:]


def test_each_of_the_five_steps_links_to_one_file() -> None:
    part = TEXTS[README].partition("## How it works\n")[2].partition("\nMore")[0]
    steps = re.split(r"^\d\. ", part, flags=re.MULTILINE)[1:]
    assert len(steps) == 5
    for step in steps:
        (target,) = re.findall(r"\]\(([^)]*)\)", step)
        assert (ROOT / target).is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        leads_to = (page.parent / path).resolve() if path else page
        assert leads_to.is_file(), target
        assert not anchor or anchor in anchors(leads_to), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths in code marks, from the root: those of sources, tests, examples and benchmarks."""
    rooms = "zinf_compile|passes|runtime|csrc|tests|docs|benchmarks|examples"
    for name in re.findall(rf"`((?:{rooms})/[\w./-]*)`", TEXTS[page]):
        assert name.endswith("NAME.py") or "<" in name or (ROOT / name).exists(), name
    for script in re.findall(r"(?:python|torchrun)[^`\n]*? ((?:benchmarks|examples)/\w+\.py)", TEXTS[page]):
        assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_make_targets_exist(page: Path) -> None:
    for target in re.findall(r"(?:`|^ *)make ([\w-]+)", TEXTS[page], re.MULTILINE):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target


@pytest.mark.parametrize("target", ["lint", "test", "docs"])
def test_ci_runs_the_readmes_commands(target: str) -> None:
    assert re.search(rf"^make {target}\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def test_every_page_is_in_the_navigation_and_on_the_first_page() -> None:
    names = {path.name for path in DOCS}
    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    assert set(_leaves(site["nav"])) == names
    assert {target for target in links(ROOT / "docs" / "index.md") if "#" not in target} == names - {"index.md"}


def _leaves(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [leaf for inner in (entry.values() if isinstance(entry, dict) else entry) for leaf in _leaves(inner)]


def test_options_are_described_in_readme_and_on_their_page() -> None:
    options = {field.name for field in dataclasses.fields(Config)}
    assert _named(_page("options")) == options
    table = TEXTS[README].partition("| option |")[2].partition("\n\n")[0]
    assert _named(table) == options


def test_every_error_has_its_line() -> None:
    classes = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__}
    table = _page("errors").partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \((.+?)\) \|", table, re.MULTILINE))
    assert rows.keys() == classes - {"ZinfError"}
    for name, bases in rows.items():
        assert set(re.findall(r"`(\w+)`", bases)) <= {kind.__name__ for kind in vars(errors)[name].__mro__[1:]}, name
        assert hasattr(zinf_compile, name)


@pytest.mark.usefixtures("_benchmarks")
def test_tables_are_those_of_the_kept_numbers() -> None:
    tables = _load(ROOT / "benchmarks" / "_docs.py")
    found = tables.tables()
    assert len(found) == len(re.findall("<!-- benchmarks/", _page("measurements"))) == 12
    for table in found:
        assert table.files, table.script
        expected = tables.text_of(_load(ROOT / table.script).report, table.files)
        assert table.text == expected, f"run: python {table.script} --docs " + " ".join(
            f"benchmarks/results/{name}" for name in table.files
        )


@pytest.mark.usefixtures("_benchmarks")
def test_all_kept_numbers_but_those_of_two_scripts_are_shown() -> None:
    shown = {name for table in _load(ROOT / "benchmarks" / "_docs.py").tables() for name in table.files}
    kept = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert kept - shown == {"overhead.json", "prefetch.json"}


@pytest.mark.usefixtures("_benchmarks")
def test_a_load_is_judged_by_its_own_peak_and_by_the_slowest_rank() -> None:
    load = _load(ROOT / "benchmarks" / "load.py")
    kept = json.loads((ROOT / "benchmarks" / "results" / "load-large.json").read_text())
    assert load.report(kept).count(": met") == 2
    (phase,) = [line for line in kept["loaded"] if line.get("phase") == "load"]
    phase["peak_bytes"] = 2 << 30
    assert re.search(r"peak of the load above training's: 1,031 MiB, target at most 128: missed", load.report(kept))
    ranks = [[{"phase": "load", "s": 1.5}, {"loss": 1.0}], [{"phase": "load", "s": 2.5}, {"phase": "train", "s": 9.0}]]
    assert load.slowest(ranks, "load") == 2.5


@pytest.mark.usefixtures("_benchmarks")
def test_a_table_is_written_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = _load(ROOT / "benchmarks" / "_docs.py")
    page, results = tmp_path / "docs" / "page.md", tmp_path / "results"
    for folder in (page.parent, results):
        folder.mkdir()
    other = "after\n<!-- benchmarks/b.py: b.json -->\n<!-- end -->\n"
    page.write_text(f"before\n<!-- benchmarks/a.py: old.json -->\nold\n<!-- end -->\n{other}")
    (results / "new.json").write_text('{"seconds": 7}')
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", results)
    tables.write("benchmarks/a.py", lambda result: f"{result['seconds']} s", [results / "new.json"])
    assert page.read_text() == f"before\n<!-- benchmarks/a.py: new.json -->\n\n7 s\n\n<!-- end -->\n{other}"
    with pytest.raises(SystemExit, match=r"0 tables .* marked <!-- benchmarks/c\.py"):
        tables.write("benchmarks/c.py", str, [results / "new.json"])
    with pytest.raises(SystemExit, match=r"elsewhere\.json: not in"):
        tables.write("benchmarks/a.py", str, [tmp_path / "elsewhere.json"])


def test_the_import_graph_is_drawn_from_the_code_as_it_is() -> None:
    script = _load(ROOT / "docs" / "import_graph.py")
    imports = script.read_imports()
    assert ("passes.schedule.insert_gathers", "ir.ops") in imports
    assert script.PICTURE.read_text() == script.draw(imports), "run: python docs/import_graph.py, or make docs"


def test_the_import_graph_leaves_away_what_follows_and_merges_circles() -> None:
    script = _load(ROOT / "docs" / "import_graph.py")
    imports = [("a.x", "b.y"), ("b.y", "c"), ("a.x", "c"), ("c", "d.z"), ("d.z", "c"), ("b.u", "b.v.w")]
    assert sorted(script.folder_graph(imports).edges) == [("a", "b"), ("b", "c ↔ d")]
    assert sorted(script.folder_graph(imports, "b").edges) == [("u", "v")]


def _code_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", _page(page), re.DOTALL)


def test_the_pass_that_a_page_builds_works() -> None:
    code, tests = _code_of("write-a-pass")
    scope: dict[str, Any] = {}
    exec(compile(code, "the pass", "exec"), scope)
    exec(compile(tests, "its tests", "exec"), scope)
    found = [value for name, value in scope.items() if name.startswith("test_")]
    assert len(found) == 3
    for test in found:
        test()


def test_no_page_claims_a_gpu_run() -> None:
    """`pytest -m gpu` alone writes that line, to README."""
    for path, text in TEXTS.items():
        assert path == README or "last run on a GPU:" not in text
