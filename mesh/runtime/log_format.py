"""Logs of a service: one JSON object per line on stderr, or short lines for people.

Fields of a JSON line: time (Unix seconds), level, service, run, message, and those of the record (`extra`): group,
member, table, code and others. Where group and member are known, `trace_id` leads to the trajectory's trace.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rollmesh.mesh.telemetry.trace_ids import trajectory_trace

if TYPE_CHECKING:
    from rollmesh.mesh.config.models import Config
    from rollmesh.mesh.config.trainers.configs import TrainerConfig

LogForm = Literal["auto", "json", "text"]
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Settings of a process' log.

    Attributes:
        level: of the least important lines.
        form: of lines; auto: text at a terminal, else JSON.
        run: name of the run; empty where it is not known yet.
    """

    level: str = "info"
    form: LogForm = "auto"
    run: str = ""

    @classmethod
    def of(cls, config: Config | TrainerConfig) -> LogSettings:
        """The settings of a run's or a training's services."""
        return cls(config.logging.level, config.logging.format, config.run.name)


class ServiceFormatter(logging.Formatter):
    """Base of the two forms.

    Args:
        service: whose log it is.
        settings: of it.
    """

    def __init__(self, service: str, settings: LogSettings) -> None:
        super().__init__()
        self.settings = settings
        self._service = service


class JsonFormatter(ServiceFormatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        run = self.settings.run
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "service": self._service,
            **({"run": run} if run else {}),
            "message": record.getMessage(),
        }
        entry.update({key: value for key, value in record.__dict__.items() if key not in _STANDARD})
        if run and {"group", "member"} <= entry.keys():
            entry["trace_id"] = f"{trajectory_trace(run, entry['group'], entry['member']):032x}"
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(ServiceFormatter):
    """Short lines for a person."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{k}={v}" for k, v in record.__dict__.items() if k not in _STANDARD)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname[0]} {self._service}: {record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def setup_logging(service: str, settings: LogSettings | None = None) -> None:
    """Configures the root logger of this process."""
    settings = settings or LogSettings()
    handler = logging.StreamHandler(sys.stderr)
    as_text = settings.form == "text" or (settings.form == "auto" and sys.stderr.isatty())
    handler.setFormatter((TextFormatter if as_text else JsonFormatter)(service, settings))
    root = logging.getLogger()
    # Handlers of libraries go, those that count stay.
    root.handlers[:] = [handler, *(each for each in root.handlers if isinstance(each, CountingHandler))]
    root.setLevel(settings.level.upper())


class CountingHandler(logging.Handler):
    """A handler that writes nothing, and so stays when the log is configured again."""


def present_settings() -> LogSettings:
    """The settings of this process, for its children."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, ServiceFormatter):
            return handler.formatter.settings
    return LogSettings(logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower())
