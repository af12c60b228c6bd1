"""What is drawn: rounds until groups have a spread, groups that grow, prompts left out, and penalties."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.forked import pair

from offdrift.advantages import advantages
from offdrift.audit.certificate_evidence import SELECTED, Proof
from offdrift.certificate import TrustRegion
from offdrift.errors import BadValueError, RecipeError, RecordError, RewardError
from offdrift.prove.certify import judge
from offdrift.records.store import read
from offdrift.stats import METRICS
from offdrift_lab.train.data.group_filter import History, has_spread, overlong_punishment, repeated_share
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.data.source import batch_seed
from offdrift_lab.train.data.tasks import TASKS
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.sections import DrawsSettings
from tests_lab.train.conftest import Digits, short_arms, small_recipe
from tests_lab.train.data.test_buffer import drawn as rollouts_with
from tests_lab.train.loop.test_processes import WORKER
from tests_lab.train.loop.test_tokenlog import logs


@dataclass(frozen=True)
class Early(Digits):
    """A completion is right if a digit is among its first three characters: about one in three."""

    def reward(self, completion: str, problem: Problem) -> float:
        return float(any(c.isdigit() for c in completion[:3]))


@pytest.fixture
def short(monkeypatch):
    short_arms(monkeypatch)
    monkeypatch.setitem(TASKS, "digits", Early())


def recipe_with(**changes):
    return small_recipe(**{"batches": 3, "arms": {"none": {"method": "none"}}, "lag": {}, **changes})


def drawn_by(run, index=0, arm="none"):
    return read(run / "arms" / arm / "rollouts" / f"batch-{index:06d}.parquet")


def metrics_of(run, arm="none"):
    return [json.loads(line) for line in (run / "arms" / arm / "metrics.jsonl").read_text().splitlines()]


def sizes(rollouts):
    return torch.bincount(rollouts.group_ids).tolist()


# -- formulas -------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.tuples(st.integers(-1, 1), st.integers(-1, 0)), min_size=1, max_size=4), max_size=6))
def test_a_group_has_a_spread_if_some_column_takes_two_values(groups):
    rows = [(g, *values) for g, group in enumerate(groups) for values in group]
    table = torch.tensor(sorted(rows, key=hash), dtype=torch.int64).reshape(-1, 3)
    expected = [len({a for a, _ in group}) > 1 or len({b for _, b in group}) > 1 for group in groups]
    assert has_spread(table[:, 1:].float() / 3, table[:, 0]).tolist() == expected


def test_the_share_of_flat_groups_is_the_specified_one():
    """Groups with rewards [1, 1], [0, 0] and [1, 0]."""
    spread = has_spread(torch.tensor([[1.0], [1.0], [0.0], [0.0], [1.0], [0.0]]), torch.tensor([0, 0, 1, 1, 2, 2]))
    sums = {"groups/n": float(len(spread)), "groups/flat": float((~spread).sum())}
    assert METRICS["groups/flat_frac"].value(sums) == pytest.approx(2 / 3)


def test_the_punishment_of_length_is_dapos():
    """Eq. 13 with L_max 20 and L_cache 5: 0 up to 15, a fifth per token after, -1 from 20 on."""
    lengths = torch.tensor([0, 15, 16, 18, 19, 20, 23])
    expected = [0.0, 0.0, -0.2, -0.6, -0.8, -1.0, -1.0]
    torch.testing.assert_close(overlong_punishment(lengths, max_tokens=20, cache=5), torch.tensor(expected))


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=5), st.integers(2, 7))
def test_repetition_is_the_share_of_ngrams_that_are_not_new(responses, n):
    tokens = torch.tensor([t for r in responses for t in r], dtype=torch.int64)
    expected = []
    for response in responses:
        ngrams = [tuple(response[i : i + n]) for i in range(len(response) - n + 1)]
        expected.append(1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0)
    share = repeated_share(tokens, torch.tensor([len(r) for r in responses], dtype=torch.int64), ngram=n)
    torch.testing.assert_close(share, torch.tensor(expected), rtol=0, atol=1e-6)


def test_the_recipes_in_the_documentation_are_ones_that_a_run_takes(tmp_path):
    text = (Path(__file__).parents[3] / "docs/tasks.md").read_text(encoding="utf-8")
    blocks = [b for b in re.findall(r"```toml\n(.*?)```", text, flags=re.S) if "[draws]" in b or "[penalties]" in b]
    draws, penalties = (tomllib.loads(block) for block in blocks)
    recipe = file_recipe(tmp_path, **draws)
    assert recipe.draws == DrawsSettings(dynamic=True, max_samples=32, leave_out_after=2)
    assert (recipe.optim.advantage, recipe.right) == ("rl_zvp", 1.0)
    assert recipe_with(**penalties).penalties.names == ("overlong", "repetition")


def test_a_prompt_is_left_out_after_so_many_right_visits_in_a_row():
    problems = [Problem(text, "") for text in "abc"]
    history = History(DrawsSettings(leave_out_after=2), right_from=0.5)

    def visit(*rewards):
        drawn = rollouts_with([[x, 1.0] for x in rewards])
        history.visit(problems, drawn)
        return [p.prompt for p in history.waiting_first(problems)], history.left_out

    assert visit(1.0, 0.0, 1.0) == (["a", "b", "c"], 0)
    assert visit(1.0, 1.0, 0.0) == (["b", "c", "a"], 1)
    assert visit(1.0, 1.0, 0.5) == (["c", "a", "b"], 2)
    assert visit(0.0, 1.0, 1.0) == (["a", "b", "c"], 2), "one failure brings a prompt back"


# -- runs -----------------------------------------------------------------------------------------


def by_turn(monkeypatch, reward):
    """Reward a prompt's responses by its number and their place among all of its responses, from 1."""
    seen: Counter[str] = Counter()

    def score(self, completion, problem):
        seen[problem.prompt] += 1
        return reward(int(problem.prompt.split("+")[0]), seen[problem.prompt])

    monkeypatch.setattr(Early, "reward", score)


def test_a_batch_is_filled_with_groups_that_have_a_spread_in_the_order_of_the_draws(tmp_path, short, monkeypatch):
    """Two of three prompts have a spread: of four a round, two or three, so that five or six in two rounds."""
    by_turn(monkeypatch, lambda number, turn: float(number % 3 == 0 or turn % 2))
    train(recipe_with(batches=1, draws={"dynamic": True}), tmp_path / "run")
    batch, (row,) = drawn_by(tmp_path / "run"), metrics_of(tmp_path / "run")
    stream = [p.prompt for p in Early().sample(8, seed=batch_seed(0, 0))]
    useful = [p for p in stream if int(p.split("+")[0]) % 3]
    assert len(useful) > 4
    assert list(batch.prompts[::4]) == useful[:4]
    assert sizes(batch) == [4] * 4
    assert batch.rewards.tolist() == [1.0, 0.0] * 8
    # The first round is what a run without dynamic sampling draws.
    train(recipe_with(batches=1), tmp_path / "plain")
    plain = drawn_by(tmp_path / "plain")
    of_first = [[r.completions[i] for i in range(16) if r.prompts[i] == useful[0]] for r in (batch, plain)]
    assert of_first[0] == of_first[1]
    # Cost: every response drawn is counted, whether it is trained on or not.
    expected = {"rounds": 2.0, "responses_per_kept": 2.0, "discarded_frac": 0.5, "filled_frac": 0.0, "group_size": 4.0}
    assert {name: row[f"draws/{name}"] for name in expected} == expected
    assert row["groups/flat_frac"] == 0.0
    # No certificate: neither of the update nor by `offdrift certify`.
    assert not row["certificate/fresh"]
    assert "chosen by the rewards" in row["certificate/verdict"]
    assert metrics_of(tmp_path / "plain")[0]["certificate/fresh"]
    with pytest.raises(RecordError, match="chosen by the rewards"):
        judge(
            [tmp_path / "run/arms/none/rollouts/batch-000000.parquet"],
            torch.nn.Linear(1, 1),
            region=TrustRegion(horizon=6, delta=0.05),
        )


def test_when_rounds_run_out_the_batch_is_filled_or_the_run_stops(tmp_path, short, monkeypatch):
    monkeypatch.setattr(Early, "reward", lambda *_: 1.0)
    train(recipe_with(batches=1, draws={"dynamic": True, "rounds": 3}), tmp_path / "fill")
    (row,) = metrics_of(tmp_path / "fill")
    assert (row["draws/rounds"], row["draws/filled_frac"], row["groups/flat_frac"]) == (3.0, 1.0, 1.0)
    assert row["draws/discarded_frac"] == pytest.approx(2 / 3)
    assert row["optim/grad_norm"] == 0
    summary = json.loads((tmp_path / "fill/arms/none/summary.json").read_text())
    assert any("rounds of draws ran out in 1 of 1 batches: 100%" in note for note in summary["notes"])
    with pytest.raises(RewardError, match=r"after 3 rounds 4 of 4 groups still have equal rewards"):
        train(recipe_with(draws={"dynamic": True, "rounds": 3, "at_cap": "stop"}), tmp_path / "stop")


def test_groups_without_a_spread_double_until_they_have_one_or_are_as_large_as_allowed(tmp_path, short, monkeypatch):
    """Of four prompts the 2nd, the 6th, the 10th and no response is wrong: sizes 4, 8, 14 and 14."""
    by_turn(monkeypatch, lambda number, turn: float(turn != (2, 6, 10, 99)[number % 4]))
    train(recipe_with(batches=1, draws={"max_samples": 14}), tmp_path)
    batch, (row,) = drawn_by(tmp_path), metrics_of(tmp_path)
    for g in range(4):
        own = (batch.group_ids == g).nonzero()[:, 0].tolist()
        (prompt,) = {batch.prompts[i] for i in own}
        kind = int(prompt.split("+")[0]) % 4
        assert [len(own), batch.rewards[own].tolist().count(0.0)] == [(4, 8, 14, 14)[kind], int(kind != 3)]
        stages = [[batch.completions[i] for i in own[a:b]] for a, b in ((0, 4), (4, 8), (8, 12))]
        assert kind == 0 or stages[0] != stages[1]
    assert (row["draws/group_size"], row["draws/responses_per_kept"]) == (10.0, 1.0)


LINES = [
    {"prompt": f"{a}+{b}=", "answer": a + b, "split": "eval" if a == 8 else "train"} for a in range(9) for b in (1, 2)
]


def file_recipe(tmp_path, **changes):
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (tmp_path / "right.py").write_text("def score(completion, prompt): return float(prompt[0] in '0123')\n")
    changes = {"reward": f"{tmp_path}/right.py:score", "task": f"{tmp_path}/sums.jsonl", **changes}
    return recipe_with(**changes)


def test_solved_prompts_of_a_file_are_left_out_and_a_resumed_run_remembers_them(tmp_path, short):
    """Prompts that begin with 0 to 3, eight of sixteen, are always right; four are drawn at a time."""
    recipe = file_recipe(
        tmp_path,
        batches=6,
        draws={"leave_out_after": 1, "max_samples": 8},
        optim={"lr": 2e-4, "advantage": "rl_zvp", "zvp_alpha": 0.5},
        log={"checkpoint_every": 2, "eval_prompts": 2, "trackers": []},
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(recipe, whole)
    rounds = [sorted(set(drawn_by(whole, i).prompts)) for i in range(6)]
    solved: set[str] = set()
    for prompts in rounds:
        assert solved.isdisjoint(prompts), "no prompt comes back that was right throughout"
        solved |= {p for p in prompts if p[0] in "0123"}
    left_out = [row["draws/left_out"] for row in metrics_of(whole)]
    assert left_out == sorted(left_out)
    assert left_out[-1] == len(solved) == 8
    assert set(sizes(drawn_by(whole))) == {8}, "no group ever has a spread"
    assert all(row["optim/grad_norm"] > 0 for row in metrics_of(whole)), "rl_zvp learns from them"

    class Stopped(Exception):
        pass

    def stop(event):
        if event.kind == "update" and event.step == 4:
            raise Stopped

    with pytest.raises(Stopped):
        train(recipe, cut, watch=stop)
    train(recipe, cut, resume=True)
    changing = {f"throughput/{name}" for name in ("seconds", "tokens_per_s", "draw_seconds", "publish_seconds")}
    for x, y in zip(metrics_of(whole), metrics_of(cut), strict=True):
        assert {k: v for k, v in x.items() if k not in changing} == {k: v for k, v in y.items() if k not in changing}


def test_rounds_of_a_file_share_no_prompt_and_end_with_it(tmp_path, short):
    """Sixteen lines are four rounds; nothing has a spread, so the batch is filled with the first four prompts."""
    train(file_recipe(tmp_path, batches=1, draws={"dynamic": True}), tmp_path / "run")
    row = metrics_of(tmp_path / "run")[0]
    assert (row["draws/rounds"], row["draws/filled_frac"]) == (4.0, 1.0)
    assert len(set(drawn_by(tmp_path / "run").prompts)) == 4


def test_penalties_are_components_of_what_is_trained_on_and_not_of_evaluations(tmp_path, short, monkeypatch):
    from offdrift_lab.train.loop import loop

    recipe = recipe_with(
        batches=1,
        penalties={"overlong": 1.0, "overlong_tokens": 4, "repetition": 0.5, "ngram": 2},
        reward_range=[-1.5, 1],
        log={"eval_prompts": 4, "trackers": []},
    )
    rewards = []
    monkeypatch.setattr(loop, "evaluate", lambda arm: rewards.append(arm.run.task.reward("123", Problem("", ""))))
    train(recipe, tmp_path)
    batch, (row,) = drawn_by(tmp_path), metrics_of(tmp_path)
    parts = batch.components
    assert list(parts) == ["task", "overlong", "repetition"]
    assert parts["overlong"].tolist() == [min(0.0, (6 - 4 - n) / 4) for n in batch.lengths.tolist()]
    torch.testing.assert_close(batch.rewards, parts["task"] + parts["overlong"] + parts["repetition"])
    assert set(parts["task"].tolist()) <= {0.0, 1.0}
    assert parts["overlong"].min() < 0
    assert row["component/overlong"] == pytest.approx(float(parts["overlong"].mean()))
    assert row["reward/mean"] == pytest.approx(float(batch.rewards.mean()))
    assert rewards[-1] == 1.0


@pytest.mark.parametrize(("reward", "changes"), [(1.5, {}), (0.0, {"pipeline": {"schedule": "sync", "workers": 1}})])
def test_a_reward_outside_the_stated_range_is_refused_before_its_batch_is_stored(
    tmp_path, short, monkeypatch, reward, changes
):
    """Certificates and pages rescale by the range; one process draws, or a worker does."""
    monkeypatch.setattr(Early, "reward", lambda *_: reward)
    recipe = recipe_with(batches=1, reward_range=[0.5, 1], **changes)
    with pytest.raises(BadValueError, match=rf"reward of sequence 0 is {reward}, outside \[0.5, 1\]"):
        train(recipe, tmp_path)
    assert not list(tmp_path.rglob("batch-*.parquet"))


def test_a_spread_is_judged_before_penalties_and_by_components_for_gdpo(tmp_path, short, monkeypatch):
    """Wrong answers of different lengths differ in their penalty alone, which is no reason to keep their group."""
    monkeypatch.setattr(Early, "reward", lambda *_: 0.0)
    penalties = {"overlong": 1.0, "overlong_tokens": 6}
    train(
        recipe_with(batches=1, draws={"dynamic": True, "rounds": 2}, penalties=penalties, reward_range=[-1, 1]),
        tmp_path / "task",
    )
    (row,) = metrics_of(tmp_path / "task")
    assert row["draws/filled_frac"] == 1.0
    (tmp_path / "parts.py").write_text(
        "def score(completion):\n    x = float(completion[:1].isdigit() or len(completion) % 2)\n"
        "    return {'a': x, 'b': 1.0 - x}\n"
    )
    for advantage, filled in (("grpo", 1.0), ("gdpo", 0.0)):
        recipe = recipe_with(
            batches=1,
            reward=f"{tmp_path}/parts.py:score",
            draws={"dynamic": True, "rounds": 6},
            optim={"lr": 2e-4, "advantage": advantage},
        )
        train(recipe, tmp_path / advantage)
        (row,) = metrics_of(tmp_path / advantage)
        assert row["draws/filled_frac"] == filled


def test_the_trainers_entropy_shapes_the_advantages_of_flat_groups(tmp_path, short, monkeypatch):
    """Advantages in the log are eq. 5 of the logged entropies, which are those of the policy before the update."""
    monkeypatch.setattr(Early, "reward", lambda self, completion, problem: float(int(problem.prompt.split("+")[0]) % 2))
    train(recipe_with(batches=1, optim={"lr": 2e-4, "advantage": "rl_zvp", "zvp_alpha": 0.3}), tmp_path)
    (log,) = logs(tmp_path, "none")
    assert (log.rewards > 0).any()
    assert (log.rewards == 0).any()
    expected = advantages(log.rewards, log.segments, how="rl_zvp", entropy=log.entropy, zvp_alpha=0.3)
    torch.testing.assert_close(log.advantages, expected, rtol=1e-4, atol=1e-6)
    assert log.advantages.abs().max() > 0.1


@pytest.mark.parametrize("buffer", [{"capacity": 8, "reuse": 2}, {}])
def test_a_queue_and_a_buffer_hold_selected_groups(tmp_path, short, buffer):
    train(recipe_with(batches=4, draws={"dynamic": True}, buffer=buffer, lag={"queue": 1}), tmp_path)
    rows = metrics_of(tmp_path)
    assert [row["groups/flat_frac"] for row in rows] == [0.0] * 4
    assert not any(row["certificate/fresh"] for row in rows)


def test_an_audit_makes_no_certificate_of_what_was_selected(tmp_path, short):
    for name, draws in (("selected", {"max_samples": 8}), ("plain", {})):
        train(recipe_with(batches=1, draws=draws), tmp_path / name)
        proof = Proof.over(logs(tmp_path / name, "none"))
        assert (proof.why_not == SELECTED) == (name == "selected"), proof.why_not


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draws": {"rounds": 4}}, "draws.rounds does nothing without draws.dynamic"),
        ({"draws": {"at_cap": "stop"}}, "draws.at_cap does nothing without draws.dynamic"),
        ({"draws": {"dynamic": True}, "rollout__samples": 1}, "rollout.samples = 1 makes no group with a spread"),
        ({"draws": {"dynamic": True}, "optim__advantage": "remax"}, "'remax' does not compare siblings"),
        ({"draws": {"max_samples": 4}}, "draws.max_samples = 4 enlarges no group of rollout.samples = 4; use 8"),
        ({"draws": {"leave_out_after": 2}}, "task = 'digits' hardly ever draws a prompt twice"),
        ({"right_from": 0.5}, "right_from does nothing"),
        ({"optim__zvp_alpha": 0.2}, 'optim.zvp_alpha is read by advantage "rl_zvp" alone'),
        ({"penalties": {"overlong": 1}}, r"reward_range = \[0, 1\]; set reward_range = \[-1, 1\]"),
        ({"penalties": {"overlong_tokens": 2}}, "does nothing without penalties.overlong"),
        ({"penalties": {"overlong": 1, "overlong_tokens": 7}, "reward_range": [-1, 1]}, "more than rollout.max_tokens"),
        ({"penalties": {"ngram": 4}}, "penalties.ngram does nothing without penalties.repetition"),
        ({"penalties": {"repetition": 1, "ngram": 6}, "reward_range": [-1, 1]}, "no response of .* repeats an n-gram"),
    ],
)
def test_what_cannot_act_is_refused_by_name(changes, words):
    with pytest.raises(RecipeError, match=words):
        recipe_with(**changes)


@pytest.mark.slow
def test_two_processes_fill_their_own_shares_of_a_batch(tmp_path):
    """Five groups are three and two; the metrics of both processes are of all that was drawn."""
    (tmp_path / "early.py").write_text(
        "def score(completion): return float(any(c.isdigit() for c in completion[:3]))\n"
    )
    changes = {
        "reward": f"{tmp_path}/early.py:score",
        "draws": {"dynamic": True, "max_samples": 8},
        "rollout": {"prompts": 5, "samples": 4, "max_tokens": 6},
        "batches": 1,
        "arms": {"none": {"method": "none"}},
    }
    words = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    pair([WORKER, str(tmp_path / "two"), "--short", *words], tmp_path / "printed")
    shares = [read(tmp_path / f"two/arms/none/rollouts/batch-000000-rank{rank}.parquet") for rank in (0, 1)]
    assert [sorted(set(share.group_ids.tolist())) for share in shares] == [[0, 2, 4], [1, 3]]
    assert set(shares[0].prompts).isdisjoint(shares[1].prompts)
    (row,) = metrics_of(tmp_path / "two")
    flat = sum(int((~has_spread(s.rewards[:, None], s.group_ids // 2)).sum()) for s in shares)
    assert row["groups/flat_frac"] == row["draws/filled_frac"] == flat / 5
    assert row["draws/group_size"] == sum(share.num_sequences for share in shares) / 5
