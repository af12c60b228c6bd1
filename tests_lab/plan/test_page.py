"""The page of a plan: every row is on it, dots stand where the numbers say, and texts stay texts."""

import json

import pytest
from tests.show.parsed import Parsed

from offdrift_lab.plan.compare import plan, splits_of
from offdrift_lab.plan.drift import DriftFit, Fit
from offdrift_lab.plan.page import bars, render, tradeoffs, write_plan_page
from offdrift_lab.plan.view import COLUMNS, verdict
from offdrift_lab.schedules import SCHEDULES
from tests_lab.plan.test_compare import SMALL, STEEP


@pytest.fixture(scope="module")
def documents():
    """A plan with a sweep, one with drift, and one without an answer."""
    return {
        "lag": plan(SMALL, splits=splits_of(SMALL), bounds=(1, 4)),
        "drift": plan(SMALL, bounds=(1, 8), drift=STEEP),
        "none": plan(SMALL, names=("unbounded", "laminar")),
    }


def parsed(document) -> Parsed:
    page = Parsed()
    page.feed(render(document))
    page.close()
    return page


KINDS = pytest.mark.parametrize("kind", ["lag", "drift", "none"])


@KINDS
def test_it_says_what_the_document_says(documents, kind):
    document = documents[kind]
    page = parsed(document)
    text = " ".join("".join(page.text).split())
    assert verdict(document) in text
    cells = [a["data-sort"] for tag, a in page.tags if tag == "th" and "data-sort" in a]
    fastest = sorted(document["schedules"], key=lambda row: -row["groups_per_s"])
    assert cells == [row["schedule"] for row in fastest]
    numbers = [a["data-sort"] for tag, a in page.tags if tag == "td" and "data-sort" in a]
    shown = [key for key, *_ in COLUMNS if key != "kl" or kind == "drift"]
    assert len(numbers) == len(fastest) * len(shown)
    first = [fastest[0]["worker_sync" if key == "sync" else key] for key in shown]
    assert numbers[: len(shown)] == ["" if value is None else str(value) for value in first]
    assert (("div", {"class": "tiles"}) in page.tags) == (kind != "none")


@KINDS
def test_dots_stand_where_the_numbers_say(documents, kind):
    document = documents[kind]
    rows = [*document["schedules"], *document["sweep"]]
    charts = tradeoffs(document)
    assert [c.id for c in charts] == (["kl"] if kind == "drift" else []) + ["lag_mean", "lag_p95"]
    for chart in charts:
        dots = [(x, y) for s in chart.series if s.kind == "dots" for x, y in zip(s.x, s.y)]
        # What is recommended stands once, as a star.
        assert sorted(dots) == sorted((row[chart.id], row["speedup_colocated"]) for row in rows)
        stars = [s for s in chart.series if s.symbol == "star"]
        best = document["recommended"]
        assert [list(s.x) for s in stars] == ([] if best is None else [[best[chart.id]]])
        assert all(y <= chart.y_range[1] for _, y in dots)
        diamonds = sum(len(s.x) for s in chart.series if s.symbol == "diamond")
        assert diamonds == sum(row["max_lag"] is None for row in rows)


@pytest.mark.parametrize("kind", ["lag", "drift"])
def test_the_front_is_drawn_as_steps_through_its_rows(documents, kind):
    document = documents[kind]
    chart = tradeoffs(document)[0]
    front = next(s for s in chart.series if s.kind == "line")
    assert list(front.x) == sorted(front.x)
    assert list(front.y) == sorted(front.y)
    rows = [row for row in (*document["schedules"], *document["sweep"]) if row["on_front"]]
    corners = set(zip(front.x, front.y))
    assert {(row[chart.id], row["speedup_colocated"]) for row in rows} <= corners
    assert sum(s.kind == "line" for c in tradeoffs(document) for s in c.series) == 1  # on the axis that decides
    names = {name for s in chart.series for label in s.labels for name in label.split(", ") if name}
    assert names - {f"{r['schedule']} ≤{r['bound']}" for r in rows} <= set(SCHEDULES)
    assert {r["schedule"] for r in rows if not r["swept"]} <= names


def test_thresholds_stand_where_drift_reaches_them(documents):
    assert [label for _, label in tradeoffs(documents["drift"])[0].upright] == ["clean below", "large above"]
    mild = DriftFit(Fit("full/k3", 1e-5, 1e-5, 1.0, None, (0.0, 4.0)), None, "mild")
    assert tradeoffs(plan(SMALL, names=("sync",), drift=mild, bounds=()))[0].upright == []


def test_bars_fill_the_time(documents):
    for row in documents["lag"]["schedules"]:
        for side in ("worker", "trainer"):
            parts = bars(row, side)
            assert sum(width for _, _, width, _ in parts) == pytest.approx(100)
            ends = [at + width for _, at, width, _ in parts]
            assert [at for _, at, _, _ in parts][1:] == pytest.approx(ends[:-1])


def test_texts_of_others_are_texts(documents, tmp_path):
    bad = "</script><img src=x onerror=alert(1)>{{7*7}}\u202e"
    document = json.loads(json.dumps(documents["drift"]))
    document["phases"]["name"] = document["drift"]["source"] = bad
    page = parsed(document)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in parsed(documents["drift"]).tags}
    assert "".join(page.text).count("onerror=alert(1)>{{7*7}}\\u202e") >= 3  # title, heading, source
    path = write_plan_page(document, tmp_path / "folder" / "plan.html")
    assert path.read_text("utf-8") == render(document)
    assert [p.name for p in path.parent.iterdir()] == ["plan.html"]
