"""Takes the documentation's pictures of the page: `python docs/figures/take_dashboard.py`, from the repository.

The demonstration runs for it, from its start to its end: the page is pictured in the middle, and of the finished run.
It needs Chromium and playwright.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).resolve().parent
CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
WIDTHS, HEIGHT = (1280, 400), 1380
# The steps of the picture of the run in progress.
MIDDLE = re.compile(r"step (1[5-9]|[2-9]\d)\d of")
DEADLINE_MS = 900_000
# Charts are drawn as they come into sight. The page forbids code in texts, by which playwright would wait.
DRAWN = """() => [...document.querySelectorAll("figure.chart")]
  .filter((chart) => chart.offsetHeight && chart.getBoundingClientRect().top < innerHeight)
  .every((chart) => chart.querySelector(".plot[data-drawn=yes]"))"""


def main() -> None:
    """Runs the demonstration, and writes four pictures next to this file."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        os.chdir(folder)
        with _started(["-m", "examples.demo", "--logging.dashboard_port=0", "--rollout.replicas=2"]) as run:
            page = _opened(browser, _url_of(run))
            page.get_by_text(MIDDLE).first.wait_for(timeout=DEADLINE_MS)
            _picture(page, "live")
            page.close()
            for _ in run.stdout or ():
                pass
        with _started(["-m", "rollmesh", "dashboard", "runs/demo", "--port", "0"]) as shown:
            _picture(_opened(browser, _url_of(shown)), "finished")
            shown.terminate()


def _started(arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _url_of(process: subprocess.Popen[str]) -> str:
    for line in process.stdout or ():
        print(line, end="", flush=True)
        if found := re.search(r"http://127\.0\.0\.1:\d+/\S+", line):
            return found[0]
    raise SystemExit("it ended without a page")


def _opened(browser: Any, url: str) -> Any:
    page = browser.new_context(viewport={"width": WIDTHS[0], "height": HEIGHT}).new_page()
    page.goto(url)
    page.wait_for_selector("main[data-state=drawn]", timeout=DEADLINE_MS)
    return page


def _picture(page: Any, name: str) -> None:
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": HEIGHT})
        while not page.evaluate(DRAWN):
            page.wait_for_timeout(200)
        page.wait_for_timeout(1000)
        taken = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
        small = taken.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        small.save(HERE / f"dashboard-{name}-{width}.png", optimize=True)


if __name__ == "__main__":
    main()
