"""Speaks `engine.registration.main`'s protocol without torch: what a folder holds says how it ends.

refuse   refused with the file's text         crash   dies with the file's text on stderr
slow     works until it is told to stop       (else)  ready, with a pack folder written

A hub id's repository says it: acme/slow, acme/flaky (cut off, ready where a part is there already),
acme/good. Its commit is that of the revision: forty times its last character.
"""

import json
import sys
import time
from pathlib import Path


def event(name: str, source: str, **fields: object) -> None:
    print(json.dumps({"event": name, "source": source, **fields}), flush=True)


def register(source: str, dest: Path, dtype: str) -> None:
    folder = Path(source)
    print("a library prints this", flush=True)
    event("progress", source, phase="check", done_bytes=0, total_bytes=0)
    if (folder / "refuse").exists():
        message = (folder / "refuse").read_text()
        code = "internal_error" if message == "a bug" else "pickle_weights"
        print(f"trace of {message}", file=sys.stderr)
        event("refused", source, code=code, message=message)
        return
    if (folder / "crash").exists():
        sys.exit((folder / "crash").read_text())
    while (folder / "slow").exists():
        event("progress", source, phase="convert", done_bytes=1, total_bytes=100)
        time.sleep(0.05)
    content = (folder / "config.json").read_text()
    ready(source, f"rev-{content.strip()}-{dtype}", dest)


def ready(source: str, revision: str, dest: Path) -> None:
    pack = dest / revision
    pack.mkdir(exist_ok=True)
    (pack / "weights.bin").write_bytes(b"w" * 100)
    event("progress", source, phase="convert", done_bytes=100, total_bytes=100)
    event(
        "ready",
        source,
        pack_dir=str(pack),
        revision=revision,
        family="llama",
        dtype="float32",
        max_context=256,
        vocab_size=1000,
        weight_bytes=100,
        parity_error=0.0,
    )


def fetch(source: str, downloads: Path, dest: Path, dtype: str) -> None:
    repo, revision = source.split("@")
    commit = revision if len(revision) == 40 else f"{len(revision)}" * 40
    event("progress", source, phase="resolve", done_bytes=0, total_bytes=0)
    event("resolved", source, commit=commit)
    folder = downloads / f"{repo.replace('/', '--')}@{commit}"
    folder.mkdir(parents=True, exist_ok=True)
    event("preflight", source, family="llama", weight_bytes=100, download_bytes=50, max_context=9)
    part = folder / "model.safetensors.part"
    resumed = part.exists()
    part.write_bytes(b"p" * 25)
    while repo == "acme/slow":
        event("progress", source, phase="download", done_bytes=25, total_bytes=50)
        time.sleep(0.05)
    if repo == "acme/flaky" and not resumed:
        event("refused", source, code="network", message="the download was interrupted")
        return
    ready(source, f"rev-{commit[:6]}-{dtype}", dest)


def main(arguments: list[str]) -> None:
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    options = dict(pairs)
    for name, value in pairs:
        if name == "--source":
            register(value, Path(options["--dest"]), options["--dtype"])
        if name == "--hub":
            downloads = Path(options["--downloads"])
            fetch(value, downloads, Path(options["--dest"]), options["--dtype"])


if __name__ == "__main__":
    main(sys.argv[1:])
