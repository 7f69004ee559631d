"""A short coverage-guided run, from the same seed each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import REPOSITORY

pytest.importorskip("atheris", reason="atheris has wheels for Linux alone")


def test_no_bytes_break_what_reads_payloads(tmp_path: Path) -> None:
    # The peak of resident memory that it looks at is inherited from the process that starts it: this one.
    limits = ("-rss_limit_mb=0", "-malloc_limit_mb=1024")
    command = [sys.executable, "-m", "tests.fuzz.coverage_guided", "-runs=20000", "-seed=1", *limits]
    done = subprocess.run(
        [*command, f"-artifact_prefix={tmp_path}/"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Done 20000 runs" in done.stderr
