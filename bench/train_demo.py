"""Train the demo models that ship with the gateway, each from one public text.

    python -m bench.train_demo --data <corpora> --out gateway/demo_models [--model sherlock]

In: `<corpora>/<name>.txt.gz`. Out: one ordinary Hugging Face folder a model, replaced only once
its training has ended. What lives here: shapes, training loop, folder. What does not: text,
tokenizer and rows (`demo_data.py`), chats (`demo_chats.py`).

With `--steps` a run repeats itself on the same machine; with `--minutes` the schedule follows the
clock, so that a busy machine gets fewer steps but still the whole cosine. Prints its figures,
keeps no log.
"""

import argparse
import json
import math
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from bench.demo_chats import BOS, CHAT_TEMPLATE, END, EOS, SPECIAL_TOKENS, check_template
from bench.demo_data import (
    IGNORE,
    VOCAB_SIZE,
    Corpus,
    RowMaker,
    held_out_chat_rows,
    held_out_rows,
    read_corpus,
    special_id,
    train_tokenizer,
)

CONTEXT_LEN = 512
HIDDEN_SIZE = 128
NUM_LAYERS = 6


@dataclass(frozen=True, slots=True)
class Recipe:
    """One demo model: family, shape, texts, and what keeps it from learning them by heart."""

    config_class: type[PretrainedConfig]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    dropout: float
    prompts: tuple[str, ...]
    extra_corpora: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and on what a training runs; exactly one of `minutes` and `steps` is set."""

    minutes: float | None
    steps: int | None
    device: torch.device
    batch_rows: int = 4
    muon_lr: float = 0.02
    adam_lr: float = 6e-3
    final_lr_share: float = 0.01
    warmup_share: float = 0.04
    weight_decay: float = 0.1
    num_evals: int = 20
    seed: int = 20


# Three families and three head shapes on purpose: each is another path through an engine.
RECIPES = {
    "shakespeare": Recipe(
        config_class=LlamaConfig,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=416,
        dropout=0.1,
        prompts=("Tell me about love", "Hello, who are you?", "To be, or not to be"),
    ),
    "sherlock": Recipe(
        config_class=Qwen3Config,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=384,
        dropout=0.15,
        prompts=(
            "Tell me about the murder.",
            "Who are you?",
            "It was a cold night in Baker Street.",
        ),
        extra_corpora=("austen", "alice"),
    ),
    "python": Recipe(
        config_class=GemmaConfig,
        num_heads=4,
        num_kv_heads=1,
        head_dim=64,
        intermediate_size=352,
        dropout=0.1,
        prompts=("def quicksort(", "Write a function for binary search.", "def is_prime(n: int)"),
    ),
}


def build_model(recipe: Recipe, tokenizer: Tokenizer, seed: int) -> nn.Module:
    """A fresh model of the recipe's family with tied embeddings, in fp32."""
    torch.manual_seed(seed)
    config = recipe.config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=CONTEXT_LEN,
        tie_word_embeddings=True,
        bos_token_id=special_id(tokenizer, BOS),
        eos_token_id=special_id(tokenizer, EOS),
        pad_token_id=None,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )
    return model


def add_dropout(model: nn.Module, probability: float) -> None:
    """Dropout on all that enters the residual stream, which these families have no setting for."""

    def drop(module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return functional.dropout(output, probability, training=module.training)

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(drop)


def make_optimizers(model: nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms.

    Measured on shakespeare, 160 steps of 2048 tokens, one seed: held-out 4.76 nats/token against
    5.11 for AdamW alone at the best of five settings, for about a quarter more time a step.
    """
    inner = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    outer = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    return [
        torch.optim.Muon(inner, lr=plan.muon_lr, weight_decay=plan.weight_decay),
        torch.optim.AdamW(outer, lr=plan.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def lr_share(progress: float, plan: Plan) -> float:
    """Share of the peak learning rate: linear warmup, then a cosine; `progress` from 0 to 1."""
    if progress < plan.warmup_share:
        return max(progress / plan.warmup_share, 0.01)
    along = (progress - plan.warmup_share) / (1.0 - plan.warmup_share)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(along, 1.0)))
    return plan.final_lr_share + (1.0 - plan.final_lr_share) * cosine


def loss_sum(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    """Summed cross-entropy (nats) of int64 [n, length + 1] rows, and their number of targets."""
    inputs, targets = rows[:, :-1].clamp(min=0), rows[:, 1:]
    with torch.autocast(rows.device.type, dtype=torch.bfloat16):
        logits: Tensor = model(input_ids=inputs, use_cache=False).logits
    loss = functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return loss, int((targets != IGNORE).sum())


@torch.no_grad()
def mean_loss(model: nn.Module, rows: Tensor, plan: Plan) -> float:
    """Mean loss (nats a token) without dropout."""
    model.eval()
    parts = [loss_sum(model, chunk.to(plan.device)) for chunk in torch.split(rows, plan.batch_rows)]
    model.train()
    return sum(float(loss) for loss, _ in parts) / sum(count for _, count in parts)


def train(
    model: nn.Module, rows: RowMaker, evaluate: Callable[[int, float, float], None], plan: Plan
) -> int:
    """Train in place, call `evaluate(step, seconds, train_loss)` on the way, return the steps."""
    progress, step, evals_done = 0.0, 0, 0
    optimizers = make_optimizers(model, plan)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda _: lr_share(progress, plan)) for o in optimizers
    ]
    started_s = time.monotonic()
    recent: deque[float] = deque(maxlen=100)
    model.train()
    while progress < 1.0:
        # The extra texts teach English first and then make way: the model ends on its own book.
        extra_share = 0.5 * max(0.0, 1.0 - progress / 0.7)
        batch = rows.batch(plan.batch_rows, extra_share).to(plan.device)
        loss, count = loss_sum(model, batch)
        torch.autograd.backward(loss / count)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent.append(float(loss.detach()) / count)
        step += 1
        elapsed_s = time.monotonic() - started_s
        progress = step / plan.steps if plan.steps else elapsed_s / (60.0 * (plan.minutes or 1.0))
        for schedule in schedules:
            schedule.step()
        if progress * plan.num_evals >= evals_done + 1:
            evals_done = int(progress * plan.num_evals)
            evaluate(step, elapsed_s, sum(recent) / len(recent))
    return step


class BestCheckpoint:
    """Prints figures at each evaluation and keeps the weights with the lowest held-out loss."""

    def __init__(self, model: nn.Module, corpus: Corpus, tokenizer: Tokenizer, plan: Plan) -> None:
        self._model = model
        self._plan = plan
        self._rows = held_out_rows(corpus, tokenizer, CONTEXT_LEN)
        self._chat_rows = held_out_chat_rows(corpus, tokenizer, CONTEXT_LEN)
        num_targets = int((self._rows[:, 1:] != IGNORE).sum())
        self._bits_per_nat = num_targets / (math.log(2.0) * len(corpus.held_out.encode()))
        self._best_loss = math.inf
        self._best: dict[str, Tensor] = {}

    def evaluate(self, step: int, seconds: float, train_loss: float) -> None:
        """One line of figures; tokens/s counts evaluations as idle time."""
        held_out = mean_loss(self._model, self._rows, self._plan)
        tokens = step * self._plan.batch_rows * CONTEXT_LEN
        print(
            f"step {step:6d}  {seconds:7.1f} s  {tokens / seconds:7.0f} tokens/s"
            f"  train {train_loss:.3f}  held-out {self.describe(held_out)}",
            flush=True,
        )
        if held_out < self._best_loss:
            self._best_loss = held_out
            self._best = {k: v.detach().cpu().clone() for k, v in self._model.state_dict().items()}

    def restore(self) -> None:
        """Put the best weights back, rounded to the bf16 they ship in, and print their losses."""
        self._model.load_state_dict(self._best)
        self._model.to(torch.bfloat16).to(torch.float32)
        loss = mean_loss(self._model, self._rows, self._plan)
        chat_loss = mean_loss(self._model, self._chat_rows, self._plan)
        print(
            f"best, in bf16: held-out {self.describe(loss)}, held-out chats {chat_loss:.3f}",
            flush=True,
        )

    def describe(self, loss: float) -> str:
        """Nats a token and bits a byte of the held-out text."""
        return f"{loss:.3f} nats/token {loss * self._bits_per_nat:.3f} bits/byte"


def save_folder(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder beside `folder` and move it in: no reader sees half a model."""
    building = folder.with_name(f".{folder.name}.new")
    retired = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(building, ignore_errors=True)
    model.generation_config = GenerationConfig(
        bos_token_id=special_id(tokenizer, BOS),
        eos_token_id=[special_id(tokenizer, END), special_id(tokenizer, EOS)],
        pad_token_id=special_id(tokenizer, EOS),
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
    )
    model.to(torch.bfloat16).save_pretrained(building)
    save_tokenizer(tokenizer, building)
    for path in building.iterdir():  # safetensors lets only the owner read what it writes
        path.chmod(0o644)
    shutil.rmtree(retired, ignore_errors=True)
    if folder.exists():
        folder.rename(retired)
    building.rename(folder)
    shutil.rmtree(retired, ignore_errors=True)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The tokenizer's files, in the spelling that transformers 4 and 5 both read."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "additional_special_tokens": [t for t in SPECIAL_TOKENS if t not in (BOS, EOS)],
        "model_max_length": CONTEXT_LEN,
        "clean_up_tokenization_spaces": False,
    }
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def show_samples(folder: Path, prompts: tuple[str, ...]) -> None:
    """Load the finished folder as a user would and answer each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    check_template(tokenizer)
    torch.manual_seed(0)
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**encoded, max_new_tokens=200)[0, encoded["input_ids"].shape[1] :]
        print(f"--- {prompt} ({len(output)} tokens)\n{tokenizer.decode(output)}", flush=True)


def train_one(name: str, data: Path, out: Path, plan: Plan) -> None:
    """One demo model from text to folder."""
    recipe = RECIPES[name]
    corpus = read_corpus(data, name, recipe.extra_corpora)
    tokenizer = train_tokenizer(corpus)
    rows = RowMaker(corpus, tokenizer, CONTEXT_LEN, plan.seed)
    model = build_model(recipe, tokenizer, plan.seed).to(plan.device)
    add_dropout(model, recipe.dropout)
    num_params = sum(p.numel() for p in model.parameters())
    print(
        f"== {name}: {num_params} parameters, {rows.num_tokens} tokens of its own text", flush=True
    )
    best = BestCheckpoint(model, corpus, tokenizer, plan)
    started_s = time.monotonic()
    steps = train(model, rows, best.evaluate, plan)
    tokens = steps * plan.batch_rows * CONTEXT_LEN
    print(f"done: {steps} steps, {tokens} tokens, {time.monotonic() - started_s:.0f} s", flush=True)
    best.restore()
    save_folder(model.cpu(), tokenizer, out / name)
    show_samples(out / name, recipe.prompts)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the demo models of the gateway.")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with <corpus>.txt.gz files"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder that gets one folder a model"
    )
    parser.add_argument(
        "--model", choices=sorted(RECIPES), help="one model only (default: all, in turn)"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="training time a model (default 25)")
    length.add_argument(
        "--steps", type=int, help="optimizer steps a model; repeatable, unlike --minutes"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Train the chosen models one after another."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    minutes = None if args.steps else (args.minutes or 25.0)
    plan = Plan(minutes=minutes, steps=args.steps, device=device)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in [args.model] if args.model else sorted(RECIPES):
        train_one(name, args.data, args.out, plan)


if __name__ == "__main__":
    main()
