"""Logit fusion in training: shares by prompt and update, recipes that cannot act, whole runs, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from offdrift import models
from offdrift.engines.hf import TransformersEngine
from offdrift.errors import RecipeError
from offdrift.models import load_model, tiny_tokenizer
from offdrift.records import Sampling
from offdrift.records.rollouts import Rollouts
from offdrift.records.store import read
from offdrift_lab.train.data.episodes import rollout
from offdrift_lab.train.data.problems import Problem, digest
from offdrift_lab.train.data.source import Source, batch_seed
from offdrift_lab.train.data.tasks import TASKS
from offdrift_lab.train.features.fusion import MixtureSettings, probed_difficulties
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.report.page import render
from offdrift_lab.train.report.stored import read_run
from tests_lab.train.conftest import Digits, short_arms, small_recipe
from tests_lab.train.loop.test_loop import rows, weights
from tests_lab.train.loop.test_old_policy import audited
from tests_lab.train.loop.test_processes import WHITENED, check_step_of_two_processes, two_processes
from tests_lab.train.loop.test_routes import smaller

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TEACHER = "tiny-qwen3-moe"
FUSION = {"teacher": TEACHER, "alpha": 0.8, "decay_updates": 5, "difficulty": "probe"}
ARMS = {
    "fused": {"method": "logit_fusion"},
    "constant": {
        "method": "shaped_is",
        "fusion": {"alpha": 0.6} | dict.fromkeys(("decay_updates", "difficulty", "probe_samples"), "absent"),
    },
    "alone": {"method": "none", "fusion": {"alpha": 0}},
}


@pytest.fixture(autouse=True)
def short(monkeypatch, digits) -> None:
    """A teacher whose distributions are far from uniform, and another architecture than the student's."""
    short_arms(monkeypatch)
    monkeypatch.setattr(models, "tiny_qwen3_moe_config", smaller)


def recipe_of_arms(**changes: Any):
    settings = {"fusion": FUSION, "arms": ARMS, "rollout__dtype": "float32", "optim__lr": 1e-3}
    settings["certificate__looks"] = "once"  # whatever the other arms
    return small_recipe(**{**settings, **changes})


def batches(run: Path, arm: str) -> list[Rollouts]:
    return [read(file) for file in sorted((run / "arms" / arm / "rollouts").glob("*.parquet"))]


def mixture_of(drawn: Rollouts, student: Any, teacher: Any) -> torch.Tensor:
    """log pi_mix over the vocabulary at every token, by unpadded passes and the definition."""
    prompts = drawn.prompt_tokens.split(drawn.prompt_cu_seqlens.diff().tolist())
    responses = drawn.tokens.split(drawn.lengths.tolist())
    expected = []
    for prompt, response, alpha in zip(prompts, responses, drawn.mix_alpha.tolist(), strict=True):
        text = torch.cat([prompt, response])[None]
        with torch.no_grad():
            own, other = (m(input_ids=text).logits[0, len(prompt) - 1 : -1].double() for m in (student, teacher))
        expected.append((alpha * other + (1 - alpha) * own).log_softmax(-1))
    return torch.cat(expected)


def test_a_run_draws_from_the_mixture_that_its_arms_say_and_resumes_bit_for_bit(tmp_path):
    run = tmp_path / "whole"
    recipe = recipe_of_arms()
    train(recipe, run)
    student, tokenizer = load_model("tiny-qwen3", seed=0)
    teacher, _ = load_model(TEACHER, seed=0)
    fused, constant = batches(run, "fused"), batches(run, "constant")
    # Of weights 0, 0, 2, 2, 4, 4: the share falls by 1/5 an update, times the difficulty of the prompt.
    largest = [0.8, 0.8, 0.48, 0.48, 0.16, 0.16]
    alone = TransformersEngine(student, dtype="float32")
    sampling = recipe.rollout.sampling(max_tokens=6, stop_token_ids=(1,))
    for index, (drawn, share) in enumerate(zip(fused, largest, strict=True)):
        assert drawn.provenance.teacher == TEACHER
        difficulty = drawn.mix_alpha / share
        assert (difficulty.min() >= 0) & (difficulty.max() <= 1 + 1e-6)
        assert len(difficulty.unique()) > 1
        if index < 2:
            seed = digest("draw", batch_seed(0, index), 0, "probe") % 2**63
            problems = Digits().sample(4, seed=batch_seed(0, index))
            probe = rollout(alone, problems, Digits(), tokenizer, sampling, samples=4, seed=seed)
            expected = 1 - probe.rewards.view(4, 4).mean(1)
            torch.testing.assert_close(difficulty, expected.repeat_interleave(4))
            torch.testing.assert_close(
                drawn.evidence.logp.double(), mixture_of(drawn, student, teacher), atol=1e-4, rtol=0
            )
    assert all((drawn.mix_alpha == torch.tensor(0.6)).all() for drawn in constant)
    by_arm = {arm: rows(run, arm) for arm in ARMS}
    for row, drawn in zip(by_arm["fused"], fused, strict=True):
        assert row["fusion/alpha_mean"] == pytest.approx(float(drawn.mix_alpha.mean()))
        assert row["fusion/kl_mean"] == pytest.approx(float(drawn.mix_kl.double().mean()))
        assert row["fusion/kl_max"] == pytest.approx(float(drawn.mix_kl.max()))
    first, difficulty = by_arm["fused"][0], fused[0].mix_alpha / 0.8
    assert first["fusion/difficulty_mean"] == pytest.approx(float(difficulty.mean()))
    # At equal weights the mixture is all of the drift.
    assert first["fusion/kl_mean"] > 0.02
    assert first["divergence/kl_rollout_current_mean"] == pytest.approx(first["fusion/kl_mean"], rel=1e-4)
    assert by_arm["fused"][5]["fusion/kl_mean"] < 0.2 * first["fusion/kl_mean"]
    assert not [key for row in by_arm["alone"] for key in row if key.startswith("fusion/") and row[key]]
    assert by_arm["alone"][0]["divergence/kl_rollout_current_mean"] < 1e-9

    def stop(event) -> None:
        if event.kind == "update" and event.step == 5:
            raise KeyboardInterrupt

    cut, recipe = tmp_path / "cut", recipe_of_arms(arms={"fused": ARMS["fused"]})
    with pytest.raises(KeyboardInterrupt):
        train(recipe, cut, watch=stop)
    train(recipe, cut, resume=True)
    assert rows(cut, "fused") == rows(run, "fused")
    assert all(torch.equal(w, weights(run, "fused")[n]) for n, w in weights(cut, "fused").items())
    check_what_is_said(run)


def check_what_is_said(run: Path) -> None:
    """The mixture is named, in the run and by an audit of its log, and nothing that it explains is accused."""
    accusations = {"wrong_weights", "engines_far_apart", "engines_disagree", "engine_gap", "systems_fix"}
    for arm in ("fused", "constant"):
        summary = json.loads((run / "arms" / arm / "summary.json").read_text())
        rules = {finding["rule"] for finding in summary["findings"]}
        assert "teacher_mixed" in rules
        assert not rules & accusations
        assert any("a teacher's logits were mixed in, with a share of" in note for note in summary["notes"])
    heard = audited(run / "arms" / "fused" / "log", run / "audit")
    shares = [row["fusion/alpha_mean"] for row in rows(run, "fused")]
    assert heard["overall"]["fusion/alpha_mean"] == pytest.approx(sum(shares) / len(shares))
    assert "teacher_mixed" in {finding["rule"] for finding in heard["findings"]}
    assert not {finding["rule"] for finding in heard["findings"]} & accusations
    assert "KL of the mixture" in render(read_run(run))


def test_every_response_to_a_prompt_has_its_share_whenever_it_is_drawn(tmp_path):
    """Groups that are enlarged in stages, rounds of further prompts, and draws that are joined into a batch."""
    draws = {"max_samples": 16, "dynamic": True, "rounds": 3}
    recipe = recipe_of_arms(draws=draws, arms={"fused": ARMS["fused"]}, batches=2, optim__accumulate=2, lag={}, rollout__samples=2)  # fmt: skip
    train(recipe, tmp_path)
    drawn = batches(tmp_path, "fused")
    assert len(drawn) == 4
    sizes = set()
    for batch in drawn:
        for group in batch.group_ids.unique():
            shares = batch.mix_alpha[batch.group_ids == group]
            sizes.add(len(shares))
            assert len(shares.unique()) == 1
    assert len(sizes) > 1, "a group was to be enlarged"
    assert len(rows(tmp_path, "fused")) == 2


BESIDE = {
    "filters": {"rollout__top_p": 0.7},
    "top k": {"rollout__evidence": 5},
    "sampled": {"rollout__evidence": "sampled"},
    "int8": {"rollout__quantization": "int8"},
    "temperature": {"rollout__temperature": 0.5},
    "buffer": {"buffer": {"capacity": 8, "reuse": 2}},
    "adapters": {"lora": {"rank": 4}},
    "queue": {"lag": {"queue": 1}},
    "routes": {"model": TEACHER, "replay": {"routes": "rollout"}, "fusion": {"teacher": "tiny-qwen3", "alpha": 0.5}},
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_teacher_decodes_along_beside(tmp_path, name):
    """At equal weights the drift of the first update is the recorded KL of the mixture, on what filters left over."""
    fusion = {**FUSION, "alpha": 0.5, "decay_updates": 40}
    changes = {"fusion": fusion, "arms": {"fused": ARMS["fused"]}, "batches": 2, "lag": {}, **BESIDE[name]}
    train(recipe_of_arms(**changes), tmp_path)
    first, second = rows(tmp_path, "fused")
    assert first["fusion/kl_mean"] > 0.02
    assert 0 < second["fusion/alpha_mean"] <= 0.5
    if name == "routes":
        assert first["router/flip_frac"] < 0.01, "routes were to be the policy's"
    if name == "top k":
        assert 0 < first["divergence/kl_rollout_current_mean"] < first["fusion/kl_mean"]
    elif name == "int8":
        difference = first["divergence/kl_rollout_current_mean"] - first["fusion/kl_mean"]
        assert 0 < abs(difference) < 0.05 * first["fusion/kl_mean"]
    elif name != "sampled":
        assert first["divergence/kl_rollout_current_mean"] == pytest.approx(first["fusion/kl_mean"], rel=1e-3)


@pytest.mark.slow
def test_two_processes_each_have_the_teacher(tmp_path):
    """Their halves of a batch are drawn by one schedule, and the metrics are of both."""
    changes = {
        "fusion": {"teacher": "tiny-qwen3-moe", "alpha": 0.5, "difficulty": "probe"},
        "rollout__dtype": "float32",
    }
    changes |= {"arms": {"arm": {"method": "logit_fusion"}}, "batches": 1, "optim": WHITENED}
    run = two_processes(tmp_path / "two", changes)
    halves = check_step_of_two_processes(run, "arm", changes)
    shares = torch.cat([half.mix_alpha for half in halves])
    (row,) = rows(run, "arm")
    assert row["fusion/alpha_mean"] == pytest.approx(float(shares.mean()))
    assert row["fusion/difficulty_mean"] == pytest.approx(float(shares.mean()) / 0.5)


def test_greedy_responses_are_the_mixtures_too(tmp_path):
    teacher, tokenizer = load_model(TEACHER, seed=0)
    recipe = recipe_of_arms(optim__advantage="remax", fusion={"teacher": TEACHER, "alpha": 1.0})
    engine = TransformersEngine(load_model("tiny-qwen3", seed=0)[0], teacher=teacher, batch_size=64)
    options = {"engine": engine, "task": Digits(), "tokenizer": tokenizer, "recipe": recipe, "folder": tmp_path}
    source = Source(**options, sampling=Sampling(max_tokens=6, stop_token_ids=(1,)), greedy=True, mixture=recipe.fusion)
    drawn = source.draw(0)
    problems = Digits().sample(4, seed=batch_seed(0, 0))
    greedy = Sampling(max_tokens=6, top_k=1, stop_token_ids=(1,))
    best = rollout(TransformersEngine(teacher), problems, Digits(), tokenizer, greedy, samples=1, seed=0)
    assert torch.equal(drawn.greedy_rewards, best.rewards.repeat_interleave(4))


def test_a_share_of_zero_costs_no_probes(tmp_path):
    recipe = recipe_of_arms(arms={"fused": ARMS["fused"]}, batches=2, fusion={**FUSION, "decay_updates": 1}, lag={})
    train(recipe, tmp_path)
    first, second = rows(tmp_path, "fused")
    assert first["fusion/difficulty_mean"] > 0
    assert second["fusion/difficulty_mean"] is None
    assert (second["fusion/alpha_mean"], second["fusion/kl_max"]) == (0, 0)
    assert batches(tmp_path, "fused")[1].mix_alpha.tolist() == [0.0] * 16


def test_difficulties_are_on_the_scale_of_the_rewards():
    rewards, ids = torch.tensor([3.0, -1.0, -1.0, -1.0, 3.0, 3.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert probed_difficulties(rewards, ids, (-1.0, 3.0)).tolist() == [0.5, 1.0, 0.0]


def file_of_problems(path: Path, difficulty: Any) -> str:
    lines = [{"prompt": f"{i}+1=", "answer": "1", "difficulty": i / 40, "split": "train"} for i in range(40)]
    lines[7]["difficulty"] = difficulty
    lines += [{"prompt": f"{i}+2=", "answer": "1", "split": "eval"} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_difficulties_of_a_file_scale_the_share(tmp_path):
    task = file_of_problems(tmp_path / "sums.jsonl", 0.175)
    fusion = {"teacher": TEACHER, "alpha": 0.5, "difficulty": "given"}
    changes = {"task": task, "reward": "number", "fusion": fusion, "arms": {"fused": ARMS["fused"]}, "batches": 1}
    train(recipe_of_arms(**changes), tmp_path / "run")
    (drawn,) = batches(tmp_path / "run", "fused")
    expected = torch.tensor([0.5 * int(prompt.split("+")[0]) / 40 for prompt in drawn.prompts])
    torch.testing.assert_close(drawn.mix_alpha, expected)
    assert len(expected.unique()) == 4
    for wrong in (1.5, "hard", None, True):
        changes["task"] = file_of_problems(tmp_path / "sums.jsonl", wrong)
        with pytest.raises(RecipeError, match=r"'7\+1=' has difficulty = .* expected a number in \[0, 1\]"):
            train(recipe_of_arms(**changes), tmp_path / "refused")


NO_TEACHER = {"fusion": None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (NO_TEACHER, r"arms\.constant: fusion does nothing without \[fusion\]"),
        ({"fusion": {"alpha": 0.5}}, "fusion.teacher is missing"),
        ({"fusion": {**FUSION, "alpha": 1.5}}, "fusion.alpha = 1.5: input should be less than or equal to 1"),
        ({"rollout__engine": "vllm"}, 'rollout.engine = "vllm", which decodes one model; use "transformers"'),
        (
            {"rollout__engine": "openai", "rollout__url": "http://x/v1"},
            'rollout.engine = "openai", which decodes one model',
        ),
        ({"pipeline": {}, "lag": {}}, r"beside \[pipeline\], whose workers decode one model"),
        ({"task": "calculator", "rollout__max_turns": 2}, 'task = "calculator", whose episodes are drawn turn by turn'),
        ({"rollout__evidence": "hidden"}, 'rollout.evidence = "hidden", states of the policy'),
        ({"fusion": {**FUSION, "difficulty": "given"}}, 'arms.fused: fusion.difficulty = "given" reads field'),
        (
            {"fusion": {"teacher": TEACHER, "probe_samples": 2}},
            'probe_samples = 2 does nothing with fusion.difficulty = "uniform"',
        ),
        (
            {"arms": {"a": {"method": "none", "fusion": {"alpha": 0, "decay_updates": 3}}}},
            "arms.a: fusion.decay_updates does nothing with fusion.alpha = 0",
        ),
        ({"arms": {"a": {"method": "none", "fusion": {"alpha": 0}}}}, "fusion.alpha is 0 in every arm"),
        ({"arms": {"a": {"method": "none", "fusion": {"teacher": "x"}}}}, "unknown key 'arms.a.fusion.teacher'"),
    ],
)
def test_recipes_whose_teacher_cannot_act_are_refused(changes, words):
    if changes is NO_TEACHER:
        settings = {"arms": ARMS}
    else:
        settings = {"fusion": FUSION, "arms": ARMS, **changes}
    with pytest.raises(RecipeError, match=words):
        small_recipe(**settings)


def test_teachers_of_other_tokens_are_refused_before_training(tmp_path, monkeypatch):
    model, _ = load_model(TEACHER, seed=0)
    vocabulary = tiny_tokenizer().get_vocab()
    swapped = {**vocabulary, "1": vocabulary["2"], "2": vocabulary["1"]}
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(tokenizer_models.WordLevel(swapped, unk_token="<unk>")), unk_token="<unk>"
    )
    models.save_for_engine(model, other, tmp_path / "other")
    with pytest.raises(RecipeError, match=r"another tokenizer than the model: 4 entries .* such as \('1', 4\)"):
        train(recipe_of_arms(fusion={"teacher": str(tmp_path / "other")}), tmp_path / "run")
    model.resize_token_embeddings(80)
    models.save_for_engine(model, tiny_tokenizer(), tmp_path / "wider")
    with pytest.raises(RecipeError, match=r"wider'?: the teacher gives 80 logits, the model 64"):
        train(recipe_of_arms(fusion={"teacher": str(tmp_path / "wider")}), tmp_path / "run")
    assert not list((tmp_path / "run").glob("arms/*"))


def test_the_share_of_a_schedule():
    assert MixtureSettings(alpha=0.4).shares(10**6, torch.ones(2)).tolist() == pytest.approx([0.4, 0.4])
    falling = MixtureSettings(alpha=0.5, decay_updates=100)
    shares = [falling.shares(update, torch.tensor([0.8])).item() for update in (0, 25, 50, 100, 120)]
    assert shares == pytest.approx([0.4, 0.3, 0.2, 0.0, 0.0])


def test_a_teacher_may_learn_the_task_first(tmp_path):
    """Its supervised start is its own: the student's weights are those of a run without it."""
    problem = Problem("1+1=", "2", demonstration="22")

    class Shown(Digits):
        def sample(self, n: int, *, seed: int, split: str = "train") -> list[Problem]:
            return [problem] * n

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "shown", Shown(name="shown"))
        patch.setenv("OFFDRIFT_CACHE", str(tmp_path / "cache"))
        start = {"steps": 30, "batch_size": 2, "lr": 1e-2, "target": 2.0}
        fusion = {"teacher": TEACHER, "alpha": 1.0, "warm_start": start}
        train(recipe_of_arms(task="shown", fusion=fusion, arms={"fused": ARMS["fused"]}, batches=1), tmp_path / "run")
    (drawn,) = batches(tmp_path / "run", "fused")
    assert drawn.rewards.mean() > 0.9
    row = rows(tmp_path / "run", "fused")[0]
    assert row["current/log_ppl"] > 1
