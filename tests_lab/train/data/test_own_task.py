"""A file of problems and a reward of the user's own: what they may say, and what is said of mistakes."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offdrift.advantages import advantages
from offdrift.errors import CheckpointError, OffdriftError, RecipeError, RewardError
from offdrift.models import load_model
from offdrift.records.store import read
from offdrift_lab.train.data.problems import Problem, read_problems
from offdrift_lab.train.data.prompts import prompt_ids
from offdrift_lab.train.data.tasks import find_task, rewards_of
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.recipe import load_recipe

LINES = [{"prompt": f"{a}+{b}=", "answer": a + b, "level": a} for a in range(9) for b in range(9)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with problems.jsonl in it."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "problems.jsonl", LINES)
    return tmp_path


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def own_reward(folder, body, name="score"):
    (folder / "own.py").write_text(body)
    return find_task("problems.jsonl", f"own.py:{name}", reward_range=(-1.0, 2.0))


def scores(task, *completions):
    return rewards_of(task, completions, [Problem("2+3=", "5", metadata={"level": 2})] * len(completions))


# -- files ----------------------------------------------------------------------------------------


def test_every_line_is_in_one_split_for_good(folder):
    file = read_problems(folder / "problems.jsonl")
    train, held_out = file.problems["train"], file.problems["eval"]
    assert len(train) + len(held_out) == 81
    assert 1 <= len(held_out) <= 20
    assert {p.prompt for p in train}.isdisjoint(p.prompt for p in held_out)
    again = file.sample(30, seed=4)
    assert file.sample(20, seed=4) == again[:20]
    assert len({p.prompt for p in again}) == 30
    assert file.sample(20, seed=5) != again[:20]
    assert set(file.sample(1000, seed=0, split="eval")) == set(held_out)
    with pytest.raises(RecipeError, match=r"rollout.prompts = 100, .*problems.jsonl has \d\d training prompts"):
        file.sample(100, seed=0)


def test_a_line_may_say_its_split_its_demonstration_and_its_chat(folder):
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    write(
        folder / "chat.jsonl",
        [
            {"prompt": turns, "answer": 2, "split": "eval"},
            {"prompt": "2+2", "answer": "4", "demonstration": "4", "split": "train", "source": "book"},
        ],
    )
    file = read_problems(folder / "chat.jsonl")
    (chat,), (plain,) = file.problems["eval"], file.problems["train"]
    assert (chat.messages, chat.prompt, chat.answer, chat.chat) == (tuple(turns), "1+1", "2", True)
    assert (plain.demonstration, plain.metadata, plain.chat) == ("4", {"source": "book"}, "if_template")
    _, tokenizer = load_model("tiny-qwen3", seed=0)
    assert prompt_ids(plain, tokenizer) == tokenizer.encode("2+2")
    with pytest.raises(RecipeError, match="no chat template"):
        prompt_ids(chat, tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}="
    assert prompt_ids(chat, tokenizer) == tokenizer.encode("<Add.><1+1>=")
    assert prompt_ids(plain, tokenizer) == tokenizer.encode("<2+2>=")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 is not JSON"),
        ("[" * 100_000, r"line 2 is not JSON"),
        ("[1]", r"line 2: expected an object"),
        ('{"answer": "1"}', r"line 2: prompt = None"),
        ('{"prompt": "", "answer": "1"}', r"line 2: prompt = ''"),
        ('{"prompt": [], "answer": "1"}', r"line 2: prompt = ''"),
        ('{"prompt": [{"role": "king", "content": "x"}]}', r"line 2: .*'king'.*system, user"),
        ('{"prompt": "x", "answer": true}', r"line 2: answer = True"),
        ('{"prompt": "x", "answer": ["1"]}', r"line 2: answer = "),
        ('{"prompt": "x", "answer": "1", "split": "test"}', r"line 2: split = 'test'"),
        ('{"prompt": "x", "answer": "1", "demonstration": 3}', r"line 2: demonstration = 3"),
    ],
)
def test_a_line_that_is_no_problem_is_named(folder, line, message):
    path = folder / "bad.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    with pytest.raises(RecipeError, match=message):
        read_problems(path)


def test_a_file_that_cannot_be_used_says_the_way_out(folder):
    write(folder / "few.jsonl", [{"prompt": "x", "answer": "1", "split": "train"}])
    with pytest.raises(RecipeError, match=r'has no eval problems.*"split": "eval"'):
        read_problems(folder / "few.jsonl")
    with pytest.raises(RecipeError, match=r"nowhere.jsonl.*No such file"):
        find_task("nowhere.jsonl", "number")
    with pytest.raises(RecipeError, match=r"needs a reward.*'number'.*rewards.py:score"):
        find_task("problems.jsonl")


@given(content=st.binary(max_size=200))
def test_no_file_does_worse_than_be_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "any.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecipeError):
        read_problems(path)


# -- functions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "def score(completion, answer): return completion == answer",
        "def score(answer, completion, level, *, unused=3): return float(completion == answer) if level < 9 else 9",
        "def score(completion, metadata, prompt, **rest): return int(completion == rest['answer'])",
        "def score(data_source, solution_str, ground_truth, extra_info=None): return solution_str == ground_truth",
        "def score(prompts, completions, answer, **_): return [float(c == a) for c, a in zip(completions, answer)]",
        "import torch\ndef score(completions, answer):\n    return torch.tensor([c == a for c, a in zip(completions, answer)])",
        "def score(completion, answer): return {'reward': float(completion == answer)}",
    ],
)
def test_a_function_is_called_with_what_its_parameters_name(folder, body):
    task = own_reward(folder, body)
    assert scores(task, "5", "6", "").total == (1.0, 0.0, 0.0)
    assert task.reward("5", Problem("2+3=", "5", metadata={"level": 0})) == 1.0


def test_named_numbers_are_components_and_their_sum_is_the_reward(folder):
    summed = own_reward(folder, "def score(completion, answer): return {'right': completion == answer, 'short': 0.5}")
    rewards = scores(summed, "5", "6")
    assert rewards.total == (1.5, 0.5)
    assert rewards.components == {"right": (1.0, 0.0), "short": (0.5, 0.5)}
    stated = own_reward(folder, "def score(completion): return {'score': 0.25, 'length': -len(completion) / 9}")
    rewards = scores(stated, "123")
    assert rewards.total == (0.25,)
    assert rewards.components == {"length": (-1 / 3,)}


def test_a_module_is_imported_from_the_working_folder(folder):
    (folder / "a_reward_module_of_this_test.py").write_text("def score(completion): return 0.5")
    assert scores(find_task("arithmetic", "a_reward_module_of_this_test:score"), "x").total == (0.5,)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("def other(completion): pass", RecipeError, r"no function 'score'; it has other"),
        ("def score(completion, gold): return 1", RecipeError, r"parameter 'gold'.*answer, completion"),
        ("import not_a_package_here", RecipeError, r"imports 'not_a_package_here'"),
        ("def score(:", RecipeError, r"cannot be imported: SyntaxError"),
        ("def score(completion): return 3", RecipeError, r"gave 3 for the answer of '\d\+\d=', outside .*\[-1, 2\]"),
        ("def score(completion): return None", RewardError, r"returned None; expected a finite number"),
        ("def score(completion): return float('nan')", RewardError, r"returned nan"),
        ("def score(completion): return 'good'", RewardError, r"returned 'good'"),
        ("def score(completion): return {}", RewardError, r"returned {}"),
        ("def score(completion): return {'a': 1} if completion else {'b': 1}", RewardError, r"entries b, and a before"),
        ("def score(completions): return [1.0]", RewardError, r"returned \[1.0\] for 2 completions"),
        ("def score(completions): return 1.0", RewardError, r"returned 1.0 for 2 completions"),
    ],
)
def test_a_function_that_cannot_reward_is_refused_before_a_run(folder, body, error, message):
    with pytest.raises(error, match=message):
        own_reward(folder, body)


def test_an_error_of_the_users_code_comes_with_its_line_and_the_sample(folder):
    with pytest.raises(RewardError) as caught:
        own_reward(
            folder, "def score(completion):\n    return helper(completion)\ndef helper(x):\n    return 1 / len(x)"
        )
    message = str(caught.value)
    assert "ZeroDivisionError" in message
    assert 'own.py", line 4, in helper' in message
    assert "rewards.py" not in message
    assert "completion: ''" in message
    assert "prompt: " in message


@pytest.mark.parametrize("spec", ["score", "own.py", ":score", "own.py:", "nowhere.py:score", "no_such_module_x:f"])
def test_a_reward_that_is_not_there_is_refused(folder, spec):
    with pytest.raises(RecipeError, match="reward = "):
        find_task("problems.jsonl", spec)


@given(st.text(max_size=60))
def test_any_name_of_a_reward_gives_one_of_our_errors(spec):
    with pytest.raises(OffdriftError):
        find_task("arithmetic", f"{spec}:no_such_function_anywhere")


# -- in a run -------------------------------------------------------------------------------------

RECIPE = """
name = "own"
model = "tiny-qwen3"
task = "problems.jsonl"
reward = "own.py:score"
batches = 2
reward_range = [0, 1]
method = "none"
[rollout]
prompts = 4
samples = 4
max_tokens = 4
[log]
eval_prompts = 64
trackers = []
"""


def test_a_file_and_a_function_beside_the_recipe_train(folder, monkeypatch):
    place = folder / "elsewhere"
    place.mkdir()
    (folder / "problems.jsonl").rename(place / "problems.jsonl")
    (place / "own.py").write_text("def score(completion, answer, level): return len(set(completion)) / 100")
    (place / "own.toml").write_text(RECIPE)
    recipe = load_recipe(place / "own.toml")
    monkeypatch.chdir("/")
    (summary,) = train(recipe, folder / "run")
    (evaluation,) = [json.loads(x) for x in (folder / "run/arms/none/eval.jsonl").read_text().splitlines()][-1:]
    held_out = len(read_problems(place / "problems.jsonl").problems["eval"])
    assert evaluation["prompts"] == held_out < 64
    assert 0 < evaluation["reward"] <= 0.05
    assert summary["updates"] == 2
    write(place / "problems.jsonl", LINES[1:])
    with pytest.raises(CheckpointError, match=r"problems.jsonl has changed since"):
        train(recipe, folder / "run", resume=True)


def test_a_mistake_is_found_before_a_model_is_loaded(folder, monkeypatch):
    (folder / "own.py").write_text("def score(completion, gold): return 1")
    (folder / "own.toml").write_text(RECIPE)
    monkeypatch.setattr("offdrift_lab.train.loop.context.load_model", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(RecipeError, match="'gold'"):
        train(load_recipe("own.toml"), folder / "run")


VARIED = "def score(completion): return {'variety': len(set(completion)) / 20, 'short': len(completion) / 100}"


def run_of(folder, body=VARIED, **changes):
    """Batches and metrics of a run on the folder's problems."""
    (folder / "own.py").write_text(body)
    (folder / "own.toml").write_text(RECIPE)
    train(load_recipe("own.toml", changes=[f"{key}={value}" for key, value in changes.items()]), folder / "run")
    arm = folder / "run/arms/none"
    return (
        [read(path) for path in sorted((arm / "rollouts").glob("*.parquet"))],
        [json.loads(line) for line in (arm / "metrics.jsonl").read_text().splitlines()],
    )


def test_components_reach_records_metrics_and_the_estimator(folder, monkeypatch):
    seen = []

    def spy(rewards, segments, **options):
        seen.append(options)
        return advantages(rewards, segments, **options)

    monkeypatch.setattr("offdrift_lab.train.loop.batch.advantages", spy)
    weights = {"optim.advantage": "gdpo", "optim.component_weights": "{short = 3.0}"}
    batches, metrics = run_of(folder, **weights)
    for batch, row, options in zip(batches, metrics, seen, strict=True):
        variety, short = batch.components["variety"], batch.components["short"]
        assert torch.equal(variety, torch.tensor([len(set(c)) / 20 for c in batch.completions]))
        torch.testing.assert_close(batch.rewards, variety + short)
        assert row["component/short"] == pytest.approx(float(short.mean()))
        assert torch.equal(options["components"], torch.stack([variety, short], 1))
        assert options["component_weights"].tolist() == [1.0, 3.0]


def test_remax_draws_a_greedy_response_to_every_prompt(folder):
    (batch, _), _ = run_of(folder, **{"optim.advantage": "remax"})
    model, tokenizer = load_model("tiny-qwen3", seed=0)
    for first in range(0, batch.num_sequences, 4):
        (ids,) = (batch.prompt_tokens[a:b] for a, b in [batch.prompt_cu_seqlens[first : first + 2].tolist()])
        tokens = ids.tolist()
        while len(tokens) < len(ids) + 4 and tokens[-1] != tokenizer.eos_token_id:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        text = tokenizer.decode(tokens[len(ids) :], skip_special_tokens=True)
        expected = len(set(text)) / 20 + len(text) / 100
        assert batch.greedy_rewards[first : first + 4].tolist() == pytest.approx([expected] * 4)


@pytest.mark.parametrize(
    ("body", "changes", "message"),
    [
        ("def score(completion): return 0.5", {"optim.advantage": "gdpo"}, r"returned none in a trial"),
        (
            VARIED,
            {"optim.component_weights": "{long = 2.0}"},
            r"has 'long'; the reward's components are variety, short",
        ),
        ("def score(completion): return {'a b': 0.5}", {}, r"an entry named 'a b'"),
    ],
)
def test_components_that_are_not_there_are_refused(folder, body, changes, message):
    with pytest.raises((RecipeError, RewardError), match=message):
        run_of(folder, body, **changes)
