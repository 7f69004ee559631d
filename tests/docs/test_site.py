"""The site of the documentation is built, with every page and without a link or anchor that leads nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.docs.test_docs import GUIDES
from tests.repository import REPOSITORY


def test_the_site_is_built(tmp_path: Path) -> None:
    """Strictly: a page that the navigation lacks is an error too."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    pages = {page.parent for page in tmp_path.rglob("index.html")}
    assert len(pages) == len(GUIDES) + 1, "the guides and the changelog, each once"
    for page in pages:
        text = (page / "index.html").read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', text)
        assert loaded == [], f"{page} asks another host"
