"""Sizes and timings of the HTML report of real runs: a plan or a frontier of GPTs of several depths.

    python -m benchmarks.report                                     # plans for H100, compiled: minutes a model
    python -m benchmarks.report --blocks 6 12 --target tpu-v5e --frontier

`page` is the file's size, `write` what `rematplan report` takes besides starting Python, `open` from asking Chromium for the
file until every chart is drawn, `choose` from choosing another configuration until everything below has followed and is
painted (median, worst). Without Chromium and its driver the last three are left out.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import rematplan as rp
from rematplan import workloads
from rematplan.report.document import html_document
from rematplan.report.run import Run, to_text, versions

MOST_SECONDS = 60
SHARE = 0.6  # of what no checkpointing needs
READY = "return document.documentElement.dataset.ready === 'true'"
CHOOSE = """
const done = arguments[arguments.length - 1], times = [];
(async () => {
  for (const radio of document.getElementsByName('shown')) {
    if (radio.checked) continue;
    const begun = performance.now();
    radio.click();
    await new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)));
    times.push(performance.now() - begun);
  }
  done(times);
})();
"""


def recorded(blocks: int, target: str, *, frontier: bool) -> Run:
    """The run of a plan, or of a whole frontier."""
    work = workloads.gpt(blocks=blocks)
    if frontier:
        return Run(
            "frontier",
            ("frontier", "gpt", f"blocks={blocks}"),
            versions(),
            target,
            rp.frontier(work, target=target).to_json(),
        )
    need = rp.measure(work, target=target, method="probe").required_bytes
    plan = rp.plan(work, budget=int(SHARE * need), target=target, finalists=1)
    return Run("plan", ("plan", "gpt", f"blocks={blocks}"), versions(), target, plan.record().to_json())


def browser() -> Any | None:
    """A headless Chromium, None where there is none."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        return None
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,2400"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=Service(driver))


def looked_at(opened: Any, file: Path) -> tuple[float, list[float]]:
    """Seconds until the page is drawn, and milliseconds of each choice."""
    begun = time.monotonic()
    opened.get(file.as_uri())
    while not opened.execute_script(READY):
        if time.monotonic() - begun > MOST_SECONDS:
            raise TimeoutError(f"{file} was not drawn within {MOST_SECONDS} s")
        time.sleep(0.01)
    drawn = time.monotonic() - begun
    opened.set_script_timeout(60)
    return drawn, opened.execute_async_script(CHOOSE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[6, 48, 96])
    parser.add_argument("--target", default="gpu-h100")
    parser.add_argument("--frontier", action="store_true", help="a whole frontier instead of one plan")
    arguments = parser.parse_args()
    opened = browser()
    shown = Table(title=f"HTML report of GPT on {arguments.target}")
    for column in ("blocks", "configurations", "run KiB", "page KiB", "write s", "open s", "choose ms"):
        shown.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        for blocks in arguments.blocks:
            run = recorded(blocks, arguments.target, frontier=arguments.frontier)
            begun = time.monotonic()
            page = html_document(run)
            written = time.monotonic() - begun
            file = Path(folder) / f"{blocks}.html"
            file.write_text(page, encoding="utf-8")
            count = len(run.record.get("points", [0])) + len(run.record["baselines"])
            seen = ["-", "-"]
            if opened is not None:
                drawn, times = looked_at(opened, file)
                seen = [f"{drawn:.2f}", f"{statistics.median(times):.0f}, {max(times):.0f}"]
            size = len(to_text(run.to_json()).encode())
            shown.add_row(
                str(blocks),
                str(count),
                f"{size / 1024:.0f}",
                f"{len(page.encode()) / 1024:.0f}",
                f"{written:.2f}",
                *seen,
            )
    if opened is not None:
        opened.quit()
    Console(width=110).print(shown)


if __name__ == "__main__":
    main()
