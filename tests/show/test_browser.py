"""Every page in a real browser: drawn, quick to the hand, and deaf to what was logged."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from offdrift.audit.compare import write_comparison
from offdrift.audit.page import write_audit_page
from offdrift.audit.result import ArmsAudit, Audit
from offdrift.check.page import write_check_page
from offdrift.show.charts import Chart, Series
from offdrift.show.figures import write_chart
from offdrift.show.numbers import kl_level
from offdrift_lab.plan.page import write_plan_page
from offdrift_lab.train.report.page import write_report
from tests.show.browser import Browser, browser, chromium
from tests.show.hostile import PAYLOADS, hostile, swept, write_hostile_run
from tests.show.synthetic import overlap, write_run
from tests.show.synthetic_audit import SNIPPETS, audit, check, little, planned
from tests.show.test_figure import PANEL, X

NAMES = ("baseline", "float16 in both engines")
ALL = "".join(PAYLOADS)
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
BAD = Chart(
    PAYLOADS[0],
    PAYLOADS[0],
    [Series(text, X, [1.0, 2.0, 3.0, i + 1.0]) for i, text in enumerate(PAYLOADS)],
    x_title=PAYLOADS[1],
    lines=[(1.0, PAYLOADS[0])],
)

STEPS, SPIKE = 10_000, 7_777
NOISE = [1e-3 * (1 + 0.3 * math.sin(0.7 * i) + (i * 7919 % 101) / 300) for i in range(STEPS)]
NOISE[SPIKE] = 5.0
LONG = Chart("KL", "nat", [Series("a", list(range(STEPS)), NOISE)], "kl", log=True, x_title="update")
SECOND = Chart(
    "Band", "", [Series("b", list(range(STEPS)), NOISE, [0.9 * v for v in NOISE], [1.1 * v for v in NOISE])], "band"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chromium()  # skips before any work is done
    return tmp_path_factory.mktemp("views")


@pytest.fixture(scope="module")
def chrome(folder: Path) -> Iterator[Browser]:
    with browser(folder / "profile") as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(folder: Path) -> dict[str, Path]:
    full = audit(steps=40)
    return {
        "report": write_report(write_run(folder / "report", updates=16)),
        "pipeline report": write_report(overlap(write_run(folder / "pipeline report", updates=16))),
        "hostile report": write_report(write_hostile_run(folder / "hostile report")),
        "figure": write_chart(folder / "figure.html", [PANEL, PANEL], title="Two panels"),
        "hostile figure": write_chart(folder / "bad.html", [BAD, PANEL], title=PAYLOADS[0], caption=PAYLOADS[1]),
        "audit": write_audit_page(full, folder / "audit"),
        "little": write_audit_page(little(), folder / "little"),
        "empty": write_audit_page({}, folder / "empty"),
        "check": write_check_page(check(), folder / "check"),
        "compare": write_comparison(full, audit(steps=20, seed=1), NAMES, folder / "compare.html"),
        "arms": ArmsAudit({"a": Audit(full), "b": Audit(audit(steps=20, seed=1))}).write_page(folder / "arms"),
        "hostile arms": ArmsAudit({ALL: Audit(hostile(full, ALL)), "b": Audit({})}).write_page(folder / "hostile arms"),
        "sweep": swept(folder / "sweep"),
        "long": write_chart(folder / "long.html", [LONG, SECOND], title="long"),
        "hostile sweep": swept(folder / "hostile sweep", ALL),
        "plan": write_plan_page(planned("plain"), folder / "plan.html"),
        "hostile plan": write_plan_page(planned(ALL), folder / "hostile plan.html"),
        "hostile audit": write_audit_page(hostile(full, ALL), folder / "hostile"),
        "hostile check": write_check_page(hostile(check(), ALL), folder / "hostile"),
        "hostile compare": write_comparison(hostile(full, ALL), hostile(little(), ALL), (ALL, f"b{ALL}"), folder / "hostile.html"),
    }  # fmt: skip


CHARTS = {"arms": 6, "hostile arms": 5, "long": 2, "sweep": 4, "hostile sweep": 4, "plan": 3, "hostile plan": 3, "report": 11, "pipeline report": 16, "figure": 2, "audit": 22, "little": 3, "empty": 0, "check": 1, "compare": 14, "hostile report": 1,
          "hostile figure": 2, "hostile audit": 22, "hostile check": 1, "hostile compare": 7}  # fmt: skip


@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_is_drawn_and_the_console_stays_silent(chrome: Browser, pages: dict[str, Path], name: str) -> None:  # fmt: skip
    chrome.open(pages[name])
    drawn = chrome.run("[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('.trace, .points').length)")  # fmt: skip
    assert len(drawn) == CHARTS[name]
    assert all(count > 0 for count in drawn), drawn
    assert chrome.console() == []
    assert chrome.run("document.documentElement.dataset.pwned ?? window.__pwned ?? ''") == ""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", CHARTS)
def test_nothing_sticks_out_of_a_narrow_screen(chrome: Browser, pages: dict[str, Path], name: str, dark: bool) -> None:  # fmt: skip
    chrome.open(pages[name], width=390, height=844, dark=dark)
    sizes = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    for details in (False, True):
        chrome.run(f"document.querySelectorAll('details').forEach(d => {{ d.open = d.open || {str(details).lower()}; }})")  # fmt: skip
        content, window = chrome.run(sizes)
        assert content <= window, f"unfolded: {details}"
    back = chrome.run("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(16, 18, 22)") == dark
    assert chrome.console() == []


def test_the_first_screen_holds_the_verdict_the_numbers_and_the_fix(chrome: Browser, pages: dict[str, Path]) -> None:  # fmt: skip
    chrome.open(pages["audit"], width=1280, height=800)
    bottoms = chrome.run("['.verdict', '.tiles', '.fix', '.copy', '[role=tabpanel]'].map(s => document.querySelector(s).getBoundingClientRect().bottom)")  # fmt: skip
    assert bottoms == sorted(bottoms, key=lambda b: b > 800), "all within 800 pixels"
    assert max(bottoms) < 800


@pytest.mark.parametrize("width", [1280, 390])
def test_a_command_is_whole_in_its_box_and_no_link_stands_alone(chrome: Browser, folder: Path, width: int) -> None:
    command = (
        "offdrift check --rollout openai:http://HOST:PORT/v1 --checkpoint STEP_FOLDER --earlier EARLIER_STEP_FOLDER"
    )
    content = audit(steps=12)
    content["findings"][-1]["snippets"] = {"shell": command}  # the most severe, which stands first
    chrome.open(write_audit_page(content, folder / f"command {width}"), width=width, height=800)
    box = "[...document.querySelectorAll('.snippets pre:not([hidden])')].map(p => [p.scrollWidth, p.clientWidth])"
    assert all(needed <= there for needed, there in chrome.run(box))
    assert chrome.run("document.querySelector('.snippets pre').textContent.trim()") == command
    top = "[...document.querySelectorAll('figcaption > .anchor')].map(a => a.getBoundingClientRect().top - a.parentElement.getBoundingClientRect().top)"  # fmt: skip
    offsets = chrome.run(top)
    assert len(offsets) > 10
    assert max(offsets) < 12, "in the first line of its caption"


def test_an_arm_is_hidden_in_both_groups_of_charts_by_either_button(chrome: Browser, pages: dict[str, Path]) -> None:
    chrome.open(pages["pipeline report"])
    first, second = chrome.run("[...document.querySelectorAll('.legend')].map(l => l.getBoundingClientRect().top > 0)")
    assert first == second
    chrome.click("section:nth-of-type(3) .legend button:nth-child(2)")
    pressed = (
        "[...document.querySelectorAll('.legend button[data-group=\"1\"]')].map(b => b.getAttribute('aria-pressed'))"
    )
    assert chrome.run(pressed) == ["false", "false"]
    shown = "['reward', 'drift_by_lag'].map(id => document.getElementById(`chart-${id}`).data.map(t => t.visible !== false && t.name === 'trm_max').includes(true))"  # fmt: skip
    assert chrome.run(shown) == [False, False]
    chrome.click(".legend button:nth-child(2)")
    assert chrome.run(pressed) == ["true", "true"]
    assert chrome.run(shown) == [True, True]
    assert chrome.console() == []


COLUMN = "[...document.querySelectorAll('#methods-table tbody tr')].map(r => r.children[{}].dataset.sort)"


def test_the_table_of_methods_is_sorted_by_click_and_by_key(chrome: Browser, pages: dict[str, Path]) -> None:  # fmt: skip
    chrome.open(pages["audit"])
    heads = chrome.run("[...document.querySelectorAll('#methods-table .sort .long')].map(e => e.textContent)")  # fmt: skip
    assert heads[:2] == ["Tokens kept", "Sequences kept"]
    button = "#methods-table th:nth-child(2) .sort"
    before = chrome.run(COLUMN.format(1))
    assert len(before) > 90
    blank = before.count("")  # of methods that reject nothing: they stand at the end in either order
    falling = sorted((float(v) for v in before if v), reverse=True)
    assert blank > 0
    assert len(falling) > 40
    chrome.click(button)
    sorted_column = chrome.run(COLUMN.format(1))
    assert [float(v) for v in sorted_column[: len(falling)]] == falling
    assert sorted_column[len(falling) :] == [""] * blank
    assert chrome.run(f"document.querySelector('{button}').parentElement.ariaSort") == "descending"
    chrome.press("Enter")
    sorted_column = chrome.run(COLUMN.format(1))
    assert [float(v) for v in sorted_column[: len(falling)]] == falling[::-1]
    assert sorted_column[len(falling) :] == [""] * blank
    assert chrome.run(f"document.querySelector('{button}').parentElement.ariaSort") == "ascending"
    chrome.click("#methods-table th:nth-child(1) .sort")
    names = chrome.run(COLUMN.format(0))
    assert names == sorted(names)
    assert chrome.run("document.querySelectorAll('#methods-table [aria-sort=ascending]').length") == 1  # fmt: skip


def test_what_has_no_number_stands_at_the_end_in_either_order(chrome: Browser, folder: Path) -> None:  # fmt: skip
    values = [0.2, None, 10.0, 9.0]
    methods = [{"name": f"m{i}", "weight_max": v} for i, v in enumerate(values)]
    chrome.open(write_audit_page({"methods": methods}, folder / "gaps"))
    column = 6
    assert chrome.run(f"document.querySelectorAll('#methods-table thead th')[{column}].innerText").startswith("Weight, max")  # fmt: skip
    orders = []
    for _ in range(2):
        chrome.click(f"#methods-table th:nth-child({column + 1}) .sort")
        orders.append(chrome.run(COLUMN.format(column)))
    assert orders == [["10.0", "9.0", "0.2", ""], ["0.2", "9.0", "10.0", ""]]


def test_the_filter_leaves_what_matches(chrome: Browser, pages: dict[str, Path]) -> None:
    chrome.open(pages["audit"])
    chrome.run("(i => { i.value = 'Decoupled RS'; i.dispatchEvent(new Event('input')); })(document.getElementById('filter'))")  # fmt: skip
    left = chrome.run("[...document.querySelectorAll('#methods-table tbody tr:not([hidden]) .name')].map(e => e.textContent)")  # fmt: skip
    assert 5 < len(left) < 20
    assert "decoupled_k3_rs" in left
    assert "ppo_clip" not in left
    assert chrome.run("document.getElementById('filter-count').textContent").startswith(f"{len(left)} of ")  # fmt: skip


def test_snippets_are_chosen_by_arrow_keys_and_copied(chrome: Browser, pages: dict[str, Path]) -> None:  # fmt: skip
    chrome.open(pages["audit"])
    for name in ("clipboardReadWrite", "clipboardSanitizedWrite"):
        chrome.send("Browser.grantPermissions", permissions=[name])
    shown = "[...document.querySelectorAll('#verdict [role=tabpanel]:not([hidden])')].map(p => p.textContent)"  # fmt: skip
    (first,) = chrome.run(shown)
    assert first == SNIPPETS["verl"].strip()
    chrome.click("#verdict [role=tab]")
    chrome.press("ArrowRight")
    (second,) = chrome.run(shown)
    assert second == SNIPPETS["trl"].strip()
    assert chrome.run("document.activeElement.textContent") == "trl"
    assert chrome.run("document.activeElement.ariaSelected") == "true"
    chrome.press("ArrowLeft")
    chrome.press("ArrowLeft")
    assert chrome.run("document.activeElement.textContent") == "offdrift", "round the corner"
    chrome.click("#verdict .copy")
    chrome.wait("document.querySelector('#verdict .copy').textContent !== 'Copy'")
    assert chrome.run("document.querySelector('#verdict .copy').textContent") == "Copied"


def test_tokens_are_read_by_key_and_recolored(chrome: Browser, pages: dict[str, Path]) -> None:
    chrome.open(pages["audit"])
    chrome.run("document.querySelector('.tokens').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        chrome.press(key)
    tip = chrome.run("document.getElementById('tip').textContent")
    assert re.fullmatch(r"“ We”  token 801\nlog-ratio \S+ nat, ratio \S+ \(mismatch\)\nrollout log-prob \S+ nat, probability \S+\nKL \S+ nat", tip)  # fmt: skip
    chrome.press("Escape")
    assert chrome.run("document.getElementById('tip').hidden")
    classes = "[...document.querySelector('.tokens').children].map(t => t.className)"
    numbers = "JSON.parse(document.getElementById('report-data').textContent).heat[0].values"
    before, values = chrome.run(classes), chrome.run(numbers)
    chrome.click("input[value=kl]")
    kls = chrome.run(classes)
    assert kls == [f"k{kl_level(kl)}" for *_, kl in values]
    assert chrome.run("[...document.querySelectorAll('.scale')].map(s => s.hidden)") == [True, False]  # fmt: skip
    chrome.click("input[value=ratio]")
    assert chrome.run(classes) == before
    assert len(set(before)) > 5


def test_the_limits_of_the_chosen_method_are_drawn(chrome: Browser, pages: dict[str, Path]) -> None:
    chrome.open(pages["audit"])
    lines = "document.querySelectorAll('#chart-ratios .shapelayer path').length"
    said = "document.getElementById('limits-said').textContent"
    choose = "(s => {{ s.value = {!r}; s.dispatchEvent(new Event('change')); }})(document.getElementById('limits'))"  # fmt: skip
    assert chrome.run(lines) == 4
    assert "masked below 0.5" in chrome.run(said)
    assert "masked above 4" in chrome.run(said), "the suggestion's own setting, not the table's 5"
    chrome.run(choose.format("geo_mask"))
    chrome.wait(f"{said}.includes('mean rejected')")
    chrome.run(choose.format(""))
    chrome.wait(f"{lines} === 0")
    assert chrome.run(said) == ""


def test_a_pair_is_hidden_in_all_charts_and_any_metric_is_drawn(chrome: Browser, pages: dict[str, Path]) -> None:  # fmt: skip
    chrome.open(pages["audit"])
    lines = "['kl', 'ratios', 'by-lag'].map(id => document.querySelectorAll(`#chart-${id} .trace.scatter`).length)"  # fmt: skip
    assert chrome.run(lines) == [3, 3, 3]
    chrome.click(".legend [data-group=full]")
    chrome.wait(f"{lines}.join() === '2,2,2'")
    assert chrome.run("document.querySelector('.legend [data-group=full]').ariaPressed") == "false"
    chrome.run("(s => { s.value = 'reward/mean'; s.dispatchEvent(new Event('change')); })(document.getElementById('explore'))")  # fmt: skip
    assert "mean reward" in chrome.run("document.getElementById('explore-meaning').dataset.tip")
    assert chrome.run("document.getElementById('chart-explore').data[0].name") == "reward/mean"


def test_the_tab_key_goes_down_the_page_in_the_order_of_reading(chrome: Browser, pages: dict[str, Path]) -> None:  # fmt: skip
    chrome.open(pages["audit"])
    seen = []
    for _ in range(16):
        chrome.press("Tab")
        seen.append(chrome.run("(e => e.textContent.trim().slice(0, 24) || e.id || e.className)(document.activeElement)"))  # fmt: skip
    assert seen[:6] == ["Skip to the verdict", "KL per token", "Effective sample size", "Correlation of probabili", "#", "verl"]  # fmt: skip
    assert seen[6] == "Copy"
    assert seen[7].startswith("algorithm:"), "a long snippet scrolls by key"
    assert all(seen)
    outline = chrome.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus can be seen"


def test_charts_follow_the_theme_while_the_page_is_open(chrome: Browser, pages: dict[str, Path]) -> None:  # fmt: skip
    chrome.open(pages["audit"])
    color = "document.getElementById('chart-kl').data[0].line.color"
    light = chrome.run(color)
    chrome.media(dark=True)
    chrome.wait(f"{color} !== '{light}'")
    assert (light, chrome.run(color)) == ("#0068b3", "#5bb3f0")


def test_it_prints_unfolded_and_without_buttons(chrome: Browser, pages: dict[str, Path]) -> None:
    chrome.open(pages["audit"])
    chrome.media(media="print")
    folded = "document.querySelectorAll('details:not([open])').length"
    before = chrome.run(folded)
    assert before > 5
    chrome.run("dispatchEvent(new Event('beforeprint'))")
    assert chrome.run(folded) == 0
    assert chrome.run("getComputedStyle(document.querySelector('.copy')).display") == "none"
    assert chrome.run("getComputedStyle(document.querySelector('.tall')).maxHeight") == "none"
    chrome.run("dispatchEvent(new Event('afterprint'))")
    assert chrome.run(folded) == before
    pdf = chrome.send("Page.printToPDF", printBackground=True)["data"]
    assert len(pdf) > 100_000


def test_every_arm_is_drawn_and_a_button_hides_it_in_all_charts(chrome: Browser, pages: dict[str, Path]) -> None:
    lines = "[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('g.trace.scatter').length)"
    button = ".legend button"
    chrome.open(pages["report"])
    assert chrome.run(lines) == [4, 8, *9 * [4]]
    chrome.click(button)
    chrome.wait(f"{lines}.join() === '3,6,' + Array(9).fill(3).join()")
    assert chrome.run(f"document.querySelector('{button}').ariaPressed") == "false"
    chrome.click(button)
    chrome.wait(f"{lines}.join() === '4,8,' + Array(9).fill(4).join()")
    # Per panel three lines and a band; "flat" is a line and a band.
    chrome.open(pages["figure"])
    assert chrome.run(lines) == [4, 4]
    chrome.click(".legend button:nth-child(2)")
    chrome.wait(f"{lines}.join() === '2,2'")
    chrome.open(pages["hostile report"])
    assert chrome.run(lines) == [2 * len(PAYLOADS)]


def test_a_token_of_a_report_is_read_by_key(chrome: Browser, pages: dict[str, Path]) -> None:
    chrome.open(pages["report"])
    chrome.run("document.querySelector('.tokens').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        chrome.press(key)
    tip = "document.getElementById('tip')"
    said = chrome.run(f"{tip}.textContent")
    assert re.fullmatch(r"“ add”  token 2\nKL \S+ nat\nTV \S+\nlog-prob \(rollout\) −\S+ nat\nweight \S+", said)
    chrome.press("Escape")
    assert chrome.run(f"{tip}.hidden")
    chrome.run("document.querySelector('[data-tip]').focus()")
    assert chrome.run(f"{tip}.textContent").startswith("Mean reward on held-out prompts")


@pytest.mark.parametrize("page", ["little", "report"])
@pytest.mark.parametrize("keep_policy", [True, False], ids=["policy", "no policy"])
def test_markup_that_slipped_through_runs_only_without_the_policy(
    chrome: Browser, pages: dict[str, Path], keep_policy: bool, page: str
) -> None:
    document = pages[page].read_text("utf-8")
    if not keep_policy:
        document, removed = POLICY.subn("", document)
        assert removed == 1
    slipped = pages[page].with_name("slipped.html")
    slipped.write_text(document.replace("</main>", f"</main>{''.join(PAYLOADS[:2])}"), "utf-8")
    chrome.open(slipped)
    chrome.run("new Promise(done => setTimeout(done, 200))")
    assert (chrome.run("window.__pwned ?? 0") == 1) != keep_policy
    assert any("Content Security Policy" in line for line in chrome.console()) == keep_policy


def test_rounding_far_below_does_not_press_a_curve_into_a_line(chrome: Browser, folder: Path) -> None:
    levels = [3e-14, 0.002, 0.01, 0.05]
    steps = [{"step": i, "full/k3": x, "full/k1": x} for i, x in enumerate(levels)]
    chrome.open(write_audit_page({"steps": steps}, folder / "decades"))
    low, high = chrome.run("document.getElementById('chart-kl').layout.yaxis.range")
    assert high - low < 10
    assert low < -7
    assert high > math.log10(0.05)


# -- looking closer ------------------------------------------------------------------------------------

DRAWN = "document.getElementById('chart-{}').data.at(-1)"
NOTE = "document.getElementById('detail-kl').textContent"


def test_a_long_line_keeps_its_spike_and_a_drag_loads_every_point(chrome: Browser, pages: dict[str, Path]) -> None:
    chrome.open(pages["long"])
    trace = DRAWN.format("kl")
    count, top, at = chrome.run(f"[{trace}.x.length, Math.max(...{trace}.y), {trace}.x[{trace}.y.indexOf(5)]]")
    assert 300 <= count <= 1200
    assert (top, at) == (5, SPIKE)
    assert chrome.run(NOTE) == "extremes of 10,000 points a line"
    box = chrome.run("(() => { const r = document.querySelector('#chart-kl .nsewdrag').getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; })()")  # fmt: skip
    middle = box[1] + box[3] / 2
    share = SPIKE / STEPS
    ends = [(box[0] + box[2] * (share + d), middle) for d in (-0.01, 0.01)]
    chrome.drag(*ends)
    chrome.wait(f"{NOTE}.startsWith('all ')")
    x, y = chrome.run(f"[{trace}.x, {trace}.y]")
    assert SPIKE in x
    assert x == list(range(x[0], x[0] + len(x))), "every update of the part"
    assert 100 < len(x) < 400
    assert y == pytest.approx(NOISE[x[0] : x[-1] + 1], rel=2**-15)
    assert chrome.run("document.getElementById('chart-band').data.at(-1).x.length") > 300, "the other stays as it is"
    assert chrome.console() == []


def test_a_chart_is_looked_at_closer_by_key(chrome: Browser, pages: dict[str, Path]) -> None:
    chrome.open(pages["long"])
    chrome.run("document.getElementById('chart-kl').focus()")
    span = "document.getElementById('chart-kl').layout.xaxis.range"
    for _ in range(6):
        chrome.press("+")
    low, high = chrome.run(span)
    assert high - low == pytest.approx((STEPS - 1) / 64)
    assert (low + high) / 2 == pytest.approx((STEPS - 1) / 2)
    assert chrome.run(NOTE).startswith("all ")
    xs = chrome.run(f"{DRAWN.format('kl')}.x")
    assert xs == list(range(math.floor(low), math.ceil(high) + 1)), "and one beyond either end"
    chrome.press("ArrowRight")
    assert chrome.run(span)[0] == pytest.approx(low + 0.25 * (high - low))
    chrome.press("-")
    assert chrome.run(f"{span}[1] - {span}[0]") == pytest.approx(2 * (high - low))
    chrome.press("0")
    assert chrome.run(NOTE) == "extremes of 10,000 points a line"
    assert chrome.run("document.getElementById('chart-kl').layout.xaxis.autorange")
    # A band is of the same points as its line.
    chrome.run("document.getElementById('chart-band').focus()")
    for _ in range(7):
        chrome.press("+")
    band, line = chrome.run("document.getElementById('chart-band').data.map(t => t.x.filter(v => v !== null).length)")
    assert band == 2 * line
    assert chrome.console() == []


def test_the_theme_and_a_hidden_line_leave_the_part_that_is_looked_at(chrome: Browser, pages: dict[str, Path]) -> None:
    chrome.open(pages["long"])
    chrome.run("document.getElementById('chart-kl').focus()")
    for _ in range(3):
        chrome.press("+")
    span = "document.getElementById('chart-kl').layout.xaxis.range.join()"
    before = chrome.run(span)
    chrome.media(dark=True)
    chrome.click(".legend button")
    assert chrome.run(span) == before


# -- places --------------------------------------------------------------------------------------------


def test_a_link_to_a_folded_finding_unfolds_it(chrome: Browser, pages: dict[str, Path]) -> None:
    chrome.open(pages["audit"], at="#finding-pearson_low")
    place = "document.getElementById('finding-pearson_low')"
    assert chrome.run(f"{place}.open && {place}.matches(':target')")
    chrome.wait(f"Math.abs({place}.getBoundingClientRect().top) < innerHeight")
    row = "document.getElementById('number-reward-mean')"
    assert not chrome.run(f"{row}.closest('details').open")
    chrome.run("location.hash = '#number-reward-mean'")
    chrome.wait(f"{row}.closest('details').open")
    assert chrome.console() == []


def test_the_links_of_a_table_are_one_stop_and_arrows_go_on(chrome: Browser, pages: dict[str, Path]) -> None:
    chrome.open(pages["audit"])
    links = "[...document.querySelectorAll('#methods-table .anchor')]"
    assert chrome.run(f"{links}.filter(a => a.tabIndex === 0).length") == 1
    chrome.run(f"{links}[0].focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowUp"):
        chrome.press(key)
    assert chrome.run(f"{links}.indexOf(document.activeElement)") == 1
    assert chrome.run("getComputedStyle(document.activeElement).opacity") == "1"
    chrome.press("End")
    assert chrome.run(f"{links}.at(-1) === document.activeElement")
    chrome.press("Enter")
    chrome.wait("location.hash.startsWith('#method-')")


# -- tables, themes, paper -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("report", 9), ("sweep", 5), ("plan", 10), ("check", 7)])
def test_the_main_table_of_every_page_is_sorted_by_key(chrome: Browser, pages: dict[str, Path], name: str, count: int) -> None:  # fmt: skip
    chrome.open(pages[name])
    heads = chrome.run("document.querySelector('table.sortable').querySelectorAll('.sort').length")
    assert heads > count
    column = "[...document.querySelector('table.sortable').tBodies[0].rows].map(r => r.children[{}].dataset.sort)"
    for at in range(heads):
        before = chrome.run(column.format(at))
        chrome.run(f"document.querySelector('table.sortable').querySelectorAll('.sort')[{at}].focus()")
        chrome.press("Enter")
        chrome.press("Enter")
        after = chrome.run(column.format(at))
        assert sorted(after) == sorted(before)
        numbers = [float(v) for v in after if re.fullmatch(r"-?\d.*", v)]
        assert numbers == sorted(numbers), (at, "a second Enter turns the order round")
    assert chrome.console() == []


@pytest.mark.parametrize("name", ["report", "audit", "check", "plan", "sweep"])
def test_no_page_opens_in_the_color_of_another_and_paper_is_light(chrome: Browser, pages: dict[str, Path], name: str) -> None:  # fmt: skip
    look = "['body', '.brand', 'h1', 'h2:not(.unseen)', '.verdict', 'figure', 'figcaption b'].map(s => { const c = getComputedStyle(document.querySelector(s)); return [c.color, c.backgroundColor, c.fontSize, c.fontFamily, c.borderRadius].join(); })"  # fmt: skip
    looks = []
    for page in (name, "audit"):
        chrome.open(pages[page], dark=True)
        looks.append(chrome.run(look))
    assert looks[0] == looks[1]
    chrome.open(pages[name], dark=True)
    dark = chrome.run("getComputedStyle(document.querySelector('.verdict')).backgroundColor")
    chrome.media(dark=True, media="print")
    chrome.run("dispatchEvent(new Event('beforeprint'))")
    assert dark == "rgb(24, 27, 32)"
    assert chrome.run("getComputedStyle(document.querySelector('.verdict')).backgroundColor") == "rgb(255, 255, 255)"
    lines = "[...document.querySelectorAll('.plot')].flatMap(p => p.layout.font.color)"
    assert set(chrome.run(lines)) == {"#585d65"}, "charts, too"
    wide = "[...document.querySelectorAll('.plot')].filter(p => [...p.querySelectorAll('.main-svg')].some(d => d.getBoundingClientRect().right > p.getBoundingClientRect().right + 1)).length"  # fmt: skip
    chrome.resize(703, 1000)
    assert chrome.run(wide) == 0, "no drawing is wider than its frame on a sheet of A4"
    chrome.media(dark=True)
    chrome.run("dispatchEvent(new Event('afterprint'))")
    assert set(chrome.run(lines)) == {"#a6adb7"}
