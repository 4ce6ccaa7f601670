"""The HTML report as a reader sees it, in a real browser without a network."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from rematplan.report.choices import choices
from rematplan.report.document import html_document
from rematplan.units import format_bytes
from tests.report import runs

pytestmark = pytest.mark.slow

# Where screenshots go, for a person to look at; by default the test's own folder.
SCREENSHOTS = os.environ.get("REMATPLAN_SCREENSHOTS")
READY = "return document.documentElement.dataset.ready === 'true'"
# Everything that is drawn in the timeline, as a string that changes with it.
LINES = "return [...document.querySelectorAll('#timeline path')].map((p) => p.getAttribute('d')).join(' ')"


@cache
def page_of(kind: str) -> str:
    return html_document(getattr(runs, kind)())


def opened(browser, tmp_path: Path, run, name: str = "report") -> Path:
    file = tmp_path / f"{name}.html"
    file.write_text(run if isinstance(run, str) else html_document(run), encoding="utf-8")
    browser.get(file.as_uri())
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(READY))
    return file


def complaints(browser) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def photograph(browser, tmp_path: Path, name: str) -> None:
    folder = Path(SCREENSHOTS) if SCREENSHOTS else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(folder / f"{name}.png"))


def cells(browser, table: str) -> list[str]:
    return [e.get_attribute("textContent").strip() for e in browser.find_elements(By.CSS_SELECTOR, f"#{table} td")]


@pytest.mark.parametrize("kind", ["plan", "comparison", "frontier"])
def test_the_page_opens_without_a_network_and_without_complaints(browser, tmp_path, kind):
    opened(browser, tmp_path, page_of(kind), kind)
    photograph(browser, tmp_path, kind)
    assert complaints(browser) == []
    charts = {
        e.get_attribute("id")
        for e in browser.find_elements(By.CSS_SELECTOR, ".chart")
        if e.find_elements(By.TAG_NAME, "svg")
    }
    assert charts == {"frontier", "timeline", "alive"}


def test_numbers_on_the_page_are_the_records(browser, tmp_path):
    run = runs.plan()
    opened(browser, tmp_path, page_of("plan"))
    shown = cells(browser, "configurations")
    for choice in choices("plan", run.record).items:
        assert format_bytes(choice.figures["required_bytes"]) in shown
        assert format_bytes(choice.figures["peak_bytes"]) in shown
    figures = cells(browser, "figures")
    assert format_bytes(run.record["measured"]["required_bytes"]) in figures
    groups = cells(browser, "groups")
    assert [format_bytes(g["bytes"]) for g in run.record["measured"]["timeline"]["alive"]] == groups[3::4]


def test_clicking_a_point_changes_everything_below(browser, tmp_path):
    run = runs.frontier()
    opened(browser, tmp_path, page_of("frontier"))
    before, lines = cells(browser, "figures"), browser.execute_script(LINES)
    points = browser.find_elements(By.CSS_SELECTOR, "#frontier .mark-symbol path")
    found = choices("frontier", run.record)
    assert len(points) >= len(found.items)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", points[3])
    ActionChains(browser).move_to_element(points[3]).click().perform()
    WebDriverWait(browser, 5).until(lambda b: cells(b, "figures") != before)
    chosen = next(i for i, e in enumerate(browser.find_elements(By.NAME, "shown")) if e.is_selected())
    assert chosen != found.default
    name = found.items[chosen].name
    assert browser.find_element(By.ID, "chosen-title").text == f"Chosen: {name}"
    assert format_bytes(found.items[chosen].figures["required_bytes"]) in cells(browser, "figures")
    WebDriverWait(browser, 5).until(lambda b: b.execute_script(LINES) != lines)
    assert complaints(browser) == []


def test_a_line_of_the_table_is_chosen_with_the_keyboard(browser, tmp_path):
    run = runs.comparison()
    opened(browser, tmp_path, page_of("comparison"))
    found = choices("compare", run.record)
    radio = browser.find_elements(By.NAME, "shown")[found.default]
    radio.send_keys(Keys.ARROW_UP)
    expected = found.items[found.default - 1]
    WebDriverWait(browser, 5).until(lambda b: expected.name in b.find_element(By.ID, "chosen-title").text)
    assert format_bytes(expected.figures["required_bytes"]) in cells(browser, "figures")
    # the tree's cells follow too
    decisions = run.record["model"]["decisions"][expected.decisions]
    shown = [e.get_attribute("textContent") for e in browser.find_elements(By.CSS_SELECTOR, "[data-value]")]
    assert shown.count("saved") == sum(d["saved"] > 0 and not d["recomputed"] and not d["where"] for d in decisions)
    # and folders open without a mouse
    summary = browser.find_element(By.CSS_SELECTOR, "#chosen details summary")
    summary.send_keys(Keys.ENTER)
    assert browser.find_element(By.CSS_SELECTOR, "#chosen details").get_attribute("open") is not None


def test_another_timeline_can_be_laid_over(browser, tmp_path):
    opened(browser, tmp_path, page_of("comparison"))
    lines = browser.execute_script(LINES)
    other = [e for e in browser.find_elements(By.NAME, "compared") if not e.is_selected()][-1]
    browser.execute_script("arguments[0].click()", other)
    WebDriverWait(browser, 5).until(lambda b: b.execute_script(LINES) != lines)
    assert complaints(browser) == []


def test_dark_and_light(browser, tmp_path):
    opened(browser, tmp_path, page_of("plan"))
    background = "return getComputedStyle(document.body).backgroundColor"
    light = browser.execute_script(background)
    browser.find_element(By.ID, "theme").click()
    WebDriverWait(browser, 5).until(lambda b: b.execute_script(background) != light)
    drawn = "return document.querySelector('#timeline svg').style.backgroundColor"
    WebDriverWait(browser, 5).until(lambda b: b.execute_script(drawn) == b.execute_script(background))
    photograph(browser, tmp_path, "dark")
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    browser.refresh()
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(READY))
    assert browser.execute_script(background) != light
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert complaints(browser) == []


def test_a_module_that_is_called_like_a_script_stays_text(browser, tmp_path):
    opened(browser, tmp_path, runs.hostile())
    for radio in browser.find_elements(By.NAME, "shown"):
        browser.execute_script("arguments[0].click()", radio)
    text = browser.find_element(By.TAG_NAME, "body").get_attribute("textContent")
    assert runs.HOSTILE in text
    assert len(browser.find_elements(By.TAG_NAME, "script")) == 3
    assert not browser.find_elements(By.TAG_NAME, "img")
    with pytest.raises(Exception, match="no such alert"):
        browser.switch_to.alert.accept()
    assert complaints(browser) == []


def test_a_deep_models_page_stays_responsive(browser, tmp_path):
    """Ninety-six blocks, twenty configurations: half a second is a bound for a busy machine; benchmarks say the figure."""
    run = runs.frontier(96, points=9)
    opened(browser, tmp_path, run)
    script = """
      const done = arguments[arguments.length - 1], radios = [...document.getElementsByName('shown')];
      const times = [];
      (async () => {
        for (const radio of radios.slice(1, 7)) {
          const begun = performance.now();
          radio.click();
          await new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)));
          times.push(performance.now() - begun);
        }
        done(times);
      })();
    """
    times = sorted(browser.execute_async_script(script))
    assert times[len(times) // 2] < 500
