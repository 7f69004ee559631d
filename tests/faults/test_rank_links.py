"""The connection between two processes dies, comes back, and is cut."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.faults import rank_links

# Connects, and repeats what it hears.
ECHO = """
import socket, sys
end = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while data := end.recv(100):
    end.sendall(data)
"""
# Accepts one connection, and passes lines on from its input and to its output.
ASK = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    end, _ = server.accept()
    end.settimeout(1.0)
    for line in sys.stdin:
        try:
            end.sendall(line.encode()) if line.strip() else None
            print(end.recv(100).decode().strip() or "ended", flush=True)
        except TimeoutError:
            print("nothing", flush=True)
        except OSError:
            print("ended", flush=True)
"""


@pytest.fixture
def ends() -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    with start(ASK) as asking:
        assert asking.stdout is not None
        with start(ECHO, asking.stdout.readline().strip()) as echo:
            yield asking, echo
            echo.kill()
        asking.kill()


def test_a_dead_link_comes_back_and_a_cut_one_ends(
    ends: tuple[subprocess.Popen[str], subprocess.Popen[str]],
) -> None:
    asking, echo = ends
    one, other = (psutil.Process(process.pid) for process in ends)

    def ask(word: str) -> str:
        assert asking.stdin is not None
        assert asking.stdout is not None
        asking.stdin.write(word + "\n")
        asking.stdin.flush()
        return asking.stdout.readline().strip()

    assert ask("hello") == "hello"
    with rank_links.dead(one, other) as number:
        assert number == 2
        assert ask("later") == "nothing"
    # TCP says it again.
    while (heard := ask("")) == "nothing":
        continue
    assert heard == "later"
    assert rank_links.cut(one, other) == 2
    assert echo.wait() == 0
    assert ask("") == "ended"
