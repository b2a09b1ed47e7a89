"""`bench.constrained` and `bench.refusals` against a server of their own, with random weights.

    python -m bench.constrained_server DATA [--num 1000] [--out bench/results/cpu-constrained.json]

Lives here: the model (a small Llama with random weights, the GPT-2 tokenizer of DATA, one chat
template a format of tool calls), the server, the result file. Prompts name the functions on offer
and leave out their schemas: what is measured is what binds the answers, not what a model makes of a
prompt.
"""

import argparse
import asyncio
import gzip
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.constrained import case_source, http
from bench.machine import facts
from bench.refusals import measure
from bench.servers import Polyhost
from gateway.answer.tools.formats import FORMATS

TOKENIZER = "gpt2.tokenizer.json.gz"
EOS = 50256
VOCAB = 50257
CONTEXT = 4096
# What tells a template's format; in a comment, for the model would learn nothing from it.
SIGNS = {
    "hermes": "<tool_call>",
    "llama3_json": 'ipython "parameters": ',
    "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS] [ARGS]",
    "pythonic": "params_name1=params_value1",
}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name + '\\n' }}{% endfor %}"
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def make_model(folder: Path, tokenizer_gz: Path, sign: str, seed: int = 0) -> None:
    """A Hugging Face folder: logits spread as those of a trained model (deviation about 2)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        bos_token_id=EOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        model.lm_head.weight.mul_(2)
        model.model.embed_tokens.weight.normal_()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(gzip.decompress(tokenizer_gz.read_bytes()))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(f"{{# {sign} #}}{TEMPLATE}")


def run(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """Everything; the result file's content."""
    data_dir = work_dir / "data"
    settings = {"device_budget_bytes": 1 << 30}
    polyhost = Polyhost(data_dir, settings)
    for name in FORMATS:
        folder = work_dir / name
        make_model(folder, args.data / "tokenizers" / TOKENIZER, SIGNS[name])
        polyhost.add_model(f"random-{name}", folder, "float32")
    key = polyhost.new_key()
    server = polyhost.serve(key)
    result: dict[str, Any] = {
        "benchmark": "constrained",
        "machine": facts(),
        "num": args.num,
        "max_tokens": args.max_tokens,
        "concurrency": args.concurrency,
        "tokenizer": TOKENIZER,
    }
    with server.process:
        args.url, args.key, args.model = f"{server.base_url}/v1", key, "random-{format}"
        for kinds, unbounded in ((("call", "schema"), False), (("call", "schema"), True)):
            args.kinds, args.unbounded = kinds, unbounded
            args.num = args.num_unbounded if unbounded else result["num"]
            start_s = time.monotonic()
            tally = asyncio.run(http(args, case_source(args)))
            report = tally.report() | {"wall_s": time.monotonic() - start_s}
            result["unbounded" if unbounded else "bounded"] = report
        result["refusals"] = asyncio.run(measure(server.base_url, key, "random-hermes"))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Write and print it; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.constrained_server", description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--num-unbounded", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = run(args, Path(folder))
    text = json.dumps(result, indent=1, ensure_ascii=False)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    bounded = result["bounded"]
    good = bounded["finished_share"] >= 0.95 and bounded["valid_share"] == 1
    return 0 if good and result["unbounded"]["valid_share"] == 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
