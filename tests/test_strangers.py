"""Files that a run has opened are told from those that it was given."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tests.strangers import open_to_strangers


def test_a_file_of_the_callers_is_told_from_one_of_the_run(tmp_path: Path) -> None:
    """Both are open to all; the one is the log of what starts the run, say."""
    run = tmp_path / "run"
    run.mkdir(0o700)
    with tempfile.NamedTemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
        own = Path(folder, "own")
        for path in (folder, log.name):
            Path(path).chmod(0o755)
        writes = f"exec 3>{own}; chmod 644 {own}; echo; read -r end"
        with subprocess.Popen(["sh", "-c", writes], stdin=-1, stdout=-1, stderr=log, start_new_session=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            found = open_to_strangers(run, process.pid)
            process.communicate()
    assert sorted(found) == sorted([str(own), f"{log.name} (inherited from what has started this)"])
