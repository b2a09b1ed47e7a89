"""docs/checkpoints.md: what becomes of the checkpoints whose configurations tests/data has.

    python -m tests.checkpoints_page            write the page
    python -m tests.checkpoints_page --probe    the same, and run the parity probe of each (minutes)

Each checkpoint is judged as a hub's would be before its weights are fetched: the names of its
files, its config.json, the blueprint, the memory that the preflight reports.
tests/engine/registration/test_checkpoints.py compares the page with this and runs the probes.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engine.errors import RegistrationRefused
from engine.registration.blueprint import Blueprint
from engine.registration.download import check_listing
from engine.registration.hub import HubFile
from engine.registration.parity import probe_model
from engine.registration.preflight import KV_TOKENS, Preflight, Room, judge, preflight
from engine.registration.source import declared_of, describe

ROOT = Path(__file__).resolve().parent
DATA = ROOT / "data" / "checkpoints"
PAGE = ROOT.parent / "docs" / "checkpoints.md"
SMALL_FILES = ("config.json", "tokenizer.json")
DTYPES = ("bfloat16", "int8", "fp8", "int4")
FACTS = {
    "shapes": "shapes that several libraries agree on",
    "card": "model card or technical report",
    "class": "what transformers' class has as its defaults",
}
HEAD = """# Checkpoints

What becomes of {total} of the most used checkpoints: **{hosted} can be hosted**, {refused} are
refused. `python -m tests.checkpoints_page` writes this page from the configurations in
`tests/data/checkpoints`, each judged as `polyhost models inspect` judges one on a hub;
`tests/engine/registration/test_checkpoints.py` compares the page with the code, and the parity
probe passes for each that can be hosted, at full structure and reduced width.

No `config.json` here is the published file: each is written from known facts, which the last column
names, so that a published one may differ in fields that do not matter to these columns. Where a
published number of parameters is known, the configuration gives the same within 1 %. Tensor-name
indexes and weights could not be had for any of them; the names are those of transformers' classes.
The towers of multimodal models are not described, except where their size is part of that number.
Run `polyhost models inspect ID` for what is true of a revision today.

- **published as**: the type of the weights, or how they are quantized.
- **bfloat16, int8, fp8, int4**: memory of the weights in that type, in GiB where nothing else is
  said; of a multimodal model its text part. int8, fp8 and int4 round linear layers, int8 and int4
  stacked experts, too: with experts there is no fp8.
- **KV**: of a sequence of {tokens} tokens, in MiB, in the type that is computed in: bfloat16, or
  float32 where that is what is published.
"""
COLUMNS = ("checkpoint", "family", "published as", *DTYPES, "KV", "state", "facts from")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A line of tests/data/checkpoints/checkpoints.json.

    parameters  as published, in billions; 0 where it is not known
    whole       whether that counts a multimodal model's towers
    """

    id: str
    parameters: float
    whole: bool
    facts: str
    files: str

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration."""
        path = DATA / self.id.replace("/", "--") / "config.json"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


@dataclass(frozen=True, slots=True)
class Judged:
    """What is known of a checkpoint: `plan` and `found`, or the refusal."""

    checkpoint: Checkpoint
    family: str
    published: str
    plan: Blueprint | None = None
    found: Preflight | None = None
    code: str = ""
    why: str = ""


@cache
def checkpoints() -> tuple[Checkpoint, ...]:
    """All, in the page's order."""
    rows = json.loads((DATA / "checkpoints.json").read_text(encoding="utf-8"))
    return tuple(
        Checkpoint(
            row["id"],
            row["published_parameters"],
            row["of"] == "whole",
            row["facts"],
            row.get("files", "model.safetensors"),
        )
        for row in rows
    )


def judge_checkpoint(checkpoint: Checkpoint) -> Judged:
    """Everything but the probe, and nothing is kept."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
        (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
        said = describe(folder)
        kind = checkpoint.config.get("torch_dtype") or checkpoint.config.get("dtype") or ""
        text = checkpoint.config.get("text_config") or {}
        kind = kind or text.get("torch_dtype") or text.get("dtype") or "float32"
        seen = Judged(checkpoint, said["model_type"], said["source_format"] or kind)
        names = (*SMALL_FILES, checkpoint.files)
        try:
            check_listing(checkpoint.id, [HubFile(path, 1, "", "") for path in names])
            plan = judge(folder)
            declared = declared_of(folder)
        except RegistrationRefused as refusal:
            why = str(refusal).replace(f"{folder}", checkpoint.id).partition(";")[0]
            return Judged(*(checkpoint, seen.family, seen.published), code=refusal.code, why=why)
        # Where transformers passes over the type of a text part, the size of the files tells it.
        width = 4 if kind == "float32" else 2
        size = width * sum(tensor.numel() for tensor in plan.tensors.values())
        found = preflight(plan, "auto", size, 0, Path("/"), Room(), declared)
        return Judged(checkpoint, seen.family, seen.published, plan, found)


def num_parameters(judged: Judged) -> int:
    """What the published number counts."""
    plan = judged.plan
    assert plan is not None
    assert judged.found is not None
    if not judged.checkpoint.whole or plan.wrapper is None:
        return judged.found.num_parameters
    return sum(tensor.numel() for tensor in plan.wrapper.skeleton.parameters())


def row(judged: Judged) -> str:
    """Its line of the table."""
    found, sizes = judged.found, {}
    state = f"refused, `{judged.code}`: {judged.why}"
    kv = "-"
    if found is not None:
        sizes = {each.dtype: _size(each.weight_bytes) for each in found.choices}
        state = "hosted" + (f" as {found.hosted_as}" if found.hosted_as else "")
        state += {"embed": ", embeds", "classify": ", classifies"}.get(found.task, "")
        kv_bytes = found.choices[0].kv_bytes
        kv = f"{kv_bytes / 2**20:.0f}" if kv_bytes else "-"
    cells = (
        f"`{judged.checkpoint.id}`",
        f"`{judged.family}`",
        judged.published,
        *(sizes.get(dtype, "-") for dtype in DTYPES),
        *(kv, state, FACTS[judged.checkpoint.facts]),
    )
    return "| " + " | ".join(cells) + " |"


def _size(num_bytes: int) -> str:
    if num_bytes < 1 << 30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.1f}"


def render() -> str:
    """The page's text."""
    judged = [judge_checkpoint(each) for each in checkpoints()]
    hosted = sum(1 for each in judged if each.found)
    head = HEAD.format(
        total=len(judged), hosted=hosted, refused=len(judged) - hosted, tokens=f"{KV_TOKENS:,}"
    )
    table = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *map(row, judged)]
    return head + "\n" + "\n".join(table) + "\n"


def main() -> None:
    """Write the page."""
    if "--probe" in sys.argv:
        for each in checkpoints():
            plan = judge_checkpoint(each).plan
            if plan is not None:
                print(f"{each.id}: {probe_model(plan):.0e}")
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
