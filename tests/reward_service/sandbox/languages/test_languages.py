"""Programs in every language that this host has, compiled once and run for each input."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rollmesh.reward_service.sandbox.executor import Sandbox
from rollmesh.reward_service.sandbox.interface import Job, Ran
from rollmesh.reward_service.sandbox.languages import sql
from rollmesh.reward_service.sandbox.languages.building import Builder, Built, CompileFailed
from rollmesh.reward_service.sandbox.languages.table import LANGUAGES, language_of
from rollmesh.reward_service.sandbox.languages.toolchains import readable
from rollmesh.reward_service.sandbox.zygote_process import Runtime, UnavailableError

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Each prints the number that it reads, and one more.
SOURCES = {
    "python": b"n = int(input()); print(n, n + 1)",
    "c": b'#include <stdio.h>\nint main() { int n; scanf("%d", &n); printf("%d %d\\n", n, n + 1); }',
    "cpp": b'#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n << " " << n + 1 << "\\n"; }',
    "javascript": b'const n = Number(require("fs").readFileSync(0)); console.log(n, n + 1)',
    "bash": b"read n; echo $n $((n + 1)) | cat",
    "java": b"import java.util.*; public final class Sum { record Pair(int a, int b) {} "
    b"public static void main(String[] all) { int n = new Scanner(System.in).nextInt(); "
    b'var p = new Pair(n, n + 1); System.out.println(p.a() + " " + p.b()); } }',
    "go": b'package main\nimport "fmt"\nfunc main() { var n int; fmt.Scan(&n); fmt.Println(n, n+1) }',
    "rust": b"fn main() { let mut t = String::new(); std::io::stdin().read_line(&mut t).unwrap(); "
    b'let n: i32 = t.trim().parse().unwrap(); println!("{} {}", n, n + 1); }',
    "sql": b"select n || ' ' || (n + 1) from t",
}
# Their builds take longer than all of the others together.
SLOW = {"go"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    try:
        sandbox = await Sandbox.open(require=3, size=2, runtime=Runtime(readable=readable([])))
    except UnavailableError as error:
        pytest.skip(str(error))
    yield sandbox
    await sandbox.close()


@pytest.fixture(scope="module")
def builder(sandbox: Sandbox) -> Builder:
    return Builder(sandbox)


@pytest.mark.parametrize("name", SOURCES)
async def test_a_program_is_built_once_and_run_for_each_input(name: str, builder: Builder, sandbox: Sandbox) -> None:
    toolchain = await builder.toolchain(name)
    if toolchain.missing or name in SLOW:
        pytest.skip(toolchain.missing or "slow")
    built = await builder.build(name, SOURCES[name])
    assert isinstance(built, Built), built
    assert await builder.build(name, SOURCES[name]) is built
    inputs = [b"create table t(n); insert into t values (%d);" % n if name == "sql" else b"%d\n" % n for n in (1, 7)]
    ran = await sandbox.run_all(built.job(cpu_s=60.0, wall_s=120.0), inputs)
    assert [(each.end, each.code, each.stdout) for each in ran] == [("exit", 0, b"1 2\n"), ("exit", 0, b"7 8\n")], ran


async def test_a_source_that_does_not_compile_says_why(builder: Builder) -> None:
    if (await builder.toolchain("c")).missing:
        pytest.skip("no compiler")
    failed = await builder.build("c", b"int main() { return x; }")
    assert isinstance(failed, CompileFailed)
    assert (failed.ran.end, b"undeclared" in failed.ran.stderr) == ("exit", True)
    assert await builder.build("c", b"int main() { return x; }") is failed
    # A source includes no file from outside of the sandbox.
    failed = await builder.build("c", b'#include "/etc/passwd"\nint main() {}')
    assert isinstance(failed, CompileFailed)
    assert b"No such file" in failed.ran.stderr


async def test_memory_of_runtimes_is_bounded(builder: Builder, sandbox: Sandbox) -> None:
    if (await builder.toolchain("js")).missing:
        pytest.skip("no node")
    source = b"const kept = []; for (;;) kept.push(Buffer.alloc(1 << 24, 1))"
    built = await builder.build("js", source)
    assert isinstance(built, Built)
    ran = await sandbox.run(built.job(cpu_s=60.0, wall_s=120.0, memory=512 << 20))
    assert (ran.end, ran.code == 0) != ("exit", True)
    assert ran.peak < 700 << 20


async def test_a_language_that_is_not_there_says_what_to_do(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="no language has the name 'cobol'"):
        await builder.build("cobol", b"")
    monkeypatch.setattr("shutil.which", lambda name, path=None: None if path else f"/elsewhere/{name}")
    with pytest.raises(UnavailableError, match=r"no rustc and no cc in .*; /elsewhere/rustc, /elsewhere/cc") as raised:
        await Builder(builder._executor).build("rs", b"")
    assert raised.value.hint == "install the package rustc, or name its folder in reward.isolation.toolchains"


async def test_a_sandbox_that_compiles_gets_the_source() -> None:
    class Other:
        rung, missing, languages = 4, "", frozenset({"python", "cpp"})

        async def run(self, job: Job) -> Ran:
            raise AssertionError(job)

    builder = Builder(Other())  # type: ignore[arg-type]
    built = await builder.build("c++", SOURCES["cpp"])
    assert isinstance(built, Built)
    assert built.job() == Job("cpp", {"main.cpp": SOURCES["cpp"]}, ["main.cpp"])
    with pytest.raises(UnavailableError, match="the sandbox has no java"):
        await builder.build("java", b"")


async def test_names() -> None:
    assert [language_of(name).name for name in ("py", "C++", "JS", "golang", " sh ")] == [  # type: ignore[union-attr]
        *("python", "cpp", "javascript", "go", "bash")
    ]
    assert language_of("cobol") is None
    assert len({name for each in LANGUAGES for name in (each.name, *each.aliases)}) == sum(
        1 + len(each.aliases) for each in LANGUAGES
    )
    assert SOURCES.keys() == {each.name for each in LANGUAGES}


async def test_statements_of_sql() -> None:
    assert sql.statements("select 1; select ';';\n select 2") == ["select 1;", " select ';';", "\n select 2;"]
