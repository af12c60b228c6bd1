"""`offdrift watch` with its alarms, as processes of their own, with receivers on loopback."""

import json
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from offdrift.cli.watch import NO_FORECAST
from offdrift.records.recorder import write_log
from tests.alarms.receivers import HOSTILE, answer, receiver
from tests.audit.logs import drawn
from tests.forked import Forked, forked

EARLIER = "alarms were sent by an earlier watch"
ONCE = "once per finding, also if the watch of the same run is started again"
QUICK = ("--every", "0.05", "--until-idle", "0.3")


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Start `offdrift watch` in the test's folder, which holds a log that drifts."""
    monkeypatch.delenv("OFFDRIFT_WEBHOOK", raising=False)
    write_log(drawn(drift=2.0, sequences=120, steps=6), tmp_path / "log" / "batch-0.parquet")

    def start(*words: str, run: str = "log", **environment: str) -> Forked:
        state = {"XDG_STATE_HOME": str(tmp_path / "state")}
        return forked(["watch", run, *words], tmp_path, **state, **environment)

    return start


def drifting(folder: Path, arm: str = "none") -> None:
    """Write an arm of a run whose metrics are judged as soon as they are there."""
    (folder / "run" / "arms" / arm).mkdir(parents=True)
    (folder / "run" / "run.json").write_text("{}")
    rows = [{"update": i, "mismatch/k3": 0.5, "mismatch/pearson": 0.5, HOSTILE: 1.0} for i in range(1, 6)]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "run" / "arms" / arm / "metrics.jsonl").write_text(text)


def findings(stdout: str) -> list[dict]:
    return [line for line in map(json.loads, stdout.splitlines()) if line["kind"] == "finding"]


def test_each_finding_goes_once_to_a_command_and_a_webhook_also_after_a_restart(watch, tmp_path):
    command = 'printf "%s\\n" "$OFFDRIFT_RULE $OFFDRIFT_STEP $OFFDRIFT_LINK" >> told; cat >> told.jsonl'
    with receiver(answer(200)) as received:
        words = (*QUICK, "--json", "--on", "act", command, "--webhook", f"{received.url}/SECRET")
        first = watch(*words).wait(60)
        again = watch(*words).wait(60)
    assert (first.returncode, again.returncode) == (0, 0)
    found = findings(first.stdout)
    assert findings(again.stdout) == found, "the terminal says them again, alarms do not"
    rules = [f["rule"] for f in found if f["severity"] in ("act", "stop")]
    assert len(rules) >= 2
    link = (tmp_path / "log").as_uri()
    assert (tmp_path / "told").read_text().splitlines() == [f"{rule} 2 {link}" for rule in rules]
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    assert [t["finding"]["rule"] for t in told] == rules
    posted = [body["finding"]["rule"] for body in received.bodies]
    assert posted == [f["rule"] for f in found if f["severity"] != "info"]
    assert EARLIER in again.stderr
    assert "SECRET" not in first.stderr + first.stdout + again.stderr
    assert "SECRET" not in "".join(file.read_text() for file in (tmp_path / "state").rglob("*.txt"))


def test_another_run_in_the_same_place_sends_its_own(watch, tmp_path):
    words = (*QUICK, "--on", "act", "echo x >> told")
    assert watch(*words).wait(60).returncode == 0
    count = len((tmp_path / "told").read_text())
    write_log(drawn(drift=3.0, sequences=120, steps=6), tmp_path / "log" / "batch-0.parquet")
    assert watch(*words).wait(60).returncode == 0
    assert len((tmp_path / "told").read_text()) > count > 0


def test_a_dead_webhook_and_a_failing_command_are_said_once_and_cost_the_watch_nothing(watch):
    with receiver(answer(403, b"no such hook")) as received:
        done = watch(*QUICK, "--fail-on", "act", "--on", "watch", "exit 7", "--webhook", received.url).wait(60)
    assert done.returncode == 3
    assert done.stderr.count("status 7") == 1
    assert done.stderr.count("403: no such hook") == 1
    assert done.stderr.count("did not arrive") == 2
    assert len(received.posts) >= 2


def test_steps_are_judged_while_a_command_still_runs(watch, tmp_path):
    drifting(tmp_path)
    process = watch("--every", "0.05", "--json", "--on", "watch", "sleep 60", run="run")
    lines = []
    for line in process.lines(process.out):
        lines.append(json.loads(line))
        if lines[-1].get("step") == 5:
            break
    assert any(line["kind"] == "finding" for line in lines[:-1]), "the command was started before the last step"
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    done = process.wait(40)
    assert done.returncode == 130
    assert time.monotonic() - begun < 13
    assert "did not arrive" in done.stderr


def test_hostile_names_in_a_log_reach_a_command_as_text(watch, tmp_path):
    drifting(tmp_path, "$(touch pwned) <!channel>")
    with receiver(answer(200)) as received:
        line = 'echo "$OFFDRIFT_SOURCE $OFFDRIFT_WHAT" >> told'
        done = watch(*QUICK, "--on", "watch", line, "--webhook", received.url, run="run").wait(60)
    assert done.returncode == 0
    assert (tmp_path / "told").read_text().startswith("$(touch pwned) <!channel> ")
    assert not list(tmp_path.rglob("pwned"))
    assert received.bodies
    assert all("<!channel>" not in body["text"] and "&lt;!channel&gt;" in body["text"] for body in received.bodies)


def test_prometheus_reads_a_run_while_it_is_watched(watch, tmp_path):
    drifting(tmp_path)
    process = watch("--every", "0.05", "--prometheus", "0", run="run")
    url = next(line for line in process.lines(process.err) if line.startswith("metrics: ")).removeprefix("metrics: ")
    assert url.startswith("http://127.0.0.1:")
    end = time.monotonic() + 30
    text = ""
    while "offdrift_finding_step" not in text and time.monotonic() < end:
        with urllib.request.urlopen(url, timeout=5) as got:
            text = got.read().decode()
        time.sleep(0.05)
    assert 'offdrift_mismatch_k3{run="run",source="none"} 0.5' in text
    assert 'offdrift_findings{run="run",source="none",severity="stop"} ' in text
    process.send_signal(signal.SIGTERM)
    assert process.wait(30).returncode == 130


def test_the_page_is_there_from_the_start_and_alarms_lead_to_its_findings(watch, tmp_path):
    with receiver(answer(200)) as received:
        words = ("--page", "out/watch.html", "--link", "https://host/watch.html", "--webhook", received.url)
        done = watch(*QUICK, *words).wait(60)
    assert done.returncode == 0
    page = (tmp_path / "out" / "watch.html").read_text()
    for body in received.bodies:
        address, _, place = body["link"].partition("#")
        assert address == "https://host/watch.html"
        assert f'id="{place}"' in page
        assert f"<{body['link']}>" in body["text"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["watch.html"]
    assert "page: out/watch.html" in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--on", "loud", "true"), "loud"),
        (("--webhook", "http://chat.example/SECRET"), "--insecure"),
        (("--webhook", ""), "--webhook"),
        (("--prometheus", "nowhere"), "nowhere"),
        (("--prometheus", "192.0.2.1:9464"), "192.0.2.1:9464"),
        (("--page", "log/batch-0.parquet/x.html"), "x.html"),
        (("--link", "https://host"), "--page"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(watch, words, told):
    done = watch(*QUICK, *words).wait(60)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert "SECRET" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_webhook_may_stand_in_the_environment(watch):
    with receiver(answer(200)) as received:
        assert watch(*QUICK, OFFDRIFT_WEBHOOK=received.url).wait(60).returncode == 0
    assert received.posts


def test_without_alarms_nothing_is_stored(watch, tmp_path):
    assert watch(*QUICK).wait(60).returncode == 0
    assert {p.name for p in tmp_path.iterdir() if not p.name.startswith("printed-")} == {"log"}


def test_the_help_says_what_is_remembered_where():
    from offdrift.cli.watch import watch as command

    text = " ".join((command.__doc__ or "").split())
    assert ONCE in text
    assert "~/.local/state/offdrift" in text


def test_a_watch_that_found_nothing_says_that_this_is_no_forecast(watch, tmp_path):
    write_log(drawn(drift=1e-4, sequences=40, steps=3), tmp_path / "healthy" / "batch-0.parquet")
    healthy = watch(*QUICK, run="healthy").wait(60)
    assert NO_FORECAST in " ".join(healthy.stderr.split())
    drifts = watch(*QUICK).wait(60)
    assert NO_FORECAST not in " ".join(drifts.stderr.split())
