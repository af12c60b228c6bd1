"""Responses that stand in a log again: by a resumed run, a copied file or rows written twice; and repeats that are none."""

import json

import numpy as np
import pytest
import torch

import offdrift as od
from offdrift.audit import tally
from offdrift.audit.partial import AuditPartial
from offdrift.audit.tally import Repeats, Tally
from tests.audit.logs import log_of


def responses(steps=8, per_step=12, *, tokens=60, seed=0, **more):
    """Responses of two engines that hardly differ, each worth about 60 nats, in groups of four."""
    rng, rows = np.random.default_rng(seed), []
    for step in range(steps):
        for i in range(per_step):
            logp = -rng.exponential(1, tokens)
            rows.append(
                {
                    "step": step,
                    "version": step,
                    "rollout_version": step,
                    "group_id": i // 4,
                    "reward": float(i // 4 % 2),
                }
                | {"logp_rollout": logp.tolist(), "logp_old": (logp * (1 + 1e-3 * rng.normal(size=tokens))).tolist()}
                | more
            )
    return rows


def write(folder, **files):
    folder.mkdir()
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return od.audit(folder)


def rules(found):
    return [(f.rule, f.severity) for f in found.findings]


AGAIN, EVENLY = [("responses_again", "watch")], [("responses_again_evenly", "info")]


def test_a_resumed_run_that_wrote_steps_again_is_said_with_its_place(tmp_path):
    rows = responses()
    found = write(tmp_path / "log", a=rows[:72], b=rows[60:])
    assert rules(found) == AGAIN
    again = found.data["coverage"]["again"]
    assert (again["known"], again["again"], again["steps"]) == (108, 12, [5])
    assert [(place["file"][-7:], place["step"]) for place in again["first"]] == [("a.jsonl", 5), ("b.jsonl", 5)]
    assert again["first"][0]["row"] - 60 == again["first"][1]["row"]
    words = "12 of 108 responses (11 %) repeat an earlier one"
    assert found.data["coverage"]["remarks"][0].startswith(words)


def test_rows_written_twice_and_batches_of_an_earlier_step_are_copies(tmp_path):
    rows = responses()
    assert rules(write(tmp_path / "twice", a=[*rows, *rows[10:15]])) == AGAIN
    late = [{**row, "step": 8, "version": 8, "rollout_version": 8} for row in rows[:12]]
    assert rules(write(tmp_path / "late", a=[*rows, *late])) == AGAIN


def test_a_log_that_holds_every_response_twice_asks(tmp_path):
    rows = responses()
    found = write(tmp_path / "log", a=rows, b=rows)
    assert rules(found) == EVENLY
    assert found.verdict.level == "ok"
    words = "Nearly every response is there 2 times."
    assert words in found.data["coverage"]["remarks"][0]


@pytest.mark.parametrize(
    "epochs",
    [
        pytest.param(lambda row, i: {"logp": [x - 1e-4 * i for x in row["logp_old"]]}, id="another policy trains"),
        pytest.param(lambda row, i: {"updates_before": i}, id="updates on the batch"),
        pytest.param(lambda row, i: {"version": row["version"] + i}, id="newer weights: a replay buffer"),
    ],
)
def test_epochs_of_a_batch_are_no_copies(tmp_path, epochs):
    rows = [row | epochs(row, i) for row in responses() for i in range(2)]
    found = write(tmp_path / "log", a=rows)
    assert found.data["coverage"]["again"]["known"] > 100
    assert found.data["coverage"]["again"]["again"] == 0
    assert not [f for f in found.findings if f.cause == "repeated_rows"]


def test_greedy_answers_to_one_prompt_are_no_copies(tmp_path):
    rows = responses()
    greedy = [rows[i - i % 4] if i < 12 else row for i, row in enumerate(rows)]  # a step of evaluation
    assert rules(write(tmp_path / "some", a=greedy)) == []
    assert rules(write(tmp_path / "all", b=[rows[i - i % 4] for i in range(len(rows))])) == EVENLY


def test_short_or_certain_responses_prove_nothing(tmp_path):
    short = responses(tokens=3)
    assert write(tmp_path / "short", a=[*short, *short]).data["coverage"]["again"]["known"] == 0
    certain = [{**row, "logp_rollout": [-1e-3] * 60, "logp_old": [-1e-3] * 60} for row in responses()]
    found = write(tmp_path / "certain", b=certain)
    assert not [f for f in found.findings if f.cause == "repeated_rows"]


def test_prints_are_the_same_however_parts_are_merged_and_stored(monkeypatch):
    monkeypatch.setattr(tally, "PRINTS_KEPT", 20)
    rng = np.random.default_rng(1)
    logs = [-torch.from_numpy(rng.exponential(1, 300)).float() for _ in range(8)]
    parts = [
        Tally.of(log_of([60] * 5, logp_rollout=x, logp_old=x), file=f"{i}") for i, x in enumerate([*logs, logs[0]])
    ]
    left = right = Repeats()
    for part in parts:
        left = left.merge(part.repeats)
    for part in reversed(parts):
        right = part.repeats.merge(right)
    assert left.responses.shape[1] <= 20
    assert np.array_equal(np.sort(left.responses[0]), np.sort(right.responses[0]))
    assert left.below == right.below < 2**63 - 1
    whole = AuditPartial(tally=parts[0].merge(parts[-1]))
    again = AuditPartial.from_bytes(whole.to_bytes())
    assert again.tally.repeats.copies() == whole.tally.repeats.copies()
    assert whole.tally.repeats.copies()["again"] == 5
