"""Train a small GPT on words, its parameters, gradients and optimizer states partitioned over the ranks.

    python examples/train_gpt.py                                   # one process, a minute and a half on two cores
    torchrun --nproc-per-node 2 examples/train_gpt.py              # each rank holds half of every parameter
    python examples/train_gpt.py --nvme DIR --device-memory 128MiB  # all of them on DIR's drive, within a cap
    python examples/train_gpt.py --eager                           # the same script without the backend

The text is the reference manual that comes with Python; --text FILE takes another. Where matplotlib is installed, the loss and
the memory of each tier are drawn into --picture.
"""

import argparse
import importlib.util
import math
import os
import re
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import zinf_compile

MIB = 2**20


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (y.view(batch, length, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary, layers, width, heads, length):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self.init)
        self.head.weight = self.wte.weight

    def init(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens, targets=None):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load_text(file):
    """Return a file's text, or the paragraphs of Python's reference manual."""
    if file:
        return Path(file).read_text(errors="replace")
    paragraphs = (" ".join(part.split()) for topic in topics.values() for part in re.split(r"\n\s*\n", topic))
    prose = [p for p in paragraphs if len(p) > 60 and p[0].isupper() and p[-1] in ".:" and not re.search(r"::=|>>>|\*\*", p)]
    return "\n".join(dict.fromkeys(prose))


class Words:
    """Tokens: the distinct words and signs of a text, a word with the space before it."""

    def __init__(self, text):
        self.texts = sorted(set(self.split(text)))
        self.number = {text: number for number, text in enumerate(self.texts)}

    @staticmethod
    def split(text):
        return re.findall(r" ?[A-Za-z]+| ?[^A-Za-z\s]|\s", text)

    def encode(self, text):
        return torch.tensor([self.number[word] for word in self.split(text)])

    def decode(self, tokens):
        return "".join(self.texts[token] for token in tokens)


def draw_batch(tokens, batch, length, generator):
    starts = torch.randint(len(tokens) - length - 1, (batch,), generator=generator)
    rows = torch.stack([tokens[s : s + length + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def memory_of(model, folder):
    """Return the MiB that each tier held at most during the last step, or holds on the drive; none where nothing moves."""
    memory = {side: kinds["peak_last_step"]["all"] for side, kinds in zinf_compile.stats(model).get("memory", {}).items()}
    if folder:  # unnamed files, visible only as open descriptors
        opened = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        own = [path.stat() for path in opened if os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep)]
        memory["nvme"] = sum({file.st_ino: file.st_blocks * 512 for file in own}.values())
    return {tier: count / MIB for tier, count in memory.items()}


def draw_picture(file, losses, memory, caps):
    """Plot the loss, and the memory of each tier with its cap."""
    from matplotlib import pyplot as plt  # noqa: PLC0415  (which only the picture needs)

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(range(1, len(losses) + 1), losses)
    left.set(title="loss", xlabel="step", ylabel="nats per token", ylim=(0, None))
    for tier, color in (("device", "C0"), ("host", "C2"), ("nvme", "C1")):
        held = [step[tier] for step in memory if tier in step]
        cap = (caps.get(f"{tier}_memory") or 0) / MIB
        if held:
            right.plot(range(1, len(held) + 1), held, color=color, label=f"{tier}: {max(held):.1f} MiB")
        if held and 0 < cap < 10 * max(held):  # a cap far above would dominate the plot
            right.axhline(cap, color=color, linestyle="--", label=f"cap of {tier} memory: {cap:.0f} MiB")
    right.set(title="memory by tier", xlabel="step", ylabel="MiB", ylim=(0, None))
    right.legend()
    figure.savefig(file, dpi=110)


def say(stage, text):
    if rank == 0:
        print(f"{stage + ':':8} {text}", flush=True)


@torch.no_grad()
def generate(model, prompt, count):
    tokens = prompt
    for _ in tqdm(range(count), desc="writing", leave=False, disable=rank != 0):
        logits = model(tokens[:, -len(prompt[0]) :])[:, -1] / 0.5
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
    return tokens[0, len(prompt[0]) :].tolist()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--eager", action="store_true", help="train without the backend, to compare")
parser.add_argument("--nvme", metavar="DIR", help="keep parameters, gradients and optimizer states on this folder's drive")
parser.add_argument("--device-memory", metavar="SIZE", help="the most that training may hold, such as 128MiB")
parser.add_argument("--text", metavar="FILE", help="text to learn; default: Python's reference manual")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks")
parser.add_argument("--length", type=int, default=48, help="tokens per sequence")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--width", type=int, default=192)
parser.add_argument("--learning-rate", type=float, default=2e-3)
parser.add_argument("--losses", metavar="FILE", help="write one loss per line")
parser.add_argument("--picture", metavar="FILE", default="train.png", help="draw loss and memory; default: train.png")
args = parser.parse_args()
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
if "RANK" in os.environ:
    dist.init_process_group()
rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
if args.batch % ranks or (args.eager and ranks > 1):
    parser.error(f"{ranks} ranks: --batch must be divisible by them, and --eager trains on one process")

torch.manual_seed(1337)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
text = load_text(args.text)
words = Words(text)
tokens = words.encode(text)
model = GPT(len(words.texts), args.layers, args.width, heads=max(1, args.width // 64), length=args.length).to(device)
parameters = sum(p.numel() for p in model.parameters())
sizes = f"{args.layers} layers of width {args.width}, {len(words.texts):,} words"
say("model", f"{parameters / 1e6:.1f}M parameters: {sizes}; learns a text of {len(tokens):,}")
if args.eager:
    say("plan", "eager PyTorch, all in memory")
else:
    options = {"device_memory": args.device_memory} if args.device_memory else {}
    if args.nvme:
        options |= {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": args.nvme}
    model = torch.compile(model, backend="zero_infinity", options=options)
    where = f"on {os.path.realpath(args.nvme)}'s drive" if args.nvme else "in memory"
    cap = f", at most {args.device_memory} in memory" if args.device_memory else ""
    say("plan", f"parameters, gradients and states of AdamW {where}, over {ranks} rank(s){cap}")

optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
warmup = max(1, args.steps // 20)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / args.steps))
)
generator = torch.Generator().manual_seed(1337)
losses, memory, ends = [], [], [time.perf_counter()]
bar = tqdm(range(args.steps), disable=rank != 0, unit="step", leave=False, mininterval=1)
for _ in bar:
    inputs, targets = (t[rank::ranks].to(device) for t in draw_batch(tokens, args.batch, args.length, generator))
    loss = model(inputs, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if ranks > 1:
        dist.all_reduce(loss := loss.detach() / ranks)
    losses.append(loss.item())
    ends.append(time.perf_counter())
    memory.append({} if args.eager else memory_of(model, args.nvme))
    bar.set_postfix_str(f"loss {losses[-1]:.3f}")

caps = {} if args.eager else zinf_compile.stats(model).get("caps", {})
states = parameters * 16 / MIB / ranks
if not args.eager and not memory[-1]:
    say("memory", f"parameters, gradients and states, {states:.1f} MiB, stay where PyTorch has them")
elif memory[-1]:
    most = {tier: max(step.get(tier, 0) for step in memory) for tier in memory[-1]}
    held = ", ".join(f"{tier} {count:.1f} MiB" for tier, count in most.items())
    limit = f" under a cap of {caps['device_memory'] / MIB:.0f} MiB" if caps["device_memory"] else ""
    say("memory", f"at most {held} per rank{limit}; the states are {states:.1f} MiB")
first = ends[1] - ends[0]
speed = args.batch * args.length * (args.steps - 1) / max(ends[-1] - ends[1], 1e-9)
say("speed", f"{speed:,.0f} tokens/s; the first step, which compiles, took {first:.0f} s")
say("loss", f"{losses[0]:.3f} -> {losses[-1]:.3f} in {args.steps} steps, {ends[-1] - ends[0]:.0f} s")

torch.manual_seed(1337)
written = generate(model, tokens[: args.length].unsqueeze(0).to(device), 100)
if rank == 0:
    if args.losses:
        Path(args.losses).write_text("".join(f"{value:.6f}\n" for value in losses))
    if importlib.util.find_spec("matplotlib"):
        draw_picture(args.picture, losses, memory, caps)
    say("picture", args.picture if importlib.util.find_spec("matplotlib") else "none: matplotlib isn't installed")
    say("writes", words.decode(written))
if dist.is_initialized():
    dist.destroy_process_group()
