"""Descriptions of languages: what they need, and how their programs are compiled and run.

In arguments, `{0}` is the path of the first program that the language needs, and `{home}` the folder above that
program's own. `{name}` is the name of a source's main part, and `{heap}` the megabytes that a runtime's heap may take.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rollmesh.reward_service.sandbox.interface import Limits

_MIB, _GIB = 1 << 20, 1 << 30
FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/go/bin")
"""Where programs of languages are, in the sandbox too."""
_PATH = (("PATH", ":".join(FOLDERS)),)
# Without /proc, a program does not find libraries by its own path.
_OWN_LIBRARIES = (*_PATH, ("LD_LIBRARY_PATH", "{home}/lib"))
# Compilers: a minute of CPU time is far more than a program of an answer takes.
_COMPILES = Limits(cpu_s=60.0, wall_s=60.0, memory=2 * _GIB, processes=16, threads=32, disk=256 * _MIB, files=256)
_PUBLIC_CLASS = re.compile(rb"\bpublic\s+(?:(?:final|abstract|strictfp|sealed)\s+)*(?:class|record|enum)\s+(\w+)")


@dataclass(frozen=True, slots=True)
class Language:
    """One language.

    Attributes:
        name: its name here.
        aliases: other names for it.
        programs: those of the host that it needs; none for Python itself.
        version: arguments with which the first of them tells its version.
        package: the Debian package that has them.
        source: file of the source.
        run: argv of a program.
        compile: argv of the compiler; none for a language that is run as it is.
        products: what the compiler makes, as `Job.outputs`.
        limits: of one run.
        compile_limits: of the compiler.
        environment: variables of compiler and program.
        files: contents by path, besides the source.
        main: the name of the main part of a source.
        readable: paths that its programs read, besides the system's.
    """

    name: str
    aliases: tuple[str, ...]
    programs: tuple[str, ...]
    version: tuple[str, ...]
    package: str
    source: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    compile_limits: Limits = _COMPILES
    environment: tuple[tuple[str, str], ...] = _PATH
    files: tuple[tuple[str, bytes], ...] = ()
    main: Callable[[bytes], str] = lambda source: "main"  # noqa: ARG005
    readable: tuple[str, ...] = ()


def _main_class(source: bytes) -> str:
    found = _PUBLIC_CLASS.search(source)
    return "Main" if found is None else found[1].decode()


_JVM = ("-Xmx{heap}m", "-Xss16m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xshare:auto")
_NODE = Limits(memory=_GIB, threads=32, reserved=1 << 40, files=256)
_JAVA = Limits(memory=_GIB, threads=64, reserved=64 * _GIB, files=256)

LANGUAGES = (
    Language("python", ("py", "python3"), (), (), "", "main.py", ("main.py",)),
    Language(
        "c",
        (),
        ("gcc",),
        ("--version",),
        "gcc libc6-dev",
        "main.c",
        ("./program",),
        ("{0}", "-O2", "-std=gnu17", "-o", "program", "main.c", "-lm"),
        ("program",),
    ),
    Language(
        "cpp",
        ("c++", "cxx", "cc", "c++17"),
        ("g++",),
        ("--version",),
        "g++",
        "main.cpp",
        ("./program",),
        ("{0}", "-O2", "-std=gnu++17", "-o", "program", "main.cpp"),
        ("program",),
    ),
    Language(
        "javascript",
        ("js", "node", "nodejs"),
        ("node",),
        ("--version",),
        "nodejs",
        "main.js",
        ("{0}", "--max-old-space-size={heap}", "--stack-size=4000", "main.js"),
        limits=_NODE,
        # Else one that it may not read ends it.
        environment=(*_PATH, ("OPENSSL_CONF", "/dev/null")),
    ),
    Language(
        "bash",
        ("sh", "shell"),
        ("bash",),
        ("--version",),
        "bash",
        "main.sh",
        ("{0}", "main.sh"),
        limits=Limits(processes=16),
    ),
    Language(
        "java",
        (),
        ("java", "javac"),
        ("--version",),
        "default-jdk-headless",
        "{name}.java",
        ("{0}", *_JVM, "-cp", "classes", "{name}"),
        ("{1}", *(f"-J{option}" for option in _JVM), "-d", "classes", "{name}.java"),
        ("classes/*",),
        limits=_JAVA,
        compile_limits=Limits(
            cpu_s=60.0, wall_s=60.0, memory=2 * _GIB, threads=64, reserved=64 * _GIB, disk=256 * _MIB, files=256
        ),
        environment=_OWN_LIBRARIES,
        main=_main_class,
        readable=tuple(map(str, sorted(Path("/etc").glob("java-*")))),
    ),
    Language(
        "go",
        ("golang",),
        ("go",),
        ("version",),
        "golang-go",
        "main.go",
        ("./program",),
        ("{0}", "build", "-o", "program", "main.go"),
        ("program",),
        limits=Limits(reserved=8 * _GIB, threads=64, files=256),
        compile_limits=Limits(
            cpu_s=120.0,
            wall_s=120.0,
            memory=2 * _GIB,
            processes=64,
            threads=256,
            reserved=64 * _GIB,
            disk=_GIB,
            files=1024,
        ),
        environment=(
            *_PATH,
            ("GOROOT", "{home}"),
            ("GOCACHE", "/box/work/cache"),
            ("GOPATH", "/box/work/go"),
            ("GOTMPDIR", "/box/work"),
        ),
    ),
    Language(
        "rust",
        ("rs",),
        ("rustc", "cc"),
        ("--version",),
        "rustc",
        "main.rs",
        ("./program",),
        ("{0}", "-O", "--sysroot", "{home}", "--edition=2021", "-C", "linker={1}", "-o", "program", "main.rs"),
        ("program",),
        environment=_OWN_LIBRARIES,
    ),
    Language(
        "sql",
        ("sqlite", "sqlite3"),
        (),
        (),
        "",
        "query.sql",
        ("sql.py",),
        files=(("sql.py", Path(__file__).with_name("sql.py").read_bytes()),),
    ),
)
_BY_NAME = {name: language for language in LANGUAGES for name in (language.name, *language.aliases)}


def language_of(name: str) -> Language | None:
    """The language that goes by a name; None if it is not known here."""
    return _BY_NAME.get(name.strip().lower())
