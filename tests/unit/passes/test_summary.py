"""The schedule in short: transfers, one line for the compute between two, blocks once."""

from __future__ import annotations

import re

import pytest
import torch
from irtext import graph_of, unit

from zinf_compile.cli import colors
from zinf_compile.passes.analysis.summary import summarize

SCHEDULED = """\
g = all_gather(w)
v = wait(g)
a = mm(x, v)
b = relu(a)
release(v)
c = exp(b)
d = sin(c)
e = cos(d)
f = neg(e)
h = abs(f)
return (h, w)
"""


def test_compute_between_transfers_is_one_line() -> None:
    gm = graph_of(SCHEDULED, x=torch.zeros(1000, 50), w=unit(50, 40))
    assert summarize(gm) == (
        f"{'g = all_gather(w)':<60}  # w 8,000 B\n"
        f"{'v = wait(g)':<60}  # w 8,000 B\n"
        "region 0: mm, relu, 4 MFLOP\n"
        f"{'release(v)':<60}  # w 8,000 B\n"
        "region 1: 5 operators\n"
        "return 2 values: 1 made here, 160,000 B; 1 hollow parameters\n"
    )


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"{'full = wait(gather)':<60}  # h.0.w 8 B\nregion 1: mm of h.0"
    assert colors.colored(line) == line
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = colors.colored(line)
    assert shown != line
    assert re.sub(r"\x1b\[\d*m", "", shown) == line
    monkeypatch.setenv("NO_COLOR", "1")
    assert colors.colored(line) == line
