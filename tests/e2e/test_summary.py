"""The summary of what a model does, from a trace of it."""

from __future__ import annotations

import re

import dump_targets
import pytest
import torch
from torch import nn

from zinf_compile.cli.main import main
from zinf_compile.cli.models import GPT
from zinf_compile.cli.trace import trace


class Conv(nn.Module):
    """A convolution, and attention within its result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).mT.contiguous().unflatten(2, (4, 2)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).sum()


def test_operations_are_counted() -> None:
    """2 x positions x channels² x 3 of the convolution; 4 x heads x length² x width of attention, five halves of it backward."""
    length = 1000
    forward, backward = (s.summary for s in trace(lambda: (Conv(), torch.zeros(1, 8, length, requires_grad=True))))
    conv, attention = 2 * length * 8 * 8 * 3, 4 * 4 * length * length * 2
    assert [f"{found} MFLOP" for found in re.findall(r", ([\d.]+) MFLOP", forward)] == [f"{(conv + attention) / 1e6:.2g} MFLOP"]
    assert f"{(2 * conv + attention * 5 / 2) / 1e6:.2g} MFLOP" in backward


def gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    tokens = torch.zeros(1, 16, dtype=torch.long)
    return GPT(layers=6, width=32, heads=2, vocabulary=50, length=16), (tokens, tokens)


def test_a_model_is_written_as_one_of_its_blocks() -> None:
    forward, backward = trace(gpt, options={"bucket": "1KiB"})
    for scheduled, blocks in ((forward, r"# h\.\d … h\.[45] as h\.[01]: \d+ lines"), (backward, r"# h\.\d … h\.\d as h\.[45]: ")):
        assert re.search(blocks, scheduled.summary)
        written = scheduled.summary.splitlines()
        left = sum(int(n) for n in re.findall(r"as h\.\d: (\d+) lines", scheduled.summary))
        transfers = sum("  # " in line for line in scheduled.text.splitlines())
        assert len(written) < 0.6 * (len(written) + left)
        assert transfers <= len(written) + left
    assert len(forward.summary.splitlines()) < len(forward.text.splitlines()) / 4


def test_the_command_prints_it_and_every_operator_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["dump", "mlp", "--graph", "forward"]
    short, whole = (main([*arguments, *more]) or capsys.readouterr().out for more in ([], ["--ops"]))
    assert "region 0: 5 operators of up and down, 34 MFLOP\n" in short
    assert "mm = mm(x, permute_2)\n" not in short
    assert "relu = relu(mm)\n" in whole
    assert "region" not in whole
    assert main([*arguments, "--ops", "--format", "json"]) == 2
    assert "--ops and --format json exclude each other" in capsys.readouterr().err


def test_parts_of_values_keep_their_names() -> None:
    found = trace(dump_targets.tiny_gpt, options={"chunk_loss": True})
    assert re.search(r"^region .* # logits of tokens 0 to \d+ [\d,]+ B$", found[0].summary, re.MULTILINE)
