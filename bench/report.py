"""What a round of load comes to: counts, rates and percentiles. Pure.

Lives here: `RoundSummary` from the results of one round, and `Comparison` over interleaved rounds.
Does not: sending, timing, printing. Failed requests are counted by kind and give no latency; their
tokens are not in the rates.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

from bench.load import LoadRun
from bench.stats import Repeated, Spread, ratio, repeated, spread


class RoundSummary(TypedDict):
    """One round. `*_tok_s` are tokens of completed requests over the round's wall time.

    `itl_s` is each request's mean time between tokens; `chunk_gap_s` are the pauses a reader saw.
    `reread_tokens` is what the text has when tokenized again: a check on the server's usage (0
    where no tokenizer was given).
    """

    num_requests: int
    num_completed: int
    errors: dict[str, int]
    wall_s: float
    prompt_tokens: int
    completion_tokens: int
    output_tok_s: float
    ttft_s: Spread | None
    itl_s: Spread | None
    e2e_s: Spread | None
    chunk_gap_s: Spread | None
    token_source: dict[str, int]
    reread_tokens: int
    finish_reasons: dict[str, int]
    num_short: int
    num_prompt_echoes: int
    client_cpu_share: float


class Comparison(TypedDict):
    """Medians over the repeats of one server at one load."""

    output_tok_s: Repeated | None
    ttft_p50_s: Repeated | None
    ttft_p99_s: Repeated | None
    itl_p50_s: Repeated | None
    itl_p99_s: Repeated | None
    e2e_p50_s: Repeated | None
    e2e_p99_s: Repeated | None
    num_errors: int
    num_short: int


def summarise(run: LoadRun, wanted_tokens: dict[int, int]) -> RoundSummary:
    """`wanted_tokens` maps a request's index to the output tokens asked for."""
    good = [result for result in run.results if not result.error]
    errors = Counter(result.error for result in run.results if result.error)
    completion_tokens = sum(result.completion_tokens for result in good)
    wall_s = run.wall_s or float("inf")
    return {
        "num_requests": len(run.results),
        "num_completed": len(good),
        "errors": dict(errors),
        "wall_s": run.wall_s,
        "prompt_tokens": sum(result.prompt_tokens for result in good),
        "completion_tokens": completion_tokens,
        "output_tok_s": completion_tokens / wall_s,
        "ttft_s": spread([r.ttft_s for r in good if r.ttft_s is not None]),
        "itl_s": spread([r.itl_s for r in good if r.itl_s is not None]),
        "e2e_s": spread([r.done_s - r.due_s for r in good]),
        "chunk_gap_s": spread([gap for r in good for gap in r.gaps_s]),
        "token_source": dict(Counter(r.token_source for r in good)),
        "reread_tokens": sum(r.reread_tokens for r in good),
        "finish_reasons": dict(Counter(r.finish_reason for r in good)),
        "num_short": sum(r.completion_tokens < wanted_tokens[r.index] for r in good),
        "num_prompt_echoes": sum(r.echoed_prompt for r in good),
        "client_cpu_share": run.client_cpu_s / wall_s,
    }


def compare(rounds: Sequence[RoundSummary]) -> Comparison:
    """One server's rounds at one load, reduced to medians with their spread."""
    return {
        "output_tok_s": repeated([r["output_tok_s"] for r in rounds if r["num_completed"]]),
        "ttft_p50_s": repeated([_at(r["ttft_s"], "p50") for r in rounds]),
        "ttft_p99_s": repeated([_at(r["ttft_s"], "p99") for r in rounds]),
        "itl_p50_s": repeated([_at(r["itl_s"], "p50") for r in rounds]),
        "itl_p99_s": repeated([_at(r["itl_s"], "p99") for r in rounds]),
        "e2e_p50_s": repeated([_at(r["e2e_s"], "p50") for r in rounds]),
        "e2e_p99_s": repeated([_at(r["e2e_s"], "p99") for r in rounds]),
        "num_errors": sum(r["num_requests"] - r["num_completed"] for r in rounds),
        "num_short": sum(r["num_short"] for r in rounds),
    }


def table(loads: dict[str, dict[str, Comparison]], ours: str) -> str:
    """Rows by load and server: tok/s (median, min-max), TTFT, ITL, errors, ratio to `ours`."""
    head = (
        f"{'load':<14}{'server':<14}{'tok/s':>8}{'(min-max)':>16}{'TTFT p50':>10}{'p99':>8}"
        f"{'ITL p50':>10}{'p99':>8}{'errors':>8}{'ours/it':>9}"
    )
    lines = [head, "-" * len(head)]
    for load, servers in loads.items():
        for server, row in servers.items():
            rate = row["output_tok_s"]
            mine = servers[ours]["output_tok_s"] if ours in servers else None
            factor = None if server == ours else ratio(mine, rate)
            bounds = f"({rate['min']:.1f}-{rate['max']:.1f})" if rate else "-"
            lines.append(
                f"{load:<14}{server:<14}{_num(rate, 1, 1):>8}{bounds:>16}"
                f"{_num(row['ttft_p50_s'], 1, 2):>9}s{_num(row['ttft_p99_s'], 1, 2):>7}s"
                f"{_num(row['itl_p50_s'], 1e3, 0):>8}ms{_num(row['itl_p99_s'], 1e3, 0):>6}ms"
                f"{row['num_errors']:>8}{f'{factor:.2f}' if factor else '-':>9}"
            )
    return "\n".join(lines)


def _at(value: Spread | None, key: str) -> float | None:
    if value is None:
        return None
    return value["p50"] if key == "p50" else value["p99"]


def _num(value: Repeated | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{value['median'] * scale:.{digits}f}"
