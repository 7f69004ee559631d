"""A hook of mkdocs: pages that lie outside `docs/` are pages of the site too, and links between all of them hold.

In the repository pages link to each other by their places there. On the site `docs/x.md` is `x.md`, the README of the
repository is the first page, and other pages keep their path. A file that is no page is published as it is. A folder
cannot be, so only its name remains.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parent.parent
# Pages of the repository that the site has under other names: its own would be those of other pages.
_RENAMED = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmark-scripts.md",
    "deploy/README.md": "deployment.md",
}
_ELSEWHERE = (*_RENAMED, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_LINK = re.compile(r"(?P<text>\[[^\]]*\])\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_BLOCK = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside `docs/`, and the files to which pages link."""
    named = [*_ELSEWHERE, *(str(page.relative_to(_ROOT)) for page in sorted(_ROOT.glob("examples/*/README.md")))]
    for place in named:
        files.append(File.generated(config, _on_site(place), abs_src_path=str(_ROOT / place)))
    linked = {target for page in list(files.documentation_pages()) for target in _linked(_place(page.src_uri))}
    for place in sorted(linked):
        if (_ROOT / place).is_file() and files.get_file_from_path(_on_site(place)) is None:
            files.append(File.generated(config, _on_site(place), abs_src_path=str(_ROOT / place)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 (mkdocs calls it by these names)
    """The page with its links as they are on the site."""
    here = _place(page.file.src_uri)
    return "".join(
        part if index % 2 else _LINK.sub(lambda found: _moved(found, here), part)
        for index, part in enumerate(_BLOCK.split(markdown))
    )


def _moved(link: re.Match[str], here: str) -> str:
    if "://" in link["target"]:
        return link[0]
    place = _resolved(here, link["target"])
    if (_ROOT / place).is_dir():
        return link["text"][1:-1]
    moved = posixpath.relpath(_on_site(place), posixpath.dirname(_on_site(here)) or ".")
    return f"{link['text']}({moved}{link['anchor'] or ''})"


def _linked(here: str) -> set[str]:
    text = "".join(_BLOCK.split((_ROOT / here).read_text(encoding="utf-8"))[::2])
    return {_resolved(here, link["target"]) for link in _LINK.finditer(text) if "://" not in link["target"]}


def _resolved(here: str, target: str) -> str:
    return os.path.normpath(posixpath.join(posixpath.dirname(here), target))


def _on_site(place: str) -> str:
    """Where a file of the repository is on the site."""
    return _RENAMED.get(place, place.removeprefix("docs/"))


def _place(on_site: str) -> str:
    """Where a page of the site is in the repository."""
    renamed = {new: old for old, new in _RENAMED.items()}
    return renamed.get(on_site) or (f"docs/{on_site}" if (_ROOT / "docs" / on_site).exists() else on_site)
