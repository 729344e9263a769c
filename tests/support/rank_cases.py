"""What several ranks do with one kind of model each; `test_distributed.py` starts the ranks and reads the results."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import rank_cases_checkpoint
import rank_cases_training
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import CASES, IN, WORDS, Mlp, ReturnsParameters, generator, loss_of, vectors
from rank_compare import Loss, Ranks, assert_equal, backward, compare_training, compare_values, sgd
from rank_models import Normed, Pair, Table, Transformer, tiny_gpt2, tiny_llama
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.cli.models import GPT
from zinf_compile.runtime.comm.collectives import DeviceCollectives, PeerToPeer
from zinf_compile.runtime.comm.shard_ranges import shard_numel
from zinf_compile.sharded.parameter import unit_of

LENGTHS = ((16, 16), (24, 16), (24, 32), (16, 24))
"""Sequence lengths of rank 0 and rank 1, by step."""
OUTER = ("first.weight", "first.bias", "last.weight", "last.bias")
NOT_COMPILED = {"breaks_between_blocks": OUTER, "breaks_inside_blocks": OUTER}
"""Parameters that no graph uses: Dynamo gives up on a loop with a break in it and compiles what the loop calls."""


KEEPS_GRAPHS = {
    "accumulation", "clip_norm_that_is_not_finite", "scaler_finds_inf_on_one_rank", "closures", "fused_adamw",
    "own_optimizer_state_loaded", "model_beside_that_is_not_compiled", "gathered_to_read", "gathered_to_write",
    "gathered_and_raising", "called_while_gathered", "eager_reads", "loading_what_does_not_fit",
    "accumulation_onto_zeros", "backward_twice", "clip_by_global_norm", "clip_by_value", "hooks",
    "gradients_without_backward", "eager_optimizer_state_loaded",
}  # fmt: skip
"""Cases about what is done with a model and its gradients: they train one of two models, whose graphs may be those of before."""


def run_cases(rank: int, size: int, names: list[str]) -> dict[str, str]:
    """Run cases one after the other; return each one's traceback, empty if it passed.

    Each case partitions over a process group of its own, so that a failing one leaves nothing behind for the next; those that
    keep graphs share a group until one fails.
    """
    outcome: dict[str, str] = {}
    shared: Ranks | None = None
    for name in sorted(names, key=KEEPS_GRAPHS.__contains__):
        ranks = shared if name in KEEPS_GRAPHS else None
        if ranks is None:
            torch.compiler.reset()
            ranks = Ranks(rank, size, {"process_group": dist.new_group(list(range(size))), "timeout_s": 20})
        try:
            find_case(name)(ranks)
            outcome[name] = ""
        except (Exception, pytest.fail.Exception):
            outcome[name] = traceback.format_exc(limit=-8)  # the innermost frames
        everywhere: list[Any] = [None] * size
        dist.all_gather_object(everywhere, outcome[name])
        shared = ranks if name in KEEPS_GRAPHS and not any(everywhere) else None
    return outcome


def find_case(name: str) -> Callable[[Ranks], None]:
    """Find a case by its name: "train" and one of `models.CASES`, or a function of one of three modules."""
    if name.startswith("train "):
        return lambda ranks: train(ranks, name.removeprefix("train "))
    for module in (rank_cases_training, rank_cases_checkpoint):
        if hasattr(module, name):
            return getattr(module, name)  # type: ignore[no-any-return]
    return globals()[name]  # type: ignore[no-any-return]


def loss_by_name(name: str) -> Loss:
    """Return the loss of one of `models.CASES` on the batch of a step and rank."""
    batch = CASES[name].batch
    return lambda model, rank, step: loss_of(model(*batch(step, rank)))


def of_vectors(model: Any, rank: int, step: int) -> torch.Tensor:
    """Return the loss of a model of `vectors`; the batches of two ranks differ in size."""
    loss: torch.Tensor = model(*vectors(step, rank, rows=3 + rank))
    return loss


def train(ranks: Ranks, name: str) -> None:
    compare_training(ranks, CASES[name].build, loss_by_name(name), whole=NOT_COMPILED.get(name, ()))


def sgd_momentum(ranks: Ranks) -> None:
    compare_training(ranks, CASES["odd_shapes"].build, loss_by_name("odd_shapes"), optimizer=sgd)


def under_autocast(loss: Loss) -> Loss:
    """Return the same loss, computed in half precision where autocast says so."""

    def half(model: Any, rank: int, step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, rank, step)

    return half


def autocast(ranks: Ranks) -> None:
    compare_training(ranks, CASES["attention"].build, under_autocast(loss_by_name("attention")))


def autocast_gpt(ranks: Ranks) -> None:
    """With small buckets a tied embedding travels in full precision for its lookup and in half for the head; sizes are uneven."""

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        words = torch.randint(67, (2, 3, 17), generator=generator(step, rank))
        return model(*words.unbind())  # type: ignore[no-any-return]

    def build() -> nn.Module:
        return GPT(layers=2, width=18, heads=2, vocabulary=67, length=17)

    for bucket in ("4KiB", "32MiB"):
        torch.compiler.reset()
        compare_training(Ranks(ranks.rank, ranks.size, {**ranks.options, "bucket": bucket}), build, under_autocast(loss), steps=2)


def autocast_halves_what_travels(ranks: Ranks) -> None:
    """Count the bytes sent and held: of layers half, of the norm, which computes in full precision, all."""
    torch.manual_seed(7)
    model = Mlp()
    compiled = ranks.compile(model)
    found = []
    for loss in (under_autocast(of_vectors), of_vectors):
        backward(loss, compiled, ranks.rank, 0)  # partitions the model and makes the context
        context = unit_of(model.first.weight).context
        sent = 0

        def send(tensor: torch.Tensor, peer: int, tag: int, original: Any = context.gathers._send) -> Any:
            nonlocal sent
            sent += tensor.numel() * tensor.element_size()
            return original(tensor, peer, tag)

        context.gathers._send = send
        backward(loss, compiled, ranks.rank, 0)
        del context.gathers._send
        found.append((sent, zinf_compile.memory(model)["peak"]["gathered"]))
    (half_sent, half_held), (sent, held) = found
    layers = {name: p for name, p in model.named_parameters() if not name.startswith("norm")}
    twice = [*layers.values(), layers["second.weight"]]  # the backward needs that one again
    assert sent - half_sent == 2 * (ranks.size - 1) * sum(unit_of(p).valid for p in twice)
    assert held == 4 * sum(p.numel() for p in model.parameters())
    assert held - half_held == 2 * sum(p.numel() for p in layers.values())


def collectives_cast_on_the_way(ranks: Ranks) -> None:
    """Both kinds fill full units of a narrower type with the bits of the whole, cast; of padding there is more than of values."""
    for kind in (PeerToPeer, DeviceCollectives):
        collectives = kind(ranks.options["process_group"])
        wholes = [torch.randn(numel, generator=generator(numel)) for numel in (0, 1, 7, 12)]
        sizes = [shard_numel(whole.numel(), ranks.size) for whole in wholes]
        padded = [F.pad(whole, (0, size * ranks.size - whole.numel())) for whole, size in zip(wholes, sizes, strict=True)]
        shards = [whole[ranks.rank * size : (ranks.rank + 1) * size] for whole, size in zip(padded, sizes, strict=True)]
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            fulls = [collectives.full_buffer(whole.numel(), dtype, whole.device) for whole in wholes]
            collectives.all_gather(shards, fulls)
            for full, whole in zip(fulls, wholes, strict=True):
                assert_equal(full, whole.to(dtype), f"{kind.__name__} of {whole.numel()} elements")


def returned(ranks: Ranks) -> None:
    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        value, _, *others = model(*vectors(step, rank))
        return loss_of((value, *others))

    model = compare_training(ranks, ReturnsParameters, loss)
    itself = ranks.compile(model)(*vectors(0))[1]
    assert itself is model.layer.weight
    with pytest.raises(zinf_compile.PartitionedParameterError, match=r"layer\.weight.*gathered\(model\)"):
        itself[0]


def compiled_by_block(ranks: Ranks) -> None:
    def prepare(ranks: Ranks, model: Any) -> Any:
        for block in model.blocks:
            block.compile(backend=BACKEND, options=ranks.options)
        return model

    compare_training(ranks, CASES["blocks"].build, of_vectors, prepare=prepare, whole=OUTER)


def two_of_one_class(ranks: Ranks) -> None:
    def prepare(ranks: Ranks, model: Any) -> Any:
        model.first.compile(backend=BACKEND, options=ranks.options)
        model.second.compile(backend=BACKEND, options=ranks.options)
        return model

    compare_training(ranks, Pair, of_vectors, prepare=prepare)


def one_function_two_models(ranks: Ranks) -> None:
    def prepare(ranks: Ranks, model: Any) -> Any:
        model.call = ranks.compile(model.call)
        return model

    compare_training(ranks, Pair, of_vectors, prepare=prepare)


def train_eval_train(ranks: Ranks) -> None:
    def with_evaluation(name: str) -> Loss:
        def loss(model: Any, rank: int, step: int) -> torch.Tensor:
            value = loss_by_name(name)(model, rank, step)
            model.eval()
            with torch.no_grad():
                evaluated = loss_by_name(name)(model, rank, step + 100)
            model.train()
            return value + evaluated

        return loss

    for name in ("mutated_buffers", "dropout"):
        compare_training(ranks, CASES[name].build, with_evaluation(name))


def lengths_differ(ranks: Ranks) -> None:
    """Ranks meet new lengths, and compile graphs for them, in steps of their own; all run the same collectives."""
    captured: list[int] = []

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        value = next_word(model, rank, step)
        if not isinstance(model, Transformer):
            captured.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return value

    torch._dynamo.utils.counters.clear()
    compare_training(ranks, Transformer, loss, steps=len(LENGTHS))
    by_rank: list[Any] = [None] * ranks.size
    dist.all_gather_object(by_rank, captured)
    grew = [[after > before for before, after in itertools.pairwise(counts)] for counts in by_rank]
    assert any(here != there for here, there in zip(*grew, strict=True)), f"no rank compiled alone: {by_rank}"


def batches_differ_where_only_buffers_are(ranks: Ranks) -> None:
    """A graph that has nothing to move but a buffer to synchronise, compiled anew by one rank alone."""

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        return model(*vectors(step, rank, rows=3 + rank * step))  # type: ignore[no-any-return]

    compare_training(ranks, Normed, loss)


def lengths_differ_gpt2(ranks: Ranks) -> None:
    compare_training(ranks, tiny_gpt2, next_word, steps=len(LENGTHS))


def lengths_differ_llama(ranks: Ranks) -> None:
    compare_training(ranks, tiny_llama, next_word, steps=len(LENGTHS), as_aot_eager=True)


def next_word(model: Any, rank: int, step: int) -> torch.Tensor:
    """Cross entropy on a sequence of this rank's length."""
    words = torch.randint(WORDS, (2, LENGTHS[step][rank] + 1), generator=generator(step, rank))
    logits = model(words[:, :-1])
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def seeds_differ(ranks: Ranks) -> None:
    """All ranks start from rank 0's parameters and buffers, whatever they drew themselves."""
    torch.manual_seed(0)
    first = Table()
    torch.manual_seed(ranks.rank)
    model = Table()
    result = ranks.compile(model)(torch.ones(4, IN))
    compare_values(model, first, "after the first call")
    assert_equal(result, first(torch.ones(4, IN)), "the first result")


def several_models(ranks: Ranks) -> None:
    """Models that one process trains in turn keep apart."""
    names = ["mlp", "tied", "mlp"]
    torch.manual_seed(0)
    models: list[nn.Module] = [CASES[name].build() for name in names]
    for name, model in zip(names, models, strict=True):
        loss_by_name(name)(ranks.compile(model), ranks.rank, 0).backward()
    before = [zinf_compile.full_state_dict(m) for m in models]
    torch.optim.SGD(models[2].parameters(), lr=0.1).step()
    after = [zinf_compile.full_state_dict(m) for m in models]
    if ranks.rank == 0:
        moved = [{key for key in old if not torch.equal(old[key], new[key])} for old, new in zip(before, after, strict=True)]
        assert moved == [set(), set(), set(before[2])]
