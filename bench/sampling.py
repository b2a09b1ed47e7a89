"""What sampling costs a step, parameter by parameter, and what constraints cost beside it.

    python -m bench.sampling [--vocab 151936] [--rows 16 64] [--kernel]
        CPU milliseconds of build_sampling and of sample, all rows with the same parameters; by
        torch's operators, or by the C++ kernel
    python -m bench.sampling --masks --tokenizer tokenizer.json[.gz] [--shape Qwen/Qwen2.5-0.5B]
        CPU milliseconds of decode steps of a model of that shape (random weights, transformers'
        own attention) with every row constrained and with none, in turn; the constraint process's
        time is counted too

CPU time, not wall time, on one thread, so that other programs disturb little. Cases take turns.
"""

import argparse
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from bench.shapes import config_kwargs, read_shapes
from engine.constraints.constraint_child import TokenizerSource
from engine.constraints.constraints import Constraints, Session
from engine.protocol import Constraint, SamplingParams
from engine.sampling.sampler import Drawer, build_sampling, sample
from engine.sampling.sampling_batch import SampleInput, SamplingState
from kernels.native_calls import library

CPU = torch.device("cpu")
NUM_PROMPT, NUM_OUTPUT = 200, 200
NUM_CONTEXT = 32

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "default": {},
    "temperature": {"temperature": 0.7},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.9, flat": {"top_p": 0.9, "temperature": 6.0},
    "min_p": {"min_p": 0.05},
    "penalties": {
        "temperature": 0.0,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
    "logit_bias": {"temperature": 0.0, "logit_bias": {i * 97: 1.0 for i in range(300)}},
    "logprobs 0": {"temperature": 0.0},
    "logprobs 5": {"temperature": 0.0},
    "mask": {"temperature": 0.0},
    "chat": {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "presence_penalty": 0.5},
}

SCHEMAS: tuple[Any, ...] = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "format": "email"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        },
        "required": ["name", "age", "email", "tags"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "number"}, "minItems": 20},
    {
        "type": "object",
        "properties": {
            "action": {"enum": ["search", "open", "close", "wait"]},
            "text": {"type": "string", "minLength": 40},
            "options": {"type": "object", "additionalProperties": {"type": "boolean"}},
        },
        "required": ["action", "text"],
        "additionalProperties": False,
    },
    {"type": "object"},
)


def sampling_costs(
    rows: int, vocab: int, repeats: int, drawer: Drawer | None = None
) -> dict[str, tuple[float, float]]:
    """Median CPU milliseconds of (build, sample) by case."""
    generator = torch.Generator().manual_seed(1)
    # As peaked as a trained model's: a nucleus of 0.9 has some hundred tokens or fewer.
    logits = torch.randn(rows, vocab, generator=generator) * 6
    inputs = {name: _inputs(name, rows, vocab) for name in CASES}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(repeats + 1):
        for name in CASES:
            fresh = logits.clone()
            start_s = time.thread_time()
            batch = build_sampling(inputs[name], CPU)
            built_s = time.thread_time()
            sample(fresh, batch, drawer)
            spent[name].append((built_s - start_s, time.thread_time() - built_s))
    return {
        name: (
            statistics.median(build for build, _ in pairs[1:]) * 1e3,
            statistics.median(drawn for _, drawn in pairs[1:]) * 1e3,
        )
        for name, pairs in spent.items()
    }


def _inputs(name: str, rows: int, vocab: int) -> list[SampleInput]:
    mask = None
    if name == "mask":
        mask = torch.zeros(-(-vocab // 32), dtype=torch.int32)
        mask[::7] = 0x5555
    made = []
    for row in range(rows):
        tokens = [(row * 7919 + i * i * 31) % vocab for i in range(NUM_PROMPT + NUM_OUTPUT)]
        params = SamplingParams(seed=row, **CASES[name])
        logprobs = int(name.partition(" ")[2]) if name.startswith("logprobs") else -1
        state = SamplingState(params, tokens[:NUM_PROMPT], (), logprobs)
        made.append(SampleInput(state, tokens[NUM_PROMPT:], mask))
    return made


class DecodeLoop:
    """Decode steps of one batch, every row constrained or none."""

    def __init__(
        self, shape: str, dtype: torch.dtype, tokenizer_json: Path, eos_id: int, rows: int
    ) -> None:
        described = read_shapes()[shape]
        config = AutoConfig.for_model(described["model_type"], **config_kwargs(described))
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self._model = model.to_empty(device="cpu").eval()
        self._model.tie_weights()
        for parameter in self._model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.uniform_(parameter, -0.05, 0.05)
            else:
                torch.nn.init.ones_(parameter)
        for buffer_name, buffer in self._model.named_buffers():
            if "inv_freq" in buffer_name:
                buffer.copy_(torch.logspace(0, -5, len(buffer)))
        self.vocab = int(described["vocab_size"])
        self._rows = rows
        self._source = TokenizerSource(str(tokenizer_json), self.vocab, (eos_id,))
        self.constraints = Constraints(2 * rows)
        self._cache = DynamicCache(config=config)
        self._states = [SamplingState(SamplingParams(seed=row), []) for row in range(rows)]
        self._tokens = torch.zeros(rows, 1, dtype=torch.int64)
        self._step = 0
        self.sessions = [self._open(row) for row in range(rows)]
        self.constraints.wait(self.sessions, 120)
        with torch.inference_mode():
            prompt = torch.zeros(rows, NUM_CONTEXT, dtype=torch.int64)
            self._model(prompt, past_key_values=self._cache, logits_to_keep=1)

    def _open(self, row: int) -> Session:
        schema = SCHEMAS[row % len(SCHEMAS)]
        return self.constraints.open(self._source, Constraint("json_schema", json.dumps(schema)))

    @torch.inference_mode()
    def step(self, constrained: bool) -> None:
        """One decode step; masks were asked for when the last one's tokens were known."""
        forward = self._model(self._tokens, past_key_values=self._cache, logits_to_keep=1)
        logits = forward.logits[:, -1].float()
        masks: list[torch.Tensor | None] = [None] * self._rows
        if constrained:
            self.constraints.wait(self.sessions)
            masks = [self.constraints.mask(session) for session in self.sessions]
        rows = [
            SampleInput(state, [0] * self._step, mask)
            for state, mask in zip(self._states, masks, strict=True)
        ]
        output = sample(logits, build_sampling(rows, CPU))
        assert not output.broken.any()
        tokens = output.token_ids
        self._tokens = tokens[:, None]
        self._step += 1
        if constrained:
            self._advance(tokens.tolist())

    def _advance(self, tokens: Sequence[int]) -> None:
        for row, token in enumerate(tokens):
            session = self.sessions[row]
            if session.finished:
                self.constraints.close(session)
                self.sessions[row] = self._open(row)
            else:
                self.constraints.advance(session, token)
        self.constraints.flush()

    def child_s(self) -> float:
        """CPU seconds of the constraint process."""
        child = self.constraints._process._child
        assert child is not None
        stat = Path(f"/proc/{child.pid}/schedstat").read_text(encoding="ascii")
        return int(stat.split()[0]) / 1e9


def mask_cost(loop: DecodeLoop, rounds: int, steps: int) -> dict[str, float]:
    """Median CPU milliseconds a step, unconstrained and constrained, in turn."""
    spent: dict[bool, list[float]] = {False: [], True: []}
    child: list[float] = []
    for _ in range(rounds + 1):
        for constrained in (False, True):
            child_s, start_s = loop.child_s(), time.process_time()
            for _ in range(steps):
                loop.step(constrained)
            if constrained:
                loop.constraints.wait(loop.sessions)
                child.append(loop.child_s() - child_s)
            spent[constrained].append(time.process_time() - start_s)
    plain, masked, beside = (
        statistics.median(values[1:]) / steps * 1e3 for values in (spent[False], spent[True], child)
    )
    return {
        "plain_ms": plain,
        "masked_ms": masked,
        "constraint_process_ms": beside,
        "share": (masked + beside) / plain - 1,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.sampling", description=__doc__)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--kernel", action="store_true", help="the C++ kernel's, by one thread")
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--eos", type=int, default=0, help="an id of the tokenizer that ends")
    parser.add_argument("--shape", default="Qwen/Qwen2.5-0.5B")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="float32",
        help="bfloat16 where the CPU multiplies it itself: elsewhere it is the slower one",
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.masks:
        if args.tokenizer is None:
            parser.error("--masks needs --tokenizer")
        _print_mask_cost(args)
        return 0
    print(f"{'CPU ms a step':<18}" + "".join(f"{rows:>10} rows{'':<8}" for rows in args.rows))
    native = library() if args.kernel else None
    if args.kernel and native is None:
        parser.error("no C++ kernels are installed")
    drawer = None
    if native is not None:
        native.set_threads(1)
        drawer = native.draw
    costs = [sampling_costs(rows, args.vocab, args.repeats, drawer) for rows in args.rows]
    for name in CASES:
        cells = [f"{cost[name][0]:>8.2f} + {cost[name][1]:<10.2f}" for cost in costs]
        print(f"{name:<18}" + " ".join(cells))
    return 0


def _print_mask_cost(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = args.tokenizer
        if path.suffix == ".gz":
            path = Path(folder) / "tokenizer.json"
            path.write_bytes(gzip.decompress(args.tokenizer.read_bytes()))
        for rows in args.rows:
            loop = DecodeLoop(args.shape, getattr(torch, args.dtype), path, args.eos, rows)
            cost = mask_cost(loop, args.repeats, 4)
            loop.constraints.shutdown()
            figures = ", ".join(f"{key} {value:.3f}" for key, value in cost.items())
            print(f"{rows} rows: {figures}")


if __name__ == "__main__":
    raise SystemExit(main())
