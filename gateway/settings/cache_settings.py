"""Settings of cached answers (docs/cache.md)."""

from dataclasses import dataclass

from gateway.settings.base_settings import MIB, setting


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """What is cached, how much, and when it may be given."""

    cache_max_bytes: int = setting(
        64 * MIB,
        "Maximum memory per gateway process for cached answers. Answers are cached only if the "
        "key or the request turns the cache on.",
        ge=0,
    )
    cache_tenant_max_bytes: int = setting(
        32 * MIB,
        "Maximum size of one tenant's cached answers, in memory or in Redis. The answers whose "
        "hits have saved least are evicted first.",
        ge=0,
    )
    cache_readings_max_bytes: int = setting(
        64 * MIB,
        "Maximum memory per gateway process for what the embedding model makes of the words of "
        "cached questions (some 6 kB a question). 0: none; every lookup embeds the similar "
        "questions again.",
        ge=0,
    )
    cache_ttl_s: float = setting(
        3600.0, "How long an answer stays in the cache, no matter how often it is used.", gt=0.0
    )
    cache_least_logprob: float = setting(
        0.0,
        "Answers whose mean token log-probability is below this value are not cached. If it is "
        "below 0, workers compute log-probabilities for every answer that may be cached. 0: not "
        "checked.",
        le=0.0,
    )
    cache_embedder: str = setting(
        "",
        "Name of the hosted embedding model that compares questions. Semantic and shadow mode "
        "need it; it runs in a small worker process of its own. Empty: none.",
    )
    cache_embed_timeout_s: float = setting(
        0.1,
        "How long a request waits for the embedding of its question. After that it counts as a "
        "cache miss.",
        gt=0.0,
    )
    cache_embed_threads: int = setting(
        1,
        "Threads of the embedding model's worker. More than 1 helps only with long questions.",
        ge=1,
    )
    cache_false_hit_budget: float = setting(
        0.01,
        "Share of cached answers that may be wrong, for keys that do not set their own.",
        ge=0.0,
        lt=1.0,
    )
