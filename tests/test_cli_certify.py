"""`offdrift certify` as a person uses it: an arm, a checkpoint, mistakes that are named, Ctrl-C."""

import copy
import importlib
import itertools
import json
import math
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner, Result

import offdrift.cli
from offdrift.certificate import TrustRegion
from offdrift.certificate.certify import certify as certificate_of
from offdrift.engines.hf import TransformersEngine
from offdrift.judge import load_rules
from offdrift.methods.describe import trained_return
from offdrift.models import load_model, save_for_engine
from offdrift.prove.certify import judge
from offdrift.records import Sampling
from offdrift.records.recorder import write_log
from offdrift.records.store import read, write
from tests.audit.logs import drawn as logged

audit = importlib.import_module("offdrift.prove.certify")
LONGEST, SEQUENCES = 5, 6


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an arm as a run leaves it: three batches, and the model that they trained."""
    folder = tmp_path_factory.mktemp("run") / "arms" / "none"
    model, tokenizer = load_model("tiny-qwen3", seed=0)
    engine = TransformersEngine(model, dtype="float32")
    sampling, g = Sampling(max_tokens=LONGEST), torch.Generator().manual_seed(0)
    for i in range(3):
        prompts = [[5, 6, 10 + 3 * i + j // 2] for j in range(SEQUENCES)]
        drawn = engine.generate(prompts, sampling, seed=i, evidence="full")
        drawn = drawn.with_(rewards=torch.rand(SEQUENCES, generator=g), group_ids=torch.arange(SEQUENCES) // 2)
        write(drawn, folder / "rollouts" / f"batch-{i}.parquet")
    trained = copy.deepcopy(model)
    with torch.no_grad():
        for p in trained.parameters():
            p += 0.05 * p.std() * torch.randn(p.shape, generator=g)
    save_for_engine(trained, tokenizer, folder / "model")
    return folder


def certify(*words: object, **options) -> Result:
    return CliRunner().invoke(offdrift.cli.application(), ["certify", *map(str, words)], **options)


def answer(*words: object) -> dict:
    done = certify(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_an_arm_is_judged_by_its_own_model_and_not_fresh(arm):
    found = answer(arm)
    assert found["model"] == str(arm / "model")
    assert (found["files"], found["tokens"]) == (3, 3 * SEQUENCES * LONGEST)
    assert (found["sequences"], found["prompts"]) == (3 * SEQUENCES, 9)
    assert found["holds_for"] == "one policy, one look"
    assert found["fresh"] is False
    assert found["certified"] is False
    assert found["gain_low"] is None
    assert "learned from these very prompts" in found["verdict"]
    assert found["region"] == {"horizon": LONGEST, "delta": 0.05, "eps": None, "tau": None}
    assert found["delta_seen"][1] > 1e-3, "it did move"


def test_only_a_model_that_did_not_learn_from_the_rollouts_is_fresh(arm, tmp_path):
    model, rollouts = arm / "model", arm / "rollouts"
    assert answer(arm, "--model", "tiny-qwen3")["fresh"] is True
    assert answer(arm, "--model", "tiny-qwen3", "--trained-on")["fresh"] is False
    for paths in ([arm], [rollouts], [rollouts / "batch-1.parquet"]):
        assert answer(*paths, "--model", model)["fresh"] is False, "it is the arm's own"
    assert answer(rollouts / "batch-1.parquet", "--model", f"{arm}/../none/model")["fresh"] is False
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "one.parquet").symlink_to(rollouts / "batch-0.parquet")
    assert answer(tmp_path / "one.parquet", "--model", tmp_path / "model")["fresh"] is False, "a link hides no arm"
    elsewhere = write(read(arm / "rollouts" / "batch-0.parquet"), tmp_path / "fresh.parquet")
    found = answer(elsewhere, "--model", arm / "model")
    assert found["fresh"] is True
    assert found["gain_low"] is not None
    assert answer(elsewhere, arm, "--prompts", "listed")["fresh"] is False, "the arm's model, and its own among them"


def test_power_says_how_many_prompts_would_certify_the_gain_that_was_seen(arm, tmp_path):
    assert "power" not in answer(arm)
    batch = read(arm / "rollouts" / "batch-0.parquet")
    # What the model makes likelier is what was right: a gain for certain, whatever was drawn.
    rescored = TransformersEngine(str(arm / "model")).rescore(batch, evidence="sampled")
    likelier = batch.segments.sum(rescored.logp_rollout - batch.logp_rollout) > 0
    assert likelier.any()
    certain = write(batch.with_(rewards=likelier.float()), tmp_path / "a.parquet")
    curve = answer(certain, "--model", arm / "model", "--power", "--T", LONGEST)["power"]
    assert len(curve) >= 3
    sizes, chances = zip(*((p["prompts"], p["probability"]) for p in curve))
    assert list(sizes) == sorted(sizes)
    # Every interval of a looser certificate is narrower.
    plan = answer(certain, "--model", arm / "model", "--power", "--T", LONGEST)["plan"]
    assert plan["curves"]["direct"] == curve
    assert set(plan["needed"]) - {"control"} == {"direct", "fresh"}
    assert plan["words"].startswith(f"For KL of sequences {plan['kl_seq']:.3g} nat, {plan['length']:.4g} tokens")
    looser = answer(certain, "--model", arm / "model", "--power", "--T", LONGEST, "--alpha", 0.9)["power"]
    both = [(p["probability"], chances[sizes.index(p["prompts"])]) for p in looser if p["prompts"] in sizes]
    assert len(both) >= 3
    assert all(wide >= strict for wide, strict in both)
    assert sum(wide for wide, _ in both) > sum(strict for _, strict in both)
    refused = certify(certain, "--model", arm / "model", "--power", "--anytime")
    assert refused.exit_code == 2
    assert "leave out --anytime" in " ".join(refused.output.split())
    shown = certify(certain, "--model", arm / "model", "--power", "--T", LONGEST)
    assert "has learned" not in shown.output
    assert "has learned" in certify(arm, "--power").output
    assert f"{sizes[-1]:,} prompts {chances[-1]:.0%}" in " ".join(shown.output.split())


def test_json_is_the_certificate(arm):
    words = ("--delta", 0.2, "--eps", 0.4, "--tau", 0.5, "--T", 9, "--reward-range", -1, 2, "--alpha", 0.1, "--constants", "paper", "--token-budget", 12)  # fmt: skip
    found = answer(arm, "--model", "tiny-qwen3", *words)
    region = TrustRegion(horizon=9, delta=0.2, eps=0.4, tau=0.5)
    policy, _ = load_model("tiny-qwen3", seed=0)
    files = sorted((arm / "rollouts").glob("*.parquet"))
    evidence = judge(files, policy, region=region, token_budget=12).evidence
    proof = certificate_of(evidence, reward_range=(-1.0, 2.0), alpha=0.1, constants="paper")
    about = {"files": 3, "skipped": 0, "rollout_version": 0, "tokens": 90, "repeated": 0, "model": "tiny-qwen3"}
    about["trained_objective"] = about["old"] = None  # no arm of a run, no old policy
    about["alphas"] = judge(files, policy, region=region).alphas.as_dict()
    about |= load_rules().as_record("Judged by the built-in rules.")
    assert found == json.loads(json.dumps({**about, **proof.as_dict()}))


def test_an_old_policy_splits_the_drift_in_two(arm):
    """The rollout engine held the old policy's weights: no mismatch, and all of the drift is staleness."""
    found = answer(arm, "--old", "tiny-qwen3")["alphas"]
    assert found["invest"] == "staleness"
    assert found["mismatch"]["grade"] == found["staleness"]["grade"] == "exact"
    assert found["mismatch"]["high"] < 1e-5 < 1e-3 < found["staleness"]["low"]
    other = answer(arm, "--model", "tiny-qwen3", "--old", arm / "model")["alphas"]
    assert other["staleness"]["low"] == pytest.approx(found["staleness"]["low"], rel=1e-4)
    assert other["mismatch"]["low"] == pytest.approx(found["staleness"]["low"], rel=1e-4)
    assert other["invest"] == "either"
    without = answer(arm)["alphas"]
    assert without["invest"] is None
    assert "--old" in without["missing"]
    shown = " ".join(certify(arm, "--old", "tiny-qwen3").output.split())
    assert "Where to invest: staleness" in shown
    assert "cannot be said" in " ".join(certify(arm).output.split())


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_shows_the_verdict_and_what_was_read(arm, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")
    done = certify(arm, "--model", "tiny-qwen3")
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.replace("│", " ").split())
    assert answer(arm, "--model", "tiny-qwen3")["verdict"] in text
    assert "3 files, 90 tokens, judged: tiny-qwen3" in text
    assert "not fresh" not in text
    assert "…" not in text


@pytest.mark.parametrize(
    ("aggregate", "advantage", "words"),
    [
        ("seq_mean_token_mean", "grpo", "E[(R / sigma - b) / |y|], not J = E[R]: it can rise while J falls"),
        ("token_mean", "rloo", "J / E[|y|]: J in other units"),
    ],
)
def test_beside_the_certificate_of_j_stands_what_the_arm_was_trained_to_raise(
    arm, monkeypatch, aggregate, advantage, words
):
    head = {"trained_return": {"none": trained_return(aggregate, advantage)}}
    run = arm.parent.parent / "run.json"
    monkeypatch.setenv("COLUMNS", "80")
    try:
        run.write_text(json.dumps(head))
        found, text = answer(arm), " ".join(certify(arm).stdout.split())
        run.write_text(json.dumps({"raises": head["trained_return"]}))
        assert answer(arm)["trained_objective"] == head["trained_return"]["none"], "a run of 0.1"
        run.write_text("{")
        assert answer(arm)["trained_objective"] is None
    finally:
        run.unlink()
    assert found["about"] == "J = E[R], the mean reward of a response"
    assert found["trained_objective"] == head["trained_return"]["none"]
    assert "The certificate is about J = E[R], the mean reward of a response." in text
    assert f"What the arm's steps raise ({advantage}): {words}" in text


def test_names_of_files_and_models_are_text(arm, tmp_path, monkeypatch):
    name = "[red]x[bold] :smile:"
    (tmp_path / name).mkdir()
    (tmp_path / name / "model").symlink_to(arm / "model")
    drawn = read(arm / "rollouts" / "batch-0.parquet")
    rollouts = write(drawn, tmp_path / f"{name.replace(':', '')}.parquet")
    # as on a terminal, where the name of each file is shown while it is read
    done = certify(rollouts, "--model", tmp_path / name / "model", env={"FORCE_COLOR": "1", "COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    assert f"judged: {tmp_path / name / 'model'}. Judged by the built-in rules.\n" in re.sub(
        r"\x1b\[[0-9;]*m", "", done.stdout
    )
    assert rollouts.name in done.stderr


def mistake(*words: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """What `offdrift certify WORDS` says when it refuses: one line, or the box of a usage error."""
    monkeypatch.setattr(sys, "argv", ["offdrift", "certify", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        offdrift.cli.main()
    out, err = capsys.readouterr()
    assert stopped.value.code in (1, 2), err
    assert out == ""
    assert len(err.strip().splitlines()) == 1 or "╭─ Error" in err
    return err


TINY = ("--model", "tiny-qwen3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--model is missing: name the checkpoint that is to be judged"),
        (("--model", "./nowhere"), "RecipeError: model = './nowhere' cannot be loaded"),
        ((*TINY, "--reward-range", 0, 0.01), "outside [0, 0.01]; give reward_range="),
        ((*TINY, "--alpha", 2), "alpha = 2.0; a probability of error lies in (0, 1)"),
        ((*TINY, "--constants", "half"), "'half' is not one of"),
        ((*TINY, "--of", 0), "greater than or equal to 1"),
        ((*TINY, "--look", 2, "--anytime"), "give one of the two"),
    ],
)  # fmt: skip
def test_mistakes_are_one_message(arm, monkeypatch, capsys, words, said):
    assert said in mistake(arm / "rollouts", *words, monkeypatch=monkeypatch, capsys=capsys)


def test_files_that_are_no_rollouts_are_named(arm, tmp_path, monkeypatch, capsys):
    def refused(path: Path) -> str:
        said = mistake(path, *TINY, monkeypatch=monkeypatch, capsys=capsys)
        assert said.startswith("RecordError: ")
        assert str(path) in said
        return said

    (tmp_path / "text.parquet").write_text("not parquet at all " * 9)
    assert "corrupt or incomplete" in refused(tmp_path / "text.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "foreign.parquet")
    assert "not of this library" in refused(tmp_path / "foreign.parquet")
    assert "holds no rollouts" in refused(tmp_path / "absent.parquet")
    (tmp_path / "bare[red]").mkdir()
    assert "holds no rollouts" in refused(tmp_path / "bare[red]")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "reward": 1}')
    assert "compared by `certify A B --fresh`" in refused(tmp_path / "rows.jsonl"), (
        "a healthy file is not to be deleted"
    )
    pq.write_table(pa.table({"prompt": ["a"], "reward": [1.0]}), tmp_path / "rows.parquet")
    assert "`certify A B --fresh`" in refused(tmp_path / "rows.parquet")


def test_a_log_of_the_recorder_is_named_with_what_it_lacks(tmp_path, monkeypatch, capsys):
    write_log(logged(sequences=4, steps=1), tmp_path / "log.parquet")
    said = mistake(tmp_path / "log.parquet", *TINY, monkeypatch=monkeypatch, capsys=capsys)
    for words in (
        "it lacks the tokens of the prompts and the settings of sampling",
        "`offdrift train` writes rollouts",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("words", "following"),
    [
        ((), "certify NEW_ROLLOUTS --model"),
        (("--model", "tiny-qwen3"), "--power"),
        (("--model", "tiny-qwen3", "--power"), "certify MORE_ROLLOUTS --model tiny-qwen3"),
        (("--model", "tiny-qwen3", "--anytime"), "certify MORE_ROLLOUTS --model tiny-qwen3"),
    ],
)
def test_the_next_step_follows_from_the_verdict(arm, monkeypatch, words, following):
    monkeypatch.setattr(sys, "argv", ["offdrift", "certify", str(arm), *words])
    done = certify(arm, *words)
    step = done.stderr.rpartition("next: offdrift ")[2]
    assert following in step
    assert "bound" not in step


def test_two_arms_do_not_say_which_model(arm, monkeypatch, capsys, tmp_path):
    other = tmp_path / "other"
    other.symlink_to(arm)
    assert "--model is missing" in mistake(arm, other, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.parametrize(
    ("words", "share", "covers"),
    [
        (("--look", 2, "--of", 5), 6 / math.pi**2 / 20, "this is look 2 at one of 5 policies"),
        (("--anytime", "--of", 4), 1 / 4, "one of 4 policies, however often you look as rollouts arrive"),
    ],
)
def test_what_the_confidence_covers_is_asked_for_and_said(arm, monkeypatch, words, share, covers):
    found = answer(arm, *TINY, "--alpha", 0.2, *words)
    assert found["alpha_total"] == 0.2
    assert found["alpha"] == pytest.approx(0.2 * share)
    assert covers in found["holds_for"]
    assert found["anytime"] is ("--anytime" in words)
    assert all(e["alpha"] < found["alpha"] for e in found["estimates"].values() if e)
    monkeypatch.setenv("COLUMNS", "80")
    shown = " ".join(certify(arm, *TINY, "--alpha", 0.2, *words).stdout.replace("│", " ").split())
    assert f"probability of error 0.2 ({found['holds_for']})" in shown
    assert found["verdict"] in shown


def test_at_every_moment_what_was_said_of_the_first_files_stands(arm):
    files = sorted((arm / "rollouts").glob("*.parquet"))
    looks = [answer(*files[:n], *TINY, "--T", LONGEST, "--anytime", "--alpha", 0.9) for n in (1, 2, 3)]
    assert [found["prompts"] for found in looks] == [3, 6, 9]
    for before, after in itertools.pairwise(looks):
        for name, e in before["estimates"].items():
            assert e["low"] is None or e["low"] <= after["estimates"][name]["low"] + 1e-12, name
            assert e["high"] is None or e["high"] >= after["estimates"][name]["high"] - 1e-12, name
    lows = [found["estimates"]["acceptance"]["low"] for found in looks]
    assert lows[0] == 0 < lows[2], "more prompts say more"


def same_prompts(folder: Path, files: int, *, prompts: int = 4, answers: int = 2) -> list[Path]:
    """Files of the same prompts, whose group ids are each file's own."""
    model, _ = load_model("tiny-qwen3", seed=0)
    engine = TransformersEngine(model, dtype="float32")
    rows, paths = prompts * answers, []
    for i in range(files):
        order = torch.randperm(prompts, generator=torch.Generator().manual_seed(i))
        asked = [[5, 6, 10 + int(order[j // answers])] for j in range(rows)]
        drawn = engine.generate(asked, Sampling(max_tokens=LONGEST), seed=i, evidence="full")
        g = torch.Generator().manual_seed(i)
        drawn = drawn.with_(rewards=torch.rand(rows, generator=g), group_ids=100 * i + torch.arange(rows) // answers)
        paths.append(write(drawn, folder / f"batch-{i}.parquet"))
    return paths


def test_four_prompts_in_eight_files_are_four_draws(tmp_path):
    files = same_prompts(tmp_path, 8)
    refused = certify(*files, *TINY)
    assert refused.exit_code == 1
    assert "32 groups of answers are to 4 distinct prompts" in str(refused.exception)
    drawn = answer(*files, *TINY, "--prompts", "drawn", "--anytime")
    assert (drawn["sequences"], drawn["prompts"], drawn["repeated"]) == (64, 32, 0)
    assert "is drawn" in drawn["averages_over"]
    listed = (*TINY, "--prompts", "listed")
    found = answer(*files, *listed)
    assert (found["files"], found["sequences"], found["prompts"], found["repeated"]) == (8, 64, 4, 0)
    assert found["estimates"]["gain"]["n"] == 4
    # Where rollouts arrive, what was once judged stays as it was: later answers to a prompt are left out.
    first, arriving = answer(files[0], *TINY, "--anytime"), answer(*files, *listed, "--anytime")
    assert (arriving["files"], arriving["sequences"], arriving["prompts"]) == (8, 8, 4)
    assert arriving["repeated"] == 56
    assert arriving["estimates"] == first["estimates"]
    assert "56 sequences answer prompts of an earlier file, and were left out" in " ".join(
        certify(*files, *listed, "--anytime").stdout.split()
    )


def test_prompts_that_share_a_source_are_one_draw(tmp_path):
    import pyarrow.parquet as pq

    files = same_prompts(tmp_path, 2, answers=1)
    for i, file in enumerate(files):
        table = pq.read_table(file)
        # Both files ask the same four prompts in some order: named by its last token, each has one source.
        sources = [tokens[-1] // 2 for tokens in table.column("prompt_tokens").to_pylist()]
        pq.write_table(table.append_column("source", [[f"text {s}" for s in sources]]), file)
        assert len(set(sources)) == 2, i
    found = answer(*files, *TINY, "--cluster", "source")
    assert (found["sequences"], found["prompts"]) == (8, 2)
    assert "clusters of prompts" in found["averages_over"]
    both = certify(*files, *TINY, "--cluster", "source", "--prompts", "drawn")
    assert both.exit_code == 2
    assert "--cluster and --prompts" in " ".join(both.output.replace("│", " ").split())
    absent = certify(*files, *TINY, "--cluster", "document")
    assert "has no column 'document'" in str(absent.exception)


def test_two_policies_are_compared_by_fresh_answers_without_a_model(tmp_path):
    for name, share in (("before", 4), ("after", 2)):
        rows = [json.dumps({"prompt": f"p{i}", "reward": int(i % share == 0), "text": i // 4}) for i in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    found = answer(before, after, "--fresh")
    assert found["certified"] is True
    assert (found["prompts"], found["answers"], found["rewards"]) == (200, [200, 200], [0.25, 0.5])
    assert 0.15 < found["gain_low"] < found["gain"]["mean"] == 0.25
    assert answer(after, before, "--fresh")["certified"] is False
    shared = answer(before, after, "--fresh", "--of", 8, "--cluster", "text")
    assert (shared["prompts"], shared["alpha"]) == (50, 0.05 / 8)
    said = " ".join(certify(before, after, "--fresh").stdout.replace("│", " ").split())
    assert "J(B) exceeds J(A)" in said
    for words in ((before, "--fresh"), (before, before, "--fresh"), (before, after, "--fresh", "--anytime")):
        assert certify(*words).exit_code == 2
    (tmp_path / "more.jsonl").write_text(before.read_text() + '\n{"prompt": "more", "reward": 1}')
    refused = certify(before, tmp_path / "more.jsonl", "--fresh")
    assert "of A alone" in str(refused.exception)


def reading_until(stop: int, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Ctrl-C while the file at `stop` is read."""
    opened: list[Path] = []

    def reading(path: Path):
        if len(opened) == stop:
            raise KeyboardInterrupt
        opened.append(path)
        return read(path)

    monkeypatch.setattr(audit, "read", reading)
    return opened


def test_mistakes_in_numbers_do_not_wait_for_the_last_file(arm, monkeypatch, capsys):
    opened = reading_until(99, monkeypatch)
    words = (arm, *TINY, "--T", LONGEST, "--alpha", 2)
    mistake(*words, monkeypatch=monkeypatch, capsys=capsys)
    assert len(opened) == 1


def test_interrupted_after_some_files_it_reports_those(arm, monkeypatch):
    first = [arm / "rollouts" / f"batch-{i}.parquet" for i in (0, 1)]
    expected = answer(*first, *TINY)
    reading_until(2, monkeypatch)
    done = certify(arm, *TINY, "--T", LONGEST, "--json")
    assert done.exit_code == 130
    assert json.loads(done.stdout) == expected, "nothing but JSON"
    assert expected["files"] == 2
    assert "interrupted after 2 of 3 files" in done.stderr
    reading_until(0, monkeypatch)  # before the first there is nothing to say
    done = certify(arm, *TINY, "--T", LONGEST, "--json")
    assert done.exit_code == 130
    assert done.stdout == ""
