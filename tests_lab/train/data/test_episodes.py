"""Episodes of several turns: what is drawn, scored, stored and trained, and that turn-level methods read real turns."""

from __future__ import annotations

import copy
import functools
import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from tests.engines.models import CACHE_MIB, need_vllm

from offdrift.audit.tally import Tally
from offdrift.batch_info import BatchInfo
from offdrift.engines import make_engine
from offdrift.engines.generate import prompts_of, responses_of
from offdrift.engines.hf import TransformersEngine
from offdrift.engines.routing import route_lengths
from offdrift.engines.score import chunks, left_right_padded, score
from offdrift.errors import EngineError, EpisodeError, RecipeError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import method
from offdrift.models import load_model, tiny_tokenizer
from offdrift.records import store
from offdrift.records.provenance import Sampling
from offdrift.records.readers import detect, pieces, read
from offdrift.records.rollouts import Turns, concatenate
from offdrift_lab.train.data.environments import (
    ENVIRONMENTS,
    Adventure,
    Answer,
    Calculator,
    Environment,
    Guess,
    calculated,
)
from offdrift_lab.train.data.episodes import demonstrated, play, stop_length
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.data.prompts import answer_ids
from offdrift_lab.train.data.warmstart import IGNORED, _batch, _Plan
from offdrift_lab.train.loop import context
from offdrift_lab.train.loop.batch import Batch
from offdrift_lab.train.loop.context import set_up
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.run_folder import RunFolder
from offdrift_lab.train.loop.step import ScoredPiece
from offdrift_lab.train.report.page import write_report
from tests_lab.train.conftest import STOPS, Echo, check_episodes, check_run_in_turns, short_arms, small_recipe
from tests_lab.train.steps import learner

CUT = (1,)


@pytest.fixture
def echo(monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "echo", Echo())
    short_arms(monkeypatch)


@pytest.fixture
def model():
    """Small, random, and likely to write the stop text."""
    with pytest.MonkeyPatch.context() as patch:
        short_arms(patch)
        model, tokenizer = load_model("tiny-qwen3", seed=0)
    return model, tokenizer


def played(model, *, turns=3, evidence="sampled", samples=3, environment: Environment | None = None, **options):
    network, tokenizer = model
    environment = environment or Echo()
    engine = make_engine("transformers", network, dtype="float32", batch_size=4)
    sampling = Sampling(max_tokens=8 * turns, stop_token_ids=CUT, **options)
    problems = environment.sample(4, seed=1)
    return play(engine, problems, environment, tokenizer, sampling, samples=samples, max_turns=turns, seed=5, evidence=evidence)  # fmt: skip


def transcripts(rollouts, tokenizer):
    """Every episode's text from the places that columns give to its tokens."""
    padded, texts = left_right_padded(rollouts), []
    for ids, seen in zip(padded.ids, padded.attention.bool()):
        texts.append(tokenizer.decode(ids[seen].tolist()))
    return texts


# -- drawing --------------------------------------------------------------------------------------


def test_an_episode_is_prompt_turns_and_answers_in_their_order(model):
    rollouts = played(model)
    check_episodes(rollouts, model[1])
    lengths = torch.bincount(torch.tensor(turn_owner(rollouts)), minlength=12)
    assert len(rollouts.segments.turns) == lengths.sum()
    assert len(lengths.unique()) > 1, "episodes of different lengths were to be compared"
    assert len(rollouts.tokens) == int(rollouts.lengths.sum()) < int(rollouts.lengths_with_context.sum())


def turn_owner(rollouts):
    """The sequence of every turn."""
    return rollouts.segments.seq_ids[rollouts.segments.turns.cu_seqlens[:-1]].tolist()


def test_a_turn_ends_at_its_stop_text_and_one_that_is_cut_off_ends_the_episode(model):
    rollouts = played(model)
    owner, texts = turn_owner(rollouts), [model[1].decode(ids) for ids in responses_of(rollouts)]
    last = [i + 1 == len(owner) or owner[i + 1] != owner[i] for i in range(len(owner))]
    stopped = [text.endswith((*STOPS, "<eos>")) for text in texts]
    for ids in responses_of(rollouts):
        assert not any(stop in model[1].decode(ids[:-1], skip_special_tokens=True) for stop in STOPS)
    assert all(s or end for s, end in zip(stopped, last)), "an episode went on after a turn that was cut off"
    for i, finish in enumerate(rollouts.finish):
        turns = [k for k, o in enumerate(owner) if o == i]
        assert (finish == "stop") == (len(turns) == 3 and stopped[turns[-1]])
    assert {"stop", "length"} == set(rollouts.finish)
    assert set(played(model, turns=2).finish) == {"length"}, "nobody said that these were over"


@pytest.mark.parametrize(("evidence", "top_k"), [("full", 0), (5, 0), ("hidden", 0), ("full", 20)])
def test_turn_by_turn_gives_the_log_probs_of_the_whole_episode_at_once(model, evidence, top_k):
    """The engine read every turn's prompt anew; one forward pass over all reads the same."""
    rollouts = played(model, evidence=evidence, temperature=1.3, top_k=top_k)
    with torch.no_grad():
        whole = score(model[0].eval(), rollouts, temperature=1.3)
    assert len(whole.logp) == len(rollouts.tokens) > 70
    torch.testing.assert_close(whole.logp, rollouts.logp_rollout, atol=1e-5, rtol=0)
    if evidence == "full":
        torch.testing.assert_close(whole.logits.log_softmax(-1), rollouts.evidence.logp, atol=2e-5, rtol=0)
    engine = make_engine("transformers", model[0], dtype="float32", batch_size=4)
    again = engine.rescore(rollouts, evidence=evidence)
    torch.testing.assert_close(again.logp_rollout, rollouts.logp_rollout, atol=1e-5, rtol=0)
    assert again.turns is rollouts.turns


def test_context_changes_log_probs_and_is_never_scored(model):
    rollouts = played(model)
    bare = rollouts.with_(turns=None)
    with torch.no_grad():
        whole, without = (score(model[0].eval(), r).logp for r in (rollouts, bare))
    first = rollouts.turns.ids == 0
    torch.testing.assert_close(whole[first], without[first], atol=1e-5, rtol=0)
    assert (whole - without)[~first].abs().mean() > 0.01


def test_every_turn_is_drawn_from_random_numbers_of_its_own(model, monkeypatch):
    seeds, generate = [], TransformersEngine.generate

    def spy(self, *args, seed, **options):
        seeds.append(seed)
        return generate(self, *args, seed=seed, **options)

    monkeypatch.setattr(TransformersEngine, "generate", spy)
    played(model)
    assert len(set(seeds)) == len(seeds) == 3


def test_one_turn_draws_what_a_task_draws(model):
    """With one turn an environment is a task: the same seed gives the same tokens."""
    rollouts = played(model, turns=1, environment=Calculator(), samples=1)
    network, tokenizer = model
    engine = make_engine("transformers", network, dtype="float32", batch_size=4)
    prompts = [tokenizer.encode(p.prompt) for p in Calculator().sample(4, seed=1)]
    plain = engine.generate(prompts, Sampling(max_tokens=8, stop_token_ids=(1, *tokenizer.encode("]"))), seed=5)
    assert torch.equal(rollouts.tokens, plain.tokens)
    assert torch.equal(rollouts.logp_rollout, plain.logp_rollout)
    assert (rollouts.turns.ids == 0).all()


def test_selecting_joining_and_storing_episodes_keeps_turns_and_context(model, tmp_path):
    rollouts = played(model, evidence=5)
    tokenizer, order = model[1], torch.tensor([7, 2, 11])
    texts = transcripts(rollouts, tokenizer)
    assert transcripts(rollouts.select(order), tokenizer) == [texts[i] for i in order]
    single = played(model, turns=1, evidence=5).with_(provenance=rollouts.provenance, turns=None)
    both = concatenate([single, rollouts])
    assert transcripts(both, tokenizer) == transcripts(single, tokenizer) + texts
    assert both.turns.ids[: len(single.tokens)].max() == 0
    back = store.read(store.write(rollouts, tmp_path / "episodes.parquet"))
    assert transcripts(back, tokenizer) == texts
    assert torch.equal(back.segments.turns.cu_seqlens, rollouts.segments.turns.cu_seqlens)
    assert store.read(store.write(single, tmp_path / "single.parquet")).turns is None


def test_a_budget_counts_what_the_environment_wrote(model):
    rollouts = played(model)
    width = (rollouts.prompt_cu_seqlens.diff() + rollouts.lengths_with_context).max()
    pieces = list(chunks(rollouts, token_budget=int(width)))
    for piece in pieces:
        assert left_right_padded(rollouts.select(piece)).ids.numel() <= width
    assert sorted(torch.cat(pieces).tolist()) == list(range(12))


def test_prompts_of_turns_are_all_that_stands_before_them():
    turns = Turns(*(torch.tensor(x) for x in ([0, 0, 1, 0], [50, 51], [1, 1], [0, 2, 2])))
    model = load_model("tiny-qwen3", seed=0)[0]
    engine = make_engine("transformers", model, dtype="float32")
    plain = engine.generate([[7, 8], [9]], Sampling(max_tokens=3), seed=0)
    episodes = plain.with_(
        tokens=torch.tensor([10, 11, 12, 13]),
        logp_rollout=torch.zeros(4),
        rollout_version=torch.zeros(4, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 3, 4]),
        turns=turns,
    )
    assert prompts_of(episodes) == [[7, 8], [7, 8, 10, 11, 50, 51], [9]]
    assert responses_of(episodes) == [[10, 11], [12], [13]]
    with pytest.raises(EngineError, match="routes of episodes"):
        route_lengths(episodes)


# -- environments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=lambda e: e.name)
def test_demonstrations_win_and_splits_are_apart(environment):
    problems = environment.sample(200, seed=3)
    assert problems == environment.sample(300, seed=3)[:200]
    assert problems != environment.sample(200, seed=4)
    held_out = {p.prompt for p in environment.sample(128, seed=4, split="eval")}
    assert len(held_out) == 128
    assert held_out.isdisjoint(p.prompt for p in problems)
    for problem in problems:
        episode = environment.start(problem)
        answers = [episode.answer(text) for text in problem.demonstration]
        assert [a.done for a in answers] == [False] * (len(answers) - 1) + [True]
        assert sum(a.reward for a in answers) == 1
        assert len(answers) <= (8 if environment.name == "adventure" else 5)
        assert problem.answer not in problem.prompt or environment.name == "guess"


def test_more_problems_than_there_are_are_refused():
    with pytest.raises(RecipeError, match=r"'adventure' gave 268 of 300 different eval problems.*log\.eval_prompts"):
        Adventure().sample(300, seed=0, split="eval")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[12*34]", "408"),
        ("[1+2][-3 - 4]", "-7"),
        ("[2*3+1]", "error"),
        ("[9**9]", "error"),
        ("[__import__('os')]", "error"),
        ("[" + "9" * 10 + "*1]", "error"),
        ("[" * 10**6 + "]", "error"),
        ("[٣*2]", "error"),
    ],
)
def test_the_calculator_matches_calls_and_evaluates_nothing(text, value):
    assert calculated(text) == value
    assert Calculator().start(Problem("", "0")).answer(text).text == value + "\n"


def test_a_guess_is_answered_and_what_is_no_number_ends_the_game():
    answers = [Guess().start(Problem("", "30")).answer(t) for t in ("29", "31", "30", "what", "9" * 5000)]
    assert [a.text for a in answers] == ["higher\n", "lower\n", "", "", ""]
    assert [a.reward for a in answers] == [0, 0, 1, 0, 0]


COMMANDS = ("go north", "go south", "go east", "go west", "take key", "open door")


def fewest_commands(problem: Problem) -> int:
    """Of all games of a problem, by trying every command in every state."""
    games, states = [Adventure().start(problem)], set()
    for count in range(1, 40):
        reached = []
        for game in games:
            for command in COMMANDS:
                after = copy.copy(game)
                if after.answer(command).reward == 1:
                    return count
                if (after.room, after.key) not in states:
                    states.add((after.room, after.key))
                    reached.append(after)
        games = reached
    raise AssertionError("no way to the reward")


def test_adventures_are_shown_by_the_shortest_games():
    problems = Adventure().sample(1000, seed=6)
    lengths = [len(p.demonstration) for p in problems]
    assert lengths == [fewest_commands(p) for p in problems]
    assert min(lengths) == 4
    assert max(lengths) == 8


def test_an_adventure_answers_every_command_in_every_state():
    game = Adventure().start(Problem("room a1, key b1, door b2:", ""))
    script = [
        ("go west", "wall"), ("go south", "wall"), ("take key", "no key here"), ("open door", "no door here"),
        ("go east", "room b1: key"), ("Take  KEY.\n", "taken"), ("take key", "no key here"), ("go north", "room b2: door"),
        ("go south", "room b1"), ("go east", "room c1"), ("go east", "room d1"), ("go east", "wall"),
        ("go north", "room d2"), ("go north", "room d3"), ("go north", "room d4"), ("go north", "wall"),
        ("open door", "no door here"), ("go west", "room c4"), ("go west", "room b4"), ("go south", "room b3"),
        ("go south", "room b2: door"),
    ]  # fmt: skip
    for command, expected in script:
        assert game.answer(command) == Answer(f"{expected}\n"), command
    assert game.answer("open door") == Answer(reward=1.0, done=True)
    early = Adventure().start(Problem("room a1, key b1, door a2:", ""))
    assert [early.answer(x).text for x in ("go north", "open door")] == ["room a2: door\n", "locked\n"]


@pytest.mark.parametrize(
    "text",
    ["", "\n", "go", "go up", "go northeast", "go north go north", "go north " * 10**6, "go north" + " " * 99 + "go west", "open door; open door",
     "room b1", "__import__('os')", "g\u043e north", "\ud800", "\0", "[1+2]", "take key b1"],
    ids=lambda text: repr(text[:20]),
)  # fmt: skip
def test_an_adventure_answers_what_is_no_command(text):
    game = Adventure().start(Problem("room b2, key b2, door a4:", ""))
    before = copy.copy(game)
    assert game.answer(text) == Answer("what?\n")
    assert game == before


def test_a_stop_text_is_found_where_it_is_complete():
    tokenizer = tiny_tokenizer()
    assert stop_length(tokenizer.encode("12ab3ab"), ("ab", "x"), tokenizer) == 4
    assert stop_length(tokenizer.encode("ab"), ("ab",), tokenizer) == 2
    assert stop_length(tokenizer.encode("a b"), ("ab",), tokenizer) is None


TEMPLATE = "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"  # fmt: skip


@pytest.mark.parametrize(("after", "expected"), [("<eos>", "<u>408<eos><a>"), ("", "<eos><u>408<eos><a>")])
def test_a_chat_template_says_what_stands_between_turns(after, expected):
    """The end of the model's turn is written once, by the model or by the template."""
    tokenizer = tiny_tokenizer()
    problem = Calculator().sample(1, seed=0)[0]
    assert tokenizer.decode(answer_ids("408", problem, tokenizer, after="")) == "408"
    tokenizer.chat_template = TEMPLATE
    assert tokenizer.decode(answer_ids("408", problem, tokenizer, after=after)) == expected
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(RecipeError, match="does not show earlier turns"):
        answer_ids("408", problem, tokenizer, after="")


def test_a_warm_start_trains_the_models_tokens_alone():
    tokenizer, problem = tiny_tokenizer(), Problem("12*3+4=", "40", ("[12*3]", "[36+4]", "40"))
    pairs = demonstrated(problem, Calculator(), tokenizer)
    text = "".join(tokenizer.decode([token]) if trained else "_" for token, trained in pairs)
    assert text == "_" * 7 + "[12*3]" + "_" * 3 + "[36+4]" + "_" * 3 + "40<eos>"
    tokens, labels = _batch(tokenizer, Calculator(), _Plan(1, 8, 1e-3, 0.5, 0), 0)
    trained = labels != IGNORED
    assert torch.equal(tokens[trained], labels[trained])
    # Three turns of three numbers each: brackets and signs are the model's, line breaks the tool's.
    for character, per_row, own in (("[", 2, True), ("]", 2, True), ("\n", 2, False), ("=", 1, False)):
        at = tokens == tokenizer.encode(character)[0]
        assert at.sum() == 8 * per_row
        assert trained[at].all() if own else not trained[at].any()
    with pytest.raises(RecipeError, match="shows no demonstrations"):
        demonstrated(Problem("1*1+1=", "2", "2"), Calculator(), tokenizer)


# -- methods --------------------------------------------------------------------------------------


def loss_of(rollouts, name, logp, **changes):
    leaf = logp.clone().requires_grad_()
    old = rollouts.logp_rollout
    logprobs = LogProbs.pack(old, leaf, old, segments=rollouts.segments)
    generator = torch.Generator().manual_seed(2)
    advantages = rollouts.segments.spread(torch.randn(rollouts.num_sequences, generator=generator))
    result = policy_loss(logprobs, method(name), advantages, BatchInfo(observed="this_batch"), normalizer=1.0)
    result.loss.backward()
    return leaf.grad, result.corrected


def drifted(rollouts):
    g = torch.Generator().manual_seed(1)
    return (rollouts.logp_rollout + 0.4 * torch.randn(len(rollouts.tokens), generator=g)).clamp(max=0.0)


@pytest.mark.parametrize("name", ["turn_ppo", "st_ppo"])
def test_turn_level_methods_read_the_turns_of_episodes(model, name):
    """On one turn the turn is the response; on several, clips act turn by turn."""
    episodes, single = played(model, turns=3), played(model, turns=1)
    for rollouts, same in ((single, True), (episodes, False)):
        logp = drifted(rollouts)
        by_turn, _ = loss_of(rollouts, name, logp)
        by_sequence, _ = loss_of(rollouts.with_(turns=None), name, logp)
        assert torch.equal(by_turn, by_sequence) == same
    with torch.no_grad():
        arm = learner(Accelerator(cpu=True), model[0], torch.optim.SGD(model[0].parameters()), method(name))
        batch = Batch(rollouts=episodes, advantages=torch.ones(len(episodes.tokens)))
        piece = ScoredPiece(arm, batch, backward_scope=ExitStack())
    assert torch.equal(piece.logprobs.segments.turns.cu_seqlens, episodes.segments.turns.cu_seqlens)
    # In closed form: the tokens of a turn share what their turn's mean log-ratio, and no other's, decides.
    logp = drifted(episodes)
    grad, _ = loss_of(episodes, "turn_ppo", logp)
    turns = episodes.segments.turns
    u = turns.mean(logp - episodes.logp_rollout).exp()
    advantages = episodes.segments.spread(torch.randn(12, generator=torch.Generator().manual_seed(2)))
    a = turns.mean(advantages)
    active = torch.where(a > 0, u <= 1.2, u >= 0.8)
    expected = -turns.spread((a * u).where(active, 0.0)) / episodes.segments.spread(episodes.lengths.float())
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)
    assert 0 < int(active.sum()) < len(turns)


def test_weights_of_turns_are_those_of_each_turn(model):
    episodes = played(model, turns=3)
    row, logp = method("segment_tis"), drifted(episodes)
    logprobs = LogProbs.pack(episodes.logp_rollout, logp, logp, segments=episodes.segments)
    weight = row.correction(logprobs, torch.ones_like(logp), BatchInfo()).weight
    turns = episodes.segments.turns
    expected = turns.spread(turns.mean(logp - episodes.logp_rollout).exp().clamp(max=1.2))
    torch.testing.assert_close(weight, expected)


# -- the trainer ----------------------------------------------------------------------------------


def turns_recipe(**changes):
    arms = {"turn_ppo": {"method": "turn_ppo"}}
    content = {"task": "echo", "arms": arms, "batches": 4, "rollout__max_turns": 3, "rollout__max_tokens": 10, "rollout__prompts": 2}  # fmt: skip
    return small_recipe(**{**content, **changes})


def test_a_run_in_turns_is_logged_shown_and_resumed_bit_for_bit(echo, tmp_path):
    class Stopped(Exception):
        pass

    def stop(event):
        if event.kind == "update" and event.step == 3:
            raise Stopped

    recipe = turns_recipe(buffer={"capacity": 4}, lag={"sync_every": 2, "queue": 1})
    train(recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "cut", watch=stop)
    train(recipe, tmp_path / "cut", resume=True)
    arm = tmp_path / "whole/arms/turn_ppo"
    rows, again = (
        [json.loads(line) for line in (tmp_path / run / "arms/turn_ppo/metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "cut")
    )
    for one, other in zip(rows, again, strict=True):
        assert {k: v for k, v in one.items() if "throughput" not in k} == {k: v for k, v in other.items() if "throughput" not in k}  # fmt: skip
    assert all(1 < row["response/turns_mean"] <= 3 for row in rows)
    # What a sample shows: the environment's text, and before which token it stands.
    samples = [json.loads(line) for line in (arm / "samples.jsonl").read_text().splitlines()]
    several = [s for s in samples if s["context"]]
    assert several
    for sample in several:
        for number, (place, words) in enumerate(sample["context"], 1):
            assert words == f"ok{number}{sample['prompt']}"
            assert "".join(sample["tokens"][:place]).endswith((*STOPS, "<eos>"))
    page = write_report(tmp_path / "whole").read_text()
    assert 'data-context="ok1' in page
    # What an audit reads.
    logs = detect([str(arm)])
    batches = [batch for piece in pieces(logs) for batch in read(piece, logs).batches]
    assert sum(b.num_sequences for b in batches) == 4 * 8
    turns = sum(len(b.segments.turns) for b in batches)
    assert turns == pytest.approx(sum(8 * row["response/turns_mean"] for row in rows))
    assert functools.reduce(Tally.merge, map(Tally.of, batches)).as_dict()["overall"][
        "response/turns_mean"
    ] == pytest.approx(turns / 32)


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_plays_episodes_and_takes_new_weights_between_them(echo, tmp_path, monkeypatch):
    need_vllm()
    # A small cache of keys and values: 2 GB hold the test.
    monkeypatch.setattr(context, "make_engine", functools.partial(context.make_engine, kv_cache_mib=CACHE_MIB))
    recipe = turns_recipe(batches=3, lag={"sync_every": 2}, optim={"lr": 1e-3}, rollout__engine="vllm", rollout__dtype="float32")  # fmt: skip
    train(recipe, tmp_path / "run")
    check_run_in_turns(tmp_path / "run/arms/turn_ppo", *load_model("tiny-qwen3", seed=recipe.seed), engine="vllm")


def test_the_trainer_states_the_horizon_of_episodes(echo, tmp_path):
    run = set_up(turns_recipe(), RunFolder(tmp_path / "run"), lambda event: None)
    assert run.sampling.max_tokens == 30
    assert run.engine.evidence_limit_mib == 1024 // 3


def test_a_turn_level_method_on_single_turns_says_so(tmp_path, monkeypatch):
    short_arms(monkeypatch)
    table = train(turns_recipe(task="digits", rollout__max_turns=None, batches=1), tmp_path / "run")
    assert any("every response was one turn" in note for note in table[0]["notes"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout__max_turns": None}, "say how many there are"),
        ({"reward": "number"}, "rewards its episodes itself"),
        ({"task": "digits"}, "rollout.max_turns = 3 does nothing with task = 'digits'"),
    ],
)
def test_turns_without_effect_are_refused(echo, changes, words):
    with pytest.raises(RecipeError, match=words):
        turns_recipe(**changes)


DOCS = (Path(__file__).parents[3] / "docs/tasks.md").read_text()
(OWN,) = re.findall(r"```python\n([^`]*class Game:[^`]*)```", DOCS)
ANSWERED = 'Answer("no, try again\\n")'


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (ANSWERED, None, ""),
        ("1 / 0", EpisodeError, r"ZeroDivisionError[\s\S]*own.py[\s\S]*turn 0: '"),
        ("('text', 1.0)", EpisodeError, "expected an `Answer`"),
        ("Answer(reward=float('nan'))", EpisodeError, "finite reward"),
    ],
)
def test_a_class_of_the_users_is_played_and_its_mistakes_are_told(tmp_path, monkeypatch, answer, error, words):
    monkeypatch.chdir(tmp_path)
    short_arms(monkeypatch)
    assert ANSWERED in OWN
    (tmp_path / "own.py").write_text(OWN.replace(ANSWERED, answer))
    recipe = turns_recipe(task="own.py:Game", batches=1, warm_start={"steps": 1})
    if error is None:
        assert train(recipe, tmp_path / "run")[0]["updates"] == 1
        return
    monkeypatch.setattr(
        "offdrift_lab.train.loop.context.load_model", lambda *args, **options: pytest.fail("a model was loaded")
    )
    with pytest.raises(error, match=words):
        train(recipe, tmp_path / "run")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("class Game", "class Other", "has no class 'Game'; it has Other"),
        ("def start", "def begin", "Game has no 'start'"),
        ('f"{split} {seed}"', "", "draw them from `seed` alone"),
        ("for x in numbers]", "for x in numbers[1:]]", "expected a list of 2 `Problem`"),
    ],
)
def test_what_is_no_environment_is_refused(tmp_path, monkeypatch, old, new, words):
    monkeypatch.chdir(tmp_path)
    assert OWN.count(old) == 1
    (tmp_path / "own.py").write_text(OWN.replace(old, new))
    with pytest.raises(RecipeError, match=words):
        train(turns_recipe(task="own.py:Game"), tmp_path / "run")
