"""Fine-tune a model of transformers that is never whole in memory: made on meta, partitioned, trained, saved.

    python examples/finetune_hf.py --nvme DIR                       # a new Llama, on real text, its states on DIR's drive
    python examples/finetune_hf.py --nvme DIR --model FOLDER        # a local folder with config.json and safetensors
    python examples/finetune_hf.py --nvme DIR --trainer             # the same with transformers' Trainer instead of a plain loop
    torchrun --nproc-per-node 2 examples/finetune_hf.py --nvme DIR  # each rank has half of every parameter; also with --trainer

The backend holds no more than --device-memory on each rank. What is saved in --output plain transformers loads. The text is the
source code of Python's standard library; its tokens are bytes, unless FOLDER has a tokenizer.
"""

import argparse
import logging
import os
import resource
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from tqdm import tqdm

import zinf_compile


def read_tokens(folder):
    text = "".join(path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40])
    if folder and (Path(folder) / "tokenizer.json").exists():
        return torch.tensor(hf.AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


class Windows(torch.utils.data.Dataset):
    """Sequences of the text; the model predicts each token from those before it."""

    def __init__(self, tokens, length):
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train(model, data, steps, batch, learning_rate):
    """Train with a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    sampler = torch.utils.data.DistributedSampler(data, ranks, rank) if ranks > 1 else None
    loader = torch.utils.data.DataLoader(data, batch, shuffle=sampler is None, sampler=sampler, drop_last=True)
    bar = tqdm(zip(range(steps), loader, strict=False), total=steps, disable=rank != 0, unit="step")
    losses = []
    for _, inputs in bar:
        loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    return losses


def train_with_trainer(model, data, steps, batch, learning_rate, folder):
    """Train with transformers' Trainer."""
    settings = hf.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=rank != 0,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = zinf_compile.hf.adopt(hf.Trainer(model=model, args=settings, train_dataset=data))
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nvme", metavar="DIR", required=True, help="keep parameters, gradients and states on this folder's drive")
parser.add_argument("--device-memory", metavar="SIZE", default="512MiB", help="the most that training may hold on a rank")
parser.add_argument("--model", metavar="FOLDER", help="what to fine-tune; default: a new Llama, of 24M parameters with 8 layers")
parser.add_argument("--layers", type=int, default=8, help="of a new Llama")
parser.add_argument("--output", metavar="FOLDER", default="finetuned", help="where the result is saved")
parser.add_argument("--trainer", action="store_true", help="train with transformers' Trainer")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch", type=int, default=8, help="sequences per step and rank")
parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
parser.add_argument("--learning-rate", type=float, default=1e-3)
args = parser.parse_args()
if "RANK" in os.environ:
    dist.init_process_group()
rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
logging.basicConfig(format="%(name)s: %(message)s")
logging.getLogger("zinf_compile").setLevel(logging.INFO)
torch.manual_seed(1337)

if args.model:
    config = hf.AutoConfig.from_pretrained(args.model)
else:
    config = hf.LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        use_cache=False,
    )
with torch.device("meta"):
    model = hf.AutoModelForCausalLM.from_config(config)
places = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": args.nvme, "device_memory": args.device_memory}
zinf_compile.partition(model, checkpoint=args.model, device=device, **places)
model.compile(backend="zero_infinity", options={"device_memory": args.device_memory})

data = Windows(read_tokens(args.model), args.length)
if args.trainer:
    losses = train_with_trainer(model, data, args.steps, args.batch, args.learning_rate, args.output)
else:
    losses = train(model, data, args.steps, args.batch, args.learning_rate)

zinf_compile.save_safetensors(model, args.output)
if rank == 0:
    config.save_pretrained(args.output)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps, at most {held:.2f} GiB in this process")
    print(f"saved: hf.AutoModelForCausalLM.from_pretrained({args.output!r}) loads it")
if dist.is_initialized():
    dist.destroy_process_group()
