"""peft's adapters on a partitioned model of one process: trained, merged, unmerged and unloaded as on an eager one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from models import Mlp, vectors
from tiers import compiled, options_for
from training import adamw, assert_same, assert_same_models, plain_step, twins


def adapted() -> Any:
    """Return a model with adapters, of which some weights are also trained whole."""
    settings: Any = {"r": 2, "target_modules": ["first", "second"], "modules_to_save": ["norm"], "init_lora_weights": False}
    return peft.get_peft_model(Mlp(), peft.LoraConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_adapters_are_merged_and_unmerged(tier: str, tmp_path: Path) -> None:
    models: list[Any] = list(twins(adapted))
    compiled(models[1], options_for((tier,) * 3, tmp_path) if tier != "device" else {})
    optimizers = [adamw(p for p in model.parameters() if p.requires_grad) for model in models]

    def train(number: int) -> None:
        losses = [plain_step(m, o, vectors(number)).detach() for m, o in zip(models, optimizers, strict=True)]
        assert_same("loss", *losses)
        assert_same_models(*models)

    train(0)
    for model in models:
        model.merge_adapter()
    assert_same_models(*models, where="merged")
    with torch.no_grad():
        assert_same("loss of the merged model", *(model(*vectors(5)) for model in models))
    for model in models:
        model.unmerge_adapter()
    train(1)
    plain = [model.merge_and_unload() for model in models]
    assert_same_models(*plain, where="unloaded")
    assert_same("loss of the unloaded model", *(model(*vectors(6)).detach() for model in plain))
    assert "lora" not in repr(plain[1])
