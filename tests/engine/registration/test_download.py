"""Registration from a hub: what is fetched, refused before, left behind, and gone on with."""

import errno
import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from engine.errors import DownloadInterrupted, RegistrationRefused
from engine.registration import download, parity
from engine.registration import main as register
from engine.registration.download import folder_name, locked
from engine.registration.hub import Hub, HubLimits
from tests.engine import hub_server
from tests.engine.hub_server import COMMIT, HubServer
from tests.engine.pack_rig import edit_json, hf_folder
from tests.engine.registration.test_convert import SHAPE

REPO = "acme/tiny"
WEIGHTS = "model.safetensors"
QUICK = ("--pause-s", "0.001", "--timeout-s", "5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of about 300 KB."""
    made = tmp_path_factory.mktemp("model") / "tiny"
    hf_folder(made, LlamaConfig(**{**SHAPE, "hidden_size": 64, "intermediate_size": 256}))
    return made


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server.hub_server() as server:
        monkeypatch.setattr("engine.registration.hub.constants.ENDPOINT", server.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        server.add(REPO, folder)
        yield server


def run(tmp_path: Path, *more: str, source: str = f"{REPO}@main") -> list[dict[str, Any]]:
    out = io.StringIO()
    register.main(("--hub", source, "--dest", str(tmp_path / "packs"), *QUICK, *more), out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def left(tmp_path: Path) -> list[str]:
    """What lies in the data folder below packs and downloads, one name a folder."""
    return sorted(
        path.relative_to(tmp_path).as_posix()
        for room in ("packs", "downloads")
        for path in (tmp_path / room).glob("*")
    )


def test_a_hub_model_becomes_the_pack_of_its_folder(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    (folder / "README.md").write_text("not fetched")
    hub.add(REPO, folder)
    events = run(tmp_path)
    ready = events[-1]
    assert ready["event"] == "ready", ready
    kinds = [event.get("phase", event["event"]) for event in events]
    assert list(dict.fromkeys(kinds)) == [
        *("resolve", "resolved", "preflight", "described"),
        *("probe", "download", "check", "convert", "ready"),
    ]
    assert events[1]["commit"] == COMMIT
    told = next(event for event in events if event["event"] == "preflight")
    assert told["family"] == "llama"
    assert told["download_bytes"] == len(hub.repos[REPO][WEIGHTS])
    # The estimate is within the pack's alignment.
    assert told["weight_bytes"] == pytest.approx(ready["weight_bytes"], rel=0.15)
    downloads = [event for event in events if event.get("phase") == "download"]
    assert downloads[-1]["done_bytes"] == downloads[-1]["total_bytes"] == told["download_bytes"]
    fetched = {path.rpartition("/")[2] for path, _ in hub.asked if "/resolve/" in path}
    assert fetched == {"config.json", "generation_config.json", "tokenizer.json", WEIGHTS}
    assert left(tmp_path) == [f"packs/{ready['revision']}"]
    # The same content from a folder is the same pack.
    out = io.StringIO()
    register.main(("--source", str(folder), "--dest", str(tmp_path / "packs")), out)
    assert json.loads(out.getvalue().splitlines()[-1])["revision"] == ready["revision"]


def test_small_files_come_first_and_the_preflight_before_the_weights(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def wrong(config: Any, **options: Any) -> float:
        seen.append(hub.sent[WEIGHTS])
        raise RegistrationRefused("parity", f"{config.model_type} differs")

    monkeypatch.setattr(parity, "probe", wrong)
    events = run(tmp_path)
    assert events[-1]["code"] == "parity"
    assert "preflight" in {event["event"] for event in events}
    assert seen == [0]
    assert left(tmp_path) == []


def test_cut_off_three_times_it_goes_on_where_it_was(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.cuts = {WEIGHTS: [50_000, 70_000, 60_000], "config.json": [100]}
    events = run(tmp_path)
    assert events[-1]["event"] == "ready", events[-1]
    size = len(hub.repos[REPO][WEIGHTS])
    ranges = [asked for path, asked in hub.asked if path.endswith(WEIGHTS) and "/lfs/" in path]
    starts = [int(asked.removeprefix("bytes=").removesuffix("-") or 0) for asked in ranges]
    assert len(starts) == 4
    assert starts == sorted(set(starts))
    # What a dropped connection still held in its buffers may be asked for again, no more.
    assert size <= hub.sent[WEIGHTS] <= size + 3 * hub_server.BLOCK
    assert starts[1] > 0
    assert starts[-1] >= 180_000 - 3 * hub_server.BLOCK


def test_an_interrupted_download_is_kept_and_a_later_process_goes_on(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.faults.cuts = {WEIGHTS: [100_000]}
    original = Hub.open
    opened: list[int] = []

    def once(self: Hub, repo: str, commit: str, path: str, start: int) -> Any:
        if path == WEIGHTS:
            opened.append(start)
            if len(opened) == 2:
                hub.faults.status[f"/{REPO}/resolve"] = (503, 100, "")
        return original(self, repo, commit, path, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hub, "open", once)
        events = run(tmp_path)
    assert (events[-1]["event"], events[-1]["code"]) == ("refused", "network")
    assert "kept" in events[-1]["message"]
    (kept,) = (tmp_path / "downloads").iterdir()
    assert kept.name == folder_name(REPO, COMMIT)
    there = (kept / f"{WEIGHTS}.part").stat().st_size
    assert 100_000 - hub_server.BLOCK <= there <= 100_000
    hub.faults.status = {}
    before = hub.sent.copy()
    events = run(tmp_path)
    assert events[-1]["event"] == "ready"
    assert hub.sent[WEIGHTS] - before[WEIGHTS] == len(hub.repos[REPO][WEIGHTS]) - there
    assert hub.sent["tokenizer.json"] == before["tokenizer.json"]
    told = next(event for event in events if event["event"] == "preflight")
    assert told["download_bytes"] == len(hub.repos[REPO][WEIGHTS]) - there
    assert left(tmp_path) == [f"packs/{events[-1]['revision']}"]


def test_a_server_without_ranges_is_asked_for_all_of_it_again(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.faults.no_ranges = True
    hub.faults.cuts = {WEIGHTS: [50_000]}
    assert run(tmp_path)[-1]["event"] == "ready"


def test_a_damaged_part_is_fetched_once_more(hub: HubServer, tmp_path: Path) -> None:
    part = tmp_path / "downloads" / folder_name(REPO, COMMIT) / f"{WEIGHTS}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"\xff" * 1000)
    assert run(tmp_path)[-1]["event"] == "ready"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"\xff" * (1 << 20))  # longer than the file
    assert run(tmp_path, "--dtype", "bfloat16")[-1]["event"] == "ready"


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_wrong_hash_is_refused_and_nothing_stays(
    hub: HubServer, tmp_path: Path, name: str
) -> None:
    hub.faults.wrong = {name}
    events = run(tmp_path)
    assert (events[-1]["event"], events[-1]["code"]) == ("refused", "hash_mismatch")
    assert name in events[-1]["message"]
    assert left(tmp_path) == []


def test_more_bytes_than_declared_are_not_taken(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.surplus = 10 << 20
    events = run(tmp_path)
    assert events[-1]["event"] == "ready"


def test_pickled_weights_are_never_fetched(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    files = hub.repos[REPO]
    files["pytorch_model.bin"] = files.pop(WEIGHTS)
    events = run(tmp_path)
    assert events[-1]["code"] == "pickle_weights"
    assert not any("/resolve/" in path or "/lfs/" in path for path, _ in hub.asked)
    assert left(tmp_path) == []


def test_pickled_weights_beside_safetensors_are_left_there(hub: HubServer, tmp_path: Path) -> None:
    hub.repos[REPO]["pytorch_model.bin"] = b"\x80 pickle"
    assert run(tmp_path)[-1]["event"] == "ready"
    assert hub.sent["pytorch_model.bin"] == 0


@pytest.mark.parametrize("by", ["file", "auto_map"])
def test_custom_code_is_refused_before_the_weights(
    hub: HubServer, folder: Path, tmp_path: Path, by: str
) -> None:
    if by == "file":
        hub.repos[REPO]["modeling_tiny.py"] = b"print('ran')"
    else:
        config = json.loads(hub.repos[REPO]["config.json"]) | {"auto_map": {"AutoModel": "m.M"}}
        hub.repos[REPO]["config.json"] = json.dumps(config).encode()
    events = run(tmp_path)
    assert events[-1]["code"] == "custom_code"
    assert "downloads" not in events[-1]["message"]
    assert hub.sent[WEIGHTS] == hub.sent["modeling_tiny.py"] == 0
    assert left(tmp_path) == []


def test_shards_are_those_of_the_index(hub: HubServer, tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "sharded", LlamaConfig(**SHAPE), max_shard_size="20KB")
    assert (source / "model.safetensors.index.json").exists()
    hub.add(REPO, source)
    hub.repos[REPO]["consolidated.safetensors"] = b"another format"
    assert run(tmp_path)[-1]["event"] == "ready"
    assert hub.sent["consolidated.safetensors"] == 0
    edit_json(source / "model.safetensors.index.json", lambda c: c["weight_map"].update(x="no"))
    hub.add(REPO, source, commit="1" * 40)
    assert run(tmp_path)[-1]["code"] == "bad_weights"


def test_the_same_commit_again_is_not_fetched_again(hub: HubServer, tmp_path: Path) -> None:
    first = run(tmp_path)[-1]
    hub.sent.clear()
    events = run(tmp_path, source=f"{REPO}@{COMMIT}")
    assert (events[-1]["event"], events[-1]["revision"]) == ("ready", first["revision"])
    assert not hub.sent
    # Another dtype is another pack.
    assert run(tmp_path, "--dtype", "bfloat16")[-1]["revision"] != first["revision"]
    assert hub.sent[WEIGHTS]


def test_two_at_a_time_fetch_once_and_share_the_pack(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.hold = {WEIGHTS: threading.Event()}
    ended: list[list[dict[str, Any]]] = []
    threads = [threading.Thread(target=lambda: ended.append(run(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not hub.sent[WEIGHTS]:
        assert any(thread.is_alive() for thread in threads)
    hub.faults.hold[WEIGHTS].set()
    for thread in threads:
        thread.join()
    assert [events[-1]["event"] for events in ended] == ["ready", "ready"], ended
    assert ended[0][-1]["revision"] == ended[1][-1]["revision"]
    assert hub.sent[WEIGHTS] == len(hub.repos[REPO][WEIGHTS])
    assert len(left(tmp_path)) == 1


@pytest.mark.parametrize(
    ("bounds", "code", "words"),
    [
        (("--quota-bytes", "300000"), "disk_quota", "packs_quota_bytes"),
        (("--arena-bytes", "100000"), "too_large", "device_budget_bytes"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_fetched(
    hub: HubServer, tmp_path: Path, bounds: tuple[str, ...], code: str, words: str
) -> None:
    events = run(tmp_path, *bounds)
    assert events[-1]["code"] == code
    assert words in events[-1]["message"]
    assert hub.sent[WEIGHTS] == 0
    assert left(tmp_path) == []


def test_a_disk_that_has_too_little_is_refused_at_once(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.registration.preflight.DISK_MARGIN_BYTES", 1 << 60)
    assert run(tmp_path)[-1]["code"] == "disk_full"
    assert hub.sent[WEIGHTS] == 0
    out = io.StringIO()
    register.main(("--source", str(folder), "--dest", str(tmp_path / "packs")), out)
    assert json.loads(out.getvalue().splitlines()[-1])["code"] == "disk_full"
    assert left(tmp_path) == []


@pytest.mark.parametrize("where", ["download", "convert"])
def test_a_disk_that_fills_up_midway_leaves_nothing(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "download":
        monkeypatch.setattr(download._Part, "write", full)
    else:
        monkeypatch.setattr(os, "pwrite", full)
    events = run(tmp_path)
    assert events[-1]["code"] == "disk_full"
    assert "free disk space" in events[-1]["message"]
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("acme/none@main", "no_repository"),
        (f"{REPO}@other", "no_revision"),
        ("../../etc@main", "no_repository"),
    ],
)
def test_what_is_not_there_is_said(hub: HubServer, tmp_path: Path, source: str, code: str) -> None:
    events = run(tmp_path, source=source)
    assert events[-1]["code"] == code
    assert left(tmp_path) == []


def test_a_gated_repository_says_what_to_do(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.status = {f"/{REPO}/resolve": (403, 9, "GatedRepo")}
    events = run(tmp_path)
    assert events[-1]["code"] == "hub_denied"
    assert "HF_TOKEN" in events[-1]["message"]


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "../../escape.json"},
        {"path": "/etc/passwd"},
        {"path": "a\\b.json"},
        {"path": "tokenizer_config.json", "size": -1},
        {"path": "tokenizer_config.json", "size": 1 << 60},
        {"path": "tokenizer_config.json", "size": 1 << 30},
        {"path": "tokenizer_config.json", "oid": "zz"},
        {"path": "\x1b[2J.safetensors"},
    ],
)
def test_lists_that_cannot_be_right_are_refused(
    hub: HubServer, tmp_path: Path, entry: dict[str, Any]
) -> None:
    hub.faults.entries = [{"type": "file", "size": 10, "oid": "0" * 40} | entry]
    events = run(tmp_path)
    assert events[-1]["code"] == "bad_hub", events[-1]
    assert hub.sent[WEIGHTS] == 0
    assert left(tmp_path) == []


def test_a_list_without_end_and_one_that_leads_elsewhere(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.next_page = "http://127.0.0.2:9/api"
    assert run(tmp_path)[-1]["code"] == "bad_hub"
    hub.faults.next_page = ""
    with monkeypatch.context() as few:
        few.setattr("engine.registration.hub.MAX_PAGES", 1)
        assert "lists more" in run(tmp_path)[-1]["message"]
    monkeypatch.setattr("engine.registration.hub.MAX_LISTED_FILES", 3)
    assert run(tmp_path)[-1]["code"] == "bad_hub"
    monkeypatch.setattr("engine.registration.hub.MAX_JSON_BYTES", 10)
    assert "more than 10 bytes" in run(tmp_path)[-1]["message"]


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "/acme/loop", "http://[::1"]
)
def test_redirects_stay_on_http_and_end(hub: HubServer, tmp_path: Path, target: str) -> None:
    hub.faults.redirect = target.replace("/acme/loop", f"/{REPO}/resolve/{COMMIT}/{WEIGHTS}")
    events = run(tmp_path)
    assert events[-1]["code"] == "bad_redirect"
    assert left(tmp_path) == []


def test_the_token_goes_to_the_endpoint_and_nowhere_else(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with hub_server.hub_server() as storage:
        storage.add(REPO, folder)
        hub.faults.redirect = f"{storage.url}/lfs/{REPO}/{WEIGHTS}"
        events = run(tmp_path)
    assert events[-1]["event"] == "ready"
    assert {token for _, token in hub.tokens} == {"Bearer hf_secret"}
    assert {token for _, token in storage.tokens} == {""}
    assert "hf_secret" not in json.dumps(events)


def test_a_token_that_is_none_is_not_told(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret\x0bx")
    (told,) = [event for event in run(tmp_path) if event["event"] == "refused"]
    assert told["code"] == "hub_denied"
    assert "hf_secret" not in told["message"]
    assert hub.asked == []


def test_passwords_and_signatures_in_addresses_are_not_told(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.redirect = "http://me:secret@127.0.0.1:9/x?sig=secret"
    assert "127.0.0.1:9 cannot be reached" in run(tmp_path, "--attempts", "1")[-1]["message"]
    hub.faults.redirect = "ftp://me:secret@127.0.0.1/x?sig=secret"
    refused = run(tmp_path)[-1]
    assert "'ftp://127.0.0.1'" in refused["message"]
    mirror = hub.url.replace("://", "://me:secret@")
    monkeypatch.setattr("engine.registration.hub.constants.ENDPOINT", mirror)
    absent = run(tmp_path, source="acme/absent@main")[-1]
    assert absent["message"].startswith(hub.url)
    assert "secret" not in json.dumps([refused, absent])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "evil.py", "onnx/model.safetensors"])
def test_what_an_index_calls_a_shard_is_not_fetched_for_that(
    hub: HubServer, tmp_path: Path, name: str
) -> None:
    content = json.dumps({"weight_map": {"lm_head.weight": name}}).encode()
    hub.repos[REPO] = {**hub.repos[REPO], "model.safetensors.index.json": content, name: b"x" * 99}
    assert run(tmp_path)[-1]["code"] == "bad_weights"
    assert hub.sent[name] == 0
    assert left(tmp_path) == []


def test_json_that_no_parser_takes(hub: HubServer, tmp_path: Path) -> None:
    deep, long = b"[" * 200_000, b'{"model_type": ' + b"9" * 5000 + b"}"
    for name, content in (("config.json", deep), ("config.json", long)):
        hub.repos[REPO] = {**hub.repos[REPO], name: content}
        assert run(tmp_path)[-1]["code"] == "bad_config"
    hub.repos[REPO]["model.safetensors.index.json"] = b'{"weight_map": ' + deep
    assert run(tmp_path)[-1]["code"] == "bad_config"
    assert left(tmp_path) == []


def test_a_server_that_stalls_is_given_up(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.stall = threading.Event()
    events = run(tmp_path, "--timeout-s", "0.1", "--attempts", "2")
    hub.faults.stall.set()
    assert events[-1]["code"] == "network"


def test_a_server_that_trickles_is_given_up(hub: HubServer, tmp_path: Path) -> None:
    now = iter(range(10_000))
    hub.faults.pace_s = 0.001
    limits = HubLimits(attempts=2, pause_s=0.0, stall_s=1.0, stall_bytes=1 << 20)
    slow = Hub(limits, clock=lambda: float(next(now)))
    with (
        pytest.raises(DownloadInterrupted, match="sent only"),
        slow.open(REPO, COMMIT, WEIGHTS, 0) as body,
    ):
        list(body.chunks)


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.registration.hub.constants.ENDPOINT", "http://127.0.0.1:9")
    events = run(tmp_path, "--attempts", "2")
    assert events[-1]["code"] == "network"
    assert "127.0.0.1:9" in events[-1]["message"]


def test_busy_is_tried_again_and_pauses_grow(hub: HubServer) -> None:
    pauses: list[float] = []
    hub.faults.status = {"/api/models": (429, 2, "")}
    asked = Hub(HubLimits(attempts=3, pause_s=0.5), sleep=pauses.append)
    assert asked.commit(REPO, "v1")[0] == COMMIT
    assert pauses == [0.5, 1.0]


def test_a_folder_that_was_removed_under_a_waiting_lock_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "downloads" / "x"
    waiting = threading.Event()
    entered = threading.Event()

    def second() -> None:
        with locked(folder, waiting.set):
            assert folder.is_dir()
            entered.set()

    with locked(folder, lambda: None):
        thread = threading.Thread(target=second)
        thread.start()
        waiting.wait(20)
        folder.rmdir()
    thread.join()
    assert entered.is_set()
