"""Rules that make verdicts: each is seen to forbid what it forbids, and powers are those of stored pairs."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from offdrift.errors import BadValueError
from offdrift_lab.evidence.claims import (
    Seen,
    causes_of,
    differs,
    has_runs,
    judged,
    pairs,
    refused,
    seen,
    sign_flip_p,
    smallest_difference,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROW = {"verdict": "reproduced", "kind": "runs", "seeds": 8, "here": ["a"], "there": "b", "says": "more"}
PAIRS = Seen(0.1, 8, 0.01, 0.2, 0.3)
OWN = {"verdict": "reproduced", "kind": "runs", "seeds": 8, "p": 0.01, "about": "library"}
COUNTS = {"verdict": "reproduced", "kind": "counts", "here": ["a"], "there": "b"}
BARE = {"verdict": "reproduced", "kind": "counts"}
EXACT = {"verdict": "reproduced", "kind": "exact"}
OTHER = {"verdict": "other regime", "found": "reproduced"}
LATER = {"verdict": "undecided", "why": "few"}
SWEEP = {"command": ["offdrift sweep a.toml"]}


@pytest.mark.parametrize(
    ("row", "far", "stated", "part"),
    [
        (ROW, [], True, None),
        (ROW, ["tokens"], True, "at another regime"),
        (ROW | OTHER, ["tokens"], True, None),
        (ROW | OTHER, [], True, "the regimes do not differ"),
        (ROW, [], False, "states no size"),
        (ROW | {"about": "library"}, [], False, None),
        (ROW | LATER | {"found": "reproduced"}, [], False, None),
        (ROW | LATER | {"found": "reproduced"}, [], True, "`found` stands beside"),
        (ROW | {"found": "reproduced"}, [], True, "`found` stands beside"),
        (ROW | {"why": "few"}, [], True, "needs no `why`"),
        (ROW | LATER | {"found": "perhaps"}, [], False, "found 'perhaps'"),
        ({k: x for k, x in ROW.items() if k != "here"}, [], True, "without `here`"),
        (COUNTS, [], True, None),
        (COUNTS, [], False, "states no size"),
        (COUNTS, ["cause"], True, "at another regime"),
        (COUNTS | OTHER | {"found": "undecided"}, ["lr"], True, "found undecided"),
        (COUNTS | {"seeds": 8}, [], True, "are of runs"),
        (BARE, [], True, "without the regime of its source"),
        (BARE | {"about": "library"}, [], True, None),
        (BARE | {"no_regime": "statistics"}, [], True, None),
        (BARE | {"no_regime": "statistics"} | SWEEP, [], True, "no_regime = 'statistics'"),
        (EXACT, [], True, None),
        (EXACT | SWEEP, [], True, "enumerate nothing"),
        ({"verdict": "reproduced", "kind": "none"}, [], True, "without a number"),
        ({"verdict": "untestable here", "kind": "none"}, [], True, "without `why`"),
    ],
)
def test_a_verdict_may_stand_or_is_refused_with_the_reason(row, far, stated, part):
    reasons = refused(row, far, [PAIRS] if row["kind"] == "runs" else [], stated=stated)
    assert reasons == [] if part is None else re.search(part, " ".join(reasons))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, None),
        ({"p": 0.06}, "p of its own pairs is 0.06"),
        ({"seeds": 7, "p": 0.02}, None),
        ({"seeds": 7, "p": 0.06}, "7 seeds with p = 0.06"),
        ({"seeds": 4, "p": 0.01}, "not below 2 of 2\\^seeds patterns"),
        ({"about": "sources"}, "the library, or left out"),
    ],
)
def test_a_p_is_stated_of_the_librarys_own_alone(changes, part):
    reasons = refused(OWN | changes)
    assert reasons == [] if part is None else re.search(part, " ".join(reasons))


@pytest.mark.parametrize(
    ("changes", "powers", "part"),
    [
        ({}, [PAIRS], None),
        ({}, [PAIRS._replace(p=0.3)], "p of its own pairs is 0.3"),
        (LATER, [PAIRS._replace(p=0.3)], None),
        (LATER, [PAIRS], "of its 8 pairs is 0.01: a finding"),
        (LATER | {"seeds": 12}, [PAIRS._replace(p=0.3)], "and 8 pairs are stored"),
        ({}, [PAIRS._replace(mean=-0.3)], "the claim says more"),
        ({"says": "less"}, [PAIRS], "the claim says less"),
        ({"verdict": "falsified here"}, [PAIRS._replace(mean=-0.3)], None),
        ({"verdict": "falsified here"}, [PAIRS], "the claim says more"),
        ({"says": "less", "verdict": "falsified here"}, [PAIRS], None),
        # Beyond the patterns that can be enumerated Student's p stands in.
        ({"seeds": 83}, [PAIRS._replace(p=None, pairs=83, student=0.001)], None),
        ({"seeds": 83}, [PAIRS._replace(p=None, pairs=83, student=0.3)], "p of its own pairs is 0.3"),
        ({}, [PAIRS._replace(p=None, student=None)], "p of its own pairs is None"),
        # Two testbeds of four pairs each are not one of eight.
        ({}, [PAIRS, PAIRS._replace(pairs=4, p=0.125), PAIRS._replace(pairs=4, p=0.125)], "each by itself"),
        ({"seeds": 16}, [PAIRS._replace(pairs=16), PAIRS, PAIRS._replace(p=0.02)], None),
        ({"p": 0.01}, [PAIRS], "p is computed from stored pairs"),
    ],
)
def test_a_finding_is_what_stored_pairs_come_to(changes, powers, part):
    reasons = refused(ROW | changes, [], powers)
    assert reasons == [] if part is None else re.search(part, " ".join(reasons))


def test_a_finding_says_in_which_direction():
    row = {k: x for k, x in ROW.items() if k != "says"}
    assert re.search("`says` does not tell", " ".join(refused(row, [], [PAIRS])))


@pytest.mark.parametrize(
    ("contrasts", "command", "part"),
    [
        ([{"data": "a.json", "sweep": "s"}], "offdrift sweep recipes/s.toml", None),
        ([{"data": "a.json", "sweep": "s"}], "offdrift sweep recipes/t.toml", "which no command runs"),
        ([{"data": "a.json"}, {"data": "a.json", "arm": "other"}], "offdrift sweep recipes/s.toml", "count twice"),
        ([{"data": "a.json"}, {"data": "a.json", "changes": ["x=1"]}], "offdrift sweep recipes/s.toml", None),
    ],
)
def test_contrasts_are_of_runs_that_a_command_makes_and_of_each_once(contrasts, command, part):
    reasons = refused(ROW | {"contrast": contrasts, "command": [command]}, [], [PAIRS])
    assert reasons == [] if part is None else re.search(part, " ".join(reasons))


@pytest.mark.parametrize("kind", ["exact", "none"])
def test_what_holds_training_runs_is_neither_enumerated_nor_free_of_a_regime(kind):
    row = {"verdict": "untestable here", "why": "x", "kind": kind}
    assert refused(row) == []
    assert re.search("train", " ".join(refused(row, trained=["figures.json"])))
    free = {"verdict": "undecided", "why": "x", "kind": "counts", "no_regime": "simulation"}
    assert refused(free) == []
    assert re.search("no_regime", " ".join(refused(free, trained=["figures.json"])))


def test_a_result_with_training_runs_is_known_by_its_content():
    names = ("figures", "staleness", "staleness_grids", "severity", "pretrained")
    assert [name for name in names if not has_runs(RESULTS / f"{name}.json")] == []
    names = ("arithmetic", "masking", "flips", "coverage", "audit", "plan_real")
    assert [name for name in names if has_runs(RESULTS / f"{name}.json")] == []


@pytest.mark.parametrize(
    ("here", "there", "far"),
    [
        ([{"parameters": 1e6}], {"parameters": 8e9}, ["parameters"]),
        ([{"parameters": 1e9}], {"parameters": 8e9}, []),
        ([{"tokens": 7}, {"tokens": 800}], {"tokens": 4096}, []),
        ([{"lr": 1e-5}], {"lr": 1e-6}, ["lr"]),
        ([{"cause": "lag of 7 updates"}], {"cause": "engine"}, ["cause"]),
        ([{"cause": "engine, 8 bits; lag of 7 updates"}], {"cause": "engine"}, []),
        ([{"kl": 0.0}], {"kl": 1.0}, []),
        ([], {"lr": 1e-6}, []),
    ],
)
def test_a_factor_of_ten_or_another_cause_is_another_regime(here, there, far):
    assert differs(here, there) == far
    assert causes_of("") == set()


def test_the_smallest_difference_is_shown_four_times_in_five():
    rng = np.random.default_rng(0)
    least = smallest_difference(1.0, 8)
    t = rng.normal(least, 1.0, (20_000, 8))
    statistic = t.mean(1) / (t.std(1, ddof=1) / math.sqrt(8))
    assert (statistic > 2.3646).mean() == pytest.approx(0.8, abs=0.02)
    with pytest.raises(BadValueError, match="n = 1"):
        smallest_difference(1.0, 1)


def test_signs_are_flipped_exactly():
    assert sign_flip_p([1.0] * 8) == 2 / 2**8
    assert sign_flip_p([3.0, -1.0, -1.0]) == 1.0
    with pytest.raises(BadValueError, match="patterns"):
        sign_flip_p([1.0] * 21)


def test_pairs_are_those_of_the_stored_runs(tmp_path):
    stored = json.loads((RESULTS / "figures.json").read_text(encoding="utf-8"))["sweeps"]["figures-lag"]
    contrast = {"data": "figures.json", "sweep": "figures-lag", "arm": "ppo_clip", "less": "token_is"}
    of_sweep = next(r for r in stored["compared"] if r["arm"] == "ppo_clip" and r["of"] == "held-out")
    found = pairs(contrast, RESULTS)
    assert len(found) == of_sweep["n"]
    assert sum(found) / len(found) == pytest.approx(of_sweep["mean"])
    power = seen({"contrast": [contrast]}, RESULTS)
    assert power is not None
    assert power.student == pytest.approx(of_sweep["p"])
    # The stored interval of the same pairs stands for them.
    (tmp_path / "interval.json").write_text(json.dumps({"auroc": [of_sweep[k] for k in ("mean", "low", "high")]}))
    interval = {"data": "interval.json", "interval": ["auroc"], "n": of_sweep["n"]}
    of_interval = seen({"contrast": [interval]}, tmp_path)
    assert of_interval is not None
    assert of_interval.smallest == pytest.approx(power.smallest, rel=1e-6)
    with pytest.raises(BadValueError, match="no seed"):
        pairs(contrast | {"less": "nobody"}, RESULTS)
    runs = [{"arm": a, "values": {"lr": v}, "seed": s, "value": x} for a, v, s, x in (("a", 1, 0, 3.0), ("a", 2, 0, 5.0), ("b", 1, 0, 1.0))]  # fmt: skip
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": runs}))
    assert pairs({"data": "sweep.json", "arm": "a", "less": "b"}, tmp_path) == [3.0]
    assert pairs({"data": "sweep.json", "arm": "a", "less": "b", "where": {"lr": 1}}, tmp_path) == [2.0]


STORED = {
    "runs.json": {"runs": [{"arm": "a", "values": {"lr": v}, "seed": s, "value": x} for s, v, x in ((0, 1, 3.0), (0, 2, 5.0), (1, 1, 1.0))]},
    "starts.json": {"sweeps": [{"name": "s", "changes": [], "runs": [{"arm": "n", "values": {}, "seed": 0, "start": 0.5, "end": 9.0}]}]},
    "fixes.json": {"runs": [{"first": {"held_out": [0.9, 0.2]}, "fixed": {"held_out": [0.9, 0.6]}}, {"fixed": None}]},
    "stacks.json": {"stacks": [{"over": [], "token_tis": [9.0], "trm_max": [9.0]}, {"over": ["tv"], "token_tis": [0.1, 0.2], "trm_max": [9.0, 9.0]}]},
    "drafters.json": {"rows": [{"drafter": d, "task": "t", "seed": 0, "speculative/accepted_frac": x} for d, x in (("f", [0.8, 0.5]), ("u", [0.7, 0.65]))]},
    "progress.json": {"rows": [{"tokens": 8, "asked_kl": 0.1, "seed": 0, "methods": [{"method": m, "over_token": [x]} for m, x in (("token_is", 1.0), ("w", 0.75))]}]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("contrast", "expected"),
    [
        # Seed 1 has no run of lr 2; both runs of seed 0 are averaged.
        ({"data": "runs.json", "arm": ["a"], "less": "a", "less_where": {"lr": 2}}, [-1.0]),
        ({"data": "runs.json", "arm": "a", "less": "nothing", "where": [{"lr": 1}, {"lr": 2}]}, [4.0, 1.0]),
        ({"data": "runs.json", "arm": "a", "less": "start", "less_data": "starts.json", "less_sweep": "s", "start_of": "n"}, [3.5]),
        ({"data": "fixes.json", "arm": "fixed", "less": "first"}, [0.4]),
        ({"data": "stacks.json", "arm": "token_tis", "less": "nothing", "where": {"repaired": False}}, [0.1, 0.2]),
        ({"data": "drafters.json", "arm": "u", "less": "f", "what": "change"}, [0.25]),
        ({"data": "progress.json", "arm": "w", "less": "token_is", "where": {"tokens": 8, "kl": 0.1}}, [-0.25]),
    ],
)  # fmt: skip
def test_pairs_are_read_from_every_kind_of_stored_result(tmp_path, contrast, expected):
    for name, content in STORED.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = pairs(contrast, tmp_path)
    assert len(found) == len(expected)
    assert found == pytest.approx(expected)


def test_an_unknown_regime_is_refused(tmp_path):
    text = '[sources]\n[testbeds]\n[[claim]]\nclaim = "c"\nhere = ["nowhere"]\nfound = "undecided"\n'
    (tmp_path / "evidence.toml").write_text(text)
    with pytest.raises(BadValueError, match="nowhere"):
        judged(tmp_path / "evidence.toml", RESULTS)
