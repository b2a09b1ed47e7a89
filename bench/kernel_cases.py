"""What bench/kernels.py measures beside attention: norms, gates, sampling, products, the layer.

A case builds its inputs on any device: at full size for a GPU, tiny for a test that runs the same
code interpreted on a CPU. It says how to compute the exact result (float64, or the definition where
results are tokens), how far off the kernel may be, what it moves or computes, and what else can do
the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional

from engine.registration.quantize import quantize_rows
from kernels.fp8_linear import fp8_linear, round_rows, round_rows_ref
from kernels.gate_mul import gate_mul
from kernels.int4_layouts import dequantize, quantize
from kernels.int4_linear import int4_linear
from kernels.logit_edits import penalize_, penalize_ref_
from kernels.rms_norm import rms_norm
from kernels.sampling import Draw, draw, draw_ref
from kernels.scaled_linear import quantize_fp8, scaled_linear
from kernels.top_logprobs import top_logprobs, top_logprobs_ref

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Target:
    """What the issue wants: `least` of the ceiling ("ceiling"), or times as fast as a peer."""

    least: float
    of: str = "ceiling"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case with its inputs.

    run        the kernel; the same result each time
    result     float tensors of a run, to be compared
    exact      what they should be
    tolerance  of the difference's root mean square against the exact result's
    peers      others that do the same, by name; `cuda_peers` need a device
    can_capture  False where a run copies from the host, which a CUDA graph cannot hold
    waiting    peers that ask the device for a value inside, which no capture survives
    """

    run: Call
    result: Callable[[], tuple[torch.Tensor, ...]]
    exact: Callable[[], tuple[torch.Tensor, ...]]
    tolerance: float
    num_bytes: int = 0
    num_flops: int = 0
    peers: Mapping[str, Call] = field(default_factory=dict)
    cuda_peers: Mapping[str, Call] = field(default_factory=dict)
    can_capture: bool = True
    waiting: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Case:
    """`build(rig, tiny)`; bound: "bytes" or "flops", which ceiling a run is held to."""

    name: str
    bound: str
    build: Callable[["Rig", bool], Prepared]
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class Rig:
    """Where and in what a case is built; the generator is fresh for every run."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    @property
    def tolerance(self) -> float:
        """Of a result rounded once, relative to its size."""
        return 1e-5 if self.dtype == torch.float32 else 6e-3

    def randn(self, *shape: int) -> torch.Tensor:
        """Normal, in the rig's dtype."""
        wide = torch.randn(*shape, generator=self.generator, device=self.device)
        return wide.to(self.dtype)

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Uniform."""
        return torch.rand(*shape, generator=self.generator, device=self.device, dtype=dtype)


def _norm(rows: int) -> Callable[[Rig, bool], Prepared]:
    def build(rig: Rig, tiny: bool) -> Prepared:
        m, d = (3, 48) if tiny else (rows, 4096)
        x, residual, weight = rig.randn(m, d), rig.randn(m, d), rig.randn(d)

        def exact() -> tuple[torch.Tensor, ...]:
            h = (x.double() + residual.double()).to(rig.dtype)
            y = h.double() * torch.rsqrt(h.double().square().mean(-1, keepdim=True) + 1e-6)
            return y * weight.double(), h.double()

        def plain() -> object:
            h = x + residual
            return functional.rms_norm(h, (d,), weight, 1e-6)

        def run() -> tuple[torch.Tensor, ...]:
            return rms_norm(x, weight, 1e-6, residual)

        size = 4 * m * d * rig.dtype.itemsize
        return Prepared(run, run, exact, rig.tolerance, size, peers={"torch": plain})

    return build


def _gate(rows: int) -> Callable[[Rig, bool], Prepared]:
    def build(rig: Rig, tiny: bool) -> Prepared:
        m, d = (2, 70) if tiny else (rows, 14336)
        x = rig.randn(m, 2 * d)

        def exact() -> tuple[torch.Tensor, ...]:
            gate, up = x.double().chunk(2, -1)
            return (functional.silu(gate) * up,)

        def plain() -> object:
            gate, up = x.chunk(2, -1)
            return functional.silu(gate) * up

        return Prepared(
            lambda: gate_mul(x, "silu"),
            lambda: (gate_mul(x, "silu"),),
            exact,
            rig.tolerance,
            3 * m * d * rig.dtype.itemsize,
            peers={"torch": plain},
        )

    return build


def _linear(kind: str, rows: int, n: int = 28672, k: int = 4096) -> Callable[[Rig, bool], Prepared]:
    def build(rig: Rig, tiny: bool) -> Prepared:
        m, out, depth = (rows if rows <= 2 else 3, 40, 300) if tiny else (rows, n, k)
        x, weight = rig.randn(m, depth), rig.randn(out, depth)
        if kind == "int4":
            packed = quantize(weight, 128, rig.dtype)
            size = packed.words.numel() * 4 + packed.scale.numel() * (rig.dtype.itemsize + 1)

            def run() -> torch.Tensor:
                return int4_linear(x, packed)

            def stands_for() -> torch.Tensor:
                return dequantize(packed).double()
        else:
            # Scales as packs have them.
            if kind == "fp8":
                q, scale = quantize_fp8(weight, torch.float32)
            else:
                q, scale = quantize_rows(weight, rig.dtype)
            size = out * depth + out * scale.itemsize

            def run() -> torch.Tensor:
                return scaled_linear(x, q, scale)

            def stands_for() -> torch.Tensor:
                return q.double() * scale.double()[:, None]

        return Prepared(
            run,
            lambda: (run(),),
            lambda: (x.double() @ stands_for().T,),
            rig.tolerance,
            size + m * (out + depth) * rig.dtype.itemsize,
            2 * m * out * depth,
            {"bf16 F.linear": lambda: functional.linear(x, weight)},
        )

    return build


def _fp8(rows: int, n: int = 28672, k: int = 4096) -> Callable[[Rig, bool], Prepared]:
    """Both sides in fp8, the rounding of x within the time; the error is the sums' alone."""

    def build(rig: Rig, tiny: bool) -> Prepared:
        m, out, depth = (20, 32, 48) if tiny else (rows, n, k)
        x, weight = rig.randn(m, depth), rig.randn(out, depth)
        q, scale = quantize_fp8(weight, torch.float32)

        def run() -> torch.Tensor:
            return fp8_linear(x, q, scale)

        def exact() -> tuple[torch.Tensor, ...]:
            rounded, of_rows = round_rows_ref(x)
            y = rounded.double() @ q.double().T
            return (y * of_rows.double() * scale.double(),)

        return Prepared(
            run,
            lambda: (run(),),
            exact,
            3 * rig.tolerance,
            num_flops=2 * m * out * depth,
            peers={
                "bf16 F.linear": lambda: functional.linear(x, weight),
                "weight only": lambda: scaled_linear(x, q, scale),
                "rounding alone": lambda: round_rows(x),
            },
        )

    return build


def _draw(
    rows: int, top_k: int, top_p: float, vocab: int = 256_000
) -> Callable[[Rig, bool], Prepared]:
    def build(rig: Rig, tiny: bool) -> Prepared:
        m, vocab_size = (2, 300) if tiny else (rows, vocab)
        logits = 4 * rig.rand(m, vocab_size).sub_(1e-7).clamp_(min=1e-7).logit_()
        cuts = top_k > 0 or top_p < 1
        device = rig.device
        how = Draw(
            torch.full((m,), 0.8, device=device),
            rig.rand(m, dtype=torch.float64),
            torch.zeros(m, device=device),
            torch.full((m,), top_k or (1 << 31) - 1, dtype=torch.int32, device=device),
            torch.full((m,), top_p, dtype=torch.float64, device=device),
            torch.arange(m if cuts else 0, device=device),
        )
        greedy = replace(how, temperature=torch.zeros(m, device=device), cut=how.cut[:0])

        def plain() -> object:
            """Sort, cut, draw: what torch offers."""
            ordered, ids = (logits / 0.8).softmax(-1).sort(-1, descending=True)
            if top_k:
                ordered[:, top_k:] = 0
            ordered[ordered.cumsum(-1) - ordered > top_p * ordered.sum(-1, keepdim=True)] = 0
            return ids.gather(-1, torch.multinomial(ordered, 1))

        return Prepared(
            lambda: draw(logits, how),
            lambda: (draw(logits, how)[0].double(),),
            lambda: (draw_ref(logits, how)[0].double(),),
            0.0,
            4 * m * vocab_size,
            peers={"torch sort": plain, "greedy": lambda: draw(logits, greedy)},
            waiting=frozenset({"torch sort"}),  # multinomial checks its weights on the host
        )

    return build


def _penalties(rows: int) -> Callable[[Rig, bool], Prepared]:
    def build(rig: Rig, tiny: bool) -> Prepared:
        m, vocab_size, used = (2, 60, 5) if tiny else (rows, 256_000, 2000)
        logits = rig.rand(m, vocab_size) - 0.5
        places = rig.rand(m, vocab_size).argsort(-1)[:, :used].flatten()
        owners = torch.arange(m, device=rig.device).repeat_interleave(used)
        more = [rig.rand(m * used) + 0.5 for _ in range(4)]
        spoiled = logits.clone()

        def result() -> tuple[torch.Tensor, ...]:
            changed = logits.clone()
            penalize_(changed, owners, places, *more)
            return (changed,)

        def exact() -> tuple[torch.Tensor, ...]:
            changed = logits.double()
            penalize_ref_(changed, owners, places, *(one.double() for one in more))
            return (changed,)

        return Prepared(
            lambda: penalize_(spoiled, owners, places, *more),
            result,
            exact,
            1e-6,
            # A float of its own line of 32 bytes, read and written, and seven arrays of entries.
            m * used * (2 * 32 + 2 * 8 + 4 * 4),
            peers={"torch": lambda: penalize_ref_(spoiled, owners, places, *more)},
            waiting=frozenset({"torch"}),  # it asks whether an entry is left out
        )

    return build


def _logprobs(rows: int) -> Callable[[Rig, bool], Prepared]:
    def build(rig: Rig, tiny: bool) -> Prepared:
        m, vocab_size = (2, 70) if tiny else (rows, 256_000)
        logits = 8 * rig.rand(m, vocab_size)
        tokens = logits.argmin(-1)

        def plain() -> object:
            logs = logits.log_softmax(-1)
            return logs.gather(-1, tokens[:, None]), logs.topk(20, -1)

        def result() -> tuple[torch.Tensor, ...]:
            chosen, ids, values = top_logprobs(logits, tokens, 20)
            return chosen.double(), logits.gather(1, ids).double(), values.double()

        def exact() -> tuple[torch.Tensor, ...]:
            chosen, ids, values = top_logprobs_ref(logits, tokens, 20)
            return chosen.double(), logits.gather(1, ids).double(), values.double()

        return Prepared(
            lambda: top_logprobs(logits, tokens, 20),
            result,
            exact,
            1e-5,
            4 * m * vocab_size,
            peers={"torch": plain},
        )

    return build


CASES = (
    *(Case(f"rms_norm rows={m} d=4096", "bytes", _norm(m)) for m in (1, 32, 4096)),
    *(Case(f"gate_mul rows={m} d=14336", "bytes", _gate(m)) for m in (1, 32, 4096)),
    Case("int8_linear rows=1", "bytes", _linear("int8", 1), Target(1.7, "bf16 F.linear")),
    Case("int4_linear rows=1", "bytes", _linear("int4", 1), Target(2.8, "bf16 F.linear")),
    Case("fp8_linear rows=1", "bytes", _linear("fp8", 1)),
    *(
        Case(f"{kind}_linear rows={m}", bound, _linear(kind, m))
        for kind in ("int8", "int4", "fp8")
        for m, bound in ((16, "bytes"), (64, "bytes"), (4096, "flops"))
    ),
    *(Case(f"fp8 both sides rows={m}", "flops", _fp8(m)) for m in (32, 64, 256, 4096)),
    Case("fp8 both sides rows=256 n=6144", "flops", _fp8(256, 6144)),
    Case("fp8 both sides rows=256 k=14336", "flops", _fp8(256, 4096, 14336)),
    *(
        Case(f"{kind}_linear rows=1 n=4096 k=14336", "bytes", _linear(kind, 1, 4096, 14336))
        for kind in ("int8", "int4")
    ),
    *(
        Case(f"draw rows={m} V=256k {name}", "bytes", _draw(m, k, p))
        for m in (1, 32)
        for name, k, p in (("plain", 0, 1.0), ("top_k=50", 50, 1.0), ("top_p=0.95", 0, 0.95))
    ),
    *(
        Case(f"draw rows={m} V=128,256 top_k=20 top_p=0.95", "bytes", _draw(m, 20, 0.95, 128_256))
        for m in (1, 256)
    ),
    Case("penalties rows=32 2000 tokens each", "bytes", _penalties(32)),
    Case("top_logprobs rows=32 V=256k 20", "bytes", _logprobs(32)),
)
