"""Where the repository is: tests move, their documents and examples stay."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
