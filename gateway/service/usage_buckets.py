"""The verb on usage by bucket: what a tenant is told of itself (usage_reports.py), and later the
pages. What a bucket is says registry/usage_buckets.py."""

from dataclasses import replace

from gateway.policy.permissions import Grants
from gateway.service.control import Control, require
from registry.usage_buckets import BucketQuery, BucketSum, bucket_sums


def usage_buckets(control: Control, query: BucketQuery) -> list[BucketSum]:
    """Sums of the query. Raises Forbidden, or InvalidValue where there are too many."""
    require(control, "usage.read", query.tenant_id)
    with control.reading() as session:
        return bucket_sums(session, query)


def as_key(control: Control, key_id: str, tenant_id: str) -> Control:
    """The same registry with the rights of a tenant's own key: to see what is the tenant's."""
    grants: Grants = {tenant_id: "viewer"}
    return replace(control, actor=f"key:{key_id}", grants=grants)
