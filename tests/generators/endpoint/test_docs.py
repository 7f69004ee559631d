"""The example of docs/endpoint.md runs as it stands there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from tests.generators.endpoint.world import Serving

DOCS = Path(__file__).parents[3] / "docs" / "endpoint.md"


def test_the_example_runs(serving: Serving) -> None:
    code = next(iter(re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)))
    assert "http://127.0.0.1:8011/v1" in code
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace("http://127.0.0.1:8011", serving.url), {})
    assert re.search(r" 1:0 \d+\n$", printed.getvalue())
