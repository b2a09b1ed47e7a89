"""What operators want of workers is kept until they want something else."""

from sqlalchemy import Engine

from registry import audit
from registry.models import worker_orders
from registry.models.worker_orders import WorkerOrder
from registry.session import reading, writing


def test_orders_last_and_a_restart_names_a_process(engine: Engine) -> None:
    with writing(engine, "test") as session:
        assert worker_orders.all_orders(session) == {}
        worker_orders.order(session, "worker-1", "drain", now_at=10.0)
        worker_orders.order(session, "worker-0", "restart", now_at=11.0, started_at=5.0)
        worker_orders.order(session, "worker-1", "restart", now_at=12.0, started_at=6.0)
    with reading(engine) as session:
        assert worker_orders.all_orders(session) == {
            "worker-0": WorkerOrder(False, 5.0),
            "worker-1": WorkerOrder(True, 6.0),
        }
    with writing(engine, "test") as session:
        found = worker_orders.order(session, "worker-1", "resume", now_at=13.0)
        assert found == WorkerOrder(False, 6.0)


def test_orders_are_in_the_audit_log_and_make_gateways_look(engine: Engine) -> None:
    with reading(engine) as session:
        before, last = audit.current_version(session), audit.last_entry(session)
    with writing(engine, "test") as session:
        worker_orders.order(session, "worker-1", "drain", now_at=10.0)
    with reading(engine) as session:
        assert audit.current_version(session) > before
        changes = audit.changes_since(session, last)
        assert changes is not None
        assert changes.others
