"""What a plain script's user sees of checkpoints, without any logging set up: each line once, from rank 0."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from example_ranks import run_on_ranks

PROGRAM = """
import os, sys, torch, zinf_compile
if int(os.environ["WORLD_SIZE"]) > 1:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(30, 30)
compiled = torch.compile(model, backend="zero_infinity", options={"compute": "fx", "checkpoint": sys.argv[1]})
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    compiled(torch.randn(3, 30)).square().mean().backward()
    optimizer.step()
    if step == 0 and os.path.isdir(os.path.join(sys.argv[1], "save-00000003")):
        zinf_compile.load(sys.argv[1], model, optimizer)
    optimizer.zero_grad()
    zinf_compile.save(sys.argv[1], model, optimizer, wait=True)
"""

TAKEN = (
    r"zinf_compile: checkpoints of Linear, Adam in \S+: 1 checkpoint to keep and one that is written take [\d,]+ bytes of the "
    r"drive, [\d,]+ each, .*\n"
)
SEEDED = (
    r"zinf_compile: \S+save-00000003 is of 1 rank, loaded on 2: random generators of rank 0 are as they were saved, those of "
    r"rank 1 are seeded from the seed \d+ and the rank\n"
)


@pytest.mark.distributed
def test_a_plain_script_shows_them_once(tmp_path: Path) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "saves"
    program.write_text(PROGRAM)
    said = run_on_ranks(program, [str(folder)], 1, tmp_path)
    assert len(re.findall(TAKEN, said)) == 1, said
    assert said.count("zinf_compile: ") == 1, "and nothing else"
    (tmp_path / "rank 0").unlink()
    said = run_on_ranks(program, [str(folder)], 2, tmp_path)
    assert [len(re.findall(line, said)) for line in (TAKEN, SEEDED)] == [1, 1], said
    assert "zinf_compile: " not in (tmp_path / "rank 1").read_text()
