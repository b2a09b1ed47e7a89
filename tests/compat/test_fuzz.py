"""A minute of schemathesis against /openapi.json: bodies and headers that are right, wrong and odd.

No 5xx, no status or answer that the document does not have, nothing accepted that it forbids.
What a schema cannot say (fields that contradict each other, unknown models) may be refused.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.compat import environments
from tests.compat.served import prepare, serving

REQUIREMENTS = Path(__file__).resolve().parent / "requirements-fuzz.txt"
SECONDS = 60
MIN_CASES = 500
TIMEOUT_S = 300.0
NOT_CHECKED = (
    "positive_data_acceptance",  # see above
    "ignored_auth",  # it sends the key that it was given, and takes the answer amiss
)


@pytest.mark.soak
def test_the_document_is_kept(tmp_path: Path) -> None:
    try:
        python = environments.environment(REQUIREMENTS)
    except environments.Missing as missing:
        pytest.skip(f"schemathesis cannot be had here: {missing}")
    with serving(prepare(tmp_path)) as server:
        command = [
            *(str(python.with_name("st")), "run", f"{server.url}/openapi.json"),
            *("--header", f"authorization: Bearer {server.api_key}"),
            *("--phases", "coverage,fuzzing", "--max-time", str(SECONDS)),
            *("--exclude-checks", ",".join(NOT_CHECKED), "--continue-on-failure", "--no-color"),
        ]
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-1000:]
        found = re.search(r"(\d+) generated, \1 passed", ended.stdout)
        assert found is not None
        assert int(found[1]) >= MIN_CASES
        assert server.is_ready()
