"""What a change of the registry costs a gateway with many keys: CPU of one poll.

    python -m bench.registry_changes [--keys 10000] [--changes 20]

A registry on SQLite in a temporary folder, every key with limits by the day and a budget. Told are
the first view, one key changed, one tenant's limits changed, and everything read anew (what every
change cost before).
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from gateway.directory import Directory
from gateway.registry_poll import RegistryPoll
from gateway.store.memory import MemoryStore
from registry import api_keys, quotas, tenants
from registry.quotas import Limits
from registry.session import make_engine, upgrade, writing

KEYS_A_TENANT = 20
LIMITS = Limits(requests_per_minute=60, tokens_per_day=10**6, month_budget_nanos=10**10)


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--changes", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'polyhost.db'}"
        upgrade(url)
        engine = make_engine(url)
        asyncio.run(measure(engine, Path(folder), options.keys, options.changes))
        engine.dispose()


async def measure(engine: Engine, folder: Path, num_keys: int, num_changes: int) -> None:
    """All figures of one registry."""
    keys, owners = fill(engine, num_keys)
    directory = Directory()
    poll = RegistryPoll(
        engine, folder, directory, 0.5, lambda models, weights: None, print, MemoryStore()
    )
    began_s = time.process_time()
    await poll.load()
    print(f"keys {num_keys}: first view {time.process_time() - began_s:.3f} s of CPU")

    async def polled(name: str, change: Callable[[Session, int], object]) -> None:
        spent_s = []
        for number in range(num_changes):
            with writing(engine, "bench") as session:
                change(session, number)
            began_s = time.process_time()
            await poll.poll()
            spent_s.append(time.process_time() - began_s)
        spent_s.sort()
        middle_s, worst_s = spent_s[len(spent_s) // 2], spent_s[-1]
        print(f"{name}: {middle_s * 1000:.2f} ms of CPU, {worst_s * 1000:.2f} at most")

    now_at = time.time()
    await polled("a key's limit", lambda s, n: set_limit(s, "key", keys[n], 61 + n, now_at))
    await polled("a key revoked", lambda s, n: api_keys.revoke(s, keys[-1 - n], now_at=now_at))
    await polled(
        f"a tenant's limit ({KEYS_A_TENANT} keys)",
        lambda s, n: set_limit(s, "tenant", owners[n], 61 + n, now_at),
    )
    began_s = time.process_time()
    await poll.poll(again=True)
    print(f"everything anew: {(time.process_time() - began_s) * 1000:.0f} ms of CPU")
    print(f"keys in the view: {len(list(directory.keys()))}")


def set_limit(
    session: Session, scope: quotas.LimitScope, owner: str, limit: int, now_at: float
) -> None:
    """One that has no past."""
    quotas.set_limits(session, scope, owner, {"requests_per_minute": limit}, now_at=now_at)


def fill(engine: Engine, num_keys: int) -> tuple[list[str], list[str]]:
    """Ids of keys and of tenants."""
    keys, owners = list[str](), list[str]()
    now_at = time.time()
    with writing(engine, "bench") as session:
        for number in range(num_keys):
            if number % KEYS_A_TENANT == 0:
                name = f"tenant-{len(owners)}"
                owners.append(tenants.create_tenant(session, name, now_at=now_at).id)
            made, _ = api_keys.create_key(
                session, owners[-1], f"key-{number}", limits=LIMITS, now_at=now_at
            )
            keys.append(made.id)
    return keys, owners


if __name__ == "__main__":
    main()
