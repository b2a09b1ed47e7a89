"""The text form of a workload: what it means, the way back, what a mistake is told."""

import re
from pathlib import Path

import pytest

from bench.sim import spec
from bench.sim.casting import Habits
from bench.sim.servegen import SERVICES
from bench.sim.shaping import Burst, Diurnal
from bench.sim.spec import WorkloadError, WorkloadSpec, format_workload, parse_workload


def test_options_mean_what_they_say() -> None:
    text = (
        "azure2023_conv:rate=20,minutes=10,speed=2,start=60,scale=0.5,max_prompt=8192,"
        "max_output=64,max_tokens=exact,aborts=0.1@3,diurnal=0.5@3600,tenant_zipf=0.7,"
        "top_share=0.9,affinity=0.5,preferred=2,flood=tenant0@60-120x10,spray=tenant3@5-7.5x2"
    )
    assert parse_workload(text, Path("data")) == WorkloadSpec(
        "azure2023_conv",
        Path("data"),
        rate=20.0,
        minutes=10.0,
        speed=2.0,
        start_s=60.0,
        scale=0.5,
        max_prompt=8192,
        max_output=64,
        max_tokens="exact",
        aborts=0.1,
        abort_after_s=3.0,
        diurnal=Diurnal(3600.0, 0.5),
        bursts=(Burst("flood", 0, 60.0, 120.0, 10.0), Burst("spray", 3, 5.0, 7.5, 2.0)),
        habits=Habits(0.7, 0.9, 0.5, 2),
    )


@pytest.mark.parametrize(
    "text",
    [
        "azure2023_conv",
        "synthetic:rate=0.1,requests=5,cv=3,lengths=short",
        "servegen_m-large:rate=20,seconds=100",
        "my/own.csv.gz:speed=3,aborts=0.25",
        "mooncake_synthetic:max_tokens=7,diurnal=0.3@60,flood=tenant2@0-1x0.5,preferred=1",
    ],
)
def test_there_is_a_way_back(text: str) -> None:
    read = parse_workload(text)
    assert parse_workload(format_workload(read)) == read


def test_every_option_is_read_from_its_example() -> None:
    for key in spec._OPTIONS:
        example = re.search(rf"^{key}=(\S+)", spec.options_help(), re.MULTILINE)
        assert example is not None
        name = "synthetic:rate=1,minutes=1" if key in ("cv", "lengths") else "azure2023_conv:"
        plain, changed = parse_workload(name), parse_workload(f"{name},{key}={example[1]}")
        if key not in ("lengths", "tenant_zipf", "top_share", "affinity", "preferred"):
            assert plain != changed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("azure", "write one of synthetic, azure2023_conv"),
        ("azure2023_conv:rate", "write key=value"),
        ("azure2023_conv:rat=3", "the key one of rate, minutes"),
        (
            "azure2023_conv:rate=fast",
            "rate=fast: mean requests a second; write for example rate=20",
        ),
        ("azure2023_conv:rate=0", "write for example rate=20"),
        ("azure2023_conv:rate=inf", "write for example rate=20"),
        ("azure2023_conv:rate=nan", "write for example rate=20"),
        ("azure2023_conv:requests=0", "requests=10000"),
        ("azure2023_conv:aborts=1.5", "aborts=0.1@5"),
        ("azure2023_conv:flood=tenant0", "flood=tenant0@60-120x10"),
        ("azure2023_conv:flood=tenant0@9-3x2", "flood=tenant0@60-120x10"),
        ("azure2023_conv:max_tokens=some", "`exact`"),
        ("azure2023_conv:cv=2", "cv is for the synthetic workload"),
        ("synthetic:minutes=1", "rate=5"),
        ("synthetic:rate=1", "minutes=10 or requests=1000"),
        ("synthetic:rate=1,minutes=1,speed=2", "speed and start are for traces"),
        ("burstgpt:rate=1", "minutes=10 or requests=1000"),
    ],
)
def test_a_mistake_is_told_what_to_write(text: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(message)):
        parse_workload(text)


def test_every_name_and_key_is_documented() -> None:
    page = (Path(spec.__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
    names = [name for name in spec.NAMES if not name.startswith("servegen_")]
    missing = [word for word in (*names, *spec._OPTIONS) if f"`{word}`" not in page]
    assert not missing
    assert not [service for service in SERVICES if f"-{service}`" not in page.replace("_m-", "-m-")]
