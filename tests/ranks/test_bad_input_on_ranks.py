"""Misuse on several ranks: errors before any collective, so that no rank waits for another."""

from __future__ import annotations

import re

import pytest
from rank_bad_input import ANSWERS, LOCAL, LOCAL_OF_MODELS, MODEL_READS, READS, WRITES, one_rank_reads, refusals
from ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_one_rank_that_reads_a_hollow_parameter_is_told_and_blocks_nobody() -> None:
    found, others = run_ranks(one_rank_reads, 2)
    assert others == {}
    assert len(found) == 2 * len(READS) + len(WRITES) + len(MODEL_READS) + len(ANSWERS) + len(LOCAL | LOCAL_OF_MODELS)
    refused = {name: text for name, text in found.items() if not name.startswith("answer ")}
    loading = refused.pop("model load_state_dict")  # PyTorch collects what each parameter raised
    assert loading.startswith("RuntimeError: Error(s) in loading state_dict")
    assert "load_full_state_dict to load" in loading
    for name, text in refused.items():
        assert re.match(r"PartitionedParameterError: ((?!__).* reads )?parameter first.weight", text), (name, text)
        assert re.search(r"gathered\(model|full_state_dict\(model\)|before its first compiled call", text), (name, text)
    answers = {name: text for name, text in found.items() if name not in refused}
    assert answers.pop("model load_state_dict") == loading
    assert not {name: text for name, text in answers.items() if not text.startswith("gave ")}
    assert "ShardedParameter(first.weight, shape=[13, 7], dtype=torch.float32, rank 0 of 2)" in answers["answer repr"]


MODEL, PARAMETER = "UnsupportedModelError: the ", "PartitionedParameterError: .*"
REFUSALS = {
    "max_norm": MODEL + r"model changes parameter embedding.weight .*rank_bad_input.py\".*self.embedding\(words\)",
    "sparse": MODEL + r"gradient of parameter embedding.weight is sparse .*sparse=False.*self.embedding\(words\)",
    "DDP": MODEL + "model is wrapped in DistributedDataParallel; .* compile the bare model",
    "FSDP": MODEL + "model is wrapped in FullyShardedDataParallel; .* compile the bare model",
    "fully_shard": MODEL + "model is wrapped in FSDPModule; .* compile the bare model",
    "DDP after": PARAMETER + "first.weight.* wrapping the model in DDP or FSDP is neither possible nor needed",
    "FSDP after": PARAMETER + "first.weight.* wrapping the model in DDP or FSDP is neither possible nor needed",
    "fully_shard after": PARAMETER + "first.weight.* wrapping the model in DDP or FSDP is neither possible nor needed",
    "nested": PARAMETER + r"gathered\(write=True\) inside .*first.weight whole already: give write=True to the outer",
    "called": PARAMETER + r" first.weight is gathered: leave `with zinf_compile.gathered\(...\)` first",
    "converted": PARAMETER + " nothing was changed. .*(first.weight became .*float16|converted on rank 0)",
    "limit": PARAMETER + "first.weight .*forward .*recompile_limit = 2 .*Raise torch._dynamo",
    "limit again": PARAMETER + "first.weight .*forward .*recompile_limit = 2 .*Raise torch._dynamo",
}


def test_what_all_ranks_do_wrong_is_refused_on_each_of_them() -> None:
    for found in run_ranks(refusals, 2):
        assert list(found) == list(REFUSALS)
        for name, message in REFUSALS.items():
            assert re.match(message, found[name], re.DOTALL), (name, found[name])
