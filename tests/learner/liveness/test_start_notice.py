"""The start of a learner says every minute what it does."""

from __future__ import annotations

import logging
import threading

import pytest

from rollmesh.learner.liveness.start_notice import note_every_minute


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.told = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.told.set()


def test_a_long_start_is_logged_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    heard, logger = Heard(), logging.getLogger("rollmesh.learner.liveness.start_notice")
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(heard)
    try:
        with note_every_minute("loads models", every_s=0.01):
            assert heard.told.wait(180)
    finally:
        logger.removeHandler(heard)
    assert heard.texts[0] == "loads models for 0 s"
