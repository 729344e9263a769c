"""Train a byte-level GPT on real text, its parameters, gradients and optimizer states partitioned over the ranks.

    python examples/train_gpt.py                                    # one process, about two minutes on two cores
    torchrun --nproc-per-node 2 examples/train_gpt.py               # each rank holds half of every parameter
    python examples/train_gpt.py --nvme DIR --device-memory 256MiB  # all of them on DIR's drive, within a cap
    python examples/train_gpt.py --eager                            # the same script without the backend

The text is the source code of Python's standard library, which every machine has; --text FILE takes another.
"""

import argparse
import logging
import math
import os
import resource
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm


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
    def __init__(self, layers, width, heads, length):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
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
    if file:
        data = Path(file).read_bytes()
    else:
        data = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def draw_batch(text, batch, length, generator):
    starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
    rows = torch.stack([text[s : s + length + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def memory_gib(device):
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else host


@torch.no_grad()
def generate(model, prompt, count):
    tokens = prompt
    for _ in tqdm(range(count), desc="writing", leave=False, disable=rank != 0):
        logits = model(tokens[:, -len(prompt[0]) :])[:, -1] / 0.8
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
    return bytes(tokens[0, len(prompt[0]) :].tolist()).decode(errors="replace")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--eager", action="store_true", help="train without the backend, to compare")
parser.add_argument("--nvme", metavar="DIR", help="keep parameters, gradients and optimizer states on this folder's drive")
parser.add_argument("--device-memory", metavar="SIZE", help="the most that the backend may hold, such as 256MiB")
parser.add_argument("--text", metavar="FILE", help="text to learn; default: Python's standard library")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks")
parser.add_argument("--length", type=int, default=128, help="bytes per sequence")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--learning-rate", type=float, default=2e-3)
parser.add_argument("--losses", metavar="FILE", help="write one loss per line")
args = parser.parse_args()
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
if "RANK" in os.environ:
    dist.init_process_group()
rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
if args.batch % ranks or (args.eager and ranks > 1):
    parser.error(f"{ranks} ranks: --batch must be divisible by them, and --eager trains on one process")

logging.basicConfig(format="%(name)s: %(message)s")
logging.getLogger("zinf_compile").setLevel(logging.INFO)
torch.manual_seed(1337)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
text = load_text(args.text)
model = GPT(args.layers, args.width, heads=args.width // 64, length=args.length).to(device)
parameters = sum(p.numel() for p in model.parameters())
if not args.eager:
    options = {"device_memory": args.device_memory} if args.device_memory else {}
    if args.nvme:
        options |= {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": args.nvme}
    model = torch.compile(model, backend="zero_infinity", options=options)

optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
warmup = max(1, args.steps // 20)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / args.steps))
)
generator = torch.Generator().manual_seed(1337)
losses = []
bar = tqdm(range(args.steps), disable=rank != 0, unit="step", desc=f"{parameters / 1e6:.1f}M parameters on {ranks} rank(s)")
for _ in bar:
    tokens, targets = (t[rank::ranks].to(device) for t in draw_batch(text, args.batch, args.length, generator))
    loss = model(tokens, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if ranks > 1:
        dist.all_reduce(loss := loss.detach() / ranks)
    losses.append(loss.item())
    speed = f"{args.batch * args.length * (bar.format_dict['rate'] or 0):,.0f} tokens/s"
    bar.set_postfix_str(f"loss {losses[-1]:.3f}, {speed}, {memory_gib(device):.2f} GiB per rank")

torch.manual_seed(1337)
written = generate(model, text[1000 : 1000 + args.length].unsqueeze(0).to(device), 200)
if rank == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {args.steps} steps. The model writes:\n{written}")
    if args.losses:
        Path(args.losses).write_text("".join(f"{value:.6f}\n" for value in losses))
if dist.is_initialized():
    dist.destroy_process_group()
