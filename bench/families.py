"""Which of transformers' causal LM and multimodal types can be hosted: docs/families.md.

    python -m bench.families                              the page, on standard output
    python -m bench.families --write docs/families.md     into the file
    python -m bench.families --check docs/families.md     whether the file still says what is so
    python -m bench.families llama gpt_oss                only these

Every type of them that transformers registers goes through registration's own judgement (folder,
blueprint, parity probe) with a tiny configuration from `family_configs.py`. The least KV is counted
in transformers' own cache after an eager pass, so it does not depend on what we derive.
"""

import argparse
import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.family_configs import MODEL_TYPES, WRAPPERS, tiny_config
from engine.errors import RegistrationRefused
from engine.modules.transformers_backend import bind_weights, build_skeleton
from engine.pack import is_indexer
from engine.registration.blueprint import Blueprint, kv_groups
from engine.registration.encoder_blueprint import plan_model
from engine.registration.parity import TOLERANCE, draw_weights, probe_model
from engine.registration.probe_size import probe_configs
from engine.registration.source import load_config

LEAST_TOKENS = 3  # fewer than any window
INDEXER_KEYS = ("indexer_keys", "idx_keys")
"""What layers of the library's cache call them."""
PLAIN, TEXT_CLASS, FLAT = "plain modules", "text class", "flat wrapper"

_HOSTED_HEAD = (
    "| family | layers run as | tried with | largest error | KV bytes a token | at least | ratio |",
    "|---|---|---|---|---|---|---|",
)
_REFUSED_HEAD = ("| family | refused by | code | why |", "|---|---|---|---|")
_INTRO = """# Families

This page lists which types of transformers can be hosted, and why the others are refused: all
causal language models, and all multimodal types, of which the text part is hosted.
`python -m bench.families --write docs/families.md` writes it; a part is compared with the code by
`tests/engine/running/test_families.py`, all of it by `make soak` and `--check`. transformers
{version} registers {total} types: **{hosted} can be hosted**, {refused} are refused.

## How a type is judged

Each type goes through the steps of registration ([packs.md](packs.md#registration)) with a tiny
random configuration (`bench/family_configs.py`):

1. `source`: the folder is checked.
2. `blueprint`: the module tree is checked.
3. `probe`: the parity probe compares our attention over pages with transformers' eager attention
   over whole prompts. Three prompts run in one batch, two in chunks of 6 and one token by token.
   Blocks are scattered over a pool full of holes, memory that was never written is NaN, and
   windows (6) are shorter than the prompts (23, 9, 14).

Registration runs the same probe on a truncated model of every configuration. So the table says that
a family works, and the probe says it of the model at hand.

The columns of the first table:

- **largest error**: of any logit in float32, in standard deviations of the logits. The weights are
  random, drawn so that attention is neither flat nor on one token; {tolerance:.0e} is allowed.
- **KV bytes a token**: of the tiny configuration in float32, all layers, while no window is full;
  **at least**: what transformers' own cache holds for it. What recurrent and convolutional layers
  keep is of one size, however long a sequence is: bytes **a sequence**. Pages and extents add what
  [memory.md](memory.md#kv-groups-blocks-chunks-extents) says.
- **layers run as**: `plain modules` are transformers' own with our attention. Of a multimodal type
  (a wrapper of a text model and towers for images or sound) the towers are never loaded, and the
  logits are compared with the wrapper's own. `text class`: its text part says the same as the
  causal class of that part's type, so the pack is that class's, and fused and native layers apply
  where the class has them. `flat wrapper`: the wrapper itself runs, with our attention.
"""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A family that comes out right. Bytes are of the tiny configuration in float32."""

    family: str
    tried: str
    error: float
    kv_bytes: int
    least_bytes: int
    runs_as: str = PLAIN
    state_bytes: int = 0
    least_state_bytes: int = 0

    def line(self) -> str:
        """Its row of the table."""
        ratio = (self.kv_bytes + self.state_bytes) / (self.least_bytes + self.least_state_bytes)
        kept = _bytes(self.kv_bytes, self.state_bytes)
        least = _bytes(self.least_bytes, self.least_state_bytes)
        return (
            f"| `{self.family}` | {self.runs_as} | {self.tried} | {self.error:.0e} "
            f"| {kept} | {least} | {ratio:.2f} |"
        )

    def stable(self) -> str:
        """The row without what differs between machines."""
        return self.line().replace(f" {self.error:.0e} ", " ")


def _bytes(kv_bytes: int, state_bytes: int) -> str:
    if not state_bytes:
        return str(kv_bytes)
    states = f"{state_bytes} a sequence"
    return f"{kv_bytes} + {states}" if kv_bytes else states


@dataclass(frozen=True, slots=True)
class Refused:
    """A family that is refused: by which step, with which code, and what the operator reads."""

    family: str
    step: str
    code: str
    why: str

    def line(self) -> str:
        """Its row of the table."""
        return f"| `{self.family}` | {self.step} | `{self.code}` | {self.why} |"

    def stable(self) -> str:
        """The row without what differs between machines."""
        return f"| `{self.family}` | {self.step} | `{self.code}` |"


Verdict = Hosted | Refused


def judge(family: str) -> Verdict:
    """What registration says of the family's tiny configuration."""
    step = "source"
    try:
        with tempfile.TemporaryDirectory() as folder:
            tiny_config(family).save_pretrained(folder)
            config = load_config(Path(folder))
            step = "blueprint"
            found = plan_model(config, Path(folder))
        step = "probe"
        error = probe_model(found)
    except RegistrationRefused as refusal:
        return Refused(family, step, refusal.code, _short(str(refusal)))
    groups = found.kv_groups
    if WRAPPERS.get(family, {}).get("text", {}) is None:  # it is as large as it is published
        config = next(probe_configs(config.get_text_config()))
        groups = kv_groups(config)
    kv_bytes = sum(g.values_per_token for g in groups) * torch.float32.itemsize
    how = PLAIN
    if found.wrapper is not None:
        how = TEXT_CLASS if found.is_text_class else FLAT
    states = sum(
        len(g.states) * math.prod(g.shape) * getattr(torch, g.dtype).itemsize
        for g in found.state_groups(torch.float32)
    )
    least, least_states = least_bytes(config)
    return Hosted(family, _tried(found), error, kv_bytes, least, how, states, least_states)


def least_bytes(config: Any) -> tuple[int, int]:
    """What transformers' own cache holds of this model in float32: bytes a token, and of states
    that do not grow."""
    model = build_skeleton(config, torch.float32, "eager")
    bind_weights(model, draw_weights(model, 0))
    with torch.inference_mode():
        tokens = torch.arange(3, 3 + LEAST_TOKENS)[None]
        output = model(input_ids=tokens, use_cache=True)
        cache = getattr(output, "past_key_values", None) or getattr(output, "cache_params", None)
        if cache is None:  # some wrappers do not hand it on
            cache = transformers.DynamicCache()
            model(input_ids=tokens, use_cache=True, past_key_values=cache)
    cache = getattr(cache, "self_attention_cache", cache)
    layers = cache.layers
    attending = [layer for layer in layers if getattr(layer, "keys", None) is not None]
    held = sum(layer.keys.numel() + layer.values.numel() for layer in attending)
    chosen = [getattr(layer, name, None) for layer in attending for name in INDEXER_KEYS]
    held += sum(keys.numel() for keys in chosen if keys is not None)
    states = [state for layer in layers for state in _states(layer)]
    states += [state for state in getattr(cache, "linear_cache", ()) if len(state)]
    kept = sum(state.numel() * state.element_size() for state in states)
    return int(held * torch.float32.itemsize // LEAST_TOKENS), kept


def _states(layer: Any) -> Iterator[torch.Tensor]:
    """What a layer of the library's cache keeps beside keys and values."""
    for name in ("conv_states", "recurrent_states"):
        for state in (getattr(layer, name, None) or {}).values():
            if state is not None:
                yield state


def _short(message: str) -> str:
    """In one line, without the words that every refusal begins with."""
    message = " ".join(message.split())
    return re.sub(r"^.*?( is not supported| failed the parity check): ", "", message)


def _tried(found: Blueprint) -> str:
    names = " ".join(found.tensors)
    groups = [group for group in found.kv_groups if not is_indexer(group.layers[0])]
    num_indexers = sum(len(g.layers) for g in found.kv_groups if is_indexer(g.layers[0]))
    num_layers = found.config.get_text_config().num_hidden_layers
    keeping = {layer for group in found.state_groups(torch.float32) for layer, _ in group.states}
    parts = [f"states in {len(keeping)} of {num_layers} layers"] if keeping else []
    attending = sum(len(group.layers) + len(group.readers) for group in groups)
    parts += [
        f"window in {len(group.layers) + len(group.readers)} of {attending} layers"
        for group in groups
        if group.window
    ]
    parts += [
        f"chunks in {len(group.layers)} of {num_layers} layers" for group in groups if group.chunk
    ]
    if num_indexers:
        parts.append(f"indexers in {num_indexers} of {num_layers} layers")
    num_readers = sum(len(group.readers) for group in groups)
    if num_readers:
        parts.append(f"KV of others read by {num_readers} of {num_layers} layers")
    said = {
        "sinks": "sinks" in names,
        "soft cap": getattr(found.config.get_text_config(), "attn_logit_softcapping", None),
        "experts": "experts." in names,
        "q/k norms": "q_norm" in names or "q_layernorm" in names or "query_layernorm" in names,
        "learned positions": any(word in names for word in ("wpe", "position_emb", "embed_pos")),
        "several KV shapes": len({(g.num_kv_heads, g.k_dim) for g in groups}) > 1,
        "V unlike K": any(g.k_dim != g.v_dim and not g.v_in_k for g in groups),
        "latents": any(g.v_in_k for g in groups),
        f"`{type(found.skeleton).__name__}`": found.wrapper is not None,
        "one KV head": groups and all(g.num_kv_heads == 1 and not g.v_in_k for g in groups),
    }
    return ", ".join([*parts, *(name for name, is_so in said.items() if is_so)])


def page(verdicts: Iterable[Verdict]) -> str:
    """The whole of docs/families.md."""
    verdicts = list(verdicts)
    hosted = [verdict for verdict in verdicts if isinstance(verdict, Hosted)]
    refused = [verdict for verdict in verdicts if isinstance(verdict, Refused)]
    counts = Counter((r.step, r.code, _kind(r.why)) for r in refused)
    intro = _INTRO.format(
        version=transformers.__version__,
        total=len(verdicts),
        hosted=len(hosted),
        refused=len(refused),
        tolerance=TOLERANCE,
    )
    lines = [intro, "## Hosted", "", *_HOSTED_HEAD, *(row.line() for row in hosted), ""]
    lines += ["## Refused", "", "| families | refused by | code | why |", "|---|---|---|---|"]
    lines += [
        f"| {count} | {step} | `{code}` | {why} |"
        for (step, code, why), count in counts.most_common()
    ]
    lines += ["", *_REFUSED_HEAD, *(row.line() for row in refused), ""]
    return "\n".join(lines)


def _kind(why: str) -> str:
    """A reason without the names and numbers of one family."""
    for beginning, kind in (
        ("it has layers of type", "it has layers that are not full, sliding or chunked attention"),
        ("its logits differ", "its logits differ from transformers"),
        ("it uses an attention mask", "it uses an attention mask of its own"),
        ("transformers cannot build", "transformers cannot build it here"),
        ("it cannot run", "it cannot run with a paged KV cache"),
    ):
        if why.startswith(beginning):
            return kind
    return why.partition(" (")[0]


def contradictions(text: str, verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Rows of a page that are not as the code says now, errors aside."""
    lines = text.splitlines()
    for verdict in verdicts:
        if isinstance(verdict, Hosted):
            rows = [_without_error(line) for line in lines if len(line.split("|")) == 9]
            found = verdict.stable() in rows
        else:
            found = any(line.startswith(verdict.stable()) for line in lines)
        if not found:
            yield verdict.line()


def _without_error(line: str) -> str:
    cells = line.split("|")
    return "|".join([*cells[:4], " ", *cells[5:]]) if len(cells) == 9 else line


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry."""
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__)
    parser.add_argument("families", nargs="*", default=[], help="only these types")
    parser.add_argument("--write", type=Path, help="write the page into this file")
    parser.add_argument("--check", type=Path, help="compare the page in this file")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    began_s = time.monotonic()
    verdicts = []
    for family in options.families or MODEL_TYPES:
        verdicts.append(judge(family))
        print(verdicts[-1].line(), file=sys.stderr)
    print(f"{time.monotonic() - began_s:.1f} s", file=sys.stderr)
    text = page(verdicts)
    if options.check:
        wrong = list(contradictions(options.check.read_text(encoding="utf-8"), verdicts))
        print("\n".join(["not so in the page:", *wrong] if wrong else ["the page is right"]))
        return 1 if wrong else 0
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
