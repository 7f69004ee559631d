"""vLLM's log: in this process a part of ours; of its child processes on stderr, and in a file.

The end of the file is reported where the engine does not come up or dies.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
from pathlib import Path

from rollmesh.generators.engines.external.process_log import tail

_TAIL_BYTES = 4000
# Warn at every swap of what is meant to be so: layers without weights of their own, blocks of running jobs.
_NOISY = ("vllm.model_executor.model_loader.reload.layerwise", "vllm.v1.core.block_pool")
_FORMAT = "%(asctime)s %(levelname)s %(processName)s[%(process)d] %(name)s: %(message)s"


class EngineLog:
    """The log of the processes of one engine.

    Attributes:
        file: that they write to.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rollmesh-vllm-")
        self.file = Path(self._folder.name, "engine.log")

    def install(self) -> None:
        """Makes vLLM's processes write to it that start from here on; before vLLM is imported."""
        level = "DEBUG" if logging.getLogger().isEnabledFor(logging.DEBUG) else "WARNING"
        handlers = {
            "stderr": {"class": "logging.StreamHandler", "formatter": "plain", "level": level},
            "file": {
                "class": "logging.FileHandler",
                "formatter": "plain",
                "level": "INFO",
                "filename": str(self.file),
            },
        }
        configuration = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": _FORMAT}},
            "handlers": handlers,
            "loggers": {
                "vllm": {
                    "handlers": list(handlers),
                    "level": "DEBUG" if level == "DEBUG" else "INFO",
                    "propagate": False,
                }
            }
            | {name: {"level": "ERROR"} for name in _NOISY},
        }
        path = Path(self._folder.name, "logging.json")
        path.write_text(json.dumps(configuration), "utf-8")
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(path)

    def tail(self) -> str:
        """The end of the log; empty without one."""
        return tail(self.file, _TAIL_BYTES)

    def close(self) -> None:
        """Removes the file; may be called twice."""
        self._folder.cleanup()


class KeptLog(EngineLog):
    """The log of one engine after the other, in one file: that of processes that a fork server starts."""

    def close(self) -> None:
        """Empties it."""
        if self.file.exists():
            os.truncate(self.file, 0)


@functools.cache
def kept_log() -> KeptLog:
    """The one of this process; it is removed with the process."""
    return KeptLog()


def adopt() -> None:
    """Makes vLLM's log in this process a part of ours, warnings and worse; after vLLM has been imported."""
    logger = logging.getLogger("vllm")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True
    logger.setLevel(logging.DEBUG if logging.getLogger().isEnabledFor(logging.DEBUG) else logging.WARNING)


def silence() -> None:
    """Silences vLLM at its end, when it warns of cancelled calls and of processes that are slow to exit."""
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
