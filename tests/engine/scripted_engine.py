"""A deterministic engine for tests of the worker: one token a step a request, no arithmetic.

Token n of a request is n. Implements as much of `Engine` as a worker calls, with the real
engine's rules for refusals, aborts and idempotence; residency changes are set by hand or take
`load_steps` steps.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.errors import IntegrityError, RequestRefused
from engine.protocol import (
    Finish,
    FinishReason,
    Layout,
    Lease,
    ModelSpec,
    ModelStatus,
    ResidencyState,
    Submit,
    SwapChoice,
    SwapRecord,
    TokenDelta,
    Usage,
    WorkerStatus,
)
from engine.residency.loaded_models import PLAIN_LOAD, LoadRequest


@dataclass(slots=True)
class Running:
    """A request and how far it is."""

    submit: Submit
    num_generated: int = 0
    aborted: bool = False

    def end(self, reason: FinishReason, token_ids: list[int]) -> TokenDelta:
        """The last delta."""
        usage = Usage(len(self.submit.prompt_token_ids), 0, self.num_generated, 0.5)
        return TokenDelta(
            self.submit.request_id, self.submit.attempt, token_ids, Finish(reason, usage)
        )


@dataclass(slots=True)
class ScriptedEngine(Engine):
    """Public fields are the script: tests read and set them between ticks."""

    max_requests: int = 8
    load_steps: int = 2
    paused: bool = False
    fail_step: bool = False
    broken: bool = False
    states: dict[str, ResidencyState] = field(default_factory=dict)
    running: dict[tuple[str, int], Running] = field(default_factory=dict)
    catalog: list[ModelSpec] | None = None
    taken: list[str] = field(default_factory=list)
    loading: dict[str, int] = field(default_factory=dict)
    swaps: list[SwapRecord] = field(default_factory=list)
    choices: list[SwapChoice] = field(default_factory=list)
    load_requests: list[tuple[str, LoadRequest]] = field(default_factory=list)
    num_steps: int = 0
    num_status: int = 0
    num_integrity: int = 0
    num_layouts: int = 0
    told_layout: Layout | None = None
    free_kv_bytes: int = 1 << 20

    def set_catalog(self, models: Sequence[ModelSpec], now_s: float) -> None:
        self.catalog = list(models)
        self.states = {m.model_id: self.states.get(m.model_id, "cold") for m in models}

    def submit(self, request: Submit, now_s: float) -> None:
        state = self.states.get(request.model_id)
        if state is None:
            raise RequestRefused("unknown_model", f"no model {request.model_id}")
        if state != "resident":
            raise RequestRefused("not_resident", f"{request.model_id} is {state}")
        if len(self.running) >= self.max_requests:
            raise RequestRefused("overloaded", "full")
        self.running[request.request_id, request.attempt] = Running(request)
        self.taken.append(request.request_id)

    def abort_all(self, keys: Collection[tuple[str, int]]) -> None:
        for key in self.running.keys() & set(keys):
            self.running[key].aborted = True

    def load(self, model_id: str, now_s: float, load_request: LoadRequest = PLAIN_LOAD) -> None:
        if model_id not in self.states:
            raise RequestRefused("unknown_model", f"no model {model_id}")
        self.load_requests.append((model_id, load_request))
        if load_request.to_host_tier:
            return
        if self.states[model_id] != "resident" and model_id not in self.loading:
            self.states[model_id] = "loading"
            self.loading[model_id] = self.load_steps

    def unload(self, model_id: str, now_s: float) -> None:
        if self.states.get(model_id) == "resident":
            self.states[model_id] = "cold"
            self.swaps.append(SwapRecord(model_id, "evict", "none", 4096, 0.001))

    def step(self, now_s: float) -> list[TokenDelta]:
        self.num_steps += 1
        if self.fail_step:
            raise IntegrityError("scripted")
        self._advance_loads()
        deltas: list[TokenDelta] = []
        for key, running in list(self.running.items()):
            if running.aborted:
                deltas.append(running.end("abort", []))
                del self.running[key]
            elif not self.paused:
                running.num_generated += 1
                token = [running.num_generated]
                if running.num_generated >= running.submit.max_tokens:
                    deltas.append(running.end("length", token))
                    del self.running[key]
                else:
                    deltas.append(TokenDelta(*key, token))
        return deltas

    def has_work(self) -> bool:
        aborting = any(running.aborted for running in self.running.values())
        return aborting or bool(self.running and not self.paused)

    @property
    def in_transition(self) -> bool:
        return any(state in ("loading", "draining") for state in self.states.values())

    @property
    def residency_key(self) -> int:
        return hash(tuple(self.states.items()))

    def status(self, now_s: float) -> WorkerStatus:
        self.num_status += 1
        free_requests = self.max_requests - len(self.running)
        resident = [m for m, state in self.states.items() if state == "resident"]
        return WorkerStatus(
            epoch="",
            worker_id="",
            lease_ttl_s=0.0,
            swaps=[],
            free_requests=free_requests,
            free_kv_bytes=self.free_kv_bytes,
            page_bytes=65536,
            num_pages=16,
            pages={"free": 16},
            models=[ModelStatus(m, state, 4096, 0, 0, 0, -1.0) for m, state in self.states.items()],
            leases=[Lease(m, free_requests, 1024, 64) for m in resident],
            counters={"steps": float(self.num_steps)},
        )

    def layout(self) -> Layout:
        self.num_layouts += 1
        return Layout(["free"], [(0, 16)]) if self.told_layout is None else self.told_layout

    def take_swaps(self) -> tuple[list[SwapRecord], list[SwapChoice]]:
        swaps, self.swaps = self.swaps, []
        choices, self.choices = self.choices, []
        return swaps, choices

    def check_integrity(self) -> None:
        self.num_integrity += 1
        if self.broken:
            raise IntegrityError("scripted")

    def _advance_loads(self) -> None:
        for model_id, steps_left in list(self.loading.items()):
            if steps_left > 1:
                self.loading[model_id] = steps_left - 1
                continue
            del self.loading[model_id]
            self.states[model_id] = "resident"
            self.swaps.append(SwapRecord(model_id, "load", "disk", 4096, 0.01))
