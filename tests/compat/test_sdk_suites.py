"""The SDKs' own suites, method by method, against expected.json: a change either way fails."""

from pathlib import Path

import pytest

from tests.compat import environments, outcomes, suites
from tests.compat.served import serving

pytestmark = pytest.mark.compat


def test_each_method_of_the_sdks_does_what_is_expected(tmp_path: Path) -> None:
    try:
        python = environments.environment(suites.REQUIREMENTS)
        sources = environments.sources(python)
    except environments.Missing as missing:
        pytest.skip(f"the SDKs' suites cannot be had here: {missing}")
    expected = outcomes.read_expected()
    lines = []
    with serving(suites.prepared_for(sources, tmp_path)) as server:
        for name in suites.SUITES:
            found = suites.run(name, python, sources[name], server, tmp_path)
            lines += [f"{name}: {line}" for line in outcomes.differences(expected[name], found)]
    assert not lines, "\n".join(["mend it, or run `python -m tests.compat.suites`:", *lines])
