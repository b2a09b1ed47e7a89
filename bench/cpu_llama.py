"""llama.cpp in a process of its own: `cpu_child.py`'s protocol, run by an environment that has it.

    python -m venv .venv-llama && .venv-llama/bin/pip install xllamacpp gguf
    .venv-llama/bin/python bench/cpu_llama.py FOLDER --kind bf16 --threads 2 --batch 16

Writes the folder's weights as GGUF once, beside the folder: bf16 as they are, q8_0, or q4_0 with
the vocabulary in q8_0, as llama.cpp's own converter has it at widths that are no multiple of 256.
Talks to llama.cpp's server inside this process, without HTTP; that server tells texts, not ids.
Needs nothing of Polyhost.
"""

import argparse
import json
import mmap
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """bf16 tensors of all shards, as uint16."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (size,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{name} is {entry['dtype']}, expected BF16")
            begin, end = entry["data_offsets"]
            array = np.frombuffer(data, np.uint16, (end - begin) // 2, 8 + size + begin)
            found[name] = array.reshape(entry["shape"])
    return found


def widened(array: np.ndarray) -> np.ndarray:
    """uint16 bits of bf16 to float32."""
    return (array.astype(np.uint32) << 16).view(np.float32)


def name_of(name: str) -> str:
    """transformers' name to GGUF's."""
    if name in WHOLE:
        return WHOLE[name]
    _, _, number, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{number}.{NAMES[module]}.{kind}"


def parts_of(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """GGUF's tensors of one of transformers': gate and up of stacked experts are two there."""
    if array.ndim != 3:
        return {name_of(name): array}
    block = f"blk.{name.split('.')[2]}"
    if name.endswith("gate_up_proj"):
        gate, up = np.split(array, 2, axis=1)
        return {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
    return {f"{block}.ffn_down_exps.weight": array}


def turned(array: np.ndarray, heads: int) -> np.ndarray:
    """llama's q and k in the order of GGUF's rotary embedding: pairs of neighbours."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    """One tensor in the file's kind."""
    if array.ndim == 1 or "ffn_gate_inp" in name:
        writer.add_tensor(name, widened(array))
    elif kind == "bf16":
        bits = np.ascontiguousarray(array).view(np.uint8)
        writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        # As llama.cpp's own converter leaves the vocabulary: not in four bits.
        four = kind == "q4_0" and name.startswith("blk.")
        scheme = gguf.GGMLQuantizationType["Q4_0" if four else "Q8_0"]
        packed = gguf.quants.quantize(widened(array), scheme)
        writer.add_tensor(name, packed, raw_dtype=scheme)


def write(folder: Path, dest: Path, kind: str) -> None:
    """The folder's model as one GGUF file."""
    config = json.loads((folder / "config.json").read_text())
    # transformers' qwen3_moe is GGUF's qwen3moe.
    arch = config["model_type"].replace("_", "")
    writer = gguf.GGUFWriter(str(dest), arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 1e4))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    words = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    words += [f"[unused{i}]" for i in range(len(words), config["vocab_size"])]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges(merges)
    for name, array in tensors(folder).items():
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = turned(array, heads if "q_proj" in name else kv_heads)
        for part, values in parts_of(name, array).items():
            add(writer, part, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def peak_bytes() -> int:
    """The most that this process has had in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def start(path: Path, threads: int, batch: int, positions: int) -> Any:
    """llama.cpp's server over the file, nothing cached between requests."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel = batch
    params.n_ctx = batch * positions
    params.n_batch = 2048
    params.n_ubatch = 512
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False
    params.warmup = True
    params.n_gpu_layers = 0
    return xllamacpp.Server(params)


def ask(server: Any, prompt: list[int], max_tokens: int) -> str:
    """One request; its text, for the server tells no ids there."""
    answer = server.handle_completions(
        {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": False,
        }
    )
    if isinstance(answer, (str, bytes)):
        answer = json.loads(answer)
    if not answer.get("choices"):
        raise SystemExit(f"llama.cpp said {json.dumps(answer)[:500]}")
    text: str = answer["choices"][0]["text"]
    return text


def main() -> None:
    """Answer until the input ends."""
    parser = argparse.ArgumentParser(prog="bench/cpu_llama.py")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=["bf16", "q8_0", "q4_0"], default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--positions", type=int, default=2048)
    args = parser.parse_args()
    path = args.folder.parent / f"{args.folder.name}.{args.kind}.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        write(args.folder, partial, args.kind)
        partial.rename(path)
    server = start(path, args.threads, args.batch, args.positions)
    print(json.dumps({"ready": True}), flush=True)
    with ThreadPoolExecutor(args.batch) as executor:
        for line in sys.stdin:
            asked = json.loads(line)
            started, cpu = time.perf_counter(), time.process_time()
            waiting = [
                executor.submit(ask, server, prompt, asked["max_tokens"])
                for prompt in asked["prompts"]
            ]
            texts = [future.result() for future in waiting]
            answer = {
                "seconds": time.perf_counter() - started,
                "cpu_seconds": time.process_time() - cpu,
                "texts": texts,
                "peak_bytes": peak_bytes(),
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
