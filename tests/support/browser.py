"""A real browser for tests of the page: headless Chromium, with a profile of its own."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["MISSING", "Page", "is_there", "open_browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "needs Chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"
"""Why a test is skipped where there is no browser."""

SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
)


def is_there() -> bool:
    """Whether there is a browser to test with."""
    return CHROMIUM is not None and DRIVER is not None


@contextmanager
def open_browser(profile: Path, *, width: int = 1280, height: int = 800, scale: float = 1) -> Iterator[Page]:
    """Start a browser; it ends with the block.

    Example::

        with open_browser(tmp_path / "profile") as page:
            page.open(run / "report.html")
            assert page.inspect()["blocks"] == 16
    """
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for switch in (*SWITCHES, f"--user-data-dir={profile}", f"--force-device-scale-factor={scale}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        page = Page(driver)
        page.resize(width, height)
        yield page
    finally:
        driver.quit()


class Page:
    """A page in the browser, and what a test does with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def resize(self, width: int, height: int, *, touch: bool = False) -> None:
        """Set the size of the page itself, without the frame of a window."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 0, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch})

    def prefer(self, theme: str, *, motion: str = "no-preference") -> None:
        """Have the system prefer a theme."""
        features = [
            {"name": "prefers-color-scheme", "value": theme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, target: Path | str) -> None:
        """Open a file or an address, and wait until it is drawn."""
        self.driver.get(target if isinstance(target, str) else target.resolve().as_uri())
        self.wait("window.pipesight && window.pipesight.inspect().drawn.frames > 0")

    def run(self, script: str, *arguments: Any) -> Any:
        """Return the value of an expression."""
        return self.driver.execute_script(f"return ({script})", *arguments)

    def wait(self, condition: str, *, seconds: float = 20) -> None:
        """Wait until an expression is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, seconds, poll_frequency=0.02).until(lambda _: self.run(condition), condition)

    def until(self, holds: Callable[[dict[str, Any]], bool], *, seconds: float = 20) -> dict[str, Any]:
        """Wait until something holds for what the page says about itself, and return that."""
        from selenium.webdriver.support.ui import WebDriverWait

        facts: dict[str, Any] = {}

        def look(_: object) -> bool:
            facts.update(self.inspect())
            return holds(facts)

        WebDriverWait(self.driver, seconds, poll_frequency=0.02).until(look)
        return facts

    def frame(self) -> None:
        """Wait until what was asked for is drawn."""
        script = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done)))"
        self.driver.execute_async_script(script)

    def inspect(self) -> dict[str, Any]:
        """Return what the page says about itself, when all is drawn."""
        self.frame()
        found: dict[str, Any] = self.run("window.pipesight.inspect()")
        return found

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return str(self.run("document.querySelector(arguments[0]).innerText", selector))

    def seen(self, selector: str) -> bool:
        """Whether an element is there and has a size."""
        return bool(
            self.run("(e => !!e && e.getClientRects().length > 0)(document.querySelector(arguments[0]))", selector)
        )

    def click(self, selector: str) -> None:
        """Click on the middle of an element, having scrolled to it."""
        self.driver.find_element("css selector", selector).click()

    def point(self, x: float, y: float, kind: str = "mouseMoved", **more: Any) -> None:
        """Move the mouse to a point of the page, or do with it what ``kind`` says."""
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **more})
        self.frame()  # in which the page hears of it

    def click_at(self, x: float, y: float, *, times: int = 1) -> None:
        """Click on a point of the page."""
        self.point(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.point(x, y, kind, button="left", clickCount=times)

    def wheel(self, x: float, y: float, *, by: float) -> None:
        """Turn the wheel: down if ``by`` is positive."""
        self.point(x, y, "mouseWheel", deltaX=0, deltaY=by)

    def keys(self, *keys: str) -> None:
        """Press keys, where the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def focus(self, selector: str) -> None:
        """Give an element the focus."""
        self.run("document.querySelector(arguments[0]).focus()", selector)

    def place_of(self, lane: int, time: float) -> tuple[float, float]:
        """Return where on the page a lane is at a time."""
        facts = self.inspect()
        row = next(row for row in facts["rows"] if row["lane"] == lane)
        box = self.run("(r => [r.left, r.top, r.width])(document.getElementById('timeline').getBoundingClientRect())")
        share = (time - facts["view"]["from"]) / (facts["view"]["to"] - facts["view"]["from"])
        return box[0] + share * box[2], box[1] + row["top"] + row["height"] * 0.7

    def complaints(self) -> list[str]:
        """Return what the page wrote to the console since the last time: nothing, if all is well."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last time."""
        entries = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        return [e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent"]

    def picture(self, path: Path, *, of: str | None = None, below: str | None = None, whole: bool = False) -> None:
        """Save what is seen as a PNG file; or an element; or all from the top to its end; or the whole page."""
        options: dict[str, Any] = {}
        if of or below or whole:
            x, y, width, height = self.run(
                "(e => { const r = e.getBoundingClientRect(); return [r.left, r.top + scrollY, r.width, r.height] })"
                "(document.querySelector(arguments[0]))",
                of or below or "html",
            )
            if below or whole:
                end = y + height + 16 if below else self.run("document.documentElement.scrollHeight")
                x, y, width, height = 0, 0, self.run("document.documentElement.clientWidth"), end
            clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
            options = {"captureBeyondViewport": True, "clip": clip}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", **options})
        path.write_bytes(base64.b64decode(shot["data"]))
