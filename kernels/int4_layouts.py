"""4-bit weights in groups: how they lie, packed and unpacked.

A weight [n, k] stands for (q - zero) * scale with q in 0..15 and one scale and zero for `group`
neighbouring k of a channel.

Eight q share a word, taken from eight *planes* 32 apart, so that a word's shift is that of a
whole plane and no lane ever needs another lane's x:

    words [n, ceil(k / 256) * 32] int32
    nibble i of word 32 b + j  =  q[n, 256 b + 32 i + j]

    scale [groups, n], zero int8 [groups, n];  k behind the last is q = 0 and never multiplied.
"""

from dataclasses import dataclass

import torch

PLANE = 32
NIBBLES = 8
BLOCK = PLANE * NIBBLES


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """words int32 [n, words], scale [groups, n], zero int8 [groups, n]; stands for [n, k]."""

    words: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    k: int
    group: int

    def __post_init__(self) -> None:
        """Raises ValueError where groups do not fit our planes or the shapes one another."""
        n, groups = self.words.shape[0], -(-self.k // self.group)
        whole = self.group in (PLANE, 2 * PLANE, 4 * PLANE) or self.group % BLOCK == 0
        if not whole and groups > 1:
            raise ValueError(f"groups of {self.group}: 32, 64, 128 or a multiple of 256")
        if self.words.shape[1] * NIBBLES != -(-self.k // BLOCK) * BLOCK:
            raise ValueError(f"{self.words.shape[1]} words for {self.k} columns")
        if self.scale.shape != (groups, n) or self.zero.shape != (groups, n):
            raise ValueError(f"scales {tuple(self.scale.shape)}, wanted {(groups, n)}")

    @property
    def n(self) -> int:
        """Output channels."""
        return self.words.shape[0]


def pack(values: torch.Tensor) -> torch.Tensor:
    """q [n, k], 0..15 of any integer type, as words int32 [n, ceil(k / 256) * 32]."""
    n, k = values.shape
    padded = torch.nn.functional.pad(values.to(torch.int64), (0, -k % BLOCK))
    planes = padded.view(n, -1, NIBBLES, PLANE)
    shifts = 4 * torch.arange(NIBBLES, device=values.device)[:, None]
    return _to_int32((planes << shifts).sum(2)).reshape(n, -1)


def unpack(words: torch.Tensor, k: int) -> torch.Tensor:
    """words [n, words] as q int8 [n, k]."""
    shifts = 4 * torch.arange(NIBBLES, device=words.device, dtype=torch.int32)[:, None]
    planes = (words.view(len(words), -1, 1, PLANE) >> shifts) & 15
    return planes.reshape(len(words), -1)[:, :k].to(torch.int8)


def dequantize(weight: Int4Weight) -> torch.Tensor:
    """What it stands for: float32 [n, k]."""
    q = unpack(weight.words, weight.k)
    group = torch.arange(weight.k, device=q.device) // weight.group
    zero, scale = weight.zero.T[:, group], weight.scale.T[:, group]
    return (q.to(torch.float32) - zero.to(torch.float32)) * scale.to(torch.float32)


def quantize(weight: torch.Tensor, group: int, dtype: torch.dtype) -> Int4Weight:
    """Round [n, k] to the nearest of 16 steps between each group's extremes; scales of `dtype`.

    Raises ValueError on NaN. The zero is a step of its own, so that a weight of 0 stays 0.
    """
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.to(torch.float32), (0, -k % group)).view(n, -1, group)
    low, high = padded.amin(-1).clamp(max=0), padded.amax(-1).clamp(min=0)
    if not bool(torch.isfinite(high - low).all()):
        raise ValueError("weights that are not finite cannot be quantized")
    scale = ((high - low) / 15).to(dtype)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    wide = scale.to(torch.float32)[:, :, None]
    zero = (-low / scale.to(torch.float32)).round_().clamp_(0, 15)
    q = (padded / wide).round_().add_(zero[:, :, None]).clamp_(0, 15)
    return Int4Weight(
        words=pack(q.view(n, -1)[:, :k].to(torch.int8)),
        scale=scale.T.contiguous(),
        zero=zero.to(torch.int8).T.contiguous(),
        k=k,
        group=group,
    )


def _to_int32(values: torch.Tensor) -> torch.Tensor:
    """int64 in 0..2^32 - 1 as int32 of the same bits."""
    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)
