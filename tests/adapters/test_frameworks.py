"""Every framework's log, written by its own code, holds what was put into it.

The samples in tests/data/logs were written by the frameworks' own dumping functions (see the README
there); verl's and TRL's are called here.
"""

import ast
import importlib.util
import json
import os
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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


ONE_HOLE = places(without=[(1, 0)])
"""prime-rl wrote the trainer's log-prob of sequence 1's only token, which was -inf, as null; Python, the engine's of
NeMo-RL as a bare NaN."""
BOTH = {"logp_old": values(places(), trainer_logp), "logp_ref": values(places(), rollout_logp) - 0.25}
SAMPLE = {"rollout_version": [6] * 7, "truncated": [0, 0, 1]}
PROMPTS = ("1+1?", "1+1?", "2+2?")

DUMPS: list[tuple[str, str, list[tuple[int, int]], dict[str, Any]]] = [
    (
        "prime_rl",
        "prime-rl",
        ONE_HOLE,
        {"logp": values(ONE_HOLE, trainer_logp), "logp_old": None, "entropy": [0.5] * 6},
    ),
    ("prime_rl_traces", "prime-rl-traces", places(), {"rewards": REWARDS, **SAMPLE}),
    (
        "nemo_rl",
        "nemo-rl",
        ONE_HOLE,
        {"logp_old": values(ONE_HOLE, trainer_logp), "rewards": REWARDS, "prompts": PROMPTS, "completions": TEXTS},
    ),
    ("slime", "slime-train", places(), {"rewards": REWARDS, **BOTH}),
    ("miles", "miles-train", places(), BOTH),
    ("skyrl", "skyrl", places(), BOTH),
    ("slime/rollout_data", "slime-rollout", places(), {"logp_old": None, "completions": TEXTS, **SAMPLE}),
    ("miles/dashboard_columns", "miles-columns", places(), {}),
    ("open_instruct", "open-instruct", places(masked=False), {"truncated": [0, 0, 1]}),
]
"""Folder of a dump, its format, which tokens are left, and other fields."""


@pytest.mark.parametrize(("folder", "named", "left", "fields"), DUMPS, ids=[name for name, *_ in DUMPS])
def test_dumps(folder: str, named: str, left: list[tuple[int, int]], fields: dict[str, Any]) -> None:
    log, (batch,), bad = read_all(LOGS / folder)
    assert (log.format, bad) == (named, [])
    assert named.startswith(log.framework)
    check_rollout_side(batch, left, advantages=folder not in ("slime/rollout_data", "miles/dashboard_columns"))
    check(batch, **fields)
    hole = "logp/missing" if folder == "prime_rl" else "logp_rollout/missing"
    assert unscored(batch) == ({hole: 1} if left is ONE_HOLE else {})
    assert folder != "slime/rollout_data" or "evaluation" in log.description


def test_slices_of_sequences_are_not_taken_for_sequences() -> None:
    with pytest.raises(RecordError, match="one of 2 context-parallel slices"):
        detect([str(LOGS / "miles_cp")])


def test_areal() -> None:
    log, batches, bad = read_all(LOGS / "areal")
    assert (log.framework, bad) == ("areal", [])
    assert [b.step.tolist() for b in batches] == [[7, 7], [7]]
    assert [b.length_unit for b in batches] == ["character"] * 2
    assert [x for b in batches for x in b.response_lengths.tolist()] == [3, 1, 4]
    check(batches[0], logp_rollout=None)


def test_samples_of_a_task_of_areal_are_one_group_of_one_step(tmp_path: Path) -> None:
    """AReaL 2.0 gives every sample its own versions, and puts a task's file into the folder of the newest of all."""
    for version, task, tails in ((7, 0, (6, 7)), (8, 1, (6, 8)), (8, 2, (8, 7))):
        file = tmp_path / "rollout" / str(version) / f"{task}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {
                **{"task_id": task, "sample_idx": i, "seqlen": 5, "prompt_len": 2, "head_version": 6},
                **{"tail_version": tail, "version_rle": [[6, 2], [tail, 1]], "reward": float(i)},
                **{"prompt": "ab", "completion": "cde"},
            }
            for i, tail in enumerate(tails)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, batches, bad = read_all(tmp_path)
    assert bad == []
    seen = [(s, g) for b in batches for s, g in zip(b.step.tolist(), b.group_ids.tolist(), strict=True)]
    assert [step for step, _ in seen] == [7, 7, 8, 8, 8, 8]
    assert len(set(seen)) == 3


def verl_writer(module: str) -> Any:
    """The function of one of verl's trainers, without the packages that the rest of its module needs."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("verl is not installed")
    source = Path(spec.origin).parent / "trainer" / "ppo" / module
    if not source.is_file():
        pytest.skip(f"this verl has no {module}")
    tree = ast.parse(source.read_text())
    own = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_write_generations")
    own.decorator_list = []
    scope: dict[str, Any] = {"os": os, "json": json, "np": np}
    exec(compile(ast.Module([own], []), str(source), "exec"), scope)
    return scope["_write_generations"]


# Trainers of verl 1's line name each sample by prompt, rollout and output; the others by request.
OF_SAMPLES = {
    "ray_trainer.py": {"acc": REWARDS, "request_id": ["a", "b", "c"]},
    "v1/trainer_base.py": {"uid": ["8f-1_0_0", "8f-1_1_0", "9a_0_0"]},
}


@pytest.mark.parametrize("module", OF_SAMPLES)
def test_verl(tmp_path: Path, module: str) -> None:
    write = verl_writer(module)
    for step in (2, 10):
        extras = OF_SAMPLES[module]
        write(["q", "q", "r"], list(TEXTS), ["2", "2", "4"], REWARDS, extras, str(tmp_path), step)
    log, batches, bad = read_all(tmp_path)
    assert (log.framework, bad) == ("verl", [])
    assert [Path(f).name for f in log.files] == ["2.jsonl", "10.jsonl"]
    assert [b.step.tolist() for b in batches] == [[2] * 3, [10] * 3]
    lengths = [len(t) for t in TEXTS]
    check(batches[0], logp_rollout=None, completions=TEXTS, response_lengths=lengths, rewards=REWARDS)
    assert batches[0].length_unit == "character"
    assert same_groups(batches[0].group_ids, GROUPS)
    assert "no log-probs" in log.description


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
    assert "not reading 1 file of offdrift rollout records" in log.description
