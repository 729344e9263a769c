"""Losses over classes as people write them, and how far summing in another order may move their numbers in fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, CLASSES = 8, 33
SHAPE = (3, 7)
"""Rows of tokens."""

ULP = 2.0**-24
"""Half of the distance of fp32 numbers near 1: what one rounding costs."""

LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of logits [rows, tokens, classes] and targets [rows, tokens]."""


def _flat(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.flatten(0, 1), targets.flatten()


def _class_weights(logits: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 2, CLASSES, dtype=logits.dtype)


def _smoothed_by_hand(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Smooth labels as transformers' LabelSmoother does."""
    log_probs, labels = -torch.log_softmax(logits, -1), targets[..., None]
    ignored = labels.eq(-100)
    nll = log_probs.gather(-1, labels.clamp(min=0)).masked_fill(ignored, 0.0)
    smooth = log_probs.sum(-1, keepdim=True).masked_fill(ignored, 0.0)
    count = ignored.numel() - ignored.long().sum()
    return 0.9 * nll.sum() / count + 0.1 * smooth.sum() / (count * log_probs.shape[-1])


LOSSES: dict[str, LossOf] = {
    "mean": lambda z, y: F.cross_entropy(*_flat(z, y)),
    "sum": lambda z, y: F.cross_entropy(*_flat(z, y), reduction="sum"),
    "ignored_class": lambda z, y: F.cross_entropy(*_flat(z, y), ignore_index=3),
    "ignored_class_0": lambda z, y: F.cross_entropy(*_flat(z, y), ignore_index=0, reduction="sum"),
    "smoothed": lambda z, y: F.cross_entropy(*_flat(z, y), label_smoothing=0.1),
    "smoothed_sum": lambda z, y: F.cross_entropy(*_flat(z, y), label_smoothing=0.1, reduction="sum"),
    "weighted": lambda z, y: F.cross_entropy(*_flat(z, y), weight=_class_weights(z)),
    "weighted_sum": lambda z, y: F.cross_entropy(*_flat(z, y), weight=_class_weights(z), reduction="sum"),
    "weighted_smoothed": lambda z, y: F.cross_entropy(*_flat(z, y), weight=_class_weights(z), label_smoothing=0.1),
    "classes_in_the_middle": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "capped": lambda z, y: F.cross_entropy(*_flat(torch.tanh(z / 3) * 3, y)),
    "scaled": lambda z, y: F.cross_entropy(*_flat(z / 4, y)),
    "class_terms": lambda z, y: F.cross_entropy(*_flat((z + _class_weights(z)) / 2, y)),
    "shifted": lambda z, y: F.cross_entropy(*_flat(z[:, :-1], y[:, 1:])),
    "last_token": lambda z, y: F.cross_entropy(z[:, -1], y[:, 0]),
    "by_nll_loss": lambda z, y: F.nll_loss(torch.log_softmax(z, -1).flatten(0, 1), y.flatten()),
    "gathered": lambda z, y: -torch.log_softmax(z, -1).gather(-1, y.clamp(min=0)[..., None]).mean(),
    "masked_by_hand": lambda z, y: (F.cross_entropy(*_flat(z, y), reduction="none") * (y.flatten() > 5)).sum() / (y > 5).sum(),
    "smoothed_by_hand": _smoothed_by_hand,
    "per_item": lambda z, y: F.cross_entropy(*_flat(z, y), reduction="sum") / (y != -100).sum(),
    "squared": lambda z, y: F.cross_entropy(*_flat(z, y)) ** 2,
}
"""Each can be chunked."""

LEFT_ALONE: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], str]] = {
    "one for each token": (
        lambda z, y: F.cross_entropy(*_flat(z, y), reduction="none"),
        "its gradient is not one number for all tokens",
    ),
    "logits returned": (lambda z, y: (F.cross_entropy(*_flat(z, y)), z), "its logits are returned"),
    "logits in half returned": (lambda z, y: (F.cross_entropy(*_flat(z, y)), z.bfloat16()), "its logits are used elsewhere"),
    "log-probabilities returned": (
        lambda z, y: (F.nll_loss(*_flat(p := torch.log_softmax(z, -1), y)), p),
        "its log-probabilities are returned",
    ),
    "accuracy": (lambda z, y: (F.cross_entropy(*_flat(z, y)), z.argmax(-1)), "its logits are used elsewhere"),
    "entropy": (
        lambda z, y: F.nll_loss(*_flat(p := torch.log_softmax(z, -1), y)) + (p.exp() * p).sum(),
        "its log-probabilities are used",
    ),
    "focal": (
        lambda z, y: ((n := F.cross_entropy(*_flat(z, y), reduction="none")) * (1 - torch.exp(-n))).mean(),
        "its gradient",
    ),
    "two targets": (
        lambda z, y: F.nll_loss(*_flat(p := torch.log_softmax(z, -1), y)) + F.nll_loss(*_flat(p, CLASSES - 1 - y)),
        "it is compared with several targets",
    ),
    "over tokens": (lambda z, y: torch.log_softmax(z, 1).sum(-1).mean(), "its softmax is not over the head's classes"),
    "some classes": (
        lambda z, y: F.cross_entropy(z[..., :20].flatten(0, 1), y.flatten().clamp(max=19)),
        "a part of the classes is used",
    ),
    "logsumexp": (lambda z, y: (z.logsumexp(-1) - z.gather(-1, y[..., None])[..., 0]).mean(), "it is written with logsumexp"),
    "probabilities as targets": (lambda z, y: F.cross_entropy(z[:, 0], torch.ones(3, CLASSES) / CLASSES), "its"),
}
"""And these can't: with what is said of each."""


class Head(nn.Module):
    """A linear head, and a loss of its logits."""

    def __init__(self, loss: Callable[..., object], *, bias: bool = False, hidden: int = HIDDEN, classes: int = CLASSES) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, classes, bias=bias)
        self.loss = loss

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> object:
        return self.loss(self.head(x), targets)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and targets."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(*SHAPE, HIDDEN, generator=numbers), torch.randint(CLASSES, SHAPE, generator=numbers)


@dataclasses.dataclass(frozen=True, slots=True)
class Exact:
    """A loss and its gradients in fp64, and how far each number may be off in fp32."""

    values: tuple[torch.Tensor, ...]
    """The loss, the gradients of hidden states, weight and, where there is one, bias."""
    bounds: tuple[torch.Tensor, ...]


def exact(head: Head, x: torch.Tensor, targets: torch.Tensor) -> Exact:
    """Compute in fp64, and bound what fp32 may make of it in any order of summation.

    A logit is a sum of `hidden` products; log-softmax adds as many exponentials as there are classes; the gradient of an input
    adds as many products, that of a weight one for each token; a sum of n terms is off by at most n half-ulps of the sum of their
    magnitudes. An error of logits moves a probability by its share of itself: hence the factor of the largest logit's terms. Some
    30 more operations (exp, log, the cap, weights, ratios) are each off by one or two half-ulps.
    """
    weight, bias = head.head.weight.detach().double().requires_grad_(), head.head.bias
    bias = None if bias is None else bias.detach().double().requires_grad_()
    hidden = x.detach().double().requires_grad_()
    logits = F.linear(hidden, weight, bias)
    logits.retain_grad()
    loss = head.loss(logits, targets)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert logits.grad is not None
    grads, inputs = logits.grad.abs().flatten(0, 1), hidden.detach().abs().flatten(0, 1)
    terms = inputs @ weight.detach().abs().t() + (0 if bias is None else bias.detach().abs())
    operations = 2 * (weight.shape[1] + 2 * weight.shape[0] + grads.shape[0] + 30)
    share = operations * ULP * max(1.0, float(terms.max()))
    at_loss = float(torch.log_softmax(logits.detach(), -1).abs().max()) * max(1.0, float(loss.detach().abs()))
    # the target's probability and 1 cancel in a gradient: the bound is that of the larger
    largest = grads.amax(1, keepdim=True).expand_as(grads)
    size = torch.maximum(grads, largest / weight.shape[0])
    values: list[torch.Tensor | None] = [loss.detach(), hidden.grad, weight.grad]
    bounds = [
        torch.tensor(share * at_loss, dtype=torch.float64),
        share * (size @ weight.detach().abs()).view_as(hidden),
        share * (size.t() @ inputs),
    ]
    if bias is not None:
        values.append(bias.grad)
        bounds.append(share * size.sum(0))
    return Exact(tuple(v for v in values if v is not None), tuple(bounds))


def assert_within(what: str, found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    """Require each number to be as near as its bound."""
    off = (found.detach().double() - expected).abs()
    assert found.shape == expected.shape, f"{what}: {found.shape}, not {expected.shape}"
    assert bool((off <= bound).all()), f"{what}: off by {float((off - bound).max()):.1e} more than the bound allows"
