"""A tokenizer, and models."""

from __future__ import annotations

from tests.learner.data.conftest import tokenizer  # noqa: F401 - a fixture
