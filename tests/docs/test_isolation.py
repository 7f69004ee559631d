"""The page about isolation: its example runs, and its tables have the languages and plug-ins that there are."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import get_args

from rollmesh.mesh.config.scorers.isolation import IsolationSection
from rollmesh.reward_service.sandbox.languages.table import LANGUAGES
from tests.repository import REPOSITORY

PAGE = (REPOSITORY / "docs" / "isolation.md").read_text()


def test_the_example_runs() -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", source], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "cannot be confined" in done.stderr, done.stderr


def test_all_languages_have_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|[^|]*\|[^|]*\| (\d+) \|$", PAGE, re.MULTILINE)
    assert [(name, tuple(re.findall(r"`([^`]+)`", also)), int(processes)) for name, also, processes in rows] == [
        (language.name, language.aliases, language.limits.processes) for language in LANGUAGES
    ]


def test_all_plugins_have_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\|[^|]*\|$", PAGE, re.MULTILINE)
    assert ["none", *rows] == list(get_args(IsolationSection.model_fields["plugin"].annotation))
