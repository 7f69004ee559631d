"""Toolchains of languages, as the host of an executor has them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

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
        return Toolchain(
            language, missing=f"the sandbox has no {language.name}", remedy="another reward.isolation.plugin"
        )
    if not language.programs:
        return Toolchain(language, version="of Python")
    found = _found(language, folders)
    if isinstance(found, Toolchain):
        return found
    programs = found
    limits = replace(language.compile_limits if language.compile else language.limits, wall_s=_PROBE_S)
    environment = environment_of(language, programs)
    job = Job("native", {}, [programs[0], *language.version], limits=limits)
    # Not for their content: where no program makes files, it cannot be compiled either.
    job = replace(job, environment=environment, outputs=language.products)
    try:
        ran = await executor.run(job)
    except UnavailableError as error:
        return Toolchain(language, programs, missing=str(error), remedy="a host with rung 3")
    if (ran.end, ran.code) != ("exit", 0):
        told = ran.reason or ran.stderr.decode(errors="replace").strip()
        return Toolchain(
            language,
            programs,
            missing=f"{programs[0]} ends with {ran.end} {ran.code}: {told}",
            remedy=_install(language),
        )
    text = (ran.stdout or ran.stderr).decode(errors="replace")
    return Toolchain(language, programs, version=text.strip().partition("\n")[0])


def _found(language: Language, folders: Sequence[Path]) -> tuple[str, ...] | Toolchain:
    """Paths of a language's programs, or what is missing."""
    where = ":".join([*(f"{folder.absolute()}/bin" for folder in folders), *FOLDERS])
    paths = [shutil.which(name, path=where) for name in language.programs]
    lacking = [name for name, path in zip(language.programs, paths, strict=True) if path is None]
    if not lacking:
        return tuple(os.path.realpath(path) for path in paths if path is not None)
    others = [found for name in lacking if (found := shutil.which(name)) is not None]
    elsewhere = f"; {', '.join(others)} is out of the sandbox" if others else ""
    missing = f"no {' and no '.join(lacking)} in {where}{elsewhere}"
    return Toolchain(language, missing=missing, remedy=f"{_install(language)}, or name its folder in {KEY}")


def _install(language: Language) -> str:
    return f"install the package {language.package}"


def filled(text: str, programs: Sequence[str], words: Mapping[str, str] = MappingProxyType({})) -> str:
    """A text of a language's description, with the folder of its programs and other words in their places."""
    words = {"home": os.path.dirname(os.path.dirname(programs[0])) if programs else "", **words}
    for word, value in words.items():
        text = text.replace(f"{{{word}}}", value)
    return text


def environment_of(language: Language, programs: Sequence[str]) -> dict[str, str]:
    """Variables of a language's programs."""
    return {name: filled(value, programs) for name, value in language.environment}


def readable(folders: Sequence[Path]) -> list[str]:
    """Paths that programs of all languages may read, besides the system's; `folders` as in `probe`."""
    return [*(path for language in LANGUAGES for path in language.readable), *map(str, folders)]
