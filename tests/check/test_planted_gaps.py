"""Logs with known data and one planted gap: an audit never says OK over what it has not seen.

Each fault is planted in a log that is known to be clean, and the command is run as a person runs it:
what it prints, its findings, its exit status and its JSON have to say the same.
"""

import html
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Rows = list[dict[str, Any]]
SEQUENCES, TOKENS = 80, 20
N = SEQUENCES * TOKENS


def clean() -> Rows:
    """80 sequences of 20 tokens whose policies differ by half a percent."""
    draw = random.Random(0)
    rows: Rows = []
    for i in range(SEQUENCES):
        mu = [-3 * draw.random() for _ in range(TOKENS)]
        old = [min(x - draw.gauss(0, 0.005), 0.0) for x in mu]
        rows.append({"step": i // 8, "logp_rollout": mu, "logp_old": old, "reward": i % 2})
    return rows


def lines(rows: Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def placeholders(rows: Rows) -> str:
    """-9999 on 18 of 20 tokens."""
    for row in rows:
        row["logp_rollout"][:18] = [-9999.0] * 18
    return lines(rows)


def few_placeholders(count: int) -> Callable[[Rows], str]:
    """Single tokens of the first steps: a finding or none by their share of the whole log, wherever they stand."""

    def fault(rows: Rows) -> str:
        for row in rows[5 : 5 + count]:
            row["logp_rollout"][3] = -9999.0
        return lines(rows)

    return fault


def damaged(rows: Rows) -> str:
    """Nine of ten lines end in the middle."""
    return "".join(json.dumps(r)[: None if i % 10 == 0 else 60] + "\n" for i, r in enumerate(rows))


def not_a_number(rows: Rows) -> str:
    for row in rows[2:]:
        row["logp_old"] = [math.nan] * TOKENS
    return lines(rows)


def zero_filled(rows: Rows) -> str:
    """The first seven tokens of every response."""
    for row in rows:
        row["logp_rollout"][:7] = [0.0] * 7
    return lines(rows)


def greedy(rows: Rows) -> str:
    """A fifth of the tokens is certain, and both policies know it."""
    for row in rows:
        for t in range(0, TOKENS, 5):
            row["logp_rollout"][t], row["logp_old"][t] = 0.0, -1e-5 * t
    return lines(rows)


def advantages_of_one(rows: Rows) -> str:
    rows[0]["advantages"] = 1.0
    return lines(rows)


def versions_of_half(rows: Rows) -> str:
    for row in rows[: SEQUENCES // 2]:
        row |= {"version": row["step"] + 1, "rollout_version": row["step"]}
    return lines(rows)


def each(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Rows], str]:
    """The same fault in every row."""
    return lambda rows: lines([{**r, **change(r)} for r in rows])


def zero_length(rows: Rows) -> str:
    return lines([*rows, *({**rows[0], "logp_rollout": [], "logp_old": []} for _ in range(40))])


def an_old_policy_with_gaps(rows: Rows) -> str:
    """Three policies, one of which scores a quarter of the responses."""
    for i, row in enumerate(rows):
        row["logp"] = list(row["logp_old"])
        if i % 4:
            row["logp_old"] = [math.nan] * TOKENS
    return lines(rows)


def no_rollout_policy(rows: Rows) -> str:
    """What TRL has without vLLM; every tenth token has drifted beyond PPO's clip."""
    for row in rows:
        row |= {"logp_old": row.pop("logp_rollout"), "logp": row["logp_old"], "advantages": 1.0 + row["reward"]}
        row["logp_old"] = [x - 0.5 * (t % 10 == 0) for t, x in enumerate(row["logp_old"])]
    return lines(rows)


@dataclass(frozen=True)
class Planted:
    """A fault, and the truth about the log that has it."""

    fault: Callable[[Rows], str]
    level: str
    rules: tuple[str, ...]
    says: str
    """Part of what is printed."""
    compared: int = N
    unread: float = 0.0
    ratio: str = "mismatch"


EXTRAS = ("tokens", "entropy", "mask", "position", "logp")
"""Numbers per row under names of lists per token, as verl writes its reward function's extras."""
PLANTED = {
    "clean": Planted(lines, "ok", (), "No drift that matters"),
    "placeholders": Planted(placeholders, "stop", ("unscored_most",), "1,440 a placeholder", N // 10),
    "one placeholder": Planted(few_placeholders(1), "ok", (), "1 of 1,600 tokens (0.062 %) could not be compared. 1 token (0.062 %) without a usable rollout log-prob: 1 a placeholder", N - 1),
    "two placeholders": Planted(few_placeholders(2), "watch", ("unscored_some",), "2 a placeholder", N - 2),
    "damaged": Planted(damaged, "stop", ("unread_most",), "72 of 80 rows (90 %)", 8 * TOKENS, 0.9),
    "not a number": Planted(not_a_number, "stop", ("unscored_most",), "1,560 null or NaN", 2 * TOKENS),
    "zero filled": Planted(zero_filled, "act", ("unscored_many",), "560 filled in with 0", 13 * SEQUENCES),
    "greedy": Planted(greedy, "ok", (), "No drift that matters"),
    "advantages of one": Planted(advantages_of_one, "act", ("side_field_many",), "Only 1 of 80 sequences have advantages"),
    "versions of half": Planted(versions_of_half, "act", ("side_field_many",), "Only 40 of 80 sequences have version"),
    "probabilities": Planted(each(lambda r: {"logp_old": [math.exp(x) for x in r["logp_old"]]}), "stop", ("probabilities_logged",), "1,600 a probability", 0),
    "negated": Planted(each(lambda r: {"logp_rollout": [-x for x in r["logp_rollout"]]}), "stop", ("negated_log_probs",), "1,600 with the sign changed", 0),
    "all missing": Planted(each(lambda r: {"logp_rollout": [None] * TOKENS}), "stop", ("unscored_most",), "1,600 null or NaN", 0),
    "newer than trained": Planted(each(lambda r: {"version": 1, "rollout_version": 2}), "act", ("lag_below_zero_many",), "1,600 tokens have a version lag below 0"),
    "zero length": Planted(zero_length, "ok", (), "40 responses have no token"),
    "extra rewards": Planted(each(lambda r: dict.fromkeys(EXTRAS, 0.5)), "ok", (), "No drift that matters"),
    "an old policy with gaps": Planted(an_old_policy_with_gaps, "watch", ("partly_scored",), "1,200 null or NaN", ratio="full"),
    "no rollout policy": Planted(no_rollout_policy, "watch", ("rollout_not_logged",), "staleness is measured", ratio="staleness"),
}  # fmt: skip


RUNS = """
import json, os, runpy, sys
import offdrift.audit.conclude, offdrift.cli, offdrift.audit.page  # once, for all processes
for name, words in json.load(sys.stdin).items():
    if (pid := os.fork()) == 0:
        status = 1
        try:
            with open(words[3] + ".out", "w") as sys.stdout:
                sys.argv = ["offdrift", *words]
                runpy.run_module("offdrift", run_name="__main__")
                status = 0
        except SystemExit as e:
            status = e.code or 0
        finally:
            os._exit(status)
    print(json.dumps([name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]), flush=True)
"""
"""A process for each audit, without importing torch again in each."""


@pytest.fixture(scope="module")
def audits(tmp_path_factory) -> dict[str, tuple[int, str, dict[str, Any]]]:
    """Exit status, output and `audit.json` of every planted log."""
    folder = tmp_path_factory.mktemp("planted")
    words = {}
    for name, planted in PLANTED.items():
        (folder / f"{name}.jsonl").write_text(planted.fault(clean()))
        words[name] = ["audit", str(folder / f"{name}.jsonl"), "--out", str(folder / name), "--fail-on", "watch"]  # fmt: skip
    env = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", RUNS], input=json.dumps(words), capture_output=True, text=True, env=env, check=True)  # fmt: skip
    found = {}
    for name, status in map(json.loads, done.stdout.splitlines()):
        stored = folder / name / "audit.json"
        assert stored.is_file(), (name, done.stderr)
        found[name] = (status, (folder / f"{name}.out").read_text(), json.loads(stored.read_text()))
    return found


@pytest.mark.parametrize("name", PLANTED)
def test_what_an_audit_has_not_seen_is_said_everywhere(audits, name):
    planted, (status, printed, told) = PLANTED[name], audits[name]
    assert told["verdict"]["level"] == planted.level
    assert tuple(f["rule"] for f in told["findings"]) == planted.rules
    assert status == (0 if planted.level == "ok" else 3)
    printed = " ".join(printed.split())
    assert planted.says in printed
    assert ("No drift that matters" in printed) == (planted.level == "ok")
    assert told["overall"]["data/unread_frac"] == planted.unread
    read = round(N * (1 - planted.unread))
    assert told["overall"]["batch/unscored_frac"] == pytest.approx(1 - planted.compared / read)
    histogram = told["histograms"].get(planted.ratio)
    assert (sum(histogram["counts"]) if histogram else 0) == planted.compared


def test_few_unscored_tokens_are_counted_by_name(audits):
    """Of the whole log, not of the steps that were read when it was first seen."""
    (finding,) = audits["two placeholders"][2]["findings"]
    (evidence,) = finding["evidence"]
    assert "(2 of 1,600 tokens)" in evidence["metric"]
    assert evidence["value"] == pytest.approx(2 / 1600)


ASIDE = ("side_field_many", "lag_below_zero_many")
"""Findings about fields beside the log-probs: nothing was left out of any comparison."""


@pytest.mark.parametrize(
    "name", [n for n, p in PLANTED.items() if p.level in ("act", "stop") and p.rules[0] not in ASIDE]
)
def test_what_is_missing_stands_first(audits, name):
    _, printed, told = audits[name]
    assert told["verdict"]["text"].startswith(told["coverage"]["sentences"][0])
    assert list(told).index("coverage") < list(told).index("overall")
    lost = "Not readable" if PLANTED[name].unread else "Not comparable"
    headline = printed.index(lost)
    assert printed.index(told["coverage"]["sentences"][0][:20]) < headline
    kl = printed.find("KL per token")
    assert kl < 0 or headline < kl
    page = (Path(told["source"]["paths"][0]).parent / name / "report.html").read_text()
    assert told["coverage"]["sentences"][0] in html.unescape(page)
    if told["verdict"]["level"] == "stop":
        assert told["suggestion"]["method"] is None


def test_numbers_of_a_field_that_half_of_the_log_has_are_of_that_half(audits):
    _, _, told = audits["versions of half"]
    assert told["coverage"]["partial"] == {
        "rollout_version": {"sequences": 40, "of": 80},
        "version": {"sequences": 40, "of": 80},
    }
    assert told["counts"]["tokens"] == N
    assert sum(b["tokens"] for b in told["facets"]["lag"]) == N // 2
    assert told["overall"]["mismatch/k1"] == pytest.approx(audits["clean"][2]["overall"]["mismatch/k1"])


def test_staleness_is_audited_where_the_log_has_nothing_else(audits):
    _, printed, told = audits["no rollout policy"]
    rows = [json.loads(x) for x in no_rollout_policy(clean()).splitlines()]
    l = [b - a for r in rows for a, b in zip(r["logp_old"], r["logp"])]  # noqa: E741
    k3 = sum(math.expm1(x) - x for x in l) / len(l)
    assert told["overall"]["staleness/k3"] == pytest.approx(k3, rel=1e-4)
    assert not [m for m in told["overall"] if m.startswith(("mismatch", "full", "rollout/"))]
    assert "KL per token" in printed
    clipped = {m["name"]: m["clipped_frac"] for m in told["methods"] if m["why_not"] is None}
    assert clipped["ppo_clip"] == pytest.approx(sum(x > math.log(1.2) for x in l) / len(l))
    why = {m["name"]: m["why_not"] for m in told["methods"]}
    assert "rollout policy" in why["token_tis"]
    assert "rollout policy" in why["decoupled_token_is"]
