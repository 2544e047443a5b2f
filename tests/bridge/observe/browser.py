"""A headless Chromium, driven over the W3C WebDriver protocol by its own chromedriver."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Browser:
    def __init__(self, driver: str, session: str) -> None:
        self._session = f"{driver}/session/{session}"

    def open(self, url: str) -> None:
        _post(f"{self._session}/url", {"url": url})

    def evaluate(self, script: str) -> Any:
        """Value of a script's return statement."""
        return _post(f"{self._session}/execute/sync", {"script": script, "args": []})

    def text(self, element_id: str) -> str:
        return str(self.evaluate(f"return document.getElementById('{element_id}').innerText"))

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + 60
        while not self.evaluate(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"never came about: {condition}"
            time.sleep(0.1)

    def command(self, name: str, **parameters: Any) -> Any:
        """Send a command of Chromium's own debugging protocol."""
        return _post(f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def prefer(self, scheme: str) -> None:
        """Prefer a "light" or a "dark" page."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.command("Page.captureScreenshot")["data"])

    def errors(self) -> list[str]:
        """What the page complained about in the console since the last call."""
        return [entry["message"] for entry in _post(f"{self._session}/se/log", {"type": "browser"})]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    assert CHROMEDRIVER is not None
    with subprocess.Popen(
        [CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        session = None
        try:
            port = next(
                found[1]
                for line in process.stdout
                if (found := re.search(r"successfully on port (\d+)", line))
            )
            driver = f"http://127.0.0.1:{port}"
            options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = _post(f"{driver}/session", {"capabilities": {"alwaysMatch": wanted}})
            session = f"{driver}/session/{answer['sessionId']}"
            yield Browser(driver, answer["sessionId"])
        finally:
            if session is not None:
                _send("DELETE", session, None)
            process.terminate()


def _post(url: str, body: dict[str, Any]) -> Any:
    return _send("POST", url, body)


def _send(method: str, url: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]
