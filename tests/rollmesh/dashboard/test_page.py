"""The page in a real browser: everything is drawn, nothing is loaded from elsewhere, and everyone can use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rollmesh.dashboard.report import write_report
from rollmesh.dashboard.run_reader import RunReader
from rollmesh.dashboard.run_view import RunView
from rollmesh.dashboard.server import page_server
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from tests.rollmesh.dashboard.runs import HOSTILE, REASONING, StaticRuns, mesh_now, sample, write_records, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python", reason="axe is not installed")

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="no /usr/bin/chromium: make system-packages"),
]
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
WIDE, NARROW = 1280, 400
HEIGHT = 900
DEADLINE_S = 600.0
RULES = Path(axe.__path__[0], "axe.min.js")
# A plot is one picture with a text in its place. The parts of it are out of the way meanwhile: axe visits all nodes,
# whatever it leaves out of its findings.
AUDIT = """(async () => {
    const plots = [...document.querySelectorAll(".plot")].map((plot) => [plot, ...plot.childNodes]);
    for (const [plot] of plots) plot.replaceChildren();
    const found = await axe.run(document, { resultTypes: ["violations"], preload: false });
    for (const [plot, ...parts] of plots) plot.replaceChildren(...parts);
    return found.violations;
})()"""


class Visit:
    """One page, and all that went wrong on it.

    Args:
        page: of the browser.
        origin: from which alone it may load; empty: it may load nothing.
    """

    def __init__(self, page: Any, origin: str) -> None:
        self.page = page
        self.troubles: list[str] = []
        page.set_default_timeout(1000 * DEADLINE_S)
        page.on("console", lambda message: self.troubles.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("request", lambda request: self._check(request.url, origin))

    def _check(self, url: str, origin: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and (not origin or f"{parts.scheme}://{parts.netloc}" != origin):
            self.troubles.append(f"loads {url}")

    def open(self, url: str) -> None:
        """Opens the page, and waits until the first charts are drawn."""
        self.page.goto(url)
        self.page.wait_for_selector("main[data-state=drawn]")

    def wait_for_charts(self) -> None:
        """Waits until every chart is drawn: they are as they come into sight."""
        for section in ("learning", "staleness", "time", "metrics"):
            charts = self.page.locator(f"#{section} figure.chart:not([hidden])")
            charts.last.scroll_into_view_if_needed()
            for chart in charts.all():
                chart.locator(".plot[data-drawn=yes]").wait_for()
        self.page.evaluate("scrollTo(0, 0)")

    def resize(self, width: int) -> None:
        """Makes the page as wide as that."""
        self.page.set_viewport_size({"width": width, "height": HEIGHT})

    def check(self) -> None:
        """Nothing went wrong, nothing is wider than the page, and no text became code."""
        assert self.troubles == []
        assert self.page.evaluate("window.hacked") is None
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    def audit(self) -> None:
        """The same, and axe finds nothing serious."""
        self.check()
        self.page.evaluate(RULES.read_text(encoding="utf-8"))
        serious = [
            f"{rule['id']}: {[node['html'][:160] for node in rule['nodes'][:3]]}"
            for rule in self.page.evaluate(AUDIT)
            if rule["impact"] in ("serious", "critical")
        ]
        assert serious == []

    def charts(self) -> set[str]:
        """Titles of the charts in sight."""
        return set(self.page.locator("figure.chart:not([hidden]) .chart-title").all_inner_texts())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def bridge() -> Iterator[AsyncBridge]:
    opened = AsyncBridge("page")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "qwen3-8b-math", 200)


@contextmanager
def served(bridge: AsyncBridge, views: Sequence[RunView]) -> Iterator[str]:
    """The URL of the real server of runs, with its key."""
    server = page_server(StaticRuns(views), host="127.0.0.1", port=0)
    url = bridge.call(server.__aenter__(), DEADLINE_S)
    try:
        yield url
    finally:
        bridge.call(server.__aexit__(None, None, None), DEADLINE_S)


@contextmanager
def visiting(browser: Any, url: str, width: int = WIDE, scheme: str = "light") -> Iterator[Visit]:
    """A new page, with nothing of another visit."""
    parts = urlsplit(url)
    context = browser.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
    try:
        yield Visit(context.new_page(), f"{parts.scheme}://{parts.netloc}")
    finally:
        context.close()


def test_a_mesh_in_progress_next_to_a_finished_run(
    browser: Any, bridge: AsyncBridge, finished: Path, tmp_path: Path
) -> None:
    """All kinds of charts and panels, on a wide page and on a narrow one."""
    view = RunReader(finished).view
    view.in_progress, view.summary, view.mesh = True, None, mesh_now(4, 200)
    other = RunReader(write_run(tmp_path / "higher-rate", 120, learning_rate=3e-6)).view
    with served(bridge, [view, other]) as url, visiting(browser, url) as visit:
        visit.open(url)
        page = visit.page
        assert "#key" not in page.url, "the key is out of sight"
        assert page.locator("#freshness").inner_text() == "live"
        assert page.locator("#mesh h3").all_inner_texts() == ["4 generators", "1 reward service", "Buffer", "Learner"]
        assert "generators wait: staleness bound" in page.locator("#mesh .waits").inner_text()
        assert page.get_by_text("learner.optimizer.lr 1e-06 -> 3e-06").is_visible()
        legend = page.locator("#learning figure").first.locator(".legend li").all_inner_texts()
        assert [text.partition(":")[0].strip() for text in legend] == ["qwen3-8b-math"] * 2 + ["higher-rate"] * 2
        see_samples(visit)
        visit.wait_for_charts()
        visit.audit()
        visit.resize(NARROW)
        visit.wait_for_charts()
        visit.check()
        assert {"Reward", "Entropy of the policy", "KL divergence", "Trained tokens by age"} <= visit.charts()
        page.get_by_text("All members and the buffer in words").click()
        assert page.get_by_role("cell", name="10.1.0.1:5000").is_visible()
        page.get_by_label("Everything else").select_option("1")
        page.locator("h1", has_text="higher-rate").wait_for()
        assert not page.locator("#mesh").is_visible()
        visit.check()


def see_samples(visit: Visit) -> None:
    """Walks through responses and their tokens; a response that has become code is shown at last."""
    page, samples = visit.page, visit.page.locator("#samples")
    tokens, facts = samples.locator(".tokens"), samples.locator(".token-facts")
    assert tokens.evaluate("element => element.textContent") == HOSTILE
    page.get_by_label("Order").select_option("best")
    assert tokens.evaluate("element => element.textContent") == REASONING
    assert samples.locator(".token-begins").get_attribute("data-mark") == "1:198"
    assert "1:197" in samples.locator(".token-legend").inner_text()
    page.get_by_label("Token", exact=True).press("ArrowRight")
    assert facts.inner_text().split("\n")[:4] == ["token", "2 of 65", "text", '" train"']
    tokens.locator(".token").nth(7).click()
    assert "gap\n0.1969" in facts.inner_text()
    page.get_by_label("Color tokens by").select_option("gap")
    assert "nats" in samples.locator(".token-legend").inner_text()
    assert tokens.locator(".token-negative").count() > 0
    samples.get_by_role("button", name="#1 0").click()
    assert tokens.evaluate("element => element.textContent") == HOSTILE
    assert tokens.locator(".token-untrained").count() == 2
    earliest = page.locator("#sample-step option").last.inner_text()
    page.locator("#sample-step").select_option(earliest)
    entries = samples.locator(".sample-entry")
    assert [f"step {earliest}" in entry for entry in entries.all_inner_texts()] == [True, True]


def test_the_report_of_a_finished_run_is_the_same_page_in_one_file(browser: Any, finished: Path) -> None:
    report = write_report(finished).as_uri()
    with visiting(browser, report, NARROW) as visit:
        visit.page.context.set_offline(True)
        visit.open(report)
        page = visit.page
        page.locator("#learning .plot[data-drawn=yes]").first.wait_for()
        assert {"Reward", "Staleness of trained tokens", "Tokens per second"} <= visit.charts()
        assert page.locator("h1").inner_text() == "qwen3-8b-math"
        assert page.title() == "qwen3-8b-math · Rollmesh"
        assert "finished" in page.locator(".state").inner_text()
        assert not page.locator("#mesh").is_visible()
        page.get_by_label("time", exact=True).check()
        page.locator("#learning .xtitle", has_text="seconds").first.wait_for()
        page.get_by_label("Metric", exact=True).select_option("actor/grad_norm")
        assert page.locator("#metrics .chart-title").inner_text() == "actor/grad_norm"
        page.locator("#learning .about summary").first.click()
        assert page.get_by_text("held-out ones measure the policy").is_visible()
        visit.audit()


@pytest.mark.parametrize("tokens", [4_000, pytest.param(32_000, marks=pytest.mark.exhaustive)])
def test_a_thousand_generators_and_a_long_response_in_the_dark_are_shown_for_a_key(
    browser: Any, bridge: AsyncBridge, tmp_path: Path, tokens: int
) -> None:
    folder = write_run(tmp_path / "large", 1)
    long = sample(1, 1, "word " * tokens)
    # A file without the values of tokens, as earlier ones are, is shown too.
    write_records(folder / "samples.jsonl", [long, {"step": 1, "reward": 0.5, "response": "short"}])
    view = RunReader(folder).view
    view.in_progress, view.mesh = True, mesh_now(1000)
    with served(bridge, [view]) as url, visiting(browser, url, NARROW, "dark") as visit:
        bare, _, key = url.partition("#key=")
        page = visit.page
        page.goto(bare)
        page.get_by_label("Key that the command").fill(key)
        page.get_by_role("button", name="Show the page").click()
        page.wait_for_selector("main[data-state=drawn]")
        # The refused request is told in the browser's console.
        assert visit.troubles
        assert all("401" in trouble for trouble in visit.troubles)
        visit.troubles.clear()
        assert page.locator(".cells rect").count() == 1000
        assert page.locator(".members li").count() == 8
        assert "142 waiting" in page.locator("#mesh .states").first.inner_text()
        assert page.locator("#samples pre", has_text="short").is_visible()
        visit.audit()
        page.locator(".sample-entry").nth(1).click()
        assert page.locator(".token").count() == 2000
        assert page.locator(".tokens").evaluate("element => element.textContent.length") == 2000 * 5 - 1
        page.get_by_role("button", name=f"Show all {tokens + 1:,} tokens").click()
        assert page.locator(".token").count() == tokens + 1
        assert visit.troubles == []
