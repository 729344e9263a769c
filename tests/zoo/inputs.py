"""The data that architectures train on: one function per kind of input, `(step) -> keywords of the model's forward`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from models import generator

from .architectures import WORDS

Keywords = dict[str, torch.Tensor]
LENGTH = 13


def words(step: int) -> Keywords:
    """Return tokens that are their own labels."""
    tokens = torch.randint(3, WORDS, (2, LENGTH), generator=generator(step))
    return {"input_ids": tokens, "labels": tokens}


def padded_words(step: int) -> Keywords:
    """Return tokens and other tokens as labels, some ignored, the second row padded."""
    tokens, labels = torch.randint(3, WORDS, (2, 2, LENGTH), generator=generator(step))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 9:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def _pictures(step: int, size: int) -> Keywords:
    return {"pixel_values": torch.randn(2, 3, size, size, generator=generator(step)), "labels": torch.tensor([1, 3])}


def pictures(step: int) -> Keywords:
    """Return pictures of 12 x 12 and their classes."""
    return _pictures(step, 12)


def larger_pictures(step: int) -> Keywords:
    """Return pictures of 16 x 16 and their classes."""
    return _pictures(step, 16)


def largest_pictures(step: int) -> Keywords:
    """Return pictures of 64 x 64, for networks that halve them five times, and their classes."""
    return _pictures(step, 64)


def clips(step: int) -> Keywords:
    """Return four frames of 12 x 12 and their classes."""
    return {"pixel_values": torch.randn(2, 4, 3, 12, 12, generator=generator(step)), "labels": torch.tensor([1, 3])}


def waves(step: int) -> Keywords:
    """Return sound, and what was said."""
    numbers = generator(step)
    return {
        "input_values": torch.randn(2, 240, generator=numbers),
        "labels": torch.randint(1, 13, (2, 5), generator=numbers),
    }


def unlabelled_waves(step: int) -> Keywords:
    """Return sound."""
    return {"input_values": waves(step)["input_values"]}


def long_waves(step: int) -> Keywords:
    """Return sound long enough for convolutions of wide strides, and what was said."""
    numbers = generator(step)
    return {
        "input_values": torch.randn(2, 3000, generator=numbers),
        "labels": torch.randint(3, WORDS, (2, 5), generator=numbers),
    }


def spectrograms(step: int) -> Keywords:
    """Return spectrograms [2, 12 times, 8 frequencies] and their classes."""
    return {"input_values": torch.randn(2, 12, 8, generator=generator(step)), "labels": torch.tensor([1, 3])}


def spoken_words(step: int) -> Keywords:
    """Return spectrograms [2, 8 frequencies, 20 times] and what was said."""
    numbers = generator(step)
    return {
        "input_features": torch.randn(2, 8, 20, generator=numbers),
        "labels": torch.randint(3, WORDS, (2, 7), generator=numbers),
    }


def listened_words(step: int) -> Keywords:
    """Return the same with times before frequencies."""
    keywords = spoken_words(step)
    return {**keywords, "input_features": keywords["input_features"].transpose(1, 2).contiguous()}


def prompted_pictures(step: int) -> Keywords:
    """Return pictures and words about them, which are the labels."""
    return {"pixel_values": _pictures(step, 12)["pixel_values"], **words(step)}


def captioned_pictures(step: int) -> Keywords:
    """Return pictures and words about them, to be told apart from each other's."""
    keywords = prompted_pictures(step)
    del keywords["labels"]
    return keywords


def pictures_in_words(step: int) -> Keywords:
    """Return words of which the first nine stand for a picture's patches."""
    keywords = prompted_pictures(step)
    tokens = torch.where(keywords["input_ids"] == 7, 8, keywords["input_ids"])
    tokens[:, :9] = 7
    return {
        "pixel_values": keywords["pixel_values"],
        "input_ids": tokens,
        "labels": tokens.masked_fill(tokens == 7, -100),
        "attention_mask": torch.ones_like(tokens),
        "token_type_ids": torch.zeros_like(tokens),
    }


INPUTS: dict[str, Callable[[int], Keywords]] = {
    function.__name__: function
    for function in (
        words, padded_words, pictures, larger_pictures, largest_pictures, clips, waves, unlabelled_waves, long_waves,
        spectrograms, spoken_words, listened_words, prompted_pictures, captioned_pictures, pictures_in_words,
    )
}  # fmt: skip
