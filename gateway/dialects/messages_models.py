"""Lists of models as Anthropic's clients check them.

A model has `type`, `id`, `display_name`, `created_at` and `lifecycle`; lists have `has_more`,
`first_id` and `last_id`, and are paged by `limit`, `after_id` and `before_id`.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gateway.api.bodies import invalid
from gateway.types import HostedModel

VERSION_HEADER = "anthropic-version"
_MAX_PAGE = 1000
_DEFAULT_PAGE = 20


def model_body(model: HostedModel) -> dict[str, Any]:
    """One model."""
    created = datetime.fromtimestamp(model.created_at, UTC)
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.max_context,
        "max_tokens": model.max_context,
    }


def model_list(models: Sequence[HostedModel], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of them. Raises ApiError."""
    limit = query.get("limit", str(_DEFAULT_PAGE))
    is_short = len(limit) <= len(str(_MAX_PAGE))
    if not (is_short and limit.isascii() and limit.isdigit() and 1 <= int(limit) <= _MAX_PAGE):
        raise invalid("limit", f"limit must be between 1 and {_MAX_PAGE}")
    size, names = int(limit), [model.name for model in models]
    first, end = 0, len(models)
    for param in ("after_id", "before_id"):
        name = query.get(param)
        if name is None:
            continue
        if name not in names:
            raise invalid(param, f"{param} is not the id of a model that you may use")
        at = names.index(name)
        first, end = (at + 1, end) if param == "after_id" else (first, at)
    if "before_id" in query and "after_id" not in query:
        page = models[max(first, end - size) : end]
        has_more = end - size > first
    else:
        page = models[first : min(end, first + size)]
        has_more = first + size < end
    return {
        "data": [model_body(model) for model in page],
        "has_more": has_more,
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }
