"""The page of a watch: written again, with findings that keep their places, and in the end for the last time."""

import re
from pathlib import Path

import pytest

from offdrift.audit.watch_page import IDLE_S, RENEW_S, WRITE_S, WatchPage
from offdrift.show.html import PAGE_BYTES
from tests.alarms.receivers import FINDING
from tests.audit.test_follow import Clock
from tests.show.browser import browser
from tests.show.hostile import PAYLOADS, SHOWN
from tests.show.parsed import parse

ROW = {"step": 1, "mismatch/k3": 0.01, "mismatch/chi2_token": 0.02, "reward/mean": 0.5}


def page(tmp_path: Path, **options) -> WatchPage:
    return WatchPage(tmp_path / "watch.html", "runs/a", "offdrift", **options)


def words(made: WatchPage) -> str:
    return " ".join("".join(parse(made.file).text).split())


def test_it_is_written_when_something_is_new_and_not_more_often_than_needed(tmp_path):
    clock = Clock()
    made = page(tmp_path, clock=clock)
    made.tick()
    assert "Waiting for the run" in words(made)
    made.file.unlink()
    made.show("log", ROW, [])
    made.tick()
    assert not made.file.exists(), "too soon"
    clock.now = WRITE_S
    made.tick()
    assert "✓ OK Nothing" in words(made)
    made.file.unlink()
    clock.now += WRITE_S
    made.tick()
    assert not made.file.exists(), "nothing is new"
    made.show("log", {**ROW, "step": 2}, [FINDING])
    made.tick()
    assert FINDING["symptom"] in words(made), "a finding does not wait"
    made.file.unlink()
    clock.now += IDLE_S
    made.tick()
    assert made.file.exists(), "a watch that waits is not one that is gone"


def test_it_renews_itself_until_the_watch_ends(tmp_path):
    made = page(tmp_path)
    made.show("log", ROW, [FINDING])
    made.tick()
    assert f'data-renew="{RENEW_S}"' in made.file.read_text()
    assert '<noscript><meta http-equiv="refresh" content="10"></noscript>' in made.file.read_text()
    made.close()
    assert "data-renew=" not in re.sub(r"(?s)<script.*", "", made.file.read_text())
    assert 'http-equiv="refresh"' not in made.file.read_text()
    assert "was watched" in words(made)


def test_findings_keep_their_places_and_the_most_severe_stands_first(tmp_path):
    made = page(tmp_path, address="https://host/w.html")
    rows = [{**FINDING, "rule": "r", "symptom": f"Symptom {i}.", "severity": s} for i, s in enumerate(("watch", "act"))]
    worst = {**FINDING, "rule": "s", "symptom": "Symptom 2.", "severity": "stop"}
    made.show("a", ROW, rows[:1])
    first = made.link("a", rows[0])
    made.show("b", ROW, rows[1:])
    made.show("a", ROW, [worst])
    made.tick()
    assert first == made.link("a", rows[0]) == "https://host/w.html#finding-a-r"
    assert made.link("b", rows[1]) == "https://host/w.html#finding-b-r"
    ids = [
        attributes["id"] for _, attributes in parse(made.file).tags if attributes.get("id", "").startswith("finding-")
    ]
    assert ids == ["finding-a-s", "finding-b-r", "finding-a-r"]
    assert "stale rollout policy · b" in words(made), "whose finding it is"


def test_a_long_run_stays_a_small_page(tmp_path):
    made = page(tmp_path)
    for step in range(30_000):
        spike = 9.0 if step == 7_777 else 0.01
        made.show("log", {"step": step, "mismatch/k3": spike, "reward/mean": step / 30_000}, [])
    made.tick()
    assert made.file.stat().st_size < PAGE_BYTES
    assert all(len(values) <= 2400 for _, values in made._series.values())
    steps, values = made._series["KL", "log"]
    assert (max(values), steps[values.index(9.0)]) == (9.0, 7_777), "a spike stays"


def test_a_page_that_cannot_be_written_is_said_and_ends_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    made = WatchPage(tmp_path / "file" / "watch.html", "r", "offdrift")
    made.tick()
    assert made.problem.startswith("--page: cannot write")
    made.show("log", ROW, [])
    made.close()


def test_hostile_texts_are_shown_as_text(tmp_path):
    text = "".join(PAYLOADS)
    bad = {**dict.fromkeys(FINDING, text), "severity": "act", "step": 1, "steps": 1, "evidence": [{"metric": text, "source": text}], "snippets": {text: text}}  # fmt: skip
    plain, hostile = page(tmp_path), WatchPage(tmp_path / "bad.html", text, text)
    for made, finding, sources in (
        (plain, {**FINDING, "snippets": {"verl": "x: y"}}, "ab"),
        (hostile, bad, (text, f"b{text}")),
    ):
        for source in sources:
            made.show(source, {**ROW, text: 1}, [finding])
        made.tick()
    good, read = parse(plain.file), parse(hostile.file)
    assert {tag for tag, _ in read.tags} <= {tag for tag, _ in good.tags}
    assert not any(name.startswith("on") for _, attributes in read.tags for name in attributes)
    assert "".join(read.text).count("".join(SHOWN)) > 10


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_it_and_nothing_sticks_out(tmp_path, chrome, width):
    made = page(tmp_path)
    for source in ("none", "token_tis"):
        for step in range(5):
            made.show(source, {**ROW, "step": step}, [FINDING] if step == 3 else [])
    made.tick()
    chrome.open(made.file, width=width)
    assert chrome.console() == []
    content, window = chrome.run("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert content <= window
    assert chrome.run("document.getElementById('age').textContent") == "renews itself every 10 s"
    assert chrome.run("document.querySelectorAll('.plot .trace, .plot .points').length") >= 6


def test_an_open_page_loads_the_next_writing_and_keeps_what_was_opened(tmp_path, chrome, monkeypatch):
    monkeypatch.setattr("offdrift.audit.watch_page.RENEW_S", 1.5)
    made = page(tmp_path)
    made.show("log", ROW, [FINDING, {**FINDING, "rule": "second", "symptom": "Another one."}])
    made.tick()
    chrome.open(made.file)
    chrome.run("document.querySelector('details').open = true; window.before = true")
    made.show("log", {**ROW, "step": 2}, [{**FINDING, "rule": "third", "severity": "stop", "symptom": "A third one."}])
    made.tick()
    chrome.wait(
        "window.before === undefined && document.documentElement.dataset.drawn !== undefined"
        " && document.querySelectorAll('.finding').length === 3"
    )
    assert chrome.run("[...document.querySelectorAll('details.finding')].map(d => [d.id, d.open])") == [
        ["finding-log-stale_engine", False],
        ["finding-log-second", True],
    ]
    made.close()
    chrome.wait("document.querySelector('.brand').textContent.includes('was watched')")


def test_a_page_that_nobody_writes_any_more_says_so(tmp_path, chrome):
    made = page(tmp_path)
    made.show("log", ROW, [])
    made.tick()
    text = made.file.read_text()
    made.file.write_text(re.sub(r'data-written="(\d+)', lambda m: f'data-written="{int(m[1]) - 600}', text))
    chrome.open(made.file)
    assert "not written for 10 minutes" in chrome.run("document.getElementById('age').textContent")
