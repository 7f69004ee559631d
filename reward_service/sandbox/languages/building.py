"""From a source to jobs: compiled once, in the sandbox, and kept."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollmesh.reward_service.sandbox.interface import Executor, Job, Limits, Ran
from rollmesh.reward_service.sandbox.languages.table import LANGUAGES, Language, language_of
from rollmesh.reward_service.sandbox.languages.toolchains import Toolchain, environment_of, filled, probe
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError

_CACHE_BYTES = 256 << 20
# The part of a runtime's memory that its heap may take.
_HEAP_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Built:
    """A program that can be run.

    Attributes:
        language: as `Job.language`.
        files: contents by path.
        argv: the program and its arguments; `{heap}` stands for megabytes.
        limits: those that its language suggests.
        environment: variables.
    """

    language: str
    files: Mapping[str, bytes]
    argv: tuple[str, ...]
    limits: Limits
    environment: Mapping[str, str]

    def job(self, *, deadline: float = float("inf"), **limits: Any) -> Job:
        """A job that runs it.

        Args:
            deadline: see `Job`.
            limits: fields of `Limits` that differ from those of the language.
        """
        given = replace(self.limits, **limits)
        heap = int(given.memory * _HEAP_SHARE) >> 20
        argv = [argument.replace("{heap}", str(heap)) for argument in self.argv]
        job = Job(self.language, self.files, argv, limits=given, deadline=deadline)
        return replace(job, environment=self.environment) if self.environment else job


@dataclass(frozen=True, slots=True)
class CompileFailed:
    """A source that was not compiled.

    Attributes:
        ran: the compiler's end. `infrastructure` is not the source's fault, and may be tried again.
    """

    ran: Ran


class Builder:
    """Builds programs with the toolchains of an executor's host.

    Args:
        executor: runs compilers, and what they make.
        folders: those of `reward.isolation.toolchains`.
    """

    def __init__(self, executor: Executor, folders: Sequence[Path] = ()) -> None:
        self._executor = executor
        self._folders = folders
        self._toolchains: dict[str, Toolchain] = {}
        self._built: OrderedDict[bytes, Built | CompileFailed] = OrderedDict()
        self._bytes = 0

    async def toolchain(self, name: str) -> Toolchain:
        """The toolchain of a language, by any of its names.

        Raises:
            UnavailableError: no language has this name.
        """
        language = language_of(name)
        if language is None:
            known = ", ".join(language.name for language in LANGUAGES)
            raise UnavailableError(f"no language has the name {name!r}", hint=f"known are {known}")
        if language.name not in self._toolchains:
            self._toolchains[language.name] = await probe(self._executor, language, self._folders)
        return self._toolchains[language.name]

    async def build(self, name: str, source: bytes, deadline: float = float("inf")) -> Built | CompileFailed:
        """A program from its source.

        Args:
            name: the language's, or another that it goes by.
            source: the text, in one file.
            deadline: moment of `time.monotonic()` at which the caller waits no longer.

        Raises:
            UnavailableError: the language is not known, or its host lacks it; the message says what is missing.
        """
        toolchain = await self.toolchain(name)
        language = toolchain.language
        if toolchain.missing:
            raise UnavailableError(f"{language.name}: {toolchain.missing}", hint=toolchain.remedy)
        key = hashlib.sha256(b"\0".join([language.name.encode(), toolchain.version.encode(), source])).digest()
        if (known := self._built.get(key)) is not None:
            self._built.move_to_end(key)
            return known
        built = await self._build(toolchain, source, deadline)
        if not isinstance(built, CompileFailed) or built.ran.end == "exit":
            self._keep(key, built)
        return built

    async def _build(self, toolchain: Toolchain, source: bytes, deadline: float) -> Built | CompileFailed:
        language = toolchain.language
        main = language.main(source)

        def arguments(given: tuple[str, ...]) -> tuple[str, ...]:
            words = {"name": main, **{str(at): path for at, path in enumerate(toolchain.programs)}}
            return tuple(filled(each, toolchain.programs, words) for each in given)

        (path,) = arguments((language.source,))
        files = {path: source, **dict(language.files)}
        kind = _kind(language, self._executor)
        if kind != "native":
            return Built(kind, files, language.run if language.files else (path,), language.limits, {})
        environment = environment_of(language, toolchain.programs)
        if not language.compile:
            return Built("native", files, arguments(language.run), language.limits, environment)
        compiling = Built("native", files, arguments(language.compile), language.compile_limits, environment)
        ran = await self._executor.run(replace(compiling.job(deadline=deadline), outputs=language.products))
        if (ran.end, ran.code) != ("exit", 0) or not ran.files:
            return CompileFailed(ran)
        return Built("native", ran.files, arguments(language.run), language.limits, environment)

    def _keep(self, key: bytes, built: Built | CompileFailed) -> None:
        self._built[key] = built
        self._bytes += _size(built)
        while self._bytes > _CACHE_BYTES:
            self._bytes -= _size(self._built.popitem(last=False)[1])


def _kind(language: Language, executor: Executor) -> str:
    if language.name in executor.languages:
        return language.name
    return "native" if language.programs else "python"


def _size(built: Built | CompileFailed) -> int:
    if isinstance(built, CompileFailed):
        return len(built.ran.stdout) + len(built.ran.stderr)
    return sum(map(len, built.files.values()))
