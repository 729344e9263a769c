"""Tables of the README that benchmarks write."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def write(script: str, reports: Iterable[str]) -> None:
    """Replace what stands between the README's marks of `script`, a path such as benchmarks/step.py, by these texts."""
    path = Path(__file__).parent.parent / "README.md"
    head, begin, rest = path.read_text().partition(f"<!-- {script} -->\n")
    _, end, tail = rest.partition("<!-- end -->")
    if not begin or not end:
        raise SystemExit(f"README.md has no place marked <!-- {script} --> ... <!-- end -->")
    path.write_text(head + begin + "\n" + "\n\n".join(reports) + "\n\n" + end + tail)
