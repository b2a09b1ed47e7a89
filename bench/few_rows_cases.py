"""Products of one to four rows as decoder layers have them: cases of bench/kernels.py, and inputs.

The peer of a product is the same by separate launches: our norm, cuBLAS (`F.linear`), our gate.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from bench.kernel_cases import Case, Prepared, Rig
from kernels.few_rows import InputNorm, few_rows
from kernels.gate_mul import Activation, gate_mul
from kernels.rms_norm import rms_norm

EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Product:
    """[n, k], with the norm and the residual before it, or SiLU of gate and up behind it."""

    name: str
    n: int
    k: int
    normed: bool = False
    gated: bool = False
    bias: bool = False

    @property
    def num_weights(self) -> int:
        """Gate and up together."""
        return self.n * self.k * (1 + self.gated)


PRODUCTS = (
    Product("8B qkv", 6144, 4096, normed=True),
    Product("8B out", 4096, 4096),
    Product("8B gate_up", 14336, 4096, normed=True, gated=True),
    Product("8B down", 4096, 14336),
    Product("8B head", 128_256, 4096),
    Product("1.7B qkv", 4096, 2048, normed=True),
    Product("1.7B out", 2048, 2048),
    Product("1.7B gate_up", 6144, 2048, normed=True, gated=True),
    Product("1.7B down", 2048, 6144),
    Product("0.5B qkv", 1152, 896, normed=True, bias=True),
    Product("0.5B out", 896, 896),
    Product("0.5B gate_up", 4864, 896, normed=True, gated=True),
    Product("0.5B down", 896, 4864),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of one product of `rows` rows; `separate` is what the layer does without the kernel."""

    product: Product
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    norm: InputNorm | None
    residual: torch.Tensor | None

    @property
    def activation(self) -> Activation | None:
        """Of the gate."""
        return "silu" if self.product.gated else None

    def together(self, **how: Any) -> torch.Tensor:
        """y of `few_rows`; `how`: out and shape."""
        given = (self.x, self.weight, self.bias, self.norm, self.residual, self.activation)
        return few_rows(*given, **how)[0]

    def separate(self) -> torch.Tensor:
        """y of up to three launches."""
        z = self.x
        if self.norm is not None:
            z, _ = rms_norm(z, self.norm.weight, self.norm.eps, self.residual)
        y = functional.linear(z, self.weight, self.bias)
        return gate_mul(y, "silu") if self.product.gated else y

    def exact(self) -> torch.Tensor:
        """y in float64, rounded where the separate launches round."""
        z = self.x.double()
        if self.norm is not None and self.norm.weight is not None and self.residual is not None:
            h = (z + self.residual.double()).to(self.x.dtype).double()
            z = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
            z = (z * self.norm.weight.double()).to(self.x.dtype).double()
        y = z @ self.weight.double().T
        if self.bias is not None:
            y += self.bias.double()
        if self.product.gated:
            gate, up = y.to(self.x.dtype).double().chunk(2, -1)
            y = functional.silu(gate) * up
        return y


def inputs_of(product: Product, rows: int, rig: Rig) -> Inputs:
    """Random ones; results are about 1."""
    n, k = product.n * (1 + product.gated), product.k
    weight = rig.randn(n, k).mul_(k**-0.5)
    return Inputs(
        product,
        rig.randn(rows, k),
        weight,
        rig.randn(n) if product.bias else None,
        InputNorm(rig.randn(k), EPS) if product.normed else None,
        rig.randn(rows, k) if product.normed else None,
    )


def _case(product: Product, rows: int) -> Callable[[Rig, bool], Prepared]:
    def build(rig: Rig, tiny: bool) -> Prepared:
        made = inputs_of(replace(product, n=12, k=80) if tiny else product, rows, rig)
        return Prepared(
            made.together,
            lambda: (made.together(),),
            lambda: (made.exact(),),
            2 * rig.tolerance,
            made.weight.numel() * rig.dtype.itemsize,
            peers={"separate" if product.normed else "F.linear": made.separate},
        )

    return build


CASES = tuple(
    Case(f"few_rows rows={rows} {product.name}", "bytes", _case(product, rows))
    for product in PRODUCTS
    for rows in ((1, 2, 4) if product.name.startswith("8B") else (1,))
)
