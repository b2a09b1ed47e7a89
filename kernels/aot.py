"""Compile every declared configuration for every architecture without a GPU; check its limits.

    python -m kernels.aot [--arch 80 90 100] [--only SUBSTRING] [--json FILE]

A process of its own: `TRITON_INTERPRET` is read when `@triton.jit` runs, and an interpreted kernel
cannot be compiled. What the compiler says is the truth about registers, spills and shared memory;
about speed it says nothing. Triton's cache makes a second run of unchanged kernels quick.

A configuration fails that spills registers or keeps anything in local memory (both go through the
cache to DRAM in the innermost loop), needs more shared memory than a block may have, or more
registers than a multiprocessor has for one block.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels import (
    delta_rule,
    expert_products,
    expert_rows,
    expert_tiles,
    few_rows,
    fp8_linear,
    gate_mul,
    head_norm,
    int4_linear,
    kv_write,
    logit_edits,
    page_copy,
    paged_decode,
    paged_join,
    paged_prefill,
    rms_norm,
    rotary,
    sampling,
    scaled_linear,
    short_conv,
    ssd,
    tail_cut,
    top_logprobs,
)
from kernels.triton_api import ARCHS, HAS_TRITON, Declared

if HAS_TRITON:
    import triton
    import triton.backends.nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

# Modules whose DECLARED is compiled; one line a kernel file.
DECLARED: tuple[Declared, ...] = (
    *delta_rule.DECLARED,
    *expert_products.DECLARED,
    *expert_rows.DECLARED,
    *expert_tiles.DECLARED,
    *few_rows.DECLARED,
    *fp8_linear.DECLARED,
    *gate_mul.DECLARED,
    *head_norm.DECLARED,
    *int4_linear.DECLARED,
    *kv_write.DECLARED,
    *logit_edits.DECLARED,
    *page_copy.DECLARED,
    *paged_decode.DECLARED,
    *paged_join.DECLARED,
    *paged_prefill.DECLARED,
    *rms_norm.DECLARED,
    *rotary.DECLARED,
    *sampling.DECLARED,
    *scaled_linear.DECLARED,
    *short_conv.DECLARED,
    *ssd.DECLARED,
    *tail_cut.DECLARED,
    *top_logprobs.DECLARED,
)

# Over all kernels: each costs 0.3-3 s of compilation an architecture, and they are part of the
# tests. An incoming model has to be worth the place of another.
MAX_DECLARED = 72

# Bytes of shared memory a block may have (CUDA C programming guide, compute capabilities).
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
# 32-bit registers of a multiprocessor; a block's registers have to fit, or it cannot be launched.
REGISTERS = 64 << 10
WARP = 32


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of one configuration. Registers are per thread, bytes a block."""

    name: str
    arch: int
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    num_warps: int
    tensor_core_ops: int

    def line(self) -> str:
        """In a terminal."""
        return (
            f"{self.name:44} sm_{self.arch:<4} {self.registers:4} registers "
            f"{self.stack_bytes + self.local_bytes:5} B spilled {self.shared_bytes:7} B shared "
            f"{self.num_warps} warps {self.tensor_core_ops:3} tensor-core ops"
        )

    def faults(self) -> list[str]:
        """Which limits it breaks, in words."""
        found = []
        if self.stack_bytes or self.local_bytes:
            found.append(f"{self.stack_bytes} + {self.local_bytes} bytes spilled to local memory")
        if self.shared_bytes > SHARED_BYTES[self.arch]:
            found.append(f"{self.shared_bytes} bytes of shared memory > {SHARED_BYTES[self.arch]}")
        if self.registers * WARP * self.num_warps > REGISTERS:
            found.append(f"{self.registers} registers x {self.num_warps} warps do not fit")
        return [f"{self.name} sm_{self.arch}: {text}" for text in found]


def check_declared(declared: Sequence[Declared]) -> None:
    """Raises ValueError for more than MAX_DECLARED, or a name that is there twice."""
    if len(declared) > MAX_DECLARED:
        raise ValueError(f"{len(declared)} configurations declared, the cap is {MAX_DECLARED}")
    names = [one.name for one in declared]
    if len(set(names)) != len(names):
        raise ValueError(f"declared twice: {sorted({n for n in names if names.count(n) > 1})}")


def compile_declared(one: Declared, arch: int) -> Compiled:
    """Compile one. Raises what the compiler raises, ValueError for a signature that is not its."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(one.kernel.params):
        kind = one.signature.get(parameter.name, "constexpr")
        kind, _, divisor = kind.partition(":")
        signature[parameter.name] = kind
        if divisor:
            attributes[place,] = [["tt.divisibility", int(divisor)]]
    constants = {
        parameter.name: one.constexprs.get(parameter.name, parameter.default)
        for parameter in one.kernel.params
        if signature[parameter.name] == "constexpr"
    }
    given = set(one.signature) | set(one.constexprs)
    needed = {p.name for p in one.kernel.params if not (p.is_constexpr and p.has_default)}
    if unfit := (given - set(signature)) | (needed - given):
        raise ValueError(f"not as {one.kernel.__name__} has them: {sorted(unfit)}")
    kernel = triton.compile(
        ASTSource(one.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", arch, WARP),
        options={"num_warps": one.num_warps, "num_stages": one.num_stages},
    )
    return compiled_as(one.name, arch, kernel)


def compiled_as(name: str, arch: int, kernel: Any) -> Compiled:
    """What the compiler made of one kernel."""
    ptx = kernel.asm["ptx"]
    used = _resources(kernel.asm["cubin"])
    return Compiled(
        name,
        arch,
        used["REG"],
        used["STACK"],
        used["LOCAL"],
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", ptx)),
    )


def _resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL... of the only function, by the cuobjdump in Triton's wheel."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = re.findall(r"(REG|STACK|LOCAL):(\d+)", out)
    if {name for name, _ in found} != {"REG", "STACK", "LOCAL"}:
        raise RuntimeError(f"cuobjdump said: {out}")
    return {name: int(value) for name, value in found}


def compile_all(
    declared: Iterable[Declared], archs: Sequence[int]
) -> tuple[list[Compiled], list[str]]:
    """All that is declared; faults and compiler errors in words."""
    done, faults = [], []
    for one in declared:
        for arch in archs:
            if arch not in one.archs:
                continue
            try:
                compiled = compile_declared(one, arch)
            except Exception as error:  # noqa: BLE001 - the compiler raises all kinds; each is a fault of one configuration
                faults.append(f"{one.name} sm_{arch}: {type(error).__name__}: {error}")
                continue
            done.append(compiled)
            faults += compiled.faults()
    return done, faults


def main() -> int:
    """Print a table, write the JSON, and return 1 where anything breaks a limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHS), choices=ARCHS)
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--json", type=Path, help="write what was found here")
    options = parser.parse_args()
    if not HAS_TRITON:
        print("Triton is not installed: install the extra `cuda` or `dev`", file=sys.stderr)
        return 2
    check_declared(DECLARED)
    chosen = [one for one in DECLARED if options.only in one.name]
    done, faults = compile_all(chosen, options.arch)
    for one in done:
        print(one.line())
    if options.json:
        report = {"configurations": [asdict(one) for one in done], "faults": faults}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults or not done else 0


if __name__ == "__main__":
    sys.exit(main())
