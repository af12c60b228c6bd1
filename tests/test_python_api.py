"""What a program and a notebook get: results with a verdict, findings, metrics, a frame, JSON and a little HTML."""

import dataclasses
import json
import math
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pandas
import polars
import pytest
import torch

import offdrift as od
from offdrift import notebook
from offdrift.audit.demo import write_demo
from offdrift.audit.result import ArmsAudit, Audit
from offdrift.check.result import Check
from offdrift.errors import BadValueError, OffdriftError, RecordError
from offdrift.judge import Finding
from offdrift.segments import Segments
from offdrift.texts import as_json
from tests.command import command

HOSTILE = "<script>alert(1)</script>\"'\u202e"


class Checker(HTMLParser):
    """Refuses markup that could run, load or break out; collects what is shown."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "style", "link", "img", "iframe", "a", "object", "form")
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("href", "src")]
        self.tags.append(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def found(log) -> Audit:
    result = od.audit(log)
    assert isinstance(result, Audit)
    return result


@pytest.fixture(scope="module")
def results(found) -> dict:
    """One of every kind of result."""
    lp = od.LogProbs.pack(
        torch.tensor([-1.0, -2.0, -0.5]),
        torch.tensor([-1.1, -1.9, -0.5]),
        torch.tensor([-1.0, -1.9, -0.6]),
        segments=Segments.from_lengths([2, 1]),
    )
    tv = od.Divergence.interval("tv_rollout_old", torch.tensor([0.1, 0.2, 0.0]), torch.tensor([0.3, 0.4, 0.0]))
    info = od.BatchInfo(divergences={"tv_rollout_old": tv})
    loss = od.policy_loss(lp, "token_tis", torch.ones(3), info)
    checked = Check(
        {
            "passed": True,
            "model": "m",
            "baseline": {"kl_mean": 0.02, "mismatch/k3": 0.02, "mismatch/pearson": None},
            "verdict": {"level": "watch", "text": "Some drift."},
            "factors": [{"factor": "bfloat16", "status": "ran", "kl_mean": 0.01}, {"factor": "cache", "kl_mean": 0.02}],
        }
    )
    return {
        "audit": found,
        "arms": ArmsAudit({"a": found, "b": found}),
        "check": checked,
        "loss": loss,
        "stats": loss.stats,
        "divergence": tv,
        "certificate": _certificate(),
    }


def _certificate() -> od.Certificate:
    n = 400
    generator = torch.Generator().manual_seed(0)
    logp = torch.full((n,), -1.0)
    lp = od.LogProbs.pack(logp, logp - 0.001, segments=Segments.from_lengths([1] * n))
    rewards = (torch.rand(n, generator=generator) < 0.5).float()
    divergences = {
        "kl_rollout_current": od.Divergence.exact("kl_rollout_current", torch.full((n,), 1e-6)),
        "tv_rollout_current": od.Divergence.exact("tv_rollout_current", torch.full((n,), 1e-3)),
    }
    region = od.TrustRegion(delta=1e-3, horizon=4)
    return od.certify(od.BatchEvidence.of(lp, rewards, region=region, divergences=divergences))


KINDS = ("audit", "arms", "check", "loss", "stats", "divergence", "certificate")


@pytest.mark.parametrize("kind", KINDS)
def test_every_result_has_the_same_ways_out(results, kind):
    result = results[kind]
    assert result.metrics
    assert json.loads(result.to_json(), parse_constant=pytest.fail)
    lines = repr(result).splitlines()
    assert 1 <= len(lines) <= 3
    assert max(map(len, lines)) <= 100
    page = Checker(result._repr_html_())
    assert "".join(page.words).strip()
    assert page.tags[0] == "div"
    assert len(result.to_frame()) > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.data = None


@pytest.mark.parametrize("kind", ["audit", "arms", "certificate", "stats", "loss", "divergence"])
def test_series_are_small_charts(results, kind):
    assert "svg" in Checker(results[kind]._repr_html_()).tags


def test_an_audit_is_that_of_the_command(found, log, monkeypatch, capsys, tmp_path):
    done = command(monkeypatch, capsys, "audit", str(log), "--out", str(tmp_path / "out"), "--json")
    told, mine = json.loads(done.stdout), json.loads(found.to_json())
    for data in (told, mine):
        data.pop("created")
        data["source"].pop("seconds")
    assert told == mine
    assert found.metrics == {k: v for k, v in told["overall"].items() if v is not None}
    assert [f.rule for f in found.findings] == [f["rule"] for f in told["findings"]]
    assert (found.verdict.level, found.verdict.text) == (told["verdict"]["level"], told["verdict"]["text"])
    assert {type(f) for f in found.findings} == {Finding}
    first = found.findings[0].as_dict()
    assert json.loads(as_json(first)) == {k: v for k, v in told["findings"][0].items() if k != "page"}
    frame = found.to_frame()
    assert list(frame["step"]) == [row["step"] for row in told["steps"]]
    kl = [row["mismatch/k3"] for row in told["steps"]]
    assert frame["mismatch/k3"].tolist() == kl


def test_an_audit_prints_nothing_and_stores_nothing_unless_asked(log, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stages = []
    od.audit(str(log), progress=lambda *stage: stages.append(stage))
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
    assert [name.split(",")[0] for name, _, total in stages if total == 0] == ["reading 1 file"]
    assert stages[-1] == ("drawing conclusions", 1, 1)
    stored = od.audit(log, out=tmp_path / "kept")
    assert {p.name for p in (tmp_path / "kept").iterdir()} == {"audit.json", "report.html", "parts"}
    assert Audit.read(tmp_path / "kept").metrics == stored.metrics


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"workers": 0}, BadValueError, "workers = 0"),
        ({"of": 0}, BadValueError, "of = 0"),
        ({"columns": {"bogus": "x"}}, RecordError, "bogus"),
        ({"rules": "/nowhere.toml"}, OffdriftError, "/nowhere.toml"),
    ],
)
def test_what_cannot_be_is_a_typed_error(log, options, error, named):
    with pytest.raises(error, match=named):
        od.audit(log, **options)
    with pytest.raises(RecordError, match="absent"):
        od.audit("absent.jsonl")


def test_a_check_takes_prompts_and_says_its_stages(tmp_path):
    stages = []
    result = od.check(
        "tiny-qwen3",
        rollout="transformers:float32",
        prompts=["Two words", "Three more words"],
        max_tokens=4,
        factors="none",
        out=tmp_path,
        progress=lambda stage, done, total: stages.append(stage),
    )
    assert (result.passed, result.data["prompts"]) == (True, 2)
    assert 0 <= result.metrics["kl_mean"] < 1e-5
    assert json.loads((tmp_path / "check.json").read_text()) == json.loads(result.to_json())
    assert (tmp_path / "check.html").is_file()
    assert "scoring with transformers:float32" in stages
    with pytest.raises(BadValueError, match="samples = 0"):
        od.check(samples=0)


def test_texts_of_others_do_nothing_in_a_notebook():
    data = {
        "verdict": {"level": "act", "text": HOSTILE, "steps": [HOSTILE]},
        "findings": [{"rule": HOSTILE, "cause": HOSTILE, "severity": "act", "symptom": HOSTILE, "fix": HOSTILE}],
        "overall": {"full/k3": 0.1},
        "steps": [{"step": 0, "full/k3": 0.1}, {"step": 1, "full/k3": 0.2}],
        "suggestion": {"method": HOSTILE, "why": HOSTILE},
    }
    for result in (Audit(data), ArmsAudit({HOSTILE: Audit(data)})):
        page = Checker(result._repr_html_())
        shown = "".join(page.words)
        assert "<script>" in shown  # as text
        assert "\u202e" not in shown + repr(result)
        assert "\\u202e" in shown
    divergence = od.Divergence.exact(HOSTILE, torch.tensor([0.1, 0.2]))
    Checker(divergence._repr_html_())
    assert "\u202e" not in repr(divergence)


@pytest.mark.parametrize(
    "data", [{}, {"verdict": 3, "findings": [None, {"evidence": [{}]}], "steps": [{}], "overall": []}]
)
def test_a_file_with_almost_nothing_in_it_is_a_result_without_numbers(data):
    for result in (Audit(data), Check(data)):
        assert result.metrics == {}
        assert result.verdict.level == ""
        assert len(repr(result).splitlines()) <= 3
        Checker(result._repr_html_())
    assert all(f.severity == "info" for f in Audit(data).findings)


def test_the_worst_arm_is_the_runs(found):
    fine = Audit({"verdict": {"level": "ok", "text": "Fine."}, "overall": {"mismatch/k3": 0.001}})
    run = ArmsAudit({"fine": fine, "bad": found, "worse": found})
    assert run.worst == "bad"
    assert run.verdict.level == found.verdict.level
    assert run.verdict.text.startswith("bad (2 of 3 arms): ")
    assert run.kl == "mismatch/k3"
    frame = run.to_frame()
    assert list(frame["arm"]) == ["fine", "bad", "worse"]
    assert frame["mismatch/k3"][0] == 0.001
    assert len(run.findings) == 2 * len(found.findings)


def test_a_cause_that_two_rules_found_is_named_once_for_its_arm(found):
    twice = Audit({**found.data, "findings": [*found.data["findings"], *found.data["findings"]]})
    once, again = (ArmsAudit({"a": audit}).table()[0][-2] for audit in (found, twice))
    assert once == again != "–"


# -- the frame is that of the program's own library -------------------------------------------------


@pytest.mark.parametrize(("loaded", "kind"), [("pandas", pandas.DataFrame), ("polars", polars.DataFrame)])
def test_a_frame_is_of_the_library_that_a_program_uses(monkeypatch, loaded, kind):
    for name in notebook.FRAMES:
        if name != loaded:
            monkeypatch.delitem(sys.modules, name)
    made = notebook.frame({"a": [1, 2.5, None], "b": ["x", None, "z"]})
    assert type(made) is kind
    assert made.shape == (3, 2)


def test_without_a_library_of_frames_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(OffdriftError, match="pip install pandas"):
        notebook.frame({"a": [1]})


def test_a_long_series_keeps_its_spike():
    values = [0.0] * 10_000
    values[7_777] = 1.0
    path = notebook.spark_path(values)
    assert path.count("L") <= notebook.POINTS
    assert " 2.0" in path  # the top
    gaps = [1.0, 2.0, math.nan, 3.0, None, math.inf, 4.0]
    assert notebook.spark_path(gaps).count("M") == 3
    assert notebook.spark_path([1.0, None]) == ""


# -- names: a function and a package of one name ----------------------------------------------------

PROGRAM = """
import sys
import offdrift as od
assert "torch" not in sys.modules
import offdrift.audit.stream as stream
import offdrift.check.check
import offdrift.advantages.table as table
from offdrift.audit import facets
from offdrift.audit.stream import slice_of
import inspect
assert inspect.isfunction(od.audit) and inspect.isfunction(od.check) and inspect.isfunction(od.advantages)
assert stream.slice_of is slice_of is offdrift_audit_stream().slice_of
assert inspect.ismodule(od.check.check) and inspect.ismodule(table) and inspect.ismodule(facets)
import offdrift.audit.watch
assert od.audit.watch.RECENT == 20
assert "path" in inspect.signature(od.audit).parameters
"""


def test_a_function_and_the_modules_of_the_package_of_its_name_are_both_reached():
    program = PROGRAM.replace("offdrift_audit_stream()", "od.audit.stream")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
