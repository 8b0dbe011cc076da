"""A headless browser for the tests that need one."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    # Without these a browser asks for updates and the like, which is no request of the page.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """Opens a page file, and tells what it drew, what it complained about and what it asked for."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, file: Path, *, width: int = 1280, dark: bool = False) -> None:
        """Loads the page at this window width and waits until its charts are drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        self.driver.get(file.as_uri())
        WebDriverWait(self.driver, 60).until(lambda _: self.run("return document.documentElement.dataset.drawn"))

    def run(self, script: str, *arguments: object) -> object:
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """Everything in the console since the page was opened, warnings too."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the page was opened, the page's own included."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Headless Chromium; skips without one, or fails where MARLHF_REQUIRE_BROWSER=1 says that there is one."""
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    chromedriver = shutil.which("chromedriver")
    if program is None or chromedriver is None:
        missing = "no Chromium" if program is None else "no chromedriver"
        reason = f"{missing} on this machine (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("MARLHF_REQUIRE_BROWSER") == "1":
            pytest.fail(f"MARLHF_REQUIRE_BROWSER=1, but there is {reason}")
        pytest.skip(reason)
    options = Options()
    options.binary_location = program
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
