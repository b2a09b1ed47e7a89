"""Parts of bench/gpu.py about weights that come and go: swaps, their price to others, many models.

Like those of gpu_parts.py they get `Settings` and give back figures, those wanted under `goals`.
"""

import math
import shutil
import statistics
import time

from bench import gpu_models
from bench.gpu_models import LARGE, SMALL
from bench.gpu_rig import Figures, Rig, Settings, goal, rig
from engine.pack import PackIndex

STILL_S = 60.0
"""Without a further pinned byte for so long, the driver pins no more of it."""


def swap(settings: Settings) -> Figures:
    """Cold, warm, and to decode at graph speed: seconds and GB/s."""
    pack_dir, index = gpu_models.make_pack(LARGE, settings.work_dir, settings.dry)
    size, found = index.total_bytes, Figures()
    room = host_room(settings, index.total_bytes)
    with rig(settings, host_tier_bytes=room, load_threads=4) as made:
        made.host({"m": pack_dir})
        cold_s = made.load("m")
        found["cold"] = {"seconds": cold_s, "gb_s": size / cold_s / 1e9}
        made.steady_decode(1, index.vocab_size)
        found["pinned_share"] = await_pinned(made, size)
        warm, speed = [], []
        for _ in range(settings.scaled(5, 1)):
            made.unload("m")
            begin = time.perf_counter()
            warm.append(made.load("m"))
            speed.append(until_graph_speed(made, index, begin))
        seconds = statistics.median(warm)
        found["warm"] = {"seconds": seconds, "gb_s": size / seconds / 1e9, "all": warm}
        found["to_graph_speed_s"] = statistics.median(speed)
    if not settings.dry:
        found["goals"] = {
            "swap-in of 8B from the host arena, s": goal(seconds, 0.35, more=False),
            "the same, GB/s": goal(found["warm"]["gb_s"], 50.0),
            "to graph-speed decode, s": goal(found["to_graph_speed_s"], 0.6, more=False),
        }
    return found


def swap_under_load(settings: Settings) -> Figures:
    """What a load beside it takes from a model that decodes."""
    large, index = gpu_models.make_pack(LARGE, settings.work_dir, settings.dry)
    small, small_index = gpu_models.make_pack(SMALL, settings.work_dir, settings.dry)
    room = host_room(settings, index.total_bytes)
    with rig(settings, host_tier_bytes=room, load_threads=4) as made:
        made.host({"runs": small, "swaps": large})
        made.load("runs")
        made.load("swaps")
        pinned = await_pinned(made, index.total_bytes)
        steady(made, small_index, swapping=False)  # whose steps are recorded
        alone, _ = steady(made, small_index, swapping=False)
        beside, swaps = steady(made, small_index, swapping=True)
    loss = 1 - beside / alone
    found: Figures = {"alone_tokens_per_s": alone, "beside_tokens_per_s": beside, "loss": loss}
    found |= {"swaps": swaps, "pinned_share": pinned}
    if not settings.dry:
        found["goals"] = {"loss of a model that runs meanwhile": goal(loss, 0.10, more=False)}
    return found


def many(settings: Settings) -> Figures:
    """Models of 8B, resident or warm, all of which answer."""
    pack_dir, index = gpu_models.make_pack(LARGE, settings.work_dir, settings.dry)
    count = settings.scaled(8, 3)
    names = {f"m{i}": path for i, path in enumerate(gpu_models.twins(pack_dir, count))}
    room = host_room(settings, 3 * index.total_bytes)
    answered, switches = 0, []
    with rig(settings, host_tier_bytes=room, load_threads=4) as made:
        made.host(names)
        for _ in range(2):
            for name in names:
                switches.append(made.load(name))
                prompt = made.prompts(1, settings.scaled(64, 8), index.vocab_size)[0]
                said = made.run_out([made.submit(name, prompt, 8)])
                answered += all(len(tokens) == 8 for tokens in said.values())
        states = list(made.states().values())
    found: Figures = {
        "resident": states.count("resident"),
        "warm": states.count("warm"),
        "answered": answered,
        "switch_s": switches,
    }
    if not settings.dry:
        ready = found["resident"] + found["warm"]
        found["goals"] = {"8B models resident or warm": goal(ready, 7)}
    return found


def until_graph_speed(made: Rig, index: PackIndex, begin: float) -> float:
    """Seconds until a decode step is a graph's replay; infinite where none ever is."""
    graphs = made.opened.graphs
    assert graphs is not None
    before = graphs.counters["graph_replays"]
    name = made.submit("m", made.prompts(1, 8, index.vocab_size)[0], 32)

    def replayed() -> bool:
        return graphs.counters["graph_replays"] > before

    made.until(lambda: replayed() or made.is_idle)
    seconds = time.perf_counter() - begin if replayed() else math.inf
    made.engine.abort(name, 1)
    made.until(lambda: made.is_idle)
    return seconds


def await_pinned(made: Rig, num_bytes: int, still_s: float = STILL_S) -> float:
    """Until the device reads the host tier's copy where it lies. Which share of it it can.

    Less than 1 where the driver refused: then swaps are slower, and are measured all the same.
    """
    pinner = getattr(made.opened.backend, "pinner", None)
    if pinner is None:
        return 1.0
    last, since = -1, time.monotonic()

    def settled() -> bool:
        nonlocal last, since
        if pinner.pinned_bytes != last:
            last, since = pinner.pinned_bytes, time.monotonic()
        return last >= num_bytes or time.monotonic() - since > still_s

    made.until(settled)
    return min(1.0, last / num_bytes)


def steady(made: Rig, index: PackIndex, swapping: bool) -> tuple[float, int]:
    """Tokens a second of a model that decodes, while another perhaps goes out and in all the time.

    Counted as long as all of its requests run. With the number of swaps.
    """
    settings = made.settings
    batch, new = settings.scaled(32, 2), settings.scaled(12_000, 60)
    for prompt in made.prompts(batch, settings.scaled(128, 8), index.vocab_size):
        made.submit("runs", prompt, new)
    for _ in range(settings.scaled(60, 6)):
        made.engine.step(time.monotonic())
    tokens, swaps, ended, begin = 0, 0, 0, time.perf_counter()
    seconds = settings.scaled(8, 0) or 0.2
    while not ended and time.perf_counter() - begin < seconds:
        # Asked for in either case: it costs the host's time.
        state = made.states()["swaps"]
        if swapping and state in ("cold", "warm"):
            made.engine.load("swaps", time.monotonic())
        elif swapping and state == "resident":
            made.engine.unload("swaps", time.monotonic())
            swaps += 1
        for delta in made.engine.step(time.monotonic()):
            tokens += len(delta.token_ids)
            ended += delta.finish is not None
    wall_s = time.perf_counter() - begin
    for request in list(made.engine.unfinished()):
        made.engine.abort(*request.key)
    made.until(lambda: made.is_idle)
    return tokens / wall_s, swaps


def host_room(settings: Settings, num_bytes: int) -> int:
    """Of the host tier. Raises RuntimeError where shared memory has no such room."""
    if settings.dry:
        return 1 << 24
    room, free = num_bytes + (1 << 30), shutil.disk_usage("/dev/shm").free
    if room > free:
        raise RuntimeError(
            f"/dev/shm has {free} bytes free, and the host tier needs {room}: "
            "mount -o remount,size=100G /dev/shm"
        )
    return room
