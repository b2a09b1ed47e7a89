"""Attention over paged KV: the maths, the shapes, and the torch reference.

For a query row i of a sequence at absolute position p_i, over cached positions j <= p_i (and
j > p_i - window where the layer has a window; and j >= p_i - p_i mod chunk where it sees the chunk
of its own position only):

    o_i = softmax_j( softcap(scale * q_i . k_j) + slope * (j - i) ) v_j

with an optional sink logit per head, and a slope per head where positions are slopes (ALiBi).

Memory. The arena is seen as *units* of `unit_bytes` (a power of two that divides one K row and one
V row, so that every row starts at a unit). A block holds `block_tokens` positions of one layer:

    block   = [ K: kv_head x position x k_dim | V: kv_head x position x v_dim ]
    chunk   = `blocks_per_chunk` blocks side by side
    address of block b in layer l = table[l, b // blocks_per_chunk]
                                    + (b % blocks_per_chunk) * block_units

Where V lies in K (`v_in_k`: layers that cache a latent), a block holds K alone, and V of a position
is the first v_dim values of its K:

    block   = [ K: kv_head x position x k_dim ]

Layers of one geometry are a *layer group*: they share block ids, extents and one table. A row of a
group with a window or chunks may leave out the blocks before them: `first` says at which position
its table begins.

Bytes moved by one decode step of one layer: sum over rows of context * kv_heads * (k_dim + v_dim),
or k_dim where V lies in K.

What is here is what every other implementation is held to, and the fallback. It never lets freed
or unwritten memory reach a result: K beyond the context is masked, V beyond it is zeroed (0 * NaN
is NaN).
"""

from dataclasses import dataclass

import torch

BIASED_QUERIES = 64


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """KV of one layer.

    window, chunk   0: full attention; at most one is not 0
    v_in_k          V is the first v_dim values of K
    """

    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0
    v_in_k: bool = False
    chunk: int = 0

    @property
    def row_dim(self) -> int:
        """Values kept of one position of one head."""
        return self.k_dim if self.v_in_k else self.k_dim + self.v_dim

    @property
    def reach(self) -> int:
        """Positions a query sees at most, itself included; 0: all."""
        return self.window or self.chunk

    def first_seen(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        if self.chunk:
            return position - position % self.chunk
        return max(0, position - self.window + 1) if self.window else 0


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """How one layer's block lies in memory, in units of `unit_bytes`."""

    layer: LayerGeometry
    block_tokens: int
    dtype: torch.dtype
    unit_bytes: int

    @property
    def unit_elements(self) -> int:
        """Elements of `dtype` in a unit."""
        return self.unit_bytes // self.dtype.itemsize

    @property
    def k_row_units(self) -> int:
        """Units of one position's K of one head."""
        return self.layer.k_dim * self.dtype.itemsize // self.unit_bytes

    @property
    def v_row_units(self) -> int:
        """Units from one position's V of one head to the next one's."""
        dim = self.layer.k_dim if self.layer.v_in_k else self.layer.v_dim
        return dim * self.dtype.itemsize // self.unit_bytes

    @property
    def v_start_units(self) -> int:
        """Where V begins inside a block."""
        if self.layer.v_in_k:
            return 0
        return self.layer.num_kv_heads * self.block_tokens * self.k_row_units

    @property
    def block_units(self) -> int:
        """Units of a whole block."""
        row_bytes = self.layer.row_dim * self.dtype.itemsize
        return self.layer.num_kv_heads * self.block_tokens * (row_bytes // self.unit_bytes)


def largest_unit_bytes(layer: LayerGeometry, dtype: torch.dtype, page_bytes: int) -> int:
    """The largest power of two dividing a K row, a V row of its own and a page, in bytes."""
    k_bytes, row_bytes = layer.k_dim * dtype.itemsize, layer.row_dim * dtype.itemsize
    unit = page_bytes
    while k_bytes % unit or row_bytes % unit:
        unit //= 2
    return unit


@dataclass(frozen=True, slots=True)
class Rows:
    """Query rows of equal length over one padded table of blocks.

    token_index   int64 [num_rows, q_len]      where the rows' tokens lie in the flat batch
    chunk         int64 [num_rows, max_blocks] chunk of each block (a column of the table)
    slot          int64 [num_rows, max_blocks] slot of each block in its chunk
    context_len   int64 [num_rows]             positions cached after this step's write
    first         int64 [num_rows]             position of the first table entry's first token
    """

    token_index: torch.Tensor
    chunk: torch.Tensor
    slot: torch.Tensor
    context_len: torch.Tensor
    first: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's addresses in one layer group.

    table: int64 [layers of the group, chunks] in units, as it was when the step was laid out.
    token_chunk, token_slot, token_offset: int64 [T], where token t's K and V are written.
    """

    table: torch.Tensor
    token_chunk: torch.Tensor
    token_slot: torch.Tensor
    token_offset: torch.Tensor
    rows: tuple[Rows, ...]


def write_kv_ref(
    arena: torch.Tensor,
    geometry: BlockGeometry,
    chunk_table: torch.Tensor,
    batch: PagedBatch,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Store K and V of T tokens. arena uint8 [bytes]; chunk_table int64 [chunks]: the layer's row.

    key [T, kv_heads, k_dim], value [T, kv_heads, v_dim], in the geometry's dtype. Where V lies in
    K, value is not read.
    """
    units = arena.view(geometry.dtype).view(-1, geometry.unit_elements)
    base = chunk_table[batch.token_chunk] + batch.token_slot * geometry.block_units
    heads = torch.arange(geometry.layer.num_kv_heads, device=arena.device)
    parts = [(key, 0, geometry.k_row_units)]
    if not geometry.layer.v_in_k:
        parts.append((value, geometry.v_start_units, geometry.v_row_units))
    for tensor, start, row_units in parts:
        row = heads * (geometry.block_tokens * row_units) + batch.token_offset[:, None] * row_units
        index = (base[:, None] + start + row)[:, :, None]
        if row_units > 1:
            index = index + torch.arange(row_units, device=arena.device)
        units.index_copy_(0, index.reshape(-1), tensor.reshape(-1, geometry.unit_elements))


def gather_kv_ref(
    arena: torch.Tensor, geometry: BlockGeometry, chunk_table: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """K [num_rows, kv_heads, max_blocks * block_tokens, k_dim] and V alike with v_dim. Where V lies
    in K, both are the same tensor: `attend_rows_ref` of it is to be cut to v_dim.

    Copies whole (block, head) tiles. V of positions that no query of the row sees is zero; so is K
    where several queries a row attend at once, otherwise it is whatever lies there and must be
    masked by replacement.
    """
    num_rows, max_blocks = rows.chunk.shape
    layer = geometry.layer
    base = chunk_table[rows.chunk] + rows.slot * geometry.block_units
    heads = torch.arange(layer.num_kv_heads, device=arena.device)[None, :, None]
    typed = arena.view(geometry.dtype)
    out = []
    parts = [(0, geometry.k_row_units, layer.k_dim)]
    if not layer.v_in_k:
        parts.append((geometry.v_start_units, geometry.v_row_units, layer.v_dim))
    for start, row_units, dim in parts:
        tile = geometry.block_tokens * dim
        step = geometry.unit_elements
        # Overlapping tiles, one starting at every unit: reading by index_select is safe.
        tiles = typed.as_strided(((typed.numel() - tile) // step + 1, tile), (step, 1))
        index = base[:, None, :] + (start + heads * (geometry.block_tokens * row_units))
        gathered = tiles.index_select(0, index.reshape(-1))
        out.append(gathered.view(num_rows, layer.num_kv_heads, -1, dim))
    key, value = out[0], out[-1]
    span = torch.arange(max_blocks * geometry.block_tokens, device=arena.device)
    position = rows.first[:, None] + span
    unseen = position >= rows.context_len[:, None]
    q_len = rows.token_index.shape[1]
    if layer.window:
        # A block that left the window may have been given to another request by now.
        unseen |= position <= (rows.context_len - q_len - layer.window)[:, None]
    if layer.chunk:
        unseen |= position < _chunk_begin(rows.context_len - q_len, layer.chunk)[:, None]
    unseen = unseen[:, None, :, None]
    value.masked_fill_(unseen, 0)
    if q_len > 1 and value is not key:
        # torch's fused attention adds its mask to the score, and NaN - inf is NaN.
        key.masked_fill_(unseen, 0)
    return key, value


def _chunk_begin(position: torch.Tensor, chunk: int) -> torch.Tensor:
    return position - position % chunk


def attend_rows_ref(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context_len: torch.Tensor,
    first: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    chunk: int = 0,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [R, heads, q_len, k_dim], key/value [R, kv_heads, S, dim] -> [R, heads, q_len, v_dim].

    The q_len queries are the last q_len of each row's context; key i of row r is at position
    first[r] + i. Scores and softmax in float32. K and V of one width take torch's fused attention,
    others are several times slower: V in K is given whole.
    """
    num_rows, num_heads, q_len, _ = query.shape
    kv_heads, span = key.shape[1], key.shape[2]
    group = num_heads // kv_heads
    position = (first[:, None] + torch.arange(span, device=query.device))[:, None, :]
    last = context_len[:, None] - q_len + torch.arange(q_len, device=query.device)
    allowed = position <= last[:, :, None]
    if window:
        allowed &= position > last[:, :, None] - window
    if chunk:
        allowed &= position >= _chunk_begin(last, chunk)[:, :, None]
    grouped = query.reshape(num_rows, kv_heads, group * q_len, -1)
    mask = allowed[:, None, None, :, :]
    if not softcap and sinks is None and slopes is None and q_len > 1:
        tiled = mask.expand(num_rows, 1, group, q_len, span)
        tiled = tiled.reshape(num_rows, 1, group * q_len, span)
        out = torch.nn.functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=tiled, scale=scale
        )
        return out.view(num_rows, num_heads, q_len, -1)
    scores = torch.matmul(grouped, key.transpose(-1, -2)).float().mul_(scale)
    scores = scores.view(num_rows, kv_heads, group, q_len, span)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes is not None:
        distance = (position - last[:, :, None]).float()[:, None, None]
        scores += slopes.float().view(1, kv_heads, group, 1, 1) * distance
    scores.masked_fill_(~mask, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.float().view(1, kv_heads, group, 1, 1).expand(num_rows, -1, -1, q_len, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    weights = weights.to(value.dtype).view(num_rows, kv_heads, group * q_len, span)
    return torch.matmul(weights, value).view(num_rows, num_heads, q_len, -1)


def _attend_biased_ref(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: Rows,
    slopes: torch.Tensor,
    scale: float,
    layer: LayerGeometry,
) -> torch.Tensor:
    """`attend_rows_ref` with slopes. Every head's scores have a bias of their own: some queries of
    one KV head at a time, so that it takes no more memory than a mask for all."""
    group, q_len = query.shape[1] // key.shape[1], query.shape[2]
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    for kv in range(key.shape[1]):
        mine = slice(kv * group, (kv + 1) * group)
        keys, values = key[:, kv : kv + 1], value[:, kv : kv + 1]
        for start in range(0, q_len, BIASED_QUERIES):
            end = min(start + BIASED_QUERIES, q_len)
            out[:, mine, start:end] = attend_rows_ref(
                query[:, mine, start:end],
                keys,
                values,
                rows.context_len - q_len + end,
                rows.first,
                scale,
                layer.window,
                0.0,
                None,
                layer.chunk,
                slopes[mine],
            )
    return out


def paged_attention_ref(
    arena: torch.Tensor,
    geometry: BlockGeometry,
    chunk_table: torch.Tensor,
    batch: PagedBatch,
    query: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [heads, T, k_dim] of a flat batch -> [T, heads, v_dim]; K and V already written.

    slopes [heads]: positions are slopes; there is neither a softcap nor sinks then.
    """
    num_heads, num_tokens, _ = query.shape
    out = query.new_empty(num_tokens, num_heads, geometry.layer.v_dim)
    for rows in batch.rows:
        key, value = gather_kv_ref(arena, geometry, chunk_table, rows)
        picked = query[:, rows.token_index].transpose(0, 1)
        if slopes is not None:
            attended = _attend_biased_ref(picked, key, value, rows, slopes, scale, geometry.layer)
            out[rows.token_index] = attended.transpose(1, 2)
            continue
        attended = attend_rows_ref(
            picked,
            key,
            value,
            rows.context_len,
            rows.first,
            scale,
            geometry.layer.window,
            softcap,
            sinks,
            geometry.layer.chunk,
        )
        out[rows.token_index] = attended[..., : geometry.layer.v_dim].transpose(1, 2)
    return out
