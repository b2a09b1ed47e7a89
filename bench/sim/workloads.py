"""A workload as a stream of arrivals: what a simulation reads, one request after another.

Lives here: the way from a `WorkloadSpec` to `Arrival`s: source, day and night, tenants and models,
bursts, then rows into prompts. Does not: any of these by itself (sources.py, servegen.py,
traces.py, casting.py, shaping.py), the text form (spec.py).

The stream is a function of the spec, the numbers of tenants and models, and the seed. It is made
some thousand rows at a time, whatever its length.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.sim import servegen
from bench.sim.batches import Batch, Ints, join, uniform
from bench.sim.casting import Cast
from bench.sim.random_lengths import DISTRIBUTIONS
from bench.sim.servegen import ClientTraffic
from bench.sim.shaping import Bursts, Diurnal, thinned
from bench.sim.sources import Renewal, Replay, Source
from bench.sim.spec import BURSTGPT, SERVEGEN, SYNTHETIC, WorkloadError, WorkloadSpec
from bench.sim.traces import BLOCK_TOKENS, TABLES, read_csv
from bench.sim.types import Arrival

ROWS_AT_ONCE = 8192
FIRST_WINDOW_S = 1.0
FRESH_IDS = 1 << 56
"""Content ids of prompts that share nothing begin here, above all blocks of traces."""


def open_workload(
    spec: WorkloadSpec, num_tenants: int, num_models: int, seed: int = 0
) -> Iterator[Arrival]:
    """Requests in order of time. Raises WorkloadError at once where the workload cannot be."""
    cast = Cast(num_tenants, num_models, seed, spec.habits)
    try:
        source, diurnal, end_s = _open_source(spec, cast, seed)
        bursts = Bursts(spec.bursts, cast, _mean_rate(spec, source, diurnal, end_s), seed)
    except OSError as error:
        raise WorkloadError(
            f"{spec.name}: {error}; give the folder of the traces, or write "
            "synthetic:rate=5,minutes=10, which needs none"
        ) from error
    except ValueError as error:
        raise WorkloadError(f"{spec.name}: {error}") from error
    batches = _batches(source, diurnal, cast, bursts, end_s)
    return _arrivals(batches, spec, seed)


def _open_source(spec: WorkloadSpec, cast: Cast, seed: int) -> tuple[Source, Diurnal | None, float]:
    """The source, at the peak's rate where days and nights are thinned out of it, and the end."""
    end_s = float("inf") if spec.minutes is None else spec.minutes * 60.0
    diurnal = spec.diurnal
    if spec.name == BURSTGPT:
        diurnal = diurnal or _burstgpt_day(_folder(spec), spec.speed)
        rate = spec.rate or 1.0
    else:
        rate = spec.rate or 0.0
    span_s = min(end_s, spec.requests / rate if spec.requests and rate else float("inf"))
    lift = 1.0 if diurnal is None else diurnal.peak / _level(diurnal, span_s)
    wanted = rate * lift if rate else None
    if spec.name in (SYNTHETIC, BURSTGPT):
        assert wanted is not None
        lengths = DISTRIBUTIONS[spec.lengths]
        return Renewal(wanted, spec.cv, lengths, seed), diurnal, end_s
    source: Replay | ClientTraffic
    more = {"speed": spec.speed, "start_s": spec.start_s}
    if spec.name in SERVEGEN:
        service = spec.name.partition("_")[2] or None
        clients = servegen.read_clients(_folder(spec), service)
        span = None if span_s == float("inf") else span_s
        source = ClientTraffic(clients, cast, seed, rate=wanted, span_s=span, **more)
    else:
        known = TABLES.get(spec.name)
        table = read_csv(Path(spec.name)) if known is None else known(_folder(spec))
        wanted = table.rate * spec.speed * lift if wanted is None else wanted
        source = Replay(table, cast, seed, rate=wanted, **more)
    if spec.minutes is None and spec.requests is None:
        end_s = source.lap_s
    return source, diurnal, end_s


def _folder(spec: WorkloadSpec) -> Path:
    if spec.data is None:
        raise WorkloadError(
            f"{spec.name} is a trace: give the folder that holds it, or write "
            "synthetic:rate=5,minutes=10, which needs none"
        )
    return spec.data


def _burstgpt_day(data: Path, speed: float) -> Diurnal:
    """The hours of BurstGPT's mean day (published as aggregates), run `speed` times as fast."""
    text = (data / "traces" / "burstgpt_aggregates.json").read_text(encoding="utf-8")
    hours = json.loads(text)["hour_of_day_mean_requests"]
    return Diurnal(24 * 3600.0 / speed, hours=tuple(float(hour["rph"]) for hour in hours))


def _mean_rate(spec: WorkloadSpec, source: Source, diurnal: Diurnal | None, end_s: float) -> float:
    if spec.rate is not None or diurnal is None:
        return spec.rate or source.rate
    return source.rate * _level(diurnal, end_s) / diurnal.peak


def _level(diurnal: Diurnal, span_s: float) -> float:
    return 1.0 if span_s == float("inf") else diurnal.mean(span_s)


def _batches(
    source: Source, diurnal: Diurnal | None, cast: Cast, bursts: Bursts, end_s: float
) -> Iterator[Batch]:
    most_s = max(FIRST_WINDOW_S, ROWS_AT_ONCE / (source.rate + bursts.most_rate))
    start_s, length_s = 0.0, FIRST_WINDOW_S
    while start_s < end_s:
        until_s = min(end_s, start_s + length_s)
        batch = source.between(start_s, until_s)
        if diurnal is not None:
            batch = thinned(batch, diurnal)
        more = bursts.between(start_s, until_s, batch)
        # The cast is asked even where all is known, so that every batch is whole.
        yield join([cast.fill(batch), *more])
        # The first windows are short, so that the first request comes soon.
        start_s, length_s = until_s, min(most_s, 2.0 * length_s)


def _arrivals(batches: Iterator[Batch], spec: WorkloadSpec, seed: int) -> Iterator[Arrival]:
    left = spec.requests if spec.requests is not None else -1
    next_id = FRESH_IDS
    for batch in batches:
        prompts = _scaled(batch.prompt_tokens, spec.scale, spec.max_prompt)
        outputs = _scaled(batch.output_tokens, spec.scale, spec.max_output)
        leaves = uniform(batch.key, seed, "leaves") < spec.aborts
        patience = -np.log1p(-uniform(batch.key, seed, "patience")) * spec.abort_after_s
        after = np.where(leaves, patience, -1.0).tolist()
        rows = zip(
            batch.at_s.tolist(),
            batch.tenant.tolist(),
            batch.model.tolist(),
            prompts.tolist(),
            outputs.tolist(),
            after,
            batch.blocks,
            batch.base.tolist(),
            strict=True,
        )
        for at_s, tenant, model, prompt, output, leaves_s, blocks, base in rows:
            if blocks is None:
                pieces: tuple[tuple[int, int], ...] = ((next_id, prompt),)
                next_id += 1
            else:
                pieces = _pieces(blocks, base, prompt, spec.scale)
            asked = output if spec.max_tokens == "exact" else spec.max_tokens
            yield Arrival(at_s, tenant, model, pieces, output, asked, leaves_s)
            left -= 1
            if left == 0:
                return


def _scaled(tokens: Ints, scale: float, most: int) -> Ints:
    """Lengths times `scale`, 1 at least, cut to `most` (0: not)."""
    scaled: Ints = np.maximum(1, np.rint(tokens * scale).astype(np.int64))
    return np.asarray(np.minimum(scaled, most)) if most else scaled


def _pieces(
    blocks: tuple[int, ...], base: int, tokens: int, scale: float
) -> tuple[tuple[int, int], ...]:
    """A prompt of `tokens` from its blocks: whole ones, and what is left in the last one."""
    size = max(1, round(BLOCK_TOKENS * scale))
    whole, rest = divmod(tokens, size)
    found = [(base + block, size) for block in blocks[:whole]]
    if rest and whole < len(blocks):
        found.append((base + blocks[whole], rest))
    return tuple(found)
