"""Random lives of an engine with encoders and generating models in too little memory.

Requests of all sizes come, are aborted or out of time; models are loaded, unloaded and thrown out
by one another; weights and KV are moved while steps are in flight. Whatever ends well has
transformers' rows or tokens, the books agree after every step, and every page comes back.
"""

import random

import pytest

from engine.errors import RequestRefused
from tests.engine import engine_hooks as hooks
from tests.engine.encoder_rig import random_inputs
from tests.engine.encoders.test_encoder_engine import EncoderDriver, Encoders
from tests.engine.test_engine import Mode, generated, in_each_mode
from tests.engine.tiny_models import TinyModel

NUM_EVENTS = 70
PROMPTS = [[3, 4, 5], [9, 8, 7, 6, 5, 4, 3], [11] * 21]


@in_each_mode
def test_whatever_ends_well_is_right(
    encoders: Encoders, tiny_models: dict[str, TinyModel], mode: Mode
) -> None:
    live(encoders, tiny_models, mode, 1)


@pytest.mark.soak
@in_each_mode
@pytest.mark.parametrize("seed", range(2, 22))
def test_many_lives(
    encoders: Encoders, tiny_models: dict[str, TinyModel], mode: Mode, seed: int
) -> None:
    live(encoders, tiny_models, mode, seed)


def live(encoders: Encoders, tiny_models: dict[str, TinyModel], mode: Mode, seed: int) -> None:
    """One life, and all pages back at its end."""
    rng = random.Random(seed)
    models = {name: tiny_models[name] for name in ("llama", "gemma")}
    driver = EncoderDriver(
        encoders, models, num_pages=130, mode=mode, drain_timeout_s=0.05, starvation_s=0.1
    )
    names = [*encoders, *models]
    prompts: dict[str, tuple[str, list[int]]] = {}
    refusals: set[str] = set()
    for number in range(NUM_EVENTS):
        request_id, name = f"r{number}", rng.choice(names)
        event = rng.random()
        try:
            if event < 0.25:
                driver.engine.load(name, driver.now_s)
            elif event < 0.3:
                driver.engine.unload(name, driver.now_s)
            elif event < 0.4:
                driver.engine.abort(f"r{rng.randrange(number + 1)}", 1)
            elif event < 0.5:
                rng.choice([hooks.move_kv, hooks.move_weights])(driver.engine, rng)
            elif name in models:
                prompt = rng.choice(PROMPTS)
                driver.submit(request_id, name, prompt, 6)
                prompts[request_id] = name, prompt
            else:
                timeout_s = rng.choice([0.0, 0.0, 0.0, 0.05])
                inputs = random_inputs(number, rng.choice([1, 2, 12, 40]))
                driver.encode(request_id, name, inputs, timeout_s=timeout_s)
                prompts.pop(request_id, None)
        except RequestRefused as refused:
            refusals.add(refused.code)
            driver.inputs.pop(request_id, None)
        for _ in range(rng.choice([0, 1, 1, 2, 5])):
            driver.step()
    asked = {**prompts, **driver.inputs}
    driver.run(lambda: len(driver.finishes) == len(asked))
    assert len(asked) > NUM_EVENTS // 8, "hardly anything was asked"
    assert refusals <= {"not_resident", "draining", "overloaded"}
    for request_id, finish in driver.finishes.items():
        assert finish.reason in ("stop", "length", "abort", "timeout"), finish.error
        if finish.reason == "stop":
            driver.check_rows(request_id)
        elif finish.reason == "length":
            model, prompt = prompts[request_id]
            assert driver.tokens[request_id] == generated(tiny_models[model], prompt, 6)
        assert (finish.reason == "stop") == (request_id in driver.vectors)
    told = sum(finish.usage.service_s for finish in driver.finishes.values())
    assert told + driver.counter("unbilled_seconds") == pytest.approx(
        driver.counter("busy_seconds")
    )
    driver.empty()
