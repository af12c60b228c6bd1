"""`offdrift bound` as a person uses it: examples that run, answers that hold, mistakes that are named."""

import json
import re
import shlex

import pytest
from typer.testing import CliRunner, Result

from offdrift.certificate import all_bounds, tightest
from offdrift.cli import application
from offdrift.errors import OffdriftError

TABLE_1 = "--T 4096 --delta 1e-4 --eps 5e-3 --kl-seq 0.01 --tv-seq 0.05"


def bound(words: str, width: int = 120, monkeypatch: pytest.MonkeyPatch | None = None) -> Result:
    if monkeypatch is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    return CliRunner().invoke(application(), ["bound", *shlex.split(words)])


def answers(words: str) -> dict[str, dict]:
    done = bound(words + " --json")
    assert done.exit_code == 0, done.output
    return {row["constants"]: row for row in json.loads(done.stdout)}


def test_each_question_is_answered_for_both_constants_or_one():
    found = answers("--delta 1e-4 --solve T")
    assert (found["sharp"]["value"], found["paper"]["value"]) == (9999, 383)
    assert list(answers("--delta 1e-4 --solve T --constants sharp")) == ["sharp"]
    known = {"delta": "--T 4096 --target 1", "eps": "--T 4096 --delta 1e-2", "kl_seq": "--T 4096 --delta 1e-2"}
    for name, words in known.items():
        for constants, row in answers(f"{words} --solve {name}").items():
            limits = {"delta": 1e-2, name: row["value"]}
            value = tightest(all_bounds(horizon=4096, **limits, constants=constants)).value
            assert value == pytest.approx(1, rel=1e-9)


def test_bounds_beyond_the_paper_and_their_questions_backwards():
    rows = {r["bound"]: r for r in json.loads(bound("--T 3 --delta inf --chi2 0.1 --reward-sd 0.2 --json").stdout)}
    assert rows["variance"]["sharp"] == pytest.approx(0.2 * 0.031**0.5)
    assert rows["unified"]["sharp"] == rows["variance"]["sharp"]
    assert rows["variance"]["paper"] is None
    far = "--T 1000 --delta inf --target 0.1 --solve"
    for words, want, row in (
        ("--T 2 --delta inf --target 0.1 --solve chi2 --reward-sd 0.2", 0.5, "variance"),
        ("--T 2 --delta inf --target 0.1 --solve reward_sd --chi2 0.5", 0.2, "variance"),
        (f"{far} hellinger_seq", 0.1 / 37, "sequence_hellinger"),
        (f"{far} kl_rewarded --kl-unrewarded 0.01", 0.1, "two_sided"),
        (f"{far} kl_unrewarded --kl-rewarded 0.01", 0.1, "two_sided"),
    ):
        found = answers(words)["sharp"]
        assert (found["value"], found["attained_by"]) == (pytest.approx(want), row)
    # .05 sqrt(2^T - 1 - T): .05 at T = 2, .1 at T = 3.
    longest = answers("--delta inf --chi2 1 --reward-sd 0.05 --solve T --target 0.0999")["sharp"]
    assert (longest["value"], longest["attained_by"]) == (2, "variance")
    anything = answers("--T 2 --delta inf --target 0.1 --solve reward_sd --chi2 0.01")["sharp"]
    assert (anything["any"], anything["value"]) == (True, None)


def test_the_target_is_the_reward_range_unless_told():
    told = answers("--T 100 --reward-range 5 --solve delta --target 5")
    assert answers("--T 100 --reward-range 5 --solve delta") == told
    assert answers("--T 100 --solve delta")["sharp"]["value"] == pytest.approx(told["sharp"]["value"], rel=1e-9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--T 0 --delta 0.1", "horizon = 0"),
        ("--T 10 --delta inf --chi2 1 --reward-sd 0.6", "reward_sd = 0.6; rewards in a range of 1"),
        ("--T 10 --delta 1 --solve reward_sd", "solving for reward_sd needs chi2"),
        ("--T 10 --delta 0.1 --eps 1.5", "eps = 1.5; a total variation lies in [0, 1]"),
        ("--T 10 --delta 0.1 --kl-seq 0.1 --kl-rate 0.1", "kl_seq and kl_rate are both given"),
        ("--T 10 --delta 0.1 --solve delta", "delta is given and solved for"),
        ("--T 10 --delta 0.1 --solve kl_seq --kl-rate 0.1", "kl_seq is solved for"),
        ("--T 0 --delta 0.1 --chart nowhere.png", "horizon = 0"),
        ("--T 9 --delta 0.1 --chart bounds.pdf", "bounds.pdf ends in '.pdf'; a chart is a .html, .svg or .png file"),
        ("--from nowhere", "nowhere holds no measured drift"),
    ],
)
def test_numbers_that_cannot_be_are_our_errors(words, said):
    done = bound(words)
    assert isinstance(done.exception, OffdriftError), done.output
    assert said in str(done.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--delta 0.1", "give --T"),
        ("--T 10", "give --delta"),
        ("--T 10 --delta 0.1 --target 1", "--target belongs to --solve"),
        ("--T 10 --delta 0.1 --reward-sd 0.1", "--reward-sd belongs to --chi2"),
        ("--T 10 --delta 0.1 --solve T", "--T is given and solved for"),
        ("--T 10 --solve eps", "give --delta"),
        ("--T 10 --solve delta --chart x.png", "leave out --solve"),
        ("--T 10 --delta 0.1 --constants half", "half"),
        ("--T 1.5 --delta 0.1", "'--T'"),
    ],
)
def test_a_command_that_makes_no_sense_says_what_is_missing(words, said):
    done = bound(words)
    assert done.exit_code == 2
    assert said in re.sub(r"\s*│?\n│?\s*", " ", done.output)


@pytest.mark.parametrize(("ending", "first"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!doctype html>")])
def test_the_chart_is_one_file_of_the_kind_that_its_name_says(ending, first, tmp_path, monkeypatch):
    done = bound(f"{TABLE_1} --chart {tmp_path / 'bounds'}.{ending}", monkeypatch=monkeypatch)
    assert done.exit_code == 0
    (file,) = tmp_path.iterdir()
    assert str(file) in done.stdout
    assert file.read_bytes()[:16].lower().startswith(first.lower())
    silent = bound(f"--T 20 --delta 0.01 --json --chart {file}")
    assert "wrote" not in silent.stdout
    assert file.stat().st_size > 1000


EXACT = {
    "divergence/kl_rollout_current_mean": 2e-3,
    "divergence/kl_rollout_current_max": 0.08,
    "divergence/tv_rollout_current_mean": 0.01,
    "divergence/tv_rollout_current_max": 0.15,
}


def last(words: str) -> dict:
    done = bound(words + " --json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)[-1]


def test_an_audit_gives_its_drift_and_its_longest_response(tmp_path):
    overall = {**EXACT, "response/length_max": 100.0}
    (tmp_path / "audit.json").write_text(json.dumps({"kind": "audit", "overall": overall}))
    known = {"delta": 0.08, "eps": 0.15, "mean_tv": 0.01}
    want = tightest(all_bounds(horizon=100, kl_seq=100 * 2e-3, **known, constants="sharp"))
    for path in (tmp_path, tmp_path / "audit.json"):
        got = last(f"--from {path}")
        assert got["sharp"] == pytest.approx(want.value, rel=1e-12)
        assert got["kl_per_token"] == pytest.approx(2e-3)
        assert "the largest that were met" in got["source"]
    # What is given counts, and the rest is still measured.
    longer = tightest(all_bounds(horizon=400, kl_seq=400 * 1e-3, **known, constants="sharp"))
    assert last(f"--from {tmp_path} --T 400 --kl-rate 1e-3")["sharp"] == pytest.approx(longer.value, rel=1e-12)
    # Given or solved for, a KL of sequences stands instead of the measured one per token.
    whole = tightest(all_bounds(horizon=100, kl_seq=0.05, **known, constants="sharp"))
    assert last(f"--from {tmp_path} --kl-seq 0.05")["sharp"] == pytest.approx(whole.value, rel=1e-12)
    solved = answers(f"--from {tmp_path} --solve kl_seq --target {whole.value!r}")["sharp"]
    assert solved["value"] == pytest.approx(0.05, rel=1e-9)
    assert last("--T 100 --delta 0.1").get("source") is None
    rows = answers(f"--from {tmp_path} --solve T --target 0.5")
    assert rows["sharp"]["value"] == 249  # below 0.5 / 2e-3 tokens


def test_sampled_log_probs_give_a_rate_and_no_maximum(tmp_path):
    overall = {"mismatch/k3": 1e-3, "response/length_max": 50}
    (tmp_path / "audit.json").write_text(json.dumps({"kind": "audit", "overall": overall}))
    got = last(f"--from {tmp_path}")
    assert got["sharp"] == pytest.approx(50 * 1e-3)  # the KL of sequences alone
    assert "sampled tokens alone (mismatch/k3)" in got["source"]
    (tmp_path / "audit.json").write_text(json.dumps({"kind": "audit", "overall": {"reward/mean": 1}}))
    assert "neither exact divergences nor k3" in str(bound(f"--T 9 --from {tmp_path}").exception)


def test_a_run_gives_its_first_arm_by_tokens_and_an_arm_itself(tmp_path):
    arms = {"a": (1e-3, 0.02), "b": (4e-3, 0.3)}
    head = {"recipe": {"arms": {"b": {}, "a": {}}, "rollout": {"max_tokens": 30}}}
    (tmp_path / "run.json").write_text(json.dumps(head))
    for name, (mean, largest) in arms.items():
        (tmp_path / "arms" / name).mkdir(parents=True)
        lines = [
            {
                "batch/tokens": 100,
                "divergence/grade": "interval",
                "divergence/kl_rollout_current_mean": mean,
                "divergence/kl_rollout_current_max": largest,
            },
            {
                "batch/tokens": 300,
                "divergence/kl_rollout_current_mean": 2 * mean,
                "divergence/kl_rollout_current_max": 0.01,
            },
        ]
        (tmp_path / "arms" / name / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines) + '{"batch/to'
        )
    chosen = {tmp_path: arms["b"], tmp_path / "run.json": arms["b"], tmp_path / "arms" / "a": arms["a"]}
    for path, (mean, largest) in chosen.items():
        got = last(f"--from {path}")
        assert got["kl_per_token"] == pytest.approx(1.75 * mean)  # (100 + 2 * 300) / 400
        assert got["from_delta"]["sharp"] == pytest.approx(
            tightest(all_bounds(horizon=30, delta=largest, constants="sharp")).value
        )
        assert "interval divergences of the current policy" in got["source"]
        assert "the true drift may be larger" in got["source"]


def test_a_check_gives_what_its_engines_differ_by(tmp_path):
    own = {"kl_mean": 1.42e-3, "kl_max": 0.029, "tv_mean": 0.012, "tv_max": 0.09}
    check = {"kind": "check", "baseline": own, "sampling": {"max_tokens": 64}}
    (tmp_path / "check.json").write_text(json.dumps(check))
    got = last(f"--from {tmp_path}")
    assert got["kl_per_token"] == pytest.approx(1.42e-3)
    assert got["vacuous_from"]["sharp"] == 705  # 1 / 1.42e-3 = 704.2, where nothing else is smaller
    assert got["sharp"] == pytest.approx(
        tightest(
            all_bounds(horizon=64, delta=0.029, eps=0.09, mean_tv=0.012, kl_seq=64 * 1.42e-3, constants="sharp")
        ).value
    )


def test_every_example_of_the_help_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = [line.strip() for line in bound("--help").stdout.splitlines() if line.startswith("  offdrift bound ")]
    assert len(examples) == 5
    for example in examples:
        done = bound(example.removeprefix("offdrift bound"))
        assert done.exit_code == 0, done.output
    assert (tmp_path / "bounds.html").exists()
