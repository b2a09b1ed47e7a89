"""Settings of cached answers (docs/cache.md)."""

from typing import Annotated

import msgspec

from gateway.settings_exports import ExportSettings
from gateway.settings_kinds import MIB, Count, CountOrZero, Seconds, doc


class CacheSettings(ExportSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of `settings.Settings`."""

    cache_max_bytes: Annotated[
        int,
        CountOrZero,
        doc("Answers kept in a gateway's memory for keys and requests that turn the cache on."),
    ] = 64 * MIB
    cache_tenant_max_bytes: Annotated[
        int,
        CountOrZero,
        doc("Of one tenant, there or in Redis; those go first whose hits have saved least."),
    ] = 32 * MIB
    cache_readings_max_bytes: Annotated[
        int,
        CountOrZero,
        doc(
            "What a gateway process remembers of questions that were taken apart to be compared; "
            "0: each look-up reads its neighbours anew."
        ),
    ] = 16 * MIB
    cache_ttl_s: Annotated[
        float, Seconds, doc("How long an answer is kept, however often it is asked for again.")
    ] = 3600.0
    cache_least_logprob: Annotated[
        float,
        msgspec.Meta(le=0.0),
        doc(
            "Answers whose tokens' log-probabilities are below it in the mean are not kept. Below "
            "0 workers are asked for them, of every answer that might be kept; 0: they are not."
        ),
    ] = 0.0
    cache_embedder: Annotated[
        str,
        doc(
            "Name of the hosted embedding model that compares questions: semantic and shadow mode "
            "need one, which then has a small worker process of its own. Empty: none."
        ),
    ] = ""
    cache_embed_timeout_s: Annotated[
        float, Seconds, doc("How long a request waits for its question's vector; then a miss.")
    ] = 0.1
    cache_embed_threads: Annotated[
        int, Count, doc("Threads of the embedder's worker; more help long questions only.")
    ] = 1
    cache_false_hit_budget: Annotated[
        float,
        msgspec.Meta(ge=0.0, lt=1.0),
        doc("Share of the answers from the cache that may be wrong, where a key does not say."),
    ] = 0.01
