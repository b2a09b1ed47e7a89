"""A folder with small traces in the formats of the public ones, for the tests of the simulator."""

import csv
import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

SYSTEM_BLOCK = 0
NUM_CONVERSATIONS = 40
TURNS = 3


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """A gzip CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(rows)
    return path


def write_jsonl(path: Path, rows: Iterable[object]) -> Path:
    """A gzip file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def write_traces(data: Path) -> Path:
    """`data` with one trace of each format; a request a second in the plain ones."""
    plain = [(place, 100 + place % 7, 10 + place % 5) for place in range(200)]
    write_csv(data / "traces/azure2023_conv.csv.gz", ("t_s", "in_tokens", "out_tokens"), plain)
    write_csv(
        data / "traces/arena27_multimodel.csv.gz",
        ("t_s", "model", "in_tokens", "out_tokens"),
        # m00 has half of the requests, m01 a quarter, m02 and m03 an eighth.
        [(t, f"m0{[0, 1, 0, 2, 0, 1, 0, 3][t % 8]}", n_in, out) for t, n_in, out in plain],
    )
    write_csv(
        data / "restricted/gentd26_requests.csv.gz",
        ("t_s", "tenant", "model", "prompt_chars"),
        [(t, f"G{t % 3}", f"M{t % 5}", 50) for t, _, _ in plain],
    )
    write_jsonl(data / "traces/mooncake_conversation.jsonl.gz", _conversations())
    _write_clients(data)
    day = [{"h": hour, "rph": 100.0 + 10 * hour} for hour in range(24)]
    (data / "traces/burstgpt_aggregates.json").write_text(
        json.dumps({"hour_of_day_mean_requests": day})
    )
    return data


def _conversations() -> list[dict[str, object]]:
    """Three turns each: every turn repeats what came before it and adds a block and a half."""
    rows: list[dict[str, object]] = []
    for number in range(NUM_CONVERSATIONS):
        first = 1 + 100 * number
        for turn in range(TURNS):
            blocks = [SYSTEM_BLOCK, *range(first, first + turn + 1), first + 50 + turn]
            rows.append(
                {
                    "timestamp": 1000 * (number + 20 * turn),
                    "input_length": 512 * (len(blocks) - 1) + 100,
                    "output_length": 30,
                    "hash_ids": blocks,
                }
            )
    return rows


def _write_clients(data: Path) -> None:
    """Two clients of one service: the busy one without lengths, the other bursty at first."""
    rates = [("m-small", 0, 600 * window, 4.0, 1.0, "Gamma", 1.0, 0.25) for window in range(12)] + [
        ("m-small", 1, 600 * window, 1.0, 4.0, "Weibull", 0.5, 0.5) for window in range(0, 12, 2)
    ]
    write_csv(
        data / "traces/servegen_rates.csv.gz",
        ("model", "client", "t_s", "rate_rps", "cv", "dist", "p1", "p2"),
        rates,
    )
    quantiles = ("p1", "p10", "p25", "p50", "p75", "p90", "p99", "mean")
    write_csv(
        data / "traces/servegen_lengths.csv.gz",
        ("model", "client", "t_s", "field", *quantiles),
        [
            ("m-small", 1, 0, "input_tokens", 10, 20, 50, 100, 200, 400, 800, 170),
            ("m-small", 1, 0, "output_tokens", 5, 5, 5, 5, 5, 5, 5, 5),
        ],
    )
