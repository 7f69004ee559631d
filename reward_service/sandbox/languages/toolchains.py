"""What the host of an executor has of each language."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollmesh.reward_service.sandbox.interface import Executor, Job
from rollmesh.reward_service.sandbox.languages.table import FOLDERS, LANGUAGES, Language
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError

_PROBE_S = 30.0
KEY = "reward.isolation.toolchains"
"""The configuration's key for folders of toolchains."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A language's programs.

    Attributes:
        language: theirs.
        programs: their paths, in the order of `Language.programs`.
        version: what they say of themselves; empty if they do not work.
        missing: reason why the language cannot be used; else empty.
        remedy: what to do about it.
    """

    language: Language
    programs: tuple[str, ...] = ()
    version: str = ""
    missing: str = ""
    remedy: str = ""


async def probe(executor: Executor, language: Language, folders: Sequence[Path] = ()) -> Toolchain:
    """A language's toolchain, tried in the executor: what works outside of it may not work there.

    Args:
        executor: whose host is looked at.
        language: whose toolchain.
        folders: those of `reward.isolation.toolchains`.
    """
    if language.name in executor.languages:
        return Toolchain(language, version="of the sandbox")
    if "native" not in executor.languages:
        return Toolchain(language, missing=f"the sandbox has no {language.name}", remedy="another reward.isolation.plugin")
    if not language.programs:
        return Toolchain(language, version="of Python")
    where = ":".join([*(f"{folder.absolute()}/bin" for folder in folders), *FOLDERS])
    paths = [shutil.which(name, path=where) for name in language.programs]
    package = f"install the package {language.package}"
    if lacking := [name for name, path in zip(language.programs, paths, strict=True) if path is None]:
        others = [found for name in lacking if (found := shutil.which(name)) is not None]
        elsewhere = f"; {', '.join(others)} is out of the sandbox" if others else ""
        missing = f"no {' and no '.join(lacking)} in {where}{elsewhere}"
        return Toolchain(language, missing=missing, remedy=f"{package}, or name its folder in {KEY}")
    programs = tuple(os.path.realpath(path) for path in paths if path is not None)
    limits = replace(language.compile_limits if language.compile else language.limits, wall_s=_PROBE_S)
    environment = filled(language.environment, programs)
    job = Job("native", {}, [programs[0], *language.version], limits=limits)
    # Not for their content: where no program makes files, it cannot be compiled either.
    job = replace(job, environment=environment, outputs=language.products)
    try:
        ran = await executor.run(job)
    except UnavailableError as error:
        return Toolchain(language, programs, missing=str(error), remedy="a host with rung 3")
    if (ran.end, ran.code) != ("exit", 0):
        told = ran.reason or ran.stderr.decode(errors="replace").strip()
        return Toolchain(language, programs, missing=f"{programs[0]} ends with {ran.end} {ran.code}: {told}", remedy=package)
    text = (ran.stdout or ran.stderr).decode(errors="replace")
    return Toolchain(language, programs, version=text.strip().partition("\n")[0])


def filled(variables: Iterable[tuple[str, str]], programs: Sequence[str]) -> dict[str, str]:
    """Variables with the folder of the language's programs."""
    home = os.path.dirname(os.path.dirname(programs[0]))
    return {name: value.replace("{home}", home) for name, value in variables}


def readable(folders: Sequence[Path]) -> list[str]:
    """Paths that programs of all languages may read, besides the system's; `folders` as in `probe`."""
    return [*(path for language in LANGUAGES for path in language.readable), *map(str, folders)]
