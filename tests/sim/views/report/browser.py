"""A Chromium without a window, for tests of pages."""

from __future__ import annotations

import base64
import io
import json
import shutil
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from selenium.webdriver import Chrome

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)
PATIENCE_S = 60.0


class Browser:
    """A page in a browser.

    Parameters
    ----------
    driver
        Of selenium.
    """

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, page: Path) -> None:
        """Open a page and wait for its first figure."""
        self.driver.get_log("performance")  # requests of the start page
        self.driver.get(page.resolve().as_uri())
        self.wait("return document.readyState === 'complete'")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, *arguments: Any) -> Any:
        """Run a script until it returns something true."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            if found := self.run(script, *arguments):
                return found
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}")

    def show(self, element_id: str) -> None:
        """Scroll to a figure and wait until it is drawn."""
        self.run(
            "document.getElementById(arguments[0]).scrollIntoView({block: 'center',"
            " behavior: 'instant'})",
            element_id,
        )
        self.wait(
            "return document.querySelector(`#${arguments[0]} .main-svg`) !== null",
            element_id,
        )

    def show_all(self) -> None:
        """Draw every figure."""
        for element_id in self.run(
            "return [...document.querySelectorAll('.plot')].map((e) => e.id)"
        ):
            self.show(element_id)

    def complaints(self) -> list[Any]:
        """Return the messages of the console."""
        return self.driver.get_log("browser")

    def requests(self) -> list[str]:
        """Addresses that were asked for since `open`."""
        messages = (
            json.loads(entry["message"])["message"]
            for entry in self.driver.get_log("performance")
        )
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def emulate(self, **features: str) -> None:
        """Set media features, such as prefers_color_scheme."""
        told = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.command("Emulation.setEmulatedMedia", features=told)

    def resize(self, width: int, height: int = 900) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def command(self, name: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, parameters)

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag with the left button between two places in the window."""
        self.mouse("mousePressed", *begin)
        for share in (0.3, 0.6, 1.0):
            x, y = (a + share * (b - a) for a, b in zip(begin, end, strict=True))
            self.mouse("mouseMoved", x, y)
        self.mouse("mouseReleased", *end)

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        button = "none" if kind == "mouseMoved" else "left"
        self.command(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button=button,
            clickCount=clicks,
        )

    def pixels(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The whole page as it looks: shape (height, width, 3)."""
        size = self.run(
            "const e = document.documentElement; return [e.clientWidth, e.scrollHeight]"
        )
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        taken = self.command(
            "Page.captureScreenshot", captureBeyondViewport=True, clip=clip
        )
        image = Image.open(io.BytesIO(base64.b64decode(taken["data"])))
        return np.asarray(image.convert("RGB"))

    def paper(self) -> bytes:
        """The page as PDF."""
        told = self.command("Page.printToPDF", printBackground=True)
        return base64.b64decode(told["data"])


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile, or skip the test."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium here")
    binary = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if binary is None:
        pytest.skip("no chromium here; install chromium and chromium-driver")
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("no chromedriver here; install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability(
        "goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"}
    )
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(started)
    finally:
        started.quit()
