"""What an audit says of rewards, advantages, lengths, entropies and lost parts of a log, and of clean logs nothing."""

import csv
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import offdrift as od
from offdrift.errors import RecordError
from offdrift.records.readers import detect

VOCAB = 16


def softmax(x):
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def log(steps=12, prompts=6, siblings=4, *, tokens=24, temperature=1.0, recorded=None, seed=0, noise=1e-3):
    """Responses drawn from random logits at a temperature; both sides record at `recorded`, by default what was drawn.

    Advantages are GRPO's, entropies those of the recorded distribution.
    """
    rng, rows = np.random.default_rng(seed), []
    for step in range(steps):
        rewards = (rng.random((prompts, siblings)) < 0.5).astype(float)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
        for prompt, sibling in np.ndindex(rewards.shape):
            logits = 2 * rng.normal(size=(tokens, VOCAB))
            drawn = [rng.choice(VOCAB, p=p) for p in softmax(logits / temperature)]
            p = softmax(logits / (temperature if recorded is None else recorded))
            logp = np.log(p[np.arange(tokens), drawn])
            rows.append(
                {"step": step, "version": step, "rollout_version": step, "group_id": prompt}
                | {"reward": rewards[prompt, sibling], "advantages": [advantages[prompt, sibling]] * tokens}
                | {"logp_rollout": logp, "logp_old": logp + noise * rng.normal(size=tokens) * (1 - np.exp(logp))}
                | {"entropy": -(p * np.log(p)).sum(-1)}
            )
    return rows


def audited(path, rows, *, without=(), **options):
    def plain(x):
        return x.tolist() if isinstance(x, np.ndarray) else x

    kept = [{name: plain(x) for name, x in row.items() if name not in without} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return od.audit(path, **options)


def told(found):
    return [(f.rule, f.severity) for f in found.findings]


def changed(rows, change):
    return [{**row, **change(i, row)} for i, row in enumerate(rows)]


def test_a_clean_log_with_every_field_says_nothing(tmp_path):
    found = audited(tmp_path / "log.jsonl", log())
    assert told(found) == []
    assert found.metrics["advantage/misplaced_frac"] == 0
    assert abs(found.metrics["record/entropy_z"]) < 4


# -- rewards and advantages ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda i, row: {"reward": 0.0, "advantages": [0.0] * 24}, [("nothing_to_learn", "watch")]),
        (lambda i, row: {"advantages": [1.0] * 24}, [("nothing_to_learn", "watch")]),
        (lambda i, row: {"reward": 1.0, "advantages": (np.arange(24) % 3).tolist()}, []),  # of a critic
        (lambda i, row: {"reward": 1.0, "advantages": [0.0] * 24} if row["step"] % 3 else {}, [("little_to_learn", "info")]),
        (lambda i, row: {"reward": 1.0, "advantages": [0.0] * 24} if row["step"] % 3 == 0 else {}, []),
    ],
    ids=["one reward", "one advantage", "a critic has others", "two of three steps", "one of three steps"],
)  # fmt: skip
def test_steps_without_a_difference_are_counted(tmp_path, change, expected):
    assert told(audited(tmp_path / "log.jsonl", changed(log(), change))) == expected


def test_one_reward_without_advantages_is_said_and_of_few_responses_not(tmp_path):
    rows = changed(log(), lambda i, row: {"reward": 1})
    assert told(audited(tmp_path / "a.jsonl", rows, without=["advantages"])) == [("nothing_to_learn", "watch")]
    assert told(audited(tmp_path / "b.jsonl", rows[::12], without=["advantages"])) == []
    assert told(audited(tmp_path / "c.jsonl", rows[:24], without=["advantages"])) == []  # one step


def moved(rows, *, within, seed=0):
    """The advantages of each step, or of each of its groups, in another order."""
    rng, places = np.random.default_rng(seed), {}
    for i, row in enumerate(rows):
        places.setdefault((row["step"], row["group_id"] if within == "group" else 0), []).append(i)
    source = {i: j for at in places.values() for i, j in zip(at, rng.permutation(at), strict=True)}
    return changed(rows, lambda i, row: {"advantages": rows[source[i]]["advantages"]})


@pytest.mark.parametrize("within", ["step", "group"])
@pytest.mark.parametrize("of", [lambda a, r: a, lambda a, r: (r - 0.5) / 0.5], ids=["by groups", "by the batch"])
def test_advantages_in_another_order_are_proved(tmp_path, within, of):
    rows = changed(log(), lambda i, row: {"advantages": [of(row["advantages"][0], row["reward"])] * 24})
    assert told(audited(tmp_path / "right.jsonl", rows)) == []
    found = audited(tmp_path / "moved.jsonl", moved(rows, within=within))
    assert told(found) == [("advantages_misplaced", "act")]
    assert found.findings[0].fact
    assert found.metrics["advantage/misplaced_frac"] > 0.2


def test_advantages_of_something_else_are_not_accused(tmp_path):
    rng = np.random.default_rng(5)
    other = changed(log(), lambda i, row: {"advantages": [float(rng.normal())] * 24})
    penalty = changed(log(), lambda i, row: {"advantages": [row["advantages"][0] - 0.1 * float(rng.random())] * 24})
    for name, rows in {"another reward": other, "a penalty that is not logged": penalty}.items():
        found = audited(tmp_path / f"{name}.jsonl", rows)
        assert told(found) == []
        assert np.isnan(found.metrics.get("advantage/misplaced_frac", np.nan))


# -- what both sides take before the temperature ---------------------------------------------------


def test_raw_log_probs_of_both_sides_contradict_logged_entropies(tmp_path):
    raw = log(temperature=0.7, recorded=1.0)
    found = audited(tmp_path / "raw.jsonl", raw)
    assert told(found) == [("entropy_off", "watch")]
    assert found.metrics["record/entropy_gap"] > 0.2
    assert told(audited(tmp_path / "right.jsonl", log(temperature=0.7))) == []
    hidden = audited(tmp_path / "hidden.jsonl", raw, without=["entropy"])
    assert told(hidden) == []


def test_placeholders_of_entropies_contradict_nothing(tmp_path):
    rng = np.random.default_rng(0)
    for name, entropy in {"one": lambda: [1.0] * 24, "any": lambda: (3 * rng.random(24)).tolist()}.items():
        rows = changed(log(), lambda i, row, make=entropy: {"entropy": make()})
        assert told(audited(tmp_path / f"{name}.jsonl", rows)) == []


def test_a_stated_temperature_that_agreement_cannot_show_asks(tmp_path):
    rows = changed(log(temperature=0.7, recorded=1.0), lambda i, row: {"temperature": 0.7})
    found = audited(tmp_path / "log.jsonl", rows, without=["entropy"])
    assert told(found) == [("temperature_unseen", "info")]
    assert found.data["context"]["temperature"] == pytest.approx(0.7)
    assert told(audited(tmp_path / "given.jsonl", rows, without=["entropy", "temperature"], temperature=0.7)) == told(
        found
    )
    mixed = changed(rows, lambda i, row: {"temperature": 0.7 + 0.1 * (i % 2)})
    assert told(audited(tmp_path / "mixed.jsonl", mixed, without=["entropy"])) == []
    one = changed(log(), lambda i, row: {"temperature": 1})
    assert told(audited(tmp_path / "one.jsonl", one, without=["entropy"])) == []


# -- lengths, lost parts, and a table --------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "step"),
    [(lambda s: 8 if s < 12 else 24, 12), (lambda s: 8 + s * 2 // 3, 12), (lambda s: 24 if s < 12 else 8, 12), (lambda s: 24, None)],
    ids=["a jump", "growth", "a fall", "none"],
)  # fmt: skip
def test_lengths_that_change_are_told_with_their_beginning(tmp_path, length, step):
    def cut(i, row):
        n = length(row["step"])
        return {name: row[name][:n] for name in ("logp_rollout", "logp_old", "advantages", "entropy")}

    found = audited(tmp_path / "log.jsonl", changed(log(steps=24), cut))
    assert told(found) == ([("length_changed", "info")] if step else [])
    assert found.verdict.level == "ok"
    if step:
        assert step <= found.findings[0].step <= step + 8


@pytest.mark.parametrize("kind", ["rank", "worker", "environment"])
def test_the_part_that_lost_its_log_probs_is_named(tmp_path, kind):
    def lost(i, row):
        gone = {"logp_old": [float("nan")] * 24} if i % 4 == 2 else {}
        return {kind: f"part {i % 4}", **gone}

    found = audited(tmp_path / "log.jsonl", changed(log(), lost))
    words = f"could not be compared, all of them of {kind} part 2 (72 of 288 sequences)."
    assert found.data["coverage"]["sentences"][0].endswith(words)
    assert words in found.verdict.text
    everywhere = changed(log(), lambda i, row: lost(2 if i % 3 == 0 else 0, row) | {kind: f"part {i % 4}"})
    (first, *_) = audited(tmp_path / "all.jsonl", everywhere).data["coverage"]["sentences"]
    assert "of them" not in first


def test_a_rank_is_named_by_its_file_and_a_file_by_itself(tmp_path):
    rows = log()
    for names in ("rank_{}.jsonl", "part{}.jsonl"):
        folder = tmp_path / names[:4]
        folder.mkdir()
        for k in range(4):
            bad = {"logp_rollout": [float("nan")] * 24} if k == 1 else {}
            audited(folder / names.format(k), [{**row, **bad} for row in rows[k::4]])
        first = od.audit(folder).data["coverage"]["sentences"][0]
        assert ("rank 1 (72 of" in first) == ("rank" in names)
        assert ("part1.jsonl (72 of" in first) == ("part" in names)


@pytest.mark.parametrize("written", [json.dumps, str, lambda x: str(np.array(x)).replace("\n", "")], ids=["JSON", "Python", "NumPy"])  # fmt: skip
def test_a_table_whose_cells_are_lists_is_a_log(tmp_path, written):
    np.set_printoptions(threshold=100)
    rows = [{k: x.tolist() if isinstance(x, np.ndarray) else x for k, x in row.items()} for row in log(steps=3)]
    by_hand = audited(tmp_path / "log.jsonl", rows)
    (tmp_path / "table").mkdir()
    with (tmp_path / "table" / "log.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows({k: written(x) if isinstance(x, list) else x for k, x in row.items()} for row in rows)
    for path in (tmp_path / "table", tmp_path / "table" / "log.csv"):
        found = od.audit(path)
        assert found.data["counts"]["tokens"] == by_hand.data["counts"]["tokens"]
        assert found.metrics["mismatch/k1"] == pytest.approx(by_hand.metrics["mismatch/k1"], abs=1e-7)
        assert found.metrics["reward/mean"] == by_hand.metrics["reward/mean"]


def test_columns_of_a_table_are_mapped_as_those_of_json_lines(tmp_path):
    rows = [{"when": i, "engine": [-0.5, -1.0], "trainer": [-0.5, -1.25], "note": "a, b"} for i in range(9)]
    mapped = {"logp_rollout": "engine", "logp_old": "trainer", "step": "when"}
    lines, table = tmp_path / "log.jsonl", tmp_path / "log.csv"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    by_lines, by_table = (od.audit(path, columns=mapped) for path in (lines, table))
    assert by_table.metrics == by_lines.metrics
    assert by_table.data["counts"] == by_lines.data["counts"]
    with pytest.raises(RecordError, match=r"log.csv has no lp; it has when, engine, trainer, note"):
        od.audit(table, columns={"logp_old": "lp"})


def test_a_table_of_metrics_is_no_log_of_lists(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "step,mismatch/k3,reward/mean\n" + "".join(f"{i},0.001,0.5\n" for i in range(9))
    )
    assert od.audit(tmp_path / "metrics.csv").data["kind"] == "audit"
    assert od.audit(tmp_path).metrics["mismatch/k3"] == 0.001


@pytest.mark.parametrize("pad", [0.0, -100.0, 1e-6])
@pytest.mark.parametrize("by_step", [False, True])
def test_padding_counts_no_tokens_and_changes_no_verdict(tmp_path, pad, by_step):
    rng, bare = np.random.default_rng(1), log(noise=0.1)
    short = [
        {k: x[: rng.integers(4, 24)] if isinstance(x, np.ndarray) else x for k, x in row.items()}
        for row in bare
    ]  # fmt: skip
    short = [{**row, "logp_old": row["logp_old"][: len(row["logp_rollout"])]} for row in short]
    short = [{**row, "logp_rollout": row["logp_rollout"][: len(row["logp_old"])]} for row in short]
    bare = [{k: row[k] for k in ("step", "reward", "logp_rollout", "logp_old")} for row in short]
    widths = {step: max(len(r["logp_old"]) for r in bare if r["step"] == step or not by_step) for step in range(12)}
    padded = [
        {
            k: np.pad(x, (0, 3 + widths[row["step"]] - len(x)), constant_values=pad) if isinstance(x, np.ndarray) else x
            for k, x in row.items()
        }
        for row in bare
    ]
    one, two = audited(tmp_path / "bare.jsonl", bare), audited(tmp_path / "padded.jsonl", padded)
    more = sum(len(r["logp_old"]) for r in padded) - sum(len(r["logp_old"]) for r in bare)
    assert two.data["coverage"]["padding"] == more > 0
    assert f"{more:,} of" in two.data["coverage"]["sentences"][-1]
    assert two.metrics == pytest.approx(one.metrics, nan_ok=True)
    assert told(two) == told(one)
    assert two.data["counts"]["tokens"] == one.data["counts"]["tokens"]
    masked = [{**row, "mask": [1] * (len(row["logp_old"]) - 3) + [0] * 3} for row in padded]
    assert audited(tmp_path / "masked.jsonl", masked).data["coverage"]["padding"] == 0  # a mask is believed
    stated = [{**row, "response_length": len(row["logp_old"])} for row in padded]
    assert audited(tmp_path / "stated.jsonl", stated).data["coverage"]["padding"] == 0  # and so are lengths
    shorter = [{**row, "response_length": len(r["logp_old"])} for row, r in zip(padded, bare, strict=True)]
    assert audited(tmp_path / "shorter.jsonl", shorter).data["coverage"]["padding"] == more


def test_certain_tokens_at_the_end_are_no_padding(tmp_path):
    """Responses of their own lengths that end in tokens of which both sides are certain."""
    rng = np.random.default_rng(2)
    logps = [[*(-rng.random(5 + i)), 0.0, 0.0, 0.0, 0.0, 0.0] for i in range(64)]
    rows = [{"step": i // 8, "logp_rollout": x, "logp_old": x} for i, x in enumerate(logps)]
    assert audited(tmp_path / "log.jsonl", rows).data["coverage"]["padding"] == 0


@pytest.mark.parametrize("mask", [True, False])
def test_a_log_of_nothing_but_zeros_stops(tmp_path, mask):
    rows = log(steps=4)
    for row in rows:
        for name in ("logp_rollout", "logp_old"):
            row[name] = np.concatenate([np.zeros(9), row[name] if mask else [], np.zeros(4)])
        row["mask"] = [1] * 9 + [0] * (len(row["logp_old"]) - 13) + [1] * 4
    found = audited(tmp_path / "log.jsonl", rows, without=("advantages", "entropy") + (() if mask else ("mask",)))
    assert found.data["verdict"]["level"] == "stop"
    assert found.data["coverage"]["sentences"][0].startswith("Every log-prob that counts is 0: a mask that is upside")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("column", "said"), [("logprobs", True), ("values", False)])
def test_a_column_that_may_be_the_other_policy_is_proposed(tmp_path, kind, column, said):
    rows = [
        {"rollout_logprobs": [-0.5, -1.25, -3.0, -0.25][: 2 + i % 3], column: [0.5] * 4, "step": i} for i in range(9)
    ]
    rows = [{**row, column: [-0.5] * len(row["rollout_logprobs"]) if said else row[column]} for row in rows]
    path = tmp_path / f"log.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    sentence = detect([str(path)]).description
    assert f"not used: {column}" in sentence
    assert (f"{column} may be the trainer's log-probs: --columns logp_old={column}" in sentence) == said
    if said:
        assert "may be" not in detect([str(path)], columns={"logp_old": column}).description


def test_the_first_step_is_to_name_a_column_that_is_there(tmp_path):
    rows = [{"rollout_log_probs": [-0.5, -1.25], "log_probs": [-0.5, -1.5], "step": i} for i in range(9)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = od.audit(path, out=tmp_path / "out").data["verdict"]["steps"]
    assert "--columns logp_old=log_probs" in steps[0]
    named = od.audit(path, out=tmp_path / "named", columns={"logp_old": "log_probs"})
    assert not any("--columns" in step for step in named.data["verdict"]["steps"])


@pytest.mark.parametrize("first", ["tokens", "metrics"])
def test_a_path_that_leads_nowhere_is_an_error_beside_others(tmp_path, first):
    """Not a reason to read the others as something else."""
    path = tmp_path / f"{first}.jsonl"
    row = {"reward": 1.0, "rollout_log_probs": [-0.5], "log_probs": [-0.4]} if first == "tokens" else {"reward": 1.0}
    path.write_text("".join(json.dumps({"step": i, **row}) + "\n" for i in range(9)))
    with pytest.raises(RecordError, match=r"nothere\.jsonl"):
        od.audit([str(path), str(tmp_path / "nothere.jsonl")], out=tmp_path / "out")


# -- what a column holds ---------------------------------------------------------------------------


def test_padding_is_known_by_its_token_where_one_policy_scores_it(tmp_path):
    """The end of sequence again and again: the engine writes 0, the trainer scores it."""
    rng, bare = np.random.default_rng(3), log()
    bare = [{**row, "tokens": rng.integers(1, 50, 24), "mask": None} for row in bare]
    bare = [{k: x for k, x in row.items() if k not in ("mask", "advantages", "entropy")} for row in bare]
    cut = [int(rng.integers(6, 24)) for _ in bare]
    bare = [
        {k: x[:n] if isinstance(x, np.ndarray) else x for k, x in row.items()}
        for row, n in zip(bare, cut, strict=True)
    ]  # fmt: skip
    ends = {
        "tokens": lambda n: [0] * n,
        "logp_rollout": lambda n: [0.0] * n,
        "logp_old": lambda n: -0.3 * rng.random(n),
    }
    padded = [
        {k: np.concatenate([x, ends[k](12)]) if k in ends else x for k, x in row.items()} for row in bare
    ]  # fmt: skip
    one, two = audited(tmp_path / "bare.jsonl", bare), audited(tmp_path / "padded.jsonl", padded)
    assert two.data["coverage"]["padding"] == 12 * len(bare)
    assert one.data["coverage"]["padding"] == 0
    assert two.metrics == pytest.approx(one.metrics, nan_ok=True)
    assert told(two) == told(one)
    # Without the tokens nobody knows: the trainer's numbers differ, and rows have lengths of their own.
    assert audited(tmp_path / "bare.jsonl", padded, without=("tokens",)).data["coverage"]["padding"] == 0


@pytest.mark.parametrize(
    ("of_rows", "cause"),
    [(np.cumsum, "running"), (lambda x: np.full(len(x), x.mean()), "repeated")],
)
@pytest.mark.parametrize("column", ["logp_rollout", "logp_old"])
def test_sums_and_means_over_a_response_are_no_log_probs_of_its_tokens(tmp_path, of_rows, cause, column):
    rows = changed(log(), lambda i, row: {column: of_rows(row[column])})
    found = audited(tmp_path / "log.jsonl", rows)
    assert ("not_per_token", "stop") in told(found)
    assert found.data["coverage"]["causes"] == {column: {cause: 24 * len(rows)}}
    masked = [{**row, "mask": [1] * 20 + [0] * 4} for row in rows]
    assert audited(tmp_path / "masked.jsonl", masked).data["coverage"]["causes"] == {column: {cause: 20 * len(rows)}}


def test_one_number_in_every_column_is_a_log_of_one_number(tmp_path):
    rows = changed(log(), lambda i, row: {name: [-1.5] * 24 for name in ("logp_rollout", "logp_old")})
    assert audited(tmp_path / "log.jsonl", rows).data["coverage"]["causes"] == {}


# -- what has a place, and was not there at first --------------------------------------------------


@pytest.mark.parametrize(("places", "rule"), [(slice(23, 24), "shape_last_token"), (slice(0, 2), "shape_support")])
def test_a_gap_that_has_a_place_and_grows_from_nothing_is_no_fault_of_inputs_or_labels(tmp_path, places, rule):
    """A policy that learns when to stop, sampled by weights of a while ago, has its drift at the last token."""

    def moved(size):
        def change(i, row):
            logp = row["logp_old"].copy()
            logp[places] -= size(row["step"]) * (1 + np.cos(i))
            return {"logp_old": logp}

        return changed(log(steps=16), change)

    without = ("version", "rollout_version", "entropy")
    growing = audited(tmp_path / "growing.jsonl", moved(lambda step: 0.5 * min(step, 5) / 5), without=without)
    always = audited(tmp_path / "always.jsonl", moved(lambda step: 0.5), without=without)
    assert rule in {r for r, _ in told(always)}
    assert not {r for r, _ in told(growing)} & {rule, "shape_first_tokens", "shape_end", "misaligned"}
    (shape, *_) = growing.data["shapes"]["found"]
    assert shape["first"] <= shape["first_high"] < shape["gap"] / 3


# -- the old log-probs, and constants ----------------------------------------------------------------


def moving(rows, size, *, seed=1):
    """The rows with log-probs of a policy that trains, which differs from the rollout's by noise of a size."""
    rng = np.random.default_rng(seed)

    def current(i, row):
        uncertain = 1 - np.exp(row["logp_rollout"])
        return {"logp": np.minimum(row["logp_rollout"] + size * rng.normal(size=24) * uncertain, 0.0)}

    return changed(rows, current)


def test_old_log_probs_that_are_of_neither_policy_are_named(tmp_path):
    rng = np.random.default_rng(2)
    rows = moving(log(), 0.02)
    assert told(audited(tmp_path / "right.jsonl", rows)) == []
    other = changed(
        rows, lambda i, row: {"logp_old": np.minimum(row["logp_rollout"] + 0.15 * rng.normal(size=24), 0.0)}
    )
    assert told(audited(tmp_path / "other.jsonl", other))[0] == ("old_apart", "act")
    # An engine that is as far from both is another matter.
    engine = changed(
        rows, lambda i, row: {"logp_rollout": np.minimum(row["logp_rollout"] + 0.3 * rng.normal(size=24), 0.0)}
    )
    assert "old_apart" not in [rule for rule, _ in told(audited(tmp_path / "engine.jsonl", engine))]


def test_old_log_probs_that_copy_the_rollouts_are_a_question(tmp_path):
    rows = moving(log(), 0.5)
    copied = changed(rows, lambda i, row: {"logp_old": row["logp_rollout"]})
    found = audited(tmp_path / "copied.jsonl", copied, without=["entropy"])
    assert told(found)[0][0] == "old_copied"
    assert not {"update_too_large", "batch_reused", "updates_drift"} & {rule for rule, _ in told(found)}
    near = changed(moving(log(), 0.01), lambda i, row: {"logp_old": row["logp_rollout"]})
    assert told(audited(tmp_path / "near.jsonl", near)) == []


@pytest.mark.parametrize("constant", [-0.05, -0.02])
def test_a_constant_on_every_token_is_no_filter(tmp_path, constant):
    rows = changed(log(temperature=0.3), lambda i, row: {"logp_old": row["logp_old"] + constant})
    assert told(audited(tmp_path / "log.jsonl", rows, without=["entropy"]))[0] == ("constant_offset", "act")


def test_half_of_the_responses_are_not_all_but_the_first(tmp_path):
    rng = np.random.default_rng(3)

    def off(which):
        def change(i, row):
            noise = 0.35 * rng.normal(size=24) * (1 - np.exp(row["logp_rollout"]))
            return {"logp_old": np.minimum(row["logp_old"] + noise, 0.0)} if which(i % 4) else {}

        return changed(log(steps=24), change)

    for name, which in {"odd": lambda i: i % 2, "one": lambda i: i == 2}.items():
        found = audited(tmp_path / f"{name}.jsonl", off(which), without=["entropy"])
        assert not [row for row in found.data["shapes"].get("found", ()) if row["kind"] == "group"], name
    later = audited(tmp_path / "later.jsonl", off(lambda i: i > 0), without=["entropy"])
    assert [row["kind"] for row in later.data["shapes"]["found"]][:1] == ["group"]


def test_entropies_of_the_policy_that_trains_may_differ_as_far_as_it_moved(tmp_path):
    rng, rows = np.random.default_rng(4), []
    for row in log():
        logits = 2 * rng.normal(size=(24, VOCAB))
        p, after = softmax(logits), softmax(1.2 * logits)
        drawn = [rng.choice(VOCAB, p=of_token) for of_token in p]
        logp, logp_after = np.log(p[np.arange(24), drawn]), np.log(after[np.arange(24), drawn])
        entropy = -(after * np.log(after)).sum(-1)
        rows.append({**row, "logp_rollout": logp, "logp_old": logp + 1e-6, "logp": logp_after, "entropy": entropy})
    found = audited(tmp_path / "log.jsonl", rows)
    assert abs(found.metrics["record/entropy_gap"]) > 0.05
    assert "entropy_off" not in [rule for rule, _ in told(found)]


# -- faults that begin at one step -----------------------------------------------------------------


def shifted(row):
    return {"logp_old": np.roll(row["logp_old"], 1)}


def turned(row):
    return {"advantages": [-a for a in row["advantages"]]}


@pytest.mark.parametrize(("change", "rule"), [(shifted, "misaligned"), (turned, "advantages_opposed")])
@pytest.mark.parametrize("first", [0, 12, 20])
def test_a_fault_that_begins_at_one_step_is_named_and_dated(tmp_path, change, rule, first):
    """Also where most of the log is without it."""
    rows = [{**row, **(change(row) if row["step"] >= first else {})} for row in log(30, prompts=8)]
    (found,) = [f for f in audited(tmp_path / "log.jsonl", rows).findings if f.rule == rule]
    assert found.severity in ("act", "stop")
    assert abs((found.step or 0) - first) <= (2 if first else 4)
    assert not first or found.steps >= 0.8 * (30 - first)


def test_a_part_of_a_log_is_judged_where_something_changed(tmp_path):
    """Not where the gap drifts, wanders, or falls."""
    calm = audited(tmp_path / "calm.jsonl", log(30)).data["since"]
    assert calm == []
    rows = [{**r, "logp_old": r["logp_old"] + 0.05 * (r["step"] >= 18) * (-1) ** np.arange(24)} for r in log(30)]
    (part,) = audited(tmp_path / "jump.jsonl", rows).data["since"]
    assert (part["step"], part["steps"]) == (18, 12)
    assert part["after"] == pytest.approx(0.05, rel=0.1)
    assert part["overall"]["batch/tokens"] == 12 * 6 * 4 * 24
    fell = [{**r, "logp_old": r["logp_old"] + 0.05 * (r["step"] < 18) * (-1) ** np.arange(24)} for r in log(30)]
    assert audited(tmp_path / "fell.jsonl", fell).data["since"] == []


def test_few_tokens_name_no_cause(tmp_path):
    """Two tokens whose log-probs are far apart, beside forty of them."""
    one = {"logp_rollout": [-3.0, -1.0], "logp": [-0.2, -2.0]}
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(one) + "\n")
    two = od.audit(path, out=tmp_path / "two").data["verdict"]
    assert (two["level"], two["text"].split(" no cause")[0]) == ("watch", "Of 2 tokens")
    path.write_text((json.dumps(one) + "\n") * 20)
    assert od.audit(path, out=tmp_path / "forty").data["verdict"]["level"] == "stop"


def test_equal_columns_are_a_question(tmp_path):
    rows = [{**row, "logp_old": row["logp_rollout"]} for row in log()]
    assert told(audited(tmp_path / "log.jsonl", rows)) == [("columns_equal", "info")]


@pytest.mark.parametrize("share", [2, 9])
def test_a_shift_in_some_responses_is_named(tmp_path, share):
    """One in two, or one in nine, of all steps."""
    rows = [{**row, **(shifted(row) if i % share == 1 else {})} for i, row in enumerate(log())]
    first = audited(tmp_path / "log.jsonl", rows).findings[0]
    assert first.rule in ("misaligned_some", "misaligned")
    assert first.severity == "stop"


def test_rewards_that_are_nan_are_missing(tmp_path):
    rows = [{**row, "reward": math.nan if row["step"] >= 9 else row["reward"]} for row in log()]
    (found,) = audited(tmp_path / "log.jsonl", rows).findings
    assert (found.rule, found.evidence[0].metric) == ("side_field_many", "data/lacking_frac/rewards")
    assert found.evidence[0].value == pytest.approx(0.25)


@pytest.mark.parametrize(("recorded", "severity"), [(0.93, "act"), (1.0, None)])
def test_a_small_gap_is_a_temperatures_where_the_log_records_one(tmp_path, recorded, severity):
    """Of .004 nat a token, below what is asked about without a record."""
    rows, at_one = log(tokens=60, temperature=0.93), log(tokens=60, temperature=0.93, recorded=1.0)
    rows = [{**row, "logp_old": other["logp_old"]} for row, other in zip(rows, at_one, strict=True)]
    found = audited(tmp_path / "log.jsonl", rows, without=("entropy",), temperature=recorded)
    assert 0.001 < found.metrics["mismatch/k3"] < 0.02
    named = {f.rule: f.severity for f in found.findings}
    assert named.get("untempered_trainer") == severity


def test_old_log_probs_that_are_scored_again_are_named(tmp_path):
    """Equal to the current ones though updates lie between; equal before the first update they may be."""
    rows = [{**row, "logp": row["logp_old"], "updates_before": i % 4} for i, row in enumerate(log())]
    assert ("old_recomputed", "act") in told(audited(tmp_path / "log.jsonl", rows))
    first = [{**row, "updates_before": 0} for row in rows]
    assert told(audited(tmp_path / "first.jsonl", first)) == []
