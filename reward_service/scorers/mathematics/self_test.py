r"""A self-test of the `math` scorer: it grades here as where it was tested.

The scorer reads answers with math-verify. Its grammar runs on the installed antlr runtime, of whatever version. Another
runtime reads `50\%` as nothing at all, and rewards change without a word. So the versions of the packages are pinned,
and known pairs are graded before the first item is scored.
"""

from __future__ import annotations

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.scorers.mathematics import math_value

# Versions under which `_KNOWN` was recorded; None: any. As in pyproject.toml.
_PINNED = {
    "math-verify": "0.8.0",
    "latex2sympy2_extended": "1.10.2",
    "antlr4-python3-runtime": "4.13.2",
    "sympy": None,
}
# Response, truth, and whether they agree: the forms of answers that versions have read differently, and some that must
# never be mixed up.
_KNOWN = (
    (r"\boxed{50\%}", "0.5", True),
    (r"\boxed{50\%}", "50", False),
    (r"\boxed{\frac{3}{4}}", "0.75", True),
    (r"\boxed{\frac34}", "3/4", True),
    (r"\boxed{\dfrac{3}{4}}", r"\frac{3}{4}", True),
    (r"\boxed{-\frac{1}{2}}", "-0.5", True),
    (r"so $x^2+2x+1$", "(x+1)^2", True),
    (r"\boxed{x^2+2x+1}", "(x-1)^2", False),
    (r"\boxed{(1,2]}", "[1,2)", False),
    (r"\boxed{(1,2)}", "(1,2)", True),
    (r"\boxed{(1,2)}", "(2,1)", False),
    (r"\boxed{[0,\infty)}", r"[0,\infty)", True),
    (r"\boxed{(-\infty,2]\cup[3,4]}", r"(-\infty,2]\cup[3,4]", True),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", True),
    (r"\boxed{\sqrt{12}}", r"3\sqrt{2}", False),
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}", True),
    (r"\boxed{1,2,3}", "3,2,1", True),
    (r"\boxed{1{,}000}", "1000", True),
    (r"\boxed{1,000,000}", "1000000", True),
    (r"\boxed{x=5}", "5", True),
    (r"\boxed{5\text{ cm}}", "5", True),
    (r"\boxed{90^\circ}", "90", True),
    (r"\boxed{\$18}", "18", True),
    (r"\boxed{\pi/2}", r"\frac{\pi}{2}", True),
    (r"\boxed{e^{2}}", "e^2", True),
    (r"\boxed{2^{10}}", "1024", True),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
    (r"\boxed{\text{(C)}}", r"\text{(C)}", True),
    ("the answer is 12", "12", True),
    ("the answer is 12", "13", False),
    ("no idea", "13", False),
)
_ABSENT = "absent"
_HINT = "install what rollmesh requires: pip install --force-reinstall 'math-verify[antlr4-13-2]==0.8.0'"


def packages() -> dict[str, str]:
    """Installed versions of the packages that grade mathematics; `absent` for a missing one."""
    return {name: installed_version(name) for name in _PINNED}


def check_versions() -> None:
    """Compares the installed packages with those that were tested; takes no time.

    Raises:
        RewardError: another version is installed, or none.
    """
    others = [
        f"{name} {found} (tested: {pin})"
        for name, pin in _PINNED.items()
        if (found := installed_version(name)) != pin and (pin is not None or found == _ABSENT)
    ]
    if others:
        raise RewardError(f"mathematics would be graded by untested versions: {', '.join(others)}", hint=_HINT)


def load_library() -> None:
    """Loads what grades mathematics, which takes half a second."""
    response, truth, _ = _KNOWN[0]
    math_value.grade(response, truth)


def run() -> None:
    """Grades known pairs, which takes a second.

    Raises:
        RewardError: a pair is graded differently here; names the installed versions.
    """
    for response, truth, expected in _KNOWN:
        graded = math_value.grade(response, truth)
        if graded is None or graded.correct is not expected:
            installed = ", ".join(f"{name} {version}" for name, version in packages().items())
            raise RewardError(
                f"the math scorer takes {response!r} and {truth!r} for {'different' if expected else 'equal'}, "
                f"which it does not with the versions that were tested; installed: {installed}",
                hint=_HINT,
            )


def installed_version(package: str) -> str:
    """The version of an installed package; `absent` for a missing one."""
    # Workers start without it.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _ABSENT
