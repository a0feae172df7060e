"""Pictures of a page, as a desktop and a phone show it, by headless Chromium.

    python scripts/screenshot.py report.html docs/images/report
    python scripts/screenshot.py report.html build/report --pdf    # as a printer shows it
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = {"desktop": (1000, 1400), "phone": (500, 1400)}  # Chromium has no narrower window
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars")


def chromium(page: Path, *options: str) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or "google-chrome"
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run([browser, *QUIET, f"--user-data-dir={profile}", *options, page.as_uri()],
                       check=True, capture_output=True, timeout=90)


def main(page: Path, base: Path, pdf: bool) -> None:
    base.parent.mkdir(parents=True, exist_ok=True)
    if pdf:
        chromium(page, f"--print-to-pdf={base}.pdf", "--no-pdf-header-footer")
        return
    for name, (width, height) in SIZES.items():
        chromium(page, f"--window-size={width},{height}", f"--screenshot={base}-{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), "--pdf" in sys.argv)
