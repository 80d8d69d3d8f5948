"""A headless chromium for tests, spoken to over its DevTools pipe; no port, no driver, nothing installed.

Protocol: https://chromedevtools.github.io/devtools-protocol, messages end with a zero byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Comes by every figure, and says how many are not drawn yet.
SCROLL = """(async () => {
  for (const plot of document.querySelectorAll(".plot:not([data-drawn])")) {
    plot.scrollIntoView();
    await new Promise((done) => setTimeout(done, 20));
  }
  window.scrollTo(0, 0);
  return document.querySelectorAll(".plot:not([data-drawn])").length;
})()"""


class Browser:
    """One tab. Keeps every request, every line of the console and every exception of the page."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._last = write, read, b"", 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer, keeping the events that come before."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next(60)
            if found.get("id") == self._last:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]

    def open(self, path: Path, width: int = 1280, dark: bool = False, script: bool = True) -> None:
        """Load a file on a screen of that width and scroll through it, so that all figures are drawn."""
        self.requests.clear()
        self.complaints.clear()
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        self._until(lambda: self.js("document.readyState == 'complete' && location.href") == path.as_uri())
        if script:
            self.js("document.querySelectorAll('details').forEach((box) => { box.open = true; })")
            self._until(lambda: self.js(SCROLL) == 0)

    def js(self, text: str) -> Any:
        """The value of an expression in the page, awaited."""
        found = self.call("Runtime.evaluate", expression=text, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def _until(self, done: Any, seconds: float = 60) -> None:
        ends = time.monotonic() + seconds
        while not done():
            if time.monotonic() > ends:
                raise TimeoutError("the page did not come to rest")
            time.sleep(0.05)

    def _next(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], seconds)[0]:
                raise TimeoutError("chromium does not answer")
            if not (part := os.read(self._read, 1 << 20)):
                raise RuntimeError("chromium ended")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            self.complaints.append(params["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("warning", "error", "assert"):
            self.complaints.append(str(params["args"]))
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        return message


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with the block."""
    assert CHROMIUM
    pipes = [*os.pipe(), *os.pipe()]
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipes]
    for end in pipes:
        os.close(end)
    commands, write, read, answers = ends[0], ends[1], ends[2], ends[3]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--no-first-run",
        ]
        words += [f"--user-data-dir={profile}", "--disable-background-networking", "about:blank"]
        quiet = [(os.POSIX_SPAWN_OPEN, end, os.devnull, os.O_WRONLY, 0) for end in (1, 2)]
        piped = [(os.POSIX_SPAWN_DUP2, commands, 3), (os.POSIX_SPAWN_DUP2, answers, 4)]  # where chromium looks for them
        running = os.posix_spawn(CHROMIUM, words, os.environ, file_actions=[*quiet, *piped])
        try:
            yield Browser(write, read)
        finally:
            os.kill(running, signal.SIGTERM)
            os.waitpid(running, 0)
            for end in ends:
                os.close(end)
