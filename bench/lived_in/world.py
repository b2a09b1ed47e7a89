"""What a history is written with: an operator's context under a clock that is set, a generator of
chance, and the people and models of the installation.

Lives here: who there is (tenants, keys, models) and the names that are hard on a page. Does not:
what happens to them (`events.py`, `postings.py`).
"""

import random
from dataclasses import dataclass, field, replace

from admin.context.operator_context import OperatorContext
from registry.accounts.api_keys import KeyRecord
from registry.models.catalog import ModelTask, PackFacts
from registry.money.prices import PriceRecord

NUM_DAYS = 45.0
DAY_S = 86_400.0
HOUR_S = 3600.0
USD = 10**9
"""Nano-units."""
PASSWORD = "lived in since October"
INTERNAL = "internal"
RENAMED = "sherlock-two"
"""A second name of sherlock's pack."""


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """A key, its part of the traffic, and what it asks. `hits`: the share answered from the cache;
    `tokens`: means of a prompt and an answer."""

    name: str
    traffic: float
    models: tuple[str, ...]
    hits: float = 0.0
    tokens: tuple[int, int] = (220, 90)


@dataclass(frozen=True, slots=True)
class TenantPlan:
    """A tenant. `plan` "": it pays list prices."""

    name: str
    keys: tuple[KeyPlan, ...]
    weight: float = 1.0
    priority: str = "standard"
    plan: str = ""
    discount_bp: int = 0


LONG = "Ministère de l'Éducation nationale - Direction du numérique pour l'éducation (évaluation)"
TENANTS = (
    TenantPlan(
        "acme",
        (
            KeyPlan("production", 9.0, ("atlas-instruct", "sherlock"), 0.04, (900, 260)),
            KeyPlan("nightly batch", 5.0, ("atlas-instruct",), 0.0, (1800, 60)),
            KeyPlan("staging", 0.6, ("sherlock", "python")),
        ),
        4.0,
        "interactive",
        "enterprise",
    ),
    TenantPlan(
        "globex",
        (
            KeyPlan("web", 4.0, ("shakespeare", "minilm-embed"), 0.08),
            KeyPlan("mobile", 2.0, ("shakespeare",), 0.05, (120, 50)),
        ),
        2.0,
        plan="startup",
    ),
    TenantPlan("initech", (KeyPlan("default", 3.0, ("python",), 0.0, (420, 160)),)),
    TenantPlan(
        "soylent",
        (
            KeyPlan("production", 2.5, ("sherlock", RENAMED)),
            KeyPlan("before the audit", 0.4, ("sherlock",)),
        ),
    ),
    TenantPlan(
        "stark-industries",
        (
            KeyPlan("jarvis", 4.0, ("atlas-instruct", "python"), 0.0, (1200, 420)),
            KeyPlan("r-and-d", 1.0, ("borealis/chat-with-a-rather-long-name-v2.1",)),
        ),
        3.0,
        "interactive",
        "enterprise",
        500,
    ),
    TenantPlan("Wayne & Söhne", (KeyPlan("main", 1.2, ("shakespeare", "legacy-gpt")),)),
    TenantPlan(
        "株式会社山田製作所",
        (
            KeyPlan("本番環境", 1.5, ("sherlock", "minilm-embed")),
            KeyPlan("検証", 0.3, ("sherlock",)),
        ),
        plan="startup",
    ),
    TenantPlan(LONG, (KeyPlan("évaluation des élèves, académie de Créteil", 0.8, ("python",)),)),
    TenantPlan('O\'Brien <b>"Labs"</b>', (KeyPlan("key #1 <script>", 0.5, ("shakespeare",)),)),
    TenantPlan("umbrella", (KeyPlan("hive", 0.6, ("sherlock",)),)),
    TenantPlan(
        "hooli",
        (
            KeyPlan("nucleus", 3.0, ("atlas-instruct",), 0.12, (700, 200)),
            KeyPlan("box", 0.7, ("minilm-embed",), 0.0, (260, 0)),
        ),
    ),
    TenantPlan(
        INTERNAL,
        (
            KeyPlan("playground", 0.3, ("shakespeare", "sherlock", "python")),
            KeyPlan("evaluation", 0.8, ("atlas-instruct", "python"), 0.2),
            KeyPlan("monitoring", 0.7, ("sherlock",), 0.0, (12, 2)),
            KeyPlan("ci", 0.2, ("python",), 0.0, (60, 20)),
        ),
        0.5,
        "batch",
    ),
    TenantPlan("q", (KeyPlan("k", 0.2, ("minilm-embed",), 0.0, (40, 0)),)),
)

# Prices in nano-units a token: prompt, found in a cache, generated, an encoder's input.
PRICES = {
    "atlas-instruct": (2500, 250, 10_000, 0),
    "borealis/chat-with-a-rather-long-name-v2.1": (1000, 100, 4000, 0),
    "sherlock": (250, 25, 1000, 0),
    RENAMED: (250, 25, 1000, 0),
    "shakespeare": (150, 15, 600, 0),
    "python": (400, 40, 1600, 0),
    "legacy-gpt": (500, 50, 1500, 0),
    "minilm-embed": (0, 0, 0, 20),
}
# Those with a pack of their own on the disk of a folder that a server serves.
HOSTED = tuple(name for name in PRICES if name not in (RENAMED, "legacy-gpt"))
REFUSED = {
    "mystery-7b": (
        "mystery-org/mystery-7b-instruct",
        "network",
        "huggingface.co cannot be reached (Temporary failure in name resolution): try again later",
    ),
    "pickled-llama": (
        "/srv/models/pickled-llama",
        "pickle_weights",
        "pickled-llama has only pickled weights (pytorch_model.bin), which can run code when they "
        "are read; convert them to safetensors",
    ),
    "custom-code-moe-with-its-own-modeling-file": (
        "acme-research/custom-code-moe",
        "custom_code",
        "acme-research/custom-code-moe@9f1c2ab34d56 brings code of its own (auto_map); only "
        "models that transformers has itself can be hosted",
    ),
    "half-downloaded": (
        "polyglot/half-downloaded-13b",
        "interrupted",
        "the registration process stopped before it was done: `polyhost models retry "
        "half-downloaded` continues with what was downloaded",
    ),
}


@dataclass(slots=True)
class World:
    """The history so far. `now_at` is the clock of every context that it gives out."""

    base: OperatorContext
    rng: random.Random
    began_at: float
    ends_at: float
    packs: dict[str, PackFacts]
    now_at: float = 0.0
    last_request: str = ""
    keys: dict[tuple[str, str], KeyRecord] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    """Plaintexts by "tenant/key"."""

    def by(self, user: str) -> OperatorContext:
        """The context of a user of the pages; "" for the command line."""
        actor = f"admin:{user}" if user else "cli:root"
        return replace(self.base, actor=actor, clock=lambda: self.now_at)

    def days(self, ago: float) -> float:
        """The instant so many days before the end of a history of NUM_DAYS; in a shorter one as
        much nearer."""
        return self.ends_at - ago / NUM_DAYS * (self.ends_at - self.began_at)


def price_of(model: str, factor: float = 1.0) -> PriceRecord:
    """The list price of PRICES, times a factor."""
    prompt, cached, made, embedding = (round(each * factor) for each in PRICES[model])
    return PriceRecord(model, 0.0, prompt, cached, made, embedding)


def some_facts(model: str) -> PackFacts:
    """A pack that is on no disk: for what was removed, and where no server is to serve."""
    size = 30 << 20 if model == "atlas-instruct" else 3 << 20
    task: ModelTask = "embed" if model == "minilm-embed" else "generate"
    return PackFacts(f"rev-{model[:20]}", model, "llama", "bfloat16", size, 512, 2048, task)
