"""A headless Chromium, for what only a browser can tell: what was drawn, and what ran."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--virtual-time-budget=10000",
)


def chromium() -> str:
    """The browser's path; without one the test is skipped, in CI it fails."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        missing = f"no Chromium found (looked for {', '.join(NAMES)}): nothing was drawn"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    return path


def open_page(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The document after its scripts ran, and what the browser's console said."""
    command = [chromium(), *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    console = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if "CONSOLE" in line]
    return done.stdout.decode("utf-8"), console
