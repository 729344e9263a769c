"""From a row of the table to a model that returns its loss."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from models import Case
from torch import nn

from .architectures import AMPLIFYING, ARCHITECTURES
from .inputs import INPUTS


class Scored(nn.Module):
    """Calls a model of transformers with keywords; its own loss, or a mean over what it returns, is to shrink.

    Of sigmoids: the mean square of what a layer normalisation returns is one, and its gradients nothing but rounding.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        output = self.model(**inputs)
        loss = output.loss if "loss" in output else None
        return output[0].sigmoid().square().mean() if loss is None else loss


def build(name: str) -> nn.Module:
    """Build the architecture of one row."""
    row = ARCHITECTURES[name]
    config: Any = hf.CONFIG_MAPPING[name](**row.config)
    model = getattr(hf, f"AutoModel{row.head}").from_config(config)
    if model.loss_type is None:
        model.loss_type = "ForCausalLM"  # the one it would take, having logged that it does, which breaks the graph
    return Scored(model)


def case(name: str) -> Case:
    """Return one row's model and data."""
    keywords = INPUTS[ARCHITECTURES[name].inputs]
    return Case(lambda: build(name), lambda step, rank=0: (keywords(step),))


def rounded_little(name: str) -> Case:
    """Return the same, in double precision where the model amplifies rounding: the comparison still allows for that of fp32."""
    single = case(name)
    if name not in AMPLIFYING:
        return single

    def batch(step: int, rank: int = 0) -> tuple[Any, ...]:
        (inputs,) = single.batch(step, rank)
        return ({key: value.double() if value.is_floating_point() else value for key, value in inputs.items()},)

    return Case(lambda: single.build().double(), batch)
