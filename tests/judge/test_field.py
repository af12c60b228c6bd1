"""What logs of the field benchmark were once taken for, by kind of mistake: each is a planted fault, read as a file."""

import pytest
from benchmarks.field.detectors import audited
from benchmarks.field.kinds import chosen
from benchmarks.field.styles import made
from benchmarks.field.writers import FORMATS

from offdrift.judge import Context, diagnose, judge, load_rules
from tests.judge.histories import clean, shape

KINDS = chosen("dev")

SAID = {
    "a floor is no filter": ("log-probs-floored", "small", 0, "slime", "record_or_support"),
    "nor a last token": ("most-likely-token-recorded", "large", 0, "skyrl", "record_or_support"),
    "a grammar is no other prompt": ("grammar-constrained", "small", 0, "trl", "shape_support"),
    "a leak is no penalty": ("neighbours-leak-in-packs", "large", 0, "skyrl", "shape_beginning"),
    "nor is a cut prompt": ("prompt-cut-in-trainer", "large", 0, "verl", "shape_beginning"),
    "a small penalty is one": ("repetition-penalty", "small", 0, "slime", "shape_seen_mild"),
    "a worker's responses do not part at a place": ("worker-never-synchronized", "large", 0, "prime-rl", "shape_kinds"),
    "rows of new tokens name no place": ("new-tokens-random", "small", 0, "roll", "engine_or_lag"),
    "updates that nobody counts": ("old-with-dropout", "large", 0, "roll", "updates_or_noise"),
    "small and growing": ("adapter-never-delivered", "small", 0, "trl", "no_versions_drifting"),
    "apart for some steps": ("restart-loses-updates", "large", 0, "verl", "no_versions_drifting"),
    "small at every step": ("engine-behind-its-claim", "small", 0, "miles", "small_gap"),
    "averages that do not agree": ("old-after-the-update", "small", 0, "slime", "agreement_gap"),
    "a question before what follows": ("bias-on-some-tokens", "large", 0, "nemo-rl", "router_or_rare_tokens"),
    "positions are no precision alone": ("rope-scaling-in-trainer", "large", 0, "plain-jsonl", "engine_gap"),
    "labels that slip after the first": ("logits-shifted", "large", 1, "verl", "misaligned"),
    "a drafter's record moves no mass": ("begin-token-twice+drafter-recorded", "large", 1, "roll", "shape_first_tokens"),
}  # fmt: skip
SURE = {"misaligned", "shape_beginning", "shape_first_tokens", "shape_support", "shape_seen_mild"}
"""Rules that name one cause; all others rank several, and name the measurement that decides."""


@pytest.mark.parametrize("case", SAID)
def test_a_mended_kind(case, tmp_path):
    kind, size, seed, form, rule = SAID[case]
    FORMATS[form].write(made(KINDS[kind], size, seed), tmp_path)
    found = audited(tmp_path)["findings"]
    assert [f["rule"] for f in found][:1] == [rule]
    assert found[0]["decides"]
    assert found[0]["confidence"] != "high" or rule == "misaligned"
    about = load_rules().rules[rule]
    ranked = "First" in about.explanation or about.cause in (
        "unexplained",
        "two_kinds",
        "engine_or_lag",
        "router_flips",
    )
    assert ranked == (rule not in SURE)


@pytest.mark.parametrize(
    ("gap", "there", "says"),
    [
        (0.1, {"ratio_mean": 0.9, "ratio_z": -20.0}, "shape_support"),
        (0.1, {"ratio_mean": 0.9, "ratio_z": -5.0}, "shape_beginning"),  # a heavy tail
        (0.6, {"ratio_mean": 0.9, "ratio_z": -20.0}, "shape_beginning"),  # sure, and too little for the gap
        (0.1, {"ratio_mean": 1.1, "ratio_z": 20.0}, "shape_beginning"),
    ],
)
def test_mass_that_lacks_in_a_place_is_a_part_of_the_vocabulary(gap, there, says):
    found = diagnose(clean(), context=Context(shapes=shape("beginning", gap, there)))
    assert [f.rule for f in found] == [says]


def test_at_the_end_a_lower_ratio_is_a_label():
    there = {"ratio_mean": 0.9, "ratio_z": -20.0}
    found = diagnose(clean(), context=Context(shapes=shape("last_token", there=there)))
    assert [f.rule for f in found] == ["shape_last_token"]


@pytest.mark.parametrize("kind", ["last_token", "beyond"])
def test_a_place_is_named_only_if_the_rest_agrees(kind):
    found = diagnose(clean(), context=Context(shapes=shape(kind, gap=0.3, there={"elsewhere": 0.1})))
    assert f"shape_{kind}" not in [f.rule for f in found]


@pytest.mark.parametrize(("ratio", "z", "rule", "confidence"), [(1.2, 30.0, "record_not_drawn", "high"), (0.8, -30.0, "record_or_support", "medium")])  # fmt: skip
def test_above_one_is_proof_and_below_it_a_question(ratio, z, rule, confidence):
    overall = {**clean()[8], "mismatch/ratio_mean": ratio, "full/ratio_mean": ratio}
    known = Context(shapes=shape(None, ratio_mean=ratio, ratio_z=z), overall=overall)
    first = diagnose(clean(), context=known)[0]
    assert (first.rule, first.confidence, first.fact) == (rule, confidence, ratio > 1)


def test_updates_that_are_counted_are_no_question():
    reading = {"kl": 1e-3, "kl_since_old": 0.3, "kl_per_update": 0.3, "gap_first": 1e-3}
    assert [f.rule for f in judge(reading, load_rules())] == ["updates_or_noise"]
    for known in ({"updates_inside": 1.5}, {"lag": 1.0}):
        assert [f.rule for f in judge(reading | known, load_rules())] == ["update_too_large"]
    metrics = {k: v for k, v in reading.items() if k != "gap_first"}
    assert [f.rule for f in judge(metrics, load_rules())] == ["update_too_large"]
