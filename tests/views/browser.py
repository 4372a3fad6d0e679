"""A headless Chromium, driven by chromedriver over the W3C WebDriver protocol, which is plain HTTP and JSON."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DRIVER = shutil.which("chromedriver")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = None if DRIVER and CHROMIUM else "needs Chromium and chromedriver (Debian: chromium, chromium-driver)"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's own key for an element
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
START_S = 60.0


class Browser:
    """One session. Elements are found by CSS selector."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, page: Path) -> None:
        self._post("/url", {"url": page.absolute().as_uri()})

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns; it runs in the page, with ``arguments``."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def texts(self, selector: str) -> list[str]:
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector))

    def click(self, selector: str) -> None:
        self._post(f"/element/{self._find(selector)}/click", {})

    def keys(self, selector: str, text: str) -> None:
        self._post(f"/element/{self._find(selector)}/value", {"text": text})

    def press(self, key: str) -> None:
        actions = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._act({"type": "key", "id": "keyboard", "actions": actions})

    def move(self, selector: str, x: float, y: float, *more: dict[str, object]) -> None:
        """The mouse to a place in the element's box, as fractions of it, and then what ``more`` says."""
        where = self._place(selector, x, y)
        actions = [{"type": "pointerMove", "duration": 0, **where}, *more]
        self._act({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions})

    def click_at(self, selector: str, x: float, y: float) -> None:
        self.move(selector, x, y, {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0})

    def drag(self, selector: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        there = {"type": "pointerMove", "duration": 20, **self._place(selector, *end)}
        self.move(selector, *start, {"type": "pointerDown", "button": 0}, there, {"type": "pointerUp", "button": 0})

    def wheel(self, selector: str, x: float, y: float, down: int, *, control: bool = False) -> None:
        scroll = {"type": "scroll", "duration": 0, "deltaX": 0, "deltaY": down, **self._place(selector, x, y)}
        wheel = {"type": "wheel", "id": "wheel", "actions": [{"type": "pause", "duration": 0}, scroll]}
        held = [{"type": "keyDown", "value": "\ue009"}, {"type": "pause"}, {"type": "keyUp", "value": "\ue009"}]
        self._act(*([{"type": "key", "id": "keyboard", "actions": held}] if control else []), wheel)

    def size(self, width: int, height: int) -> None:
        self._post("/window/rect", {"width": width, "height": height})

    def dark(self, on: bool) -> None:
        """Whether the system prefers dark pages."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self._post("/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}})

    def screenshot(self) -> bytes:
        return base64.b64decode(self._request("GET", "/screenshot"))

    def messages(self) -> list[str]:
        """Errors in the page's console since the last call, and what its own policy forbade."""
        said = self._post("/se/log", {"type": "browser"})
        return [entry["message"] for entry in said if entry["level"] == "SEVERE"]

    def _place(self, selector: str, x: float, y: float) -> dict[str, object]:
        """A point of the window, after the element was scrolled into it."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({ block: 'center' })", selector)
        left, top, width, height = self.run(
            "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [r.left, r.top, r.width, r.height]",
            selector,
        )
        return {"origin": "viewport", "x": round(left + x * width), "y": round(top + y * height)}

    def _find(self, selector: str) -> str:
        return str(self._post("/element", {"using": "css selector", "value": selector})[ELEMENT])

    def _act(self, *sources: dict[str, object]) -> None:
        self._post("/actions", {"actions": list(sources)})

    def _post(self, path: str, body: object) -> Any:
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: object | None = None) -> Any:
        return request(method, self._session + path, body)


def request(method: str, url: str, body: object | None = None) -> Any:
    """The value of the driver's answer; raises RuntimeError with its message where it refuses."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, with a new profile, closed at the end. Raises RuntimeError where it does not start."""
    with tempfile.TemporaryDirectory(prefix="arachnec-browser-", ignore_cleanup_errors=True) as scratch:
        log = Path(scratch) / "driver.log"
        driver = subprocess.Popen(
            [str(DRIVER), "--port=0", f"--log-path={log}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            root = f"http://127.0.0.1:{_port(driver)}"
            options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={scratch}/profile"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = request("POST", f"{root}/session", {"capabilities": {"alwaysMatch": wanted}})
            url = f"{root}/session/{session['sessionId']}"
            try:
                yield Browser(url)
            finally:
                request("DELETE", url)
        finally:
            driver.terminate()
            driver.wait()
            assert driver.stdout is not None
            driver.stdout.close()


def _port(driver: subprocess.Popen[str]) -> int:
    """The port that the driver says it listens on."""
    assert driver.stdout is not None
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        line = driver.stdout.readline()
        if "started successfully on port" in line:
            return int(line.rstrip().rstrip(".").rsplit(" ", 1)[1])
        if not line:
            break
    raise RuntimeError("chromedriver did not start")
