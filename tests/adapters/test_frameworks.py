"""Every framework's log, written by its own code, holds what was put into it.

The samples in tests/data/logs were written by the frameworks' own dumping functions (see the README
there); verl's and TRL's are called here.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offdrift.errors import RecordError
from offdrift.records import store
from offdrift.records.batch import Logged
from offdrift.records.readers import detect
from offdrift.records.recorder import write_log
from tests.records.samples import (
    ADVANTAGES,
    LOGS,
    RESPONSES,
    REWARDS,
    STEP,
    TEXTS,
    one,
    places,
    ragged,
    read_all,
    rollout_logp,
    rollouts,
    same_groups,
    trainer_logp,
    unscored,
)

GROUPS = torch.tensor([0, 0, 1])


def values(places: list[tuple[int, int]], of: Any) -> torch.Tensor:
    return torch.tensor([of(s, t) for s, t in places])


def check(batch: Logged, **fields: Any) -> None:
    """The batch has these fields: tensors, or what they are as lists; None for one that it lacks."""
    for name, value in fields.items():
        actual = getattr(batch, name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(actual, value), name
        else:
            assert (actual.tolist() if isinstance(actual, torch.Tensor) else actual) == value, name


def check_rollout_side(batch: Logged, expected: list[tuple[int, int]], *, advantages: bool = True) -> None:
    check(
        batch,
        logp_rollout=values(expected, rollout_logp),
        in_response=[t for _, t in expected],
        tokens=[RESPONSES[s][t] for s, t in expected],
        step=[STEP] * 3,
        row=[1, 2, 3],
        response_lengths=[3, 1, 4],
    )
    assert same_groups(batch.group_ids, GROUPS)
    if advantages:
        check(batch, advantages=values(expected, lambda s, t: ADVANTAGES[s]))


def test_prime_rl() -> None:
    # The trainer's log-prob of sequence 1's only token was -inf, which prime-rl writes as null.
    left = places(without=[(1, 0)])
    batch = one(LOGS / "prime_rl")
    check_rollout_side(batch, left)
    check(batch, logp=values(left, trainer_logp), logp_old=None, entropy=[0.5] * 6)
    assert unscored(batch) == {"logp/missing": 1}


def test_the_episodes_of_prime_rl() -> None:
    log, (batch,), bad = read_all(LOGS / "prime_rl_traces")
    assert (log.framework, log.format, bad) == ("prime-rl", "prime-rl-traces", [])
    check_rollout_side(batch, places())
    check(batch, rewards=REWARDS, rollout_version=[6] * 7, truncated=[0, 0, 1])


def test_nemo_rl() -> None:
    # Python wrote the engine's log-prob of sequence 1's only token as a bare NaN.
    left = places(without=[(1, 0)])
    batch = one(LOGS / "nemo_rl")
    check_rollout_side(batch, left)
    prompts = ("1+1?", "1+1?", "2+2?")
    check(batch, logp_old=values(left, trainer_logp), rewards=REWARDS, prompts=prompts, completions=TEXTS)
    assert unscored(batch) == {"logp_rollout/missing": 1}


@pytest.mark.parametrize("framework", ["slime", "miles", "skyrl"])
def test_train_dumps(framework: str) -> None:
    log, (batch,), bad = read_all(LOGS / framework)
    assert log.framework == framework
    assert bad == []
    check_rollout_side(batch, places())
    check(batch, logp_old=values(places(), trainer_logp), logp_ref=values(places(), rollout_logp) - 0.25)
    if framework == "slime":
        check(batch, rewards=REWARDS)


def test_rollout_dumps() -> None:
    log, (batch,), bad = read_all(LOGS / "slime" / "rollout_data")
    assert (log.format, bad) == ("slime-rollout", [])
    check_rollout_side(batch, places(), advantages=False)
    check(batch, logp_old=None, rollout_version=[6] * 7, truncated=[0, 0, 1], completions=TEXTS)
    assert "evaluation" in log.said


def test_the_dashboard_columns_of_miles() -> None:
    log, (batch,), _ = read_all(LOGS / "miles" / "dashboard_columns")
    assert (log.framework, log.format) == ("miles", "miles-columns")
    check_rollout_side(batch, places(), advantages=False)


def test_slices_of_sequences_are_not_taken_for_sequences() -> None:
    with pytest.raises(RecordError, match="one of 2 context-parallel slices"):
        detect([str(LOGS / "miles_cp")])


def test_open_instruct() -> None:
    batch = one(LOGS / "open_instruct")
    check_rollout_side(batch, places(masked=False))
    check(batch, truncated=[0, 0, 1])


def test_areal() -> None:
    log, batches, bad = read_all(LOGS / "areal")
    assert (log.framework, bad) == ("areal", [])
    assert [b.step.tolist() for b in batches] == [[7, 7], [7]]
    assert [b.length_unit for b in batches] == ["character"] * 2
    assert [x for b in batches for x in b.response_lengths.tolist()] == [3, 1, 4]
    check(batches[0], logp_rollout=None)


def verl_writer() -> Any:
    """verl's own function, without the packages that the rest of its module needs."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("verl is not installed")
    source = Path(spec.origin).parent / "trainer" / "ppo" / "ray_trainer.py"
    tree = ast.parse(source.read_text())
    own = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_write_generations")
    own.decorator_list = []
    scope: dict[str, Any] = {"os": os, "json": json}
    exec(compile(ast.Module([own], []), str(source), "exec"), scope)
    return scope["_write_generations"]


def test_verl(tmp_path: Path) -> None:
    write = verl_writer()
    for step in (2, 10):
        extras = {"acc": REWARDS, "request_id": ["a", "b", "c"]}
        write(["q", "q", "r"], list(TEXTS), ["2", "2", "4"], REWARDS, extras, str(tmp_path), step)
    log, batches, bad = read_all(tmp_path)
    assert (log.framework, bad) == ("verl", [])
    assert [Path(f).name for f in log.files] == ["2.jsonl", "10.jsonl"]
    assert [b.step.tolist() for b in batches] == [[2] * 3, [10] * 3]
    lengths = [len(t) for t in TEXTS]
    check(batches[0], logp_rollout=None, completions=TEXTS, response_lengths=lengths, rewards=REWARDS)
    assert batches[0].length_unit == "character"
    assert same_groups(batches[0].group_ids, GROUPS)
    assert "no log-probs" in log.said


def trl_log(folder: Path, monkeypatch: pytest.MonkeyPatch, **extra: list[Any]) -> None:
    """What TRL's `GRPOTrainer.log` leaves, called on a trainer that has only what it looks at."""
    grpo = pytest.importorskip("trl.trainer.grpo_trainer")
    import transformers

    (folder / "completions").mkdir()
    monkeypatch.setattr(transformers.Trainer, "log", lambda *args: None)
    monkeypatch.setattr(grpo, "is_rich_available", lambda: False)
    trainer = object.__new__(grpo.GRPOTrainer)
    vars(trainer).update(
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(is_main_process=True),
        log_completions=True,
        args=SimpleNamespace(report_to=[], output_dir=str(folder)),
        state=SimpleNamespace(global_step=STEP),
        _logs={
            "prompt": deque(["q", "q", "r"]),
            "completion": deque(TEXTS),
            "rewards": {"accuracy": deque(REWARDS)},
            "advantages": deque(ADVANTAGES),
            "extra": extra,
            "images": [],
        },
    )
    vars(trainer).setdefault("_modules", {})
    trainer.log({})


@pytest.mark.filterwarnings("ignore")
def test_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl_log(tmp_path, monkeypatch)
    log, (batch,), bad = read_all(tmp_path)
    assert (log.framework, log.format, bad) == ("trl", "trl", [])
    assert [Path(f).name for f in log.files] == ["completions_00007.parquet"]
    check(batch, step=[STEP] * 3, completions=TEXTS, rewards=REWARDS, logp_rollout=None, num_tokens=0)
    assert same_groups(batch.group_ids, GROUPS)


@pytest.mark.filterwarnings("ignore")
def test_trl_with_logged_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = [[rollout_logp(s, t) for t in range(len(r))] for s, r in enumerate(RESPONSES)]
    trainer = [[trainer_logp(s, t) for t in range(len(r))] for s, r in enumerate(RESPONSES)]
    trl_log(tmp_path, monkeypatch, logp_rollout=rollout, mine=trainer, tokens=RESPONSES)
    batch = one(tmp_path, columns={"logp_old": "mine"})
    check_rollout_side(batch, places(masked=False))
    check(batch, logp_old=values(places(masked=False), trainer_logp))


def test_own_rollouts(tmp_path: Path) -> None:
    store.write(rollouts(), tmp_path / "rollouts" / f"{STEP:05d}.parquet")
    log, (batch,), bad = read_all(tmp_path)
    assert (log.framework, log.format, bad) == ("offdrift", "offdrift-rollouts", [])
    check_rollout_side(batch, places(masked=False), advantages=False)
    check(batch, rollout_version=[5] * 8, truncated=[0, 0, 1], completions=TEXTS)


def test_the_own_log_is_read_where_it_lies_beside_the_rollouts(tmp_path: Path) -> None:
    store.write(rollouts(), tmp_path / "rollouts" / "00000.parquet")
    write_log(ragged(3), tmp_path / "logs" / "00000.parquet")
    log, (batch,), _ = read_all(tmp_path)
    assert (log.framework, log.format) == ("offdrift", "plain")
    assert batch.logp is not None
    assert "not reading 1 file of this library's rollout records" in log.said
