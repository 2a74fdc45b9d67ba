"""Take the pictures of the README and of these documents: the page of a run, in a real browser, and `watch`.

    python docs/pictures/take.py                 record the demo, then take them
    python docs/pictures/take.py --run RUN       take them of a run that is there

It needs Chromium and chromedriver, and what `make test` installs.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
STATISTICS = {
    "all layers": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": r"embed|block\d|head"},
        "LogTensorStats": {"enabled": True, "tensors": ["activation", "gradient"], "stats": ["mean", "std", "max"]},
    }
}
WIDE, NARROW = (1280, 800), (400, 800)


def main(arguments: list[str]) -> int:
    """Take all pictures; 2 if there is no browser."""
    parser = argparse.ArgumentParser(description="Take the pictures of the README and of the documents.")
    parser.add_argument("--run", type=Path, metavar="RUN", help="a run directory (default: the demo is recorded)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", metavar="DIR", help="where they go")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT / "tests"))
    from support import browser

    if not browser.is_there():
        print(f"no picture was taken: it {browser.MISSING}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.run or record(Path(scratch) / "demo")
        from pipesight.view.page import write_page

        page = write_page(folder, output=Path(scratch) / "report.html")
        with browser.open_browser(Path(scratch) / "profile", scale=2) as window:
            window.open(page)
            take(window, options.out)
        draw_watch(folder, options.out / "watch.svg")
    return 0


def record(folder: Path) -> Path:
    """Train the demo's model for a while."""
    from pipesight.demo.training import Training, one_thread
    from pipesight.recording import observe

    with one_thread():
        training = Training(partitions=2, chunks=4, checkpoint="except_last", seed=0)
        with observe(folder, stats=STATISTICS):
            for _ in range(STEPS):
                training.step()
    return folder


def take(page: Any, out: Path) -> None:
    """Take each picture, light and dark where the README has both."""
    for theme in ("light", "dark"):
        page.prefer(theme)
        page.resize(*WIDE)
        save(page, out / f"page-{theme}.png", below="#timeline-section")
    page.prefer("light")
    page.focus("#timeline")
    page.keys("\ue014", "\ue015", "\ue015", "\ue014", "\ue007")  # a forward of the last partition, opened
    save(page, out / "block.png", of="#timeline-section")
    page.keys("\ue00c")
    page.run("document.activeElement.blur()")
    for name in ("time", "layers", "statistics"):
        save(page, out / f"{name}.png", of=f"#{name}-section")
    page.resize(*NARROW)
    page.run("window.scrollTo(0, 0)")
    page.inspect()
    page.picture(out / "narrow.png")


def draw_watch(folder: Path, path: Path) -> None:
    """Draw what `pipesight watch` shows in a terminal of 80 columns while the run is in progress."""
    from rich.console import Console
    from rich.text import Text

    from pipesight.analysis.latest_step import latest_step
    from pipesight.report import analyse, open_run
    from pipesight.view.live.watch_screen import Frame, draw_frame

    with open_run(folder) as run:
        report = analyse(run)
    frame = Frame("RUN", "running for 0:12", report, latest_step(report))
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(Text.from_ansi("\n".join(draw_frame(frame, width=80, height=24, colour=True))))
    drawn = console.export_svg(title="pipesight watch RUN", unique_id="watch")
    path.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL), encoding="utf-8")  # those are remote


def save(page: Any, path: Path, *, of: str | None = None, below: str | None = None) -> None:
    """Save a part of the page, or all from its top to the end of a part."""
    page.inspect()
    if not page.seen(of or below):
        path.unlink(missing_ok=True)
        print(f"{path.name}: the run has no such thing")
        return
    page.picture(path, of=of, below=below)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
