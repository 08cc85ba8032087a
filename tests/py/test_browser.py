"""report.html in a browser: it fits its window, follows the theme, says nothing on the console and fetches nothing."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

from netbottleneck.report import Run
from ringwriter import FakeRun

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
LIMIT_S = 120
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files", "--virtual-time-budget=5000"),
    *("--enable-logging=stderr", "--v=0", "--dump-dom"),
)
THEMES = ("dark", "light")  # in the order of the browser's numbers
# Shows the page in a window of this width, and writes what it finds into its own title.
FRAME = """<!doctype html><title></title><iframe src="report.html" style="width:%dpx;height:2000px;border:0"></iframe>
<script>
document.querySelector("iframe").onload = ({target}) => {
  const page = target.contentDocument.documentElement
  const style = target.contentWindow.getComputedStyle(target.contentDocument.body)
  document.title = JSON.stringify({
    width: page.scrollWidth,
    pictures: page.querySelectorAll("svg").length,
    background: style.backgroundColor,
    fetched: target.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name),
  })
}
</script>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a report of 8 ranks and 200 steps."""
    if BROWSER is None:
        pytest.skip("chromium is not installed")
    made = tmp_path_factory.mktemp("browser")
    run = FakeRun(tmp_path_factory.mktemp("run"), blocks=20, block_steps=10, size=8, transports=("stock", "ofi"))
    (made / "report.html").write_text(Run(run.write()).html, encoding="utf-8")
    return made


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [390, 1200])
def test_a_page_fits_its_window_and_fetches_nothing(folder, width, theme):
    frame = folder / f"frame-{width}-{theme}.html"
    frame.write_text(FRAME % width, encoding="utf-8")
    options = (
        f"--user-data-dir={folder / frame.stem}",
        f"--blink-settings=preferredColorScheme={THEMES.index(theme)}",
    )
    shown = subprocess.run(
        [BROWSER, *OPTIONS, *options, frame.as_uri()], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert "CONSOLE" not in shown.stderr
    title = re.search("<title>(.+?)</title>", shown.stdout)
    assert title is not None, shown.stdout[:2000]
    found = json.loads(html.unescape(title[1]))
    assert found["fetched"] == []
    assert found["width"] <= width
    assert found["pictures"] > 5
    dark = sum(map(int, re.findall(r"\d+", found["background"])[:3])) < 3 * 128
    assert dark == (theme == "dark")
