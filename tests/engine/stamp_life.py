"""One life of a `StampRig`: what its world is like, and everything that can happen in it.

Each action takes its choices from the life's own generator, so that the random walk is nothing but
a list of actions drawn from a seed, and hypothesis can draw the actions itself.
"""

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from engine.errors import RequestRefused
from engine.protocol import ModelSpec
from tests.engine.engine_hooks import compact, move_kv, move_weights
from tests.engine.stamp_packs import Shape, random_shape
from tests.engine.stamp_rig import Pace, StampRig

TENANTS = ("ada", "bob", "cyd")
FAMILIES_PER_PACK = 3
STATEFUL = 0.5
"""Of the packs, how many have layers that keep states."""
PACES: tuple[Pace, ...] = ("inline", "slow", "slow")
FAULTS = ("raise", "memory", "shape", "broken")
ACTIONS = {
    "submit": 40,
    "step": 100,
    "abort": 4,
    "load": 6,
    "unload": 2.5,
    "change_catalog": 0.8,
    "move_kv": 6,
    "move_weights": 2,
    "compact": 2,
    "fail_a_step": 1.5,
    "let_time_pass": 0.7,
    "rest": 0.5,
}
# Where there is hardly room: models come and go, and what stays is scattered.
CROWDED = {"submit": 25, "load": 12, "unload": 8, "move_weights": 8}


class Life:
    """A world drawn from a seed."""

    def __init__(self, folder: Path, seed: int, pace: Pace | None = None) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        page_bytes = rng.choice((4096, 4096, 8192))
        block_tokens = rng.choice((1, 2, 4, 4, 8))
        # Packs of long runs that hardly fit together: to load one, the others' weights must move.
        self.crowded = crowded = rng.random() < 0.3
        shapes = {
            f"p{i}": random_shape(rng, page_bytes, block_tokens, crowded, STATEFUL)
            for i in range(rng.randint(3 if crowded else 1, 5))
        }
        self.rig = StampRig(
            folder,
            rng,
            shapes,
            _pool_size(rng, shapes, page_bytes, crowded),
            page_bytes,
            lag=rng.choice((0, 0, 1, 4)),
            pace=rng.choice(PACES) if pace is None else pace,
            block_tokens=block_tokens,
            **_batch(rng),
            min_run_steps=rng.choice((1, 2, 4)),
            steps_ahead=rng.choice((0, 1, 1)),
            prefix_cache=rng.random() < 0.85,
            tenant_kv_share=rng.choice((0.3, 0.75, 1.0)),
            host_tier_bytes=rng.choice((0, 1 << 18, 1 << 24)),
            drain_timeout_s=rng.choice((0.0, 0.05, 1.0)),
            starvation_s=rng.choice((0.0, 0.1, 2.0)),
            max_waiting=16,
            **_watermarks(rng),
        )
        self.shapes = shapes
        self.families = {
            name: [self._tokens(name, shape.max_context) for _ in range(FAMILIES_PER_PACK)]
            for name, shape in shapes.items()
        }
        self.change_catalog()

    def act(self, name: str) -> None:
        """One action by its name."""
        getattr(self, name)()

    # Actions --------------------------------------------------------------------------------

    def submit(self) -> None:
        """A request to a random model; a model that is not there is asked for instead."""
        rng, rig = self.rng, self.rig
        model_id = self._some_model()
        if model_id is None:
            return
        pack = Path(rig.catalog[model_id].pack_dir).name
        prompt = self._prompt(pack)
        room = self.shapes[pack].max_context - len(prompt)
        max_tokens = min(room, rng.choice((1, 5, 12, 30, 80)))
        stop = rng.sample(range(self.shapes[pack].vocab_size), rng.choice((0, 0, 1, 3)))
        timeout_s = rng.choice((0.0, 0.0, 0.0, 0.0, 0.03, 0.5, 3.0))
        try:
            tenant, loses, is_batch = rng.choice(TENANTS), rng.random() < 0.2, rng.random() < 0.3
            rig.submit(model_id, tenant, prompt, max_tokens, stop, timeout_s, loses, is_batch)
        except RequestRefused as refused:
            if refused.code == "not_resident":
                rig.engine.load(model_id, rig.now_s)

    def step(self) -> None:
        """Some time, some progress of the loaders, one engine step."""
        self.rig.step(self.rng.choice((0.0, 0.001, 0.01, 0.05)), self.rng.choice((0, 1, 3, 50)))

    def abort(self) -> None:
        """Somebody gives up; sometimes somebody who has ended, or never was."""
        names = list(self.rig.open) or ["nobody"]
        self.rig.abort(self.rng.choice((*names, "nobody")))

    def load(self) -> None:
        """A model is asked for that is not there; others may have to move or go for it."""
        states = self.rig.states()
        away = [name for name in self.rig.catalog if states.get(name) in ("cold", "warm")]
        if away:
            self.rig.engine.load(self.rng.choice(away), self.rig.now_s)

    def unload(self) -> None:
        """A model is sent away."""
        model_id = self._some_model()
        if model_id is not None:
            self.rig.engine.unload(model_id, self.rig.now_s)

    def change_catalog(self) -> None:
        """Names come and go, change their packs, share one, are pinned."""
        rng = self.rng
        packs = list(self.rig.packs)
        specs = [
            self._spec(name, pack if rng.random() < 0.9 else rng.choice(packs))
            for name, pack in zip((f"m{i}" for i in range(len(packs))), packs, strict=True)
            if rng.random() < 0.92
        ]
        if rng.random() < 0.5:
            specs.append(self._spec("twin", rng.choice(packs)))
        self.rig.set_catalog(specs)

    def move_kv(self) -> None:
        """KV has to leave random pages."""
        self.rig.events["forced kv moves"] += move_kv(self.rig.engine, self.rng)

    def move_weights(self) -> None:
        """Weights of somebody go somewhere else."""
        self.rig.events["forced weight moves"] += move_weights(self.rig.engine, self.rng)

    def compact(self) -> None:
        """Almost empty extents are copied together."""
        self.rig.events["forced compactions"] += compact(self.rig.engine)

    def fail_a_step(self) -> None:
        """The next step of any model goes wrong."""
        self.rig.fault(self.rng.choice(FAULTS))

    def let_time_pass(self) -> None:
        """Long enough for drains, starvation and deadlines."""
        self.rig.step(self.rng.choice((0.2, 1.5, 5.0)))

    def rest(self) -> None:
        """Nobody asks for a while."""
        for _ in range(self.rng.randint(5, 40)):
            self.rig.step(load_parts=10)

    # The whole ------------------------------------------------------------------------------

    def walk(self, num_steps: int) -> Counter[str]:
        """Random actions until the engine has stepped so often, then the end of everything."""
        actions = ACTIONS | (CROWDED if self.crowded else {})
        names, weights = list(actions), list(actions.values())
        while self.rig.events["steps"] < num_steps:
            self.act(self.rng.choices(names, weights)[0])
        return self.rig.end()

    def _some_model(self) -> str | None:
        """Mostly one that is resident, so that requests are not all for models that come."""
        states = self.rig.states()
        known = [name for name in self.rig.catalog if name in states]
        there = [name for name in known if states[name] == "resident"]
        if there and self.rng.random() < 0.8:
            return self.rng.choice(there)
        return self.rng.choice(known) if known else None

    def _spec(self, name: str, pack: str) -> ModelSpec:
        return ModelSpec(
            name,
            str(self.rig.packs[pack]),
            pinned=self.rng.random() < 0.08,
            weight=self.rng.choice((0.5, 1.0, 3.0)),
        )

    def _prompt(self, pack: str) -> list[int]:
        """The beginning of a family, then something of its own; or a chat that goes on."""
        rng, longest = self.rng, self.shapes[pack].max_context - 1
        if rng.random() < 0.25:
            earlier = [
                told
                for told in list(self.rig.requests.values())[-30:]
                if told.instance.name == pack and told.tokens
            ]
            if earlier:
                told = rng.choice(earlier)
                text = [*told.submit.prompt_token_ids, *told.tokens]
                return [*text, *self._tokens(pack, rng.randint(0, 9))][:longest]
        family = rng.choice(self.families[pack])
        cut = rng.randint(1, longest)
        return [*family[:cut], *self._tokens(pack, rng.choice((0, 0, 1, 5)))][:longest]

    def _tokens(self, pack: str, count: int) -> list[int]:
        return [self.rng.randrange(self.shapes[pack].vocab_size) for _ in range(count)]


def _pool_size(rng: random.Random, shapes: dict[str, Shape], page_bytes: int, crowded: bool) -> int:
    """From hardly enough for one pack and one long sequence to room for all and everybody."""
    weights = [shape.weight_pages(page_bytes) for shape in shapes.values()]
    rooms = [shape.kv_pages(page_bytes) for shape in shapes.values()]
    least = max(weight + room for weight, room in zip(weights, rooms, strict=True))
    if crowded:
        return max(least, sum(weights) - min(weights) + rng.randint(0, 2) * max(rooms))
    return rng.choice(
        (
            least + rng.randint(0, 20),
            least + rng.randint(10, 120),
            max(least, sum(weights) * 3 // 4 + max(rooms)),
            sum(weights) + max(rooms) + rng.randint(0, 60),
            sum(weights) + 2 * max(rooms) + rng.randint(0, 200),
            sum(weights) + 600 + max(rooms),
        )
    )


def _batch(rng: random.Random) -> dict[str, Any]:
    tokens, rows = rng.choice((5, 16, 33, 64)), rng.choice((1, 4, 8, 12))
    return {"max_batch_tokens": max(tokens, rows), "max_num_seqs": rows}


def _watermarks(rng: random.Random) -> dict[str, Any]:
    low = rng.choice((0.0, 0.02, 0.1))
    return {"kv_low_watermark": low, "kv_high_watermark": low + rng.choice((0.0, 0.05))}


def main() -> None:
    """SEED STEPS: that walk again."""
    seed, num_steps = (int(text) for text in sys.argv[1:3])
    with tempfile.TemporaryDirectory(prefix="life-") as folder:
        life = Life(Path(folder) / "life", seed)
        print(life.rig.config, *life.shapes.values(), sep="\n")
        for event, count in sorted(life.walk(num_steps).items()):
            print(f"{count:>12,}  {event}")


if __name__ == "__main__":
    main()
