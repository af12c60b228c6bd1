"""The benchmark of drift diagnosis: honest draws, logs that are read whole, labels that agree, and a scorer that counts."""

import ast
import functools
import json
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from benchmarks.field import detectors, run, score
from benchmarks.field import tables as field_tables
from benchmarks.field.kinds import CAUSES, FIXES, chosen, dev, held_out, is_held_out, reported
from benchmarks.field.kinds.base import Kind
from benchmarks.field.score import Answer, Truth, clopper_pearson, outcome, summary, tables, wilson
from benchmarks.field.styles import made
from benchmarks.field.world import FLOAT8, FLOAT32, Side, World, to_bfloat16, to_float8
from benchmarks.field.writers import FORMATS

from tests.judge.foreign import merged

FOLDER = Path(run.__file__).parent
ALL = chosen("all")
FAULTS = [k for k in ALL.values() if not k.clean]
CLEAN = [k for k in ALL.values() if k.clean]
SMALL = {"steps": 2, "prompts": 3}
ARRAYS = ("tokens", "mask", "mu", "old", "current", "version", "rollout_version", "updates_before")


@functools.cache
def small_log(kind):
    """The log of a kind that every format is asked to hold; writers read it."""
    return made(ALL[kind], "large", 0, **SMALL)


def drawn(log):
    """Log-ratios of old over rollout policy by response, of tokens that the policy drew."""
    found = [(b.old - b.mu)[i][b.mask[i]] for b in log.batches for i in range(len(b.prompts))]
    return [d[np.isfinite(d)] for d in found]


def off_one(log):
    """How many standard errors, clustered by response, the mean ratio is off 1."""
    found = [np.expm1(d) for d in drawn(log)]
    sums, tokens = np.array([d.sum() for d in found]), np.array([len(d) for d in found])
    mean = sums.sum() / tokens.sum()
    error = np.sqrt(((sums - mean * tokens) ** 2).sum()) / tokens.sum()
    return abs(mean) / max(error, 1e-9)


@pytest.mark.parametrize("kind", CLEAN, ids=lambda k: k.name)
def test_clean_logs_are_honest(kind):
    """E[pi / mu] = 1 at every token that an honest engine records."""
    assert off_one(made(kind, "large", 1, steps=4)) < 4


@pytest.mark.parametrize("name", ["most-likely-token-recorded", "vocabulary-padded-in-softmax", "top-p-renormalized"])
def test_dishonest_records_are_not(name):
    """The test above can fail: these records are not of what was drawn, or lack a part of the vocabulary."""
    assert off_one(made(ALL[name], "large", 1, steps=4)) > 20


def test_engines_draw_what_they_record():
    """Frequencies of first tokens are the recorded probabilities."""
    world = World(5, vocab=24)
    side = Side(lambda step, worker: world.weights(3), FLOAT8)
    n = 4000
    walked = world.walk(side, 0, [[3, 7]] * n, np.zeros(n, int), np.zeros((n, 1), int))
    p = np.zeros(24)
    p[walked.tokens[:, 0]] = np.exp(walked.logp[:, 0])
    count = np.bincount(walked.tokens[:, 0], minlength=24)
    seen = count > 0
    assert p[seen].sum() == pytest.approx(1, abs=0.02)
    assert (((count - n * p)[seen] ** 2) / (n * p)[seen]).sum() < 60


def test_scoring_repeats_drawing():
    """The side that drew gives the same log-probs when it scores."""
    world = World(6, experts=4)
    side = Side(lambda step, worker: world.weights(2), FLOAT32)
    turn, worker = np.zeros((8, 20), int), np.zeros(8, int)
    a = world.walk(side, 0, [[1, 2, 3], [4]] * 4, worker, turn)
    b = world.walk(side, 0, [[1, 2, 3], [4]] * 4, worker, turn, feed=a.tokens, labels=a.tokens)
    np.testing.assert_allclose(a.logp, b.logp, atol=1e-12)
    other = world.walk(
        Side(lambda s, w: world.weights(5)), 0, [[1, 2, 3], [4]] * 4, worker, turn, feed=a.tokens, labels=a.tokens
    )
    assert np.abs(a.logp - other.logp).max() > 1e-3


def test_rounding():
    x = np.random.default_rng(0).standard_normal((64, 64))
    for rounding, bits in ((to_bfloat16, 8), (to_float8, 4)):
        off = np.abs(rounding(x) - x) / np.abs(x)
        assert 2.0 ** -(bits + 3) < np.median(off) < 2.0**-bits
        np.testing.assert_allclose(rounding(rounding(x)), rounding(x), rtol=1e-12)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["clean-lag-1", "clean-multi-turn"])
def test_every_format_is_read_whole(name, kind, tmp_path):
    """No bad row, every response and token, and the drift of the very log-probs that were written."""
    log = small_log(kind)
    FORMATS[name].write(log, tmp_path)
    audit = detectors.audited(tmp_path)
    assert not audit["bad_rows"]
    assert audit["coverage"]["unread_frac"] == 0
    fields = FORMATS[name].fields
    if "mu" in fields:
        assert audit["counts"]["sequences"] == sum(len(b.prompts) for b in log.batches)
    if fields & {"old", "current"}:
        d = np.concatenate(drawn(log))
        assert audit["coverage"]["trainable"] == len(d)
        assert audit["coverage"]["unscored"] == 0
        measured = audit["overall"]["mismatch/k1" if "old" in fields else "full/k1"]
        assert measured == pytest.approx(-d.mean(), abs=2e-6)


@pytest.mark.parametrize("kind", ["many-missing", "adapter-never-delivered"])
@pytest.mark.parametrize("name", [n for n in FORMATS if FORMATS[n].fields & {"old", "current"}])
def test_faults_leave_rows_readable(name, kind, tmp_path):
    """What an audit has read before it concludes: the test above is of the command, whole."""
    FORMATS[name].write(small_log(kind), tmp_path)
    part, _ = merged(tmp_path, sample_rate=1e-9)
    assert not part.bad
    assert part.tally is not None


def test_labels():
    """Names are unique, each half is in its file, and half of at least 40 kinds of faults is held out."""
    later = reported.KINDS + reported.LATER
    kinds = dev.KINDS + held_out.KINDS + later
    assert len(ALL) == len(kinds)
    assert not [k.name for k in dev.KINDS + later if is_held_out(k.name)]
    assert [k.name for k in held_out.KINDS if not is_held_out(k.name)] == []
    assert len(later) >= 20
    single = [k for k in FAULTS if "+" not in k.name and k not in later]
    assert len(single) >= 40
    assert 0.4 <= sum(is_held_out(k.name) for k in single) / len(single) <= 0.6
    for kind in kinds:
        assert all((kind.source, kind.planted, kind.right, kind.fixes)), kind.name
        assert "none" in kind.right or not kind.clean, kind.name
        assert kind.tells or not kind.without or "+" in kind.name, kind.name
        assert any(kind.visible(f.fields) for f in FORMATS.values()), kind.name
    assert len(FORMATS) >= 12


def test_what_a_format_lacks_makes_abstention_right():
    kind = ALL["adapter-never-delivered"]
    right, abstain = kind.accepted(FORMATS["plain-jsonl"].fields)
    assert not abstain
    assert "stale-unlogged" not in right
    right, abstain = kind.accepted(FORMATS["slime"].fields)
    assert abstain
    assert "stale-unlogged" in right
    assert not ALL["trainer-in-train-mode"].visible(FORMATS["slime"].fields)
    assert not kind.visible(FORMATS["open-instruct"].fields)


def same(a, b):
    """Whether two logs hold the same."""
    if len(a.batches) != len(b.batches) or a.versions != b.versions:
        return False
    return all(
        np.array_equal(getattr(x, name), getattr(y, name), equal_nan=True)
        for x, y in zip(a.batches, b.batches, strict=True)
        for name in ARRAYS
    )


def traces(log):
    """What a fault can leave in a log: drift of each pair, a mean ratio off 1, and records that contradict themselves."""
    keep = np.concatenate([b.mask.ravel() for b in log.batches])
    flat = {n: np.concatenate([getattr(b, n).ravel() for b in log.batches])[keep] for n in ("mu", "old", "current")}
    bits = flat["mu"].astype(np.float32).view(np.uint32)

    def k3(a, b):
        d = np.clip(flat[a] - flat[b], -30, 30)
        d = d[np.isfinite(d)]
        return float((np.expm1(d) - d).mean())

    return {
        "mismatch": k3("old", "mu"),
        "staleness": k3("current", "old"),
        "off 1": off_one(log),
        "missing": float((~np.isfinite(flat["mu"]) | (flat["mu"] == 0)).mean()),
        "positive": float((flat["mu"] > 0).mean()),
        "rounded": float((np.abs(flat["mu"] * 100 - np.round(flat["mu"] * 100)) < 1e-9).mean()),
        "short": float((bits & 0xFFFF == 0).mean()),
        "ahead": float(np.mean([(b.rollout_version > b.version[:, None]).mean() for b in log.batches])),
    }


def planted_shows(found, healthy):
    """Whether one of the traces is well above what a healthy twin has."""
    by_size = any(found[n] > 1.5 * healthy[n] + 1e-5 for n in ("mismatch", "staleness"))
    by_share = any(found[n] > healthy[n] + 0.01 for n in ("missing", "positive", "rounded", "short", "ahead"))
    return by_size or by_share or found["off 1"] > 6


CHANGED = ("label-of-the-last-token", "repetition-penalty", "prompt-cut-in-trainer", "too-many-epochs", "two-decimals")


def check_shows(kind: Kind, size: str) -> None:
    """The planted log shows what a log of the same style without the fault does not."""
    short = {"steps": 7, "prompts": 3, "max_length": 40}
    planted, healthy = traces(made(kind, size, 0, **short)), traces(made(kind, size, 0, dev.healthy, **short))
    assert not planted_shows(healthy, healthy), healthy
    assert planted_shows(planted, healthy), (kind.name, planted, healthy)


def test_a_log_is_made_again():
    kind = ALL["old-with-dropout"]
    assert same(made(kind, "large", 3, **SMALL), made(kind, "large", 3, **SMALL))
    assert not same(made(kind, "large", 3, **SMALL), made(kind, "large", 4, **SMALL))


@pytest.mark.parametrize("name", CHANGED)
def test_some_kinds_show(name):
    check_shows(ALL[name], "small")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS, ids=lambda k: k.name)
def test_every_kind_shows(kind):
    """In one of its sizes, which its name chooses: half of the kinds as faint as they are planted, half as plain."""
    check_shows(kind, kind.sizes[zlib.crc32(kind.name.encode()) % len(kind.sizes)])


def truth(*right, clean=False, visible=True, abstain=False):
    return Truth(clean, visible, frozenset(right), abstain, frozenset({"repair-sync"}))


def said(*causes, confident=False, abstains=False, severity="act", fix=()):
    return Answer(causes, confident, abstains, severity, fix)


@pytest.mark.parametrize(
    ("planted", "answer", "expected"),
    [
        (truth("a"), said("a", "b"), "right"),
        (truth("a", "b"), said("b"), "right"),
        (truth("a"), said("b", "a"), "wrong"),
        (truth("a"), said("b", confident=True), "confidently wrong"),
        (truth("a"), said("b", abstains=True), "abstention"),
        (truth("a", abstain=True), said("b", abstains=True, confident=True), "honest abstention"),
        (truth("a"), said("none", severity="ok"), "missed"),
        (truth("a"), said(severity="ok"), "missed"),
        (truth("a", "none"), said("none", severity="ok"), "right"),
        (truth("a"), said("unexplained", confident=True), "unexplained"),
        (truth("none", clean=True), said("none", severity="ok"), "clean"),
        (truth("none", clean=True), said("b", severity="watch", confident=True), "clean"),
        (truth("none", clean=True), said("b"), "false alarm"),
        (truth("none", clean=True), said("b", abstains=True), "false alarm"),
        (truth("none", clean=True, abstain=True), said("b", abstains=True), "clean"),
        (truth("none", "stale-as-logged", clean=True), said("stale-as-logged", severity="stop"), "clean"),
        (truth("none", clean=True, visible=False), said("b", severity="watch"), "silent"),
        (truth("none", clean=True, visible=False), said("b"), "invented"),
        (truth("a", visible=False), said("none", severity="ok"), "silent"),
        (truth("a", visible=False), said("unexplained", abstains=True), "silent"),
        (truth("a", visible=False), said("b"), "invented"),
    ],
)
def test_outcomes(planted, answer, expected):
    assert outcome(planted, answer) == expected
    assert expected in score.OUTCOMES


def test_counts():
    """A table by hand: ten visible faults, four clean logs, one that shows nothing."""
    outcomes = ["right"] * 4 + ["honest abstention"] * 2 + ["abstention", "missed", "wrong", "confidently wrong"]
    outcomes += ["clean"] * 3 + ["false alarm", "silent"]
    records = [
        {
            "kind": f"k{i % 3}", "half": "dev", "format": "slime" if i % 2 else "verl", "size": "large",
            "clean": o in ("clean", "false alarm"), "visible": o != "silent", "outcome": o, "fix_applies": i < 3,
        }
        for i, o in enumerate(outcomes)
    ]  # fmt: skip
    found = summary(records)
    assert found["logs"] == 15
    counts = {name: (s["count"], s["of"]) for name, s in found.items() if isinstance(s, dict) and "of" in s}
    assert counts == {
        "right": (4, 10), "right or abstaining": (7, 10), "right or honestly abstaining": (6, 10), "missed": (1, 10),
        "unexplained": (0, 10), "wrong": (2, 10), "confidently wrong": (1, 10), "fix applicable": (3, 10),
        "false alarms": (1, 4), "invented": (0, 1),
    }  # fmt: skip
    by = tables(records)
    assert {n: s["logs"] for n, s in by["by_format"].items()} == {"slime": 7, "verl": 8}
    assert sum(by["by_kind"]["k0"].values()) == 5


def test_the_first_fix_counts():
    planted = truth("a")
    assert score.fix_applies(planted, said("a", fix=("repair-sync", "x")))
    assert not score.fix_applies(planted, said("a", fix=("x", "repair-sync")))
    assert not score.fix_applies(planted, said("a"))


def test_intervals():
    """Against tables: Wilson 8 of 10, Clopper and Pearson 0, 8 and 10 of 10."""
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert clopper_pearson(0, 10) == pytest.approx((0, 0.3085), abs=1e-4)
    assert clopper_pearson(8, 10) == pytest.approx((0.4439, 0.9748), abs=1e-4)
    assert clopper_pearson(10, 10) == pytest.approx((0.6915, 1), abs=1e-4)
    assert wilson(0, 0) == clopper_pearson(0, 0) == (0, 1)


def test_the_table_of_findings_is_of_known_words():
    for name, row in {**detectors.table()["rules"], **detectors.table()["causes"]}.items():
        assert row["cause"] in {*CAUSES, "unexplained"}, name
        assert set(row.get("fix", ())) <= FIXES.keys(), name


def test_findings_are_translated():
    def finding(rule, cause, severity, confidence):
        return {"rule": rule, "cause": cause, "severity": severity, "confidence": confidence}

    audit = {
        "findings": [
            finding("engine_or_lag", "engine_or_lag", "act", "medium"),
            finding("misaligned", "x", "stop", "high"),
        ]
    }
    found = detectors.answer(audit)
    assert found == Answer(("unexplained", "misaligned"), False, True, "stop", ("measure",), found.detail)
    by_cause = detectors.answer({"findings": [finding("a_new_rule", "precision", "watch", "high")]})
    assert by_cause.causes == ("precision",)
    assert by_cause.confident
    assert detectors.answer({"findings": [finding("new", "newer", "act", "low")]}).causes == ("unmapped",)
    assert detectors.answer({"findings": []}).causes == ("none",)


def counting(path):
    """A detector that leaves a mark for each call."""
    (path.parents[2] / f"called-{path.name}").touch()
    return {"causes": ["temperature"], "confident": True, "severity": "act", "fix": "same-sampling"}


def breaking(path):
    raise ValueError(path)


def test_a_run_goes_on_where_it_stopped(tmp_path):
    """Answers are kept, logs are not; another detector is asked anew, and one that breaks is wrong."""

    def go(detector):
        words = [
            "--only",
            "engine-tempered",
            "--formats",
            "plain-jsonl,open-instruct",
            "--out",
            str(tmp_path),
            "--detector",
            detector,
        ]
        return run.main([*words, "--json", str(tmp_path / "results.json")])

    first = go(f"{__name__}:counting")
    marks = sorted(p.name for p in tmp_path.glob("called-*"))
    assert marks == [f"called-{s}-0-{f}" for s in ("large", "small") for f in ("open-instruct", "plain-jsonl")]
    assert [r["outcome"] for r in first["logs"]] == ["right", "invented", "right", "invented"]
    assert first["tables"]["all"]["fix applicable"]["count"] == 2
    assert not list((tmp_path / "logs").rglob("*.jsonl"))
    for mark in marks:
        (tmp_path / mark).unlink()
    assert go(f"{__name__}:counting") == first == json.loads((tmp_path / "results.json").read_text())
    assert not list(tmp_path.glob("called-*"))
    broken = go(f"{__name__}:breaking")
    assert {r["outcome"] for r in broken["logs"]} == {"wrong", "invented"}


def test_a_command_is_a_detector(tmp_path):
    script = tmp_path / "detector.py"
    script.write_text(
        'import json, sys\nprint("reading", sys.argv[1])\nprint(json.dumps({"causes": ["filter"], "severity": "watch"}))\n'
    )
    found = detectors.named(f"{sys.executable} {script} {{log}}")(tmp_path)
    assert found == Answer(("filter",), False, False, "watch")
    script.write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="ended with 3"):
        detectors.named(f"{sys.executable} {script} {{log}}")(tmp_path)
    with pytest.raises(ValueError, match="severity"):
        Answer.of({"severity": "loud"})


def test_formats_are_chosen_by_name_and_seed():
    a = run.formats_of("engine-tempered", "large", 0, "2")
    assert a == run.formats_of("engine-tempered", "large", 0, "2")
    every = {f for seed in range(7) for f in run.formats_of("engine-tempered", "large", seed, "2")}
    assert every == set(FORMATS)


def test_logs_are_made_without_the_library():
    """What makes and labels logs imports nothing of `offdrift`: the rules' code and the logs have nothing in common."""
    for path in FOLDER.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        names += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        ours = {n for n in names if n.split(".")[0] == "offdrift"}
        assert ours <= ({"offdrift.cli"} if path.name == "detectors.py" else set()), path


def test_the_pages_say_what_is_stored():
    text = field_tables.table()
    assert all(text in page.read_text("utf-8") for page in field_tables.PAGES)
    assert "held out" in text.splitlines()[0]
