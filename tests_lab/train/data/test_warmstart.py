"""The supervised start: it learns, it is deterministic, and its cache can be trusted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from transformers import PreTrainedModel

from offdrift.errors import RecipeError
from offdrift.models import load_model, tiny_tokenizer
from offdrift_lab.train.data import warmstart
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.data.tasks import find_task
from offdrift_lab.train.data.warmstart import IGNORED, warm_start

TOKENIZER = tiny_tokenizer()
TASK = find_task("arithmetic")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Steps this small spend their time waiting for a second thread when tests run in parallel."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Fixed:
    """A task of given problems; `asked` records the seeds it was sampled with."""

    name = "fixed"

    def __init__(self, *problems: Problem) -> None:
        self.problems, self.asked = problems, []

    def sample(self, n: int, *, seed: int, split: str = "train") -> list[Problem]:
        self.asked.append((seed, split))
        return [self.problems[i % len(self.problems)] for i in range(n)]

    def reward(self, completion: str, problem: Problem) -> float:
        return float(completion == problem.answer)


ONE = Problem("1+1=", "2", demonstration="2\n")
LONGER = Problem("10+10=", "20", demonstration="20\n")


def start(cache: Path, *, model_seed: int = 0, **changes: object) -> tuple[PreTrainedModel, list]:
    """A short start of the tiny model, and the losses it reported (none if it came from cache)."""
    settings = {"task": TASK, "steps": 2, "batch_size": 4, "seed": 0, "cache_dir": cache} | changes
    model, _ = load_model("tiny-qwen3", seed=model_seed)
    losses: list[tuple[int, float]] = []
    settings.setdefault("progress", lambda step, loss: losses.append((step, loss)))
    return warm_start(model, TOKENIZER, settings.pop("task"), **settings), losses


def plan(**changes: object) -> warmstart._Plan:
    settings = {"steps": 1, "batch_size": 1, "lr": 1e-3, "target": 2.0, "seed": 0}
    return warmstart._Plan(**(settings | changes))


def flat(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_batch_labels_completions_and_their_end() -> None:
    tokens, labels = warmstart._batch(TOKENIZER, Fixed(ONE, LONGER), plan(batch_size=2), 0)
    e, x = TOKENIZER.eos_token_id, IGNORED
    assert TOKENIZER.decode(tokens[0, :6]) == "1+1=2\n"
    two, zero, line = TOKENIZER.encode("20\n")
    assert labels.tolist() == [[x, x, x, x, two, line, e, x, x, x], [x, x, x, x, x, x, two, zero, line, e]]
    assert torch.equal(tokens[labels != x], labels[labels != x])


def demonstration_logp(model: PreTrainedModel, problem: Problem) -> tuple[float, int]:
    """log-prob of one demonstration and its tokens, without padding or batches."""
    prompt = TOKENIZER.encode(problem.prompt)
    answer = [*TOKENIZER.encode(problem.demonstration), TOKENIZER.eos_token_id]
    with torch.no_grad():
        logp = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return sum(float(logp[len(prompt) - 1 + i, a]) for i, a in enumerate(answer)), len(answer)


def test_the_loss_is_that_of_each_completion_alone() -> None:
    """Loss: the mean over completion tokens, not over prompts or padding. Chance: exp(-sum)."""
    model, _ = load_model("tiny-qwen3", seed=0)
    tokens, labels = warmstart._batch(TOKENIZER, Fixed(ONE, LONGER), plan(batch_size=2), 0)
    alone = [demonstration_logp(model, problem) for problem in (ONE, LONGER)]
    assert [count for _, count in alone] == [3, 4]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss, chance = warmstart._step(model, optimizer, plan(), tokens, labels)
    assert loss == pytest.approx(-sum(logp for logp, _ in alone) / 7, 1e-5)
    assert chance == pytest.approx(sum(math.exp(logp) for logp, _ in alone) / 2, 1e-4)


def test_the_learning_rate_rises_then_falls() -> None:
    rates = [plan(steps=100, lr=1.0).lr_at(step) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == pytest.approx(1.0)
    assert rates[99] == pytest.approx(0.1 + 0.9 / 95)
    assert all(a > b for a, b in itertools.pairwise(rates[5:]))
    landing = [plan(steps=100, lr=1.0).lr_at(50, landed=i) / rates[50] for i in (0, 1, 10, 19)]
    assert landing == pytest.approx([1.0, 0.95, 0.5, 0.05])
    assert plan(steps=1, lr=1.0).lr_at(0) == 1.0


@pytest.mark.parametrize("source", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_it_learns_from_nothing_to_the_target(source: str, tmp_path: Path) -> None:
    """From log 64 = 4.16 nats per token to a chance of 0.5 or more, and it stops there."""
    model, _ = load_model(source, seed=0)
    losses: list[float] = []
    problems = (ONE, LONGER)
    settings = {"steps": 60, "batch_size": 4, "seed": 0, "cache_dir": tmp_path}
    warm_start(model, TOKENIZER, Fixed(*problems), **settings, progress=lambda step, loss: losses.append(loss))
    assert losses[0] == pytest.approx(math.log(64), abs=0.5)
    assert 29 <= len(losses) < 60
    chances = [math.exp(demonstration_logp(model, problem)[0]) for problem in problems]
    assert sum(chances) / 2 > 0.5
    for problem in problems:
        ids = torch.tensor([TOKENIZER.encode(problem.prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert TOKENIZER.decode(out[0, ids.shape[1] :]) == f"{problem.demonstration}<eos>"


@pytest.mark.parametrize(("target", "steps"), [(0.0, 29), (2.0, 31)])
def test_the_target_must_hold_over_a_window(target: float, steps: int, tmp_path: Path) -> None:
    """Met at once: 10 batches to see it, then 19 at 19/20, ..., 1/20 of the rate."""
    _, losses = start(tmp_path, target=target, steps=31, batch_size=1)
    assert len(losses) == steps


def test_a_landing_once_begun_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is met at batch 10 and lost at once; the rate must not go up again."""
    chances = iter([1.0] * 10 + [0.0] * 50)
    monkeypatch.setattr(warmstart, "_step", lambda *batch: (0.0, next(chances)))
    _, losses = start(tmp_path, target=1.0, steps=60)
    assert len(losses) == 29


@pytest.mark.parametrize("training", [True, False])
def test_it_works_in_place_and_leaves_no_trace(training: bool, tmp_path: Path) -> None:
    model, _ = load_model("tiny-qwen3", seed=0)
    before = flat(model).clone()
    model.train(training)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    result = warm_start(model, TOKENIZER, TASK, steps=2, batch_size=4, seed=0, cache_dir=tmp_path)
    assert torch.equal(torch.rand(3), expected), "the host's random state moved"
    assert result is model
    assert not torch.equal(flat(model), before)
    assert model.training is training
    assert all(p.grad is None for p in model.parameters())


def test_every_step_draws_new_training_problems(tmp_path: Path) -> None:
    task = Fixed(ONE)
    start(tmp_path, task=task, steps=5)
    drawn = set(task.asked)
    assert len(drawn) == 5
    assert {split for _, split in drawn} == {"train"}
    assert all(seed > 10**6 for seed, _ in drawn), "the trainer's own steps use small seeds"


def test_zero_steps_change_nothing_and_a_task_without_demonstrations_is_refused(tmp_path: Path) -> None:
    model, losses = start(tmp_path, steps=0)
    assert torch.equal(flat(model), flat(load_model("tiny-qwen3", seed=0)[0]))
    assert (losses, list(tmp_path.iterdir())) == ([], [])
    with pytest.raises(RecipeError, match=r"'fixed' shows no demonstrations.*steps to 0"):
        start(tmp_path, task=Fixed(replace(ONE, demonstration=None)))


def test_the_same_start_is_trained_once_and_is_the_same(tmp_path: Path) -> None:
    first, losses = start(tmp_path / "a")
    assert [step for step, _ in losses] == [1, 2]
    cached, none = start(tmp_path / "a")
    assert none == []
    again, _ = start(tmp_path / "b")
    assert torch.equal(flat(first), flat(cached))
    assert torch.equal(flat(first), flat(again))
    (file,) = (tmp_path / "a" / "warmstart").iterdir()
    assert file.name.startswith("arithmetic-")


class Renamed(Fixed):
    name = "another"


def test_whatever_matters_is_in_the_key(tmp_path: Path) -> None:
    changes = [{"steps": 3}, {"batch_size": 5}, {"lr": 1e-3}, {"target": 0.6}, {"seed": 1}, {"model_seed": 1}]
    changes += [{"task": Renamed(ONE)}, {"task": Fixed(replace(ONE, demonstration="3\n"))}]
    for i, change in enumerate([{}, *changes], 1):
        _, losses = start(tmp_path, **({"task": Fixed(ONE)} | change))
        assert losses, f"taken from the cache of another start: {change}"
        assert len(list((tmp_path / "warmstart").iterdir())) == i


def test_versions_and_a_config_without_weights_of_its_own_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load_model("tiny-qwen3", seed=0)
    names = [warmstart._file_name(model, TOKENIZER, TASK, plan())]
    assert warmstart._file_name(model, TOKENIZER, TASK, plan()) == names[0]
    changed = [("CODE_VERSION", 10**6), ("torch.__version__", "99.1.0"), ("transformers.__version__", "99.1.0")]
    for name, value in changed:
        with monkeypatch.context() as patch:
            patch.setattr(f"offdrift_lab.train.data.warmstart.{name}", value)
            names.append(warmstart._file_name(model, TOKENIZER, TASK, plan()))
    model.config.rms_norm_eps = 0.1
    names.append(warmstart._file_name(model, TOKENIZER, TASK, plan()))
    assert len(set(names)) == 5


def test_a_damaged_cache_or_one_of_another_model_is_found_and_replaced(tmp_path: Path) -> None:
    """A file with other weights, or other shapes at the end, is refused before any is copied."""
    first, _ = start(tmp_path)
    (file,) = (tmp_path / "warmstart").iterdir()
    whole, named = file.read_bytes(), warmstart._named(first)
    others = {f"other.{name}": w for name, w in named.items()}, named | {list(named)[-1]: torch.zeros(3)}
    for damaged in (b"", whole[: len(whole) // 2], b"\xff" * len(whole), *map(save, others)):
        file.write_bytes(damaged)
        with pytest.warns(UserWarning, match=r"cannot be read.*training it again"):
            second, losses = start(tmp_path)
        assert len(losses) == 2
        assert torch.equal(flat(first), flat(second))
    assert start(tmp_path)[1] == []


def test_an_interrupted_start_or_write_leaves_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(step: int, loss: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, steps=3, progress=interrupt)
    assert list(tmp_path.rglob("*")) == []

    def half(tensors: dict, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(warmstart, "save_file", half)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    assert list((tmp_path / "warmstart").iterdir()) == []


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(UserWarning, match=r"not cached.*OFFDRIFT_CACHE"):
        model, losses = start(blocked)
    assert len(losses) == 2
    assert bool(flat(model).isfinite().all())


def test_two_processes_may_race(tmp_path: Path) -> None:
    """Another process with the same start finishes while this one is still training."""
    others: list[PreTrainedModel] = []

    def overtaken(step: int, loss: float) -> None:
        if step == 2:
            model, losses = start(tmp_path)
            assert len(losses) == 2
            others.append(model)

    mine, _ = start(tmp_path, progress=overtaken)
    assert len(others) == 1
    assert torch.equal(flat(mine), flat(others[0]))
    (file,) = (tmp_path / "warmstart").iterdir()
    assert warmstart._restored(load_model("tiny-qwen3", seed=1)[0], file)
