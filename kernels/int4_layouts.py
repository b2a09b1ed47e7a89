"""4-bit weights in groups: our layout, and those of GPTQ and AWQ checkpoints read into it.

A weight [n, k] stands for (q - zero) * scale with q in 0..15 and one scale and zero for `group`
neighbouring k of a channel.

Ours. Eight q share a word, taken from eight *planes* 32 apart, so that a word's shift is that of a
whole plane and no lane ever needs another lane's x:

    words [n, ceil(k / 256) * 32] int32
    nibble i of word 32 b + j  =  q[n, 256 b + 32 i + j]

    scale [groups, n], zero int8 [groups, n];  k behind the last is q = 0 and never multiplied.

GPTQ (v1, as AutoGPTQ and its heirs write it): qweight int32 [k / 8, n], nibble i of word r is
q[8 r + i, n]; qzeros int32 [groups, n / 8], nibble i of word c is the zero of channel 8 c + i less
1; scales [groups, n]; g_idx [k] the group of each k, in any order where `desc_act` was set. v2
files keep zeros as they are.

AWQ (GEMM): qweight int32 [k, n / 8], nibble i of word c is q[k, 8 c + ORDER[i]]; qzeros int32
[groups, n / 8] alike; scales [groups, n].
"""

from dataclasses import dataclass

import torch

PLANE = 32
NIBBLES = 8
BLOCK = PLANE * NIBBLES
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """words int32 [n, words], scale [groups, n], zero int8 [groups, n]; stands for [n, k].

    order: int64 [k], where x[order] meets the columns; None where they are in order.
    """

    words: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    k: int
    group: int
    order: torch.Tensor | None = None

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
    """What it stands for: float32 [n, k], columns in their original order."""
    q = unpack(weight.words, weight.k)
    group = torch.arange(weight.k, device=q.device) // weight.group
    zero, scale = weight.zero.T[:, group], weight.scale.T[:, group]
    wide = (q.to(torch.float32) - zero.to(torch.float32)) * scale.to(torch.float32)
    if weight.order is None:
        return wide
    restored = torch.empty_like(wide)
    restored[:, weight.order] = wide
    return restored


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


def read_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    zero_offset: int = 1,
) -> Int4Weight:
    """A GPTQ linear of 4 bits. zero_offset: 1 for v1 files, 0 for v2.

    Raises ValueError where a group of `g_idx` is not as long as the others.
    """
    k, (groups, n) = qweight.shape[0] * NIBBLES, scales.shape
    q = _nibbles(qweight).permute(0, 2, 1).reshape(k, n)
    zero = _nibbles(qzeros).reshape(groups, n) + zero_offset
    group = -(-k // groups)
    order = None
    if g_idx is not None:
        place = torch.arange(k, device=g_idx.device)
        if not bool((g_idx == place // group).all()):
            order = torch.sort(g_idx.to(torch.int64), stable=True).indices
            if not bool((g_idx[order] == place // group).all()):
                raise ValueError("groups of unlike lengths")
            q = q[order]
    return Int4Weight(pack(q.T), scales.contiguous(), zero.to(torch.int8), k, group, order)


def read_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> Int4Weight:
    """An AWQ linear of 4 bits in the GEMM layout."""
    k, (groups, n) = qweight.shape[0], scales.shape
    # Where channel c of a word lies: the inverse of the order.
    place = [AWQ_ORDER.index(channel) for channel in range(NIBBLES)]
    q = _nibbles(qweight)[:, :, place].reshape(k, n)
    zero = _nibbles(qzeros)[:, :, place].reshape(groups, n)
    return Int4Weight(pack(q.T), scales.contiguous(), zero.to(torch.int8), k, -(-k // groups))


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [a, b] as [a, b, 8], the lowest first."""
    shifts = 4 * torch.arange(NIBBLES, device=words.device, dtype=torch.int32)
    return (words[:, :, None] >> shifts) & 15


def _to_int32(values: torch.Tensor) -> torch.Tensor:
    """int64 in 0..2^32 - 1 as int32 of the same bits."""
    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)
