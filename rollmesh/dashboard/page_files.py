"""The files of the page: its template, its style, its modules, and plotly's as plotly's package ships it.

The modules import each other by bare names (`rollmesh/dom.js`). A map in the page says where these are: on the server,
or in a page of one file in the file itself. So no bundler is needed.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from jinja2 import Environment

STATIC = "/static/"
PLOTLY = "/plotly.min.js"
MAIN = 'import "rollmesh/main.js";'
"""The script that starts the page."""
STYLE = "style.css"
_TEMPLATE = "page.html"


def _static() -> Traversable:
    return resources.files("rollmesh.dashboard").joinpath("static")


@cache
def static_files() -> dict[str, str]:
    """Texts of all files by path, `panels/mesh.js`."""
    found: dict[str, str] = {}

    def collect(folder: Traversable, prefix: str) -> None:
        for entry in sorted(folder.iterdir(), key=lambda item: item.name):
            if entry.is_dir():
                collect(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith((".js", ".css", ".html")):
                found[prefix + entry.name] = entry.read_text(encoding="utf-8")

    collect(_static(), "")
    return found


@cache
def plotly_gzipped() -> bytes:
    """plotly.js, compressed."""
    # Half the time of the usual level, and 4 % more bytes.
    return gzip.compress(_plotly(), compresslevel=4, mtime=0)


@cache
def plotly_style_ids() -> list[str]:
    """Ids of the style sheets that plotly would add: with an element of each id it adds none.

    The policy of the page forbids them, and no plot here needs them. One is for every plot, the others are for maps.
    """
    found = re.findall(rb'getElementById\("([0-9a-f]{64})"\)', _plotly())
    return ["plotly.js-style-global", *sorted({name.decode() for name in found})]


def _plotly() -> bytes:
    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()


def import_map(*, embedded: bool) -> str:
    """The map from modules to where they are, as JSON.

    Args:
        embedded: in the page itself, instead of on its server.
    """
    modules = {name: text for name, text in static_files().items() if name.endswith(".js")}
    if embedded:
        found = {name: f"data:text/javascript;base64,{_base64(text.encode())}" for name, text in modules.items()}
    else:
        found = {name: f"{STATIC}{name}" for name in modules}
    return json.dumps({"imports": {f"rollmesh/{name}": place for name, place in found.items()}})


def fill_page(title: str, imports: str, *, policy: str = "", embedded: Mapping[str, str] | None = None) -> str:
    """The page.

    Args:
        title: of the page, a text.
        imports: see `import_map`.
        policy: of a page in one file, which has no headers.
        embedded: JSON of the data (`data`) and plotly (`plotly`, compressed, in base64) of a page in one file.
    """
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(static_files()[_TEMPLATE])
    return template.render(
        title=title,
        imports=imports,
        main=MAIN,
        policy=policy,
        style_ids=plotly_style_ids(),
        style=static_files()[STYLE] if embedded is not None else None,
        data=_in_script(embedded["data"]) if embedded is not None else None,
        plotly=embedded["plotly"] if embedded is not None else None,
    )


def embedded_plotly() -> str:
    """plotly.js for a page in one file, compressed, in base64."""
    return _base64(plotly_gzipped())


def _in_script(text: str) -> str:
    """JSON that cannot end the script element which holds it."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
