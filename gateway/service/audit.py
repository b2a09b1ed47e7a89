"""The verb on the audit log, for the CLI and, later, the admin API and pages (control.py)."""

from gateway.service.control import Control, require
from registry import audit
from registry.audit import AuditEntry, AuditFilter


def list_audit(
    control: Control, wanted: AuditFilter, before_id: int | None = None, limit: int = 100
) -> list[AuditEntry]:
    """Changes, newest first; `before_id` is the last entry of the page before."""
    require(control, "audit.read")
    with control.reading() as session:
        return audit.page(session, wanted, before_id=before_id, limit=limit)
