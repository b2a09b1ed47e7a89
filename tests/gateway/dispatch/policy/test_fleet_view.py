"""What would leave for an incoming model: idle and cheap ones first, pinned ones never."""

from gateway.dispatch.policy.fleet_view import ModelView, WorkerView, outlook


def view(free: int, **models: ModelView) -> WorkerView:
    return WorkerView("w", free, 100, models)


def there(size: int, idle: bool = True, pinned: bool = False, load_s: float = 1.0) -> ModelView:
    return ModelView("resident", size, load_s, idle, pinned=pinned)


def test_what_fits_pushes_nobody_out() -> None:
    assert outlook(view(40, a=there(60)), 40, {}).fit == "free"


def test_the_idle_and_the_cheap_leave_first() -> None:
    models = view(0, busy=there(20, idle=False), dear=there(40), cheap=there(40))
    asks_s = {"dear": 1.0, "cheap": 0.1}
    assert outlook(models, 30, asks_s).leavers == ("cheap",)
    assert outlook(models, 80, asks_s).leavers == ("cheap", "dear")
    assert outlook(models, 90, asks_s).leavers == ("cheap", "dear", "busy")


def test_no_more_leave_than_must() -> None:
    assert outlook(view(30, a=there(40), b=there(30)), 60, {}).leavers == ("a",)


def test_what_is_pinned_or_on_its_way_stays() -> None:
    loading = ModelView("loading", 30, 1.0, True)
    found = outlook(view(10, a=there(60, pinned=True), b=loading), 50, {})
    assert found.fit == "never"
    assert found.leavers == ()
