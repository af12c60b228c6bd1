"""What only a browser can tell: every chart is drawn, the page reacts, and no stored text runs."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from offdrift.train.page import write_report
from tests.show.browser import chromium, open_page
from tests.show.hostile import PAYLOADS, write_hostile_run
from tests.show.synthetic import write_run

POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')

PROBE = """
const state = document.documentElement.dataset;
const key = k => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: k, bubbles: true}));
const wait = () => new Promise(done => setTimeout(done, 300));
(async () => {
  while (!state.drawn) await wait();
  const tip = document.getElementById("tip");
  document.querySelector(".tokens").focus();
  key("ArrowRight"); key("ArrowRight"); key("ArrowRight"); key("ArrowLeft");
  state.token = tip.textContent;
  key("Escape"); state.closed = tip.hidden;
  document.querySelector("[data-tip]").focus(); state.hint = tip.textContent;
  const lines = () => document.querySelectorAll("#chart-kl_max g.trace.scatter").length;
  state.linesBefore = lines();
  const button = document.querySelector(".legend button");
  button.click(); await wait();
  state.linesAfter = lines(); state.pressed = button.getAttribute("aria-pressed");
  button.click(); await wait();
  state.linesAgain = lines();
  state.wide = document.documentElement.scrollWidth > innerWidth;
})();
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chromium()  # skips before any work is done
    return tmp_path_factory.mktemp("browser")


def traces(document: str) -> dict[str, int]:
    """Drawn scatter traces of each chart."""
    charts = re.split(r'id="chart-(\w+)"', document.split('<section aria-labelledby="samples')[0])[1:]
    return {name: body.count('class="trace scatter') for name, body in zip(charts[::2], charts[1::2])}


def altered(page: Path, name: str, *, keep_policy: bool, insert: str) -> Path:
    """A copy of the page with markup inserted before its scripts, as if escaping had failed."""
    document = page.read_text("utf-8")
    if not keep_policy:
        document, removed = POLICY.subn("", document)
        assert removed == 1
    head, tail = document.split("</main>")
    copy = page.with_name(name)
    copy.write_text(f"{head}</main>{insert}{tail}", encoding="utf-8")
    return copy


def test_every_chart_of_a_run_is_drawn_and_the_console_stays_silent(folder: Path) -> None:
    page = write_report(write_run(folder / "good"))
    document, console = open_page(page, folder / "profile-good")
    assert 'data-drawn="10"' in document
    assert traces(document) == {
        "reward": 12, "acceptance": 4, "kl_mean": 4, "kl_max": 4, "bound": 4, "gain_low": 4,
        "ppl_gap": 4, "ess": 4, "length": 4, "version_lag": 4,
    }  # fmt: skip
    assert console == []


def test_the_page_answers_keys_and_clicks(folder: Path) -> None:
    page = write_report(write_run(folder / "keys", updates=8))
    probed = altered(page, "probed.html", keep_policy=False, insert=f"<script>{PROBE}</script>")
    document, _ = open_page(probed, folder / "profile-keys")
    (root,) = re.findall(r"<html[^>]*>", document)
    state = {k: unescape(v) for k, v in re.findall(r'data-([\w-]+)="([^"]*)"', root)}
    assert re.fullmatch(
        r"“ add”  token 2\nKL \S+ nat\nTV \S+\nlog-prob \(rollout\) −\S+ nat\nweight \S+", state["token"]
    )
    assert state["closed"] == "true"
    assert state["hint"].startswith("Mean reward on held-out prompts")
    assert (state["lines-before"], state["lines-after"], state["lines-again"]) == ("4", "3", "4")
    assert state["pressed"] == "false"
    assert state["wide"] == "false", "nothing sticks out to the right"


def test_no_stored_text_runs(folder: Path) -> None:
    page = write_report(write_hostile_run(folder / "hostile"))
    document, console = open_page(page, folder / "profile-hostile")
    assert 'data-drawn="1"' in document
    assert traces(document) == {"reward": 2 * len(PAYLOADS)}
    assert "data-pwned" not in document
    assert console == []


@pytest.mark.parametrize("keep_policy", [True, False], ids=["policy", "no policy"])
def test_markup_that_slipped_through_runs_only_without_the_policy(folder: Path, keep_policy: bool) -> None:
    name = f"slipped-{keep_policy}"
    page = write_report(write_run(folder / name, updates=2))
    slipped = altered(page, "slipped.html", keep_policy=keep_policy, insert="".join(PAYLOADS[:2]))
    document, console = open_page(slipped, folder / f"profile-{name}")
    assert ("data-pwned" in document.split(">", 2)[1]) != keep_policy
    assert any("Content Security Policy" in line for line in console) == keep_policy
