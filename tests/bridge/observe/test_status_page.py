"""The status page in a real browser, fed by a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bridge.client.client import TraceClient
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer
from tests.bridge.observe.browser import CHROMEDRIVER, CHROMIUM, Browser, browser
from tests.bridge.observe.observed import Observed, observed_daemon

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or CHROMEDRIVER is None,
    reason="no Chromium with its chromedriver here (Debian: chromium chromium-driver)",
)

POINTS = "(document.querySelector('#in-line polyline')?.points ?? [])"
HOSTILE = "<img src=x onerror=\"document.title='taken over'\">"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Observed]:
    options = ["--dir", str(tmp_path / "store"), "--disk-limit", "64MiB"]
    with observed_daemon(tmp_path / "log", *options) as started:
        yield started


@pytest.fixture
def filled(
    daemon: Observed, layout: RecordLayout, make_rows: Callable[..., NDArray[np.uint8]]
) -> Observed:
    with RecordProducer(daemon.endpoint) as engine, TraceClient(daemon.endpoint) as trainer:
        engine.register(HOSTILE, layout)
        for part in Part:
            engine.send_rows(part, range(1234), np.repeat(make_rows(part, [0]), 1234, 0), "v")
        engine.send_trajectory("done", 0, range(1234), range(1234), "finished")
        engine.send_trajectory("running", 0, range(3), range(3), "open")
        engine.count_dropped(Part.FORWARD, 5678)
        engine.flush()
        trainer.fetch("running")
        trainer.begin_step(17)
    daemon.status_when(lambda status: status.held.step == 17)
    return daemon


def test_the_page_shows_what_the_daemon_counts_and_renews_itself(
    page: Browser, filled: Observed, layout: RecordLayout
) -> None:
    page.open(filled.url)
    page.wait_for("document.getElementById('state').innerText === 'serving'")
    assert page.text("endpoint") == filled.endpoint
    assert "RL step 17" in page.text("about")
    assert page.text("dropped") == "5,678 rows"
    expected = "stored removed since start; open 1 0 expired; finished 1 0; aborted 0 0; all 2 0"
    assert page.text("trajectories").split() == expected.replace(";", "").split()
    forward = page.text("rows").splitlines()[1]
    assert forward.split("\t")[:3] == ["forward", "1,234", "1,234"]
    assert "of 64.0 MiB" in page.text("space")
    assert "0 rows" in page.text("acks")
    page.wait_for(f"{POINTS}.length >= 2")
    with TraceClient(filled.endpoint) as trainer:
        trainer.begin_step(18)
    page.wait_for("document.getElementById('about').innerText.includes('RL step 18')")
    assert page.errors() == []


def test_charts_have_a_time_axis_that_ends_now(page: Browser, filled: Observed) -> None:
    page.open(filled.url)
    page.wait_for(f"{POINTS}.length >= 2")
    for chart in ("in", "out", "dropped"):
        assert page.text(f"{chart}-axis").split("\n") == ["2 min ago", "1 min ago", "now"]
    # A daemon of a few seconds fills the right end only: two minutes are 100 units wide.
    xs = page.evaluate(f"return Array.from({POINTS}).map(point => point.x)")
    assert xs == sorted(xs)
    assert 60 < xs[0] < xs[-1] <= 100


def test_ages_do_not_depend_on_the_browsers_clock(page: Browser, filled: Observed) -> None:
    page.open(filled.url)
    page.wait_for(f"{POINTS}.length >= 2")
    page.evaluate("Date.now = () => 4e12")
    page.wait_for(f"{POINTS}.length >= 4")
    assert page.text("state") == "serving"
    assert "ago" in page.text("engines")


def test_names_of_engines_are_texts_and_never_markup(page: Browser, filled: Observed) -> None:
    page.open(filled.url)
    page.wait_for("document.querySelectorAll('#engines tr').length === 2")
    assert HOSTILE in page.text("engines")
    assert page.evaluate("return document.images.length") == 0
    assert page.evaluate("return document.title").startswith("bridge tcp://")


def test_the_page_needs_nothing_from_anywhere_else(page: Browser, filled: Observed) -> None:
    page.open(filled.url)
    page.wait_for("document.getElementById('state').innerText === 'serving'")
    loaded = page.evaluate("return performance.getEntriesByType('resource').map(e => e.name)")
    assert set(loaded) == {f"{filled.url}status.json"}


def test_the_page_fits_a_phone_and_both_colour_schemes(page: Browser, filled: Observed) -> None:
    backgrounds = {}
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        for width in (360, 1200):
            page.resize(width, 900)
            page.open(filled.url)
            page.wait_for("document.getElementById('state').innerText === 'serving'")
            assert page.evaluate("return document.documentElement.scrollWidth") <= width
        colour = page.evaluate("return getComputedStyle(document.body).backgroundColor")
        backgrounds[scheme] = [int(value) for value in colour[4:-1].split(",")]
    assert min(backgrounds["light"]) > 200
    assert max(backgrounds["dark"]) < 60


def test_a_daemon_that_is_gone_is_told_and_its_last_numbers_stay(
    page: Browser, filled: Observed
) -> None:
    page.open(filled.url)
    page.wait_for("document.getElementById('state').innerText === 'serving'")
    filled.stop()
    page.wait_for("document.getElementById('state').innerText.startsWith('no answer')")
    assert page.text("dropped") == "5,678 rows"
