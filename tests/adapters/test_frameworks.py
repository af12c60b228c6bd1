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
from offdrift.records.log import write_log
from offdrift.records.readers import detect
from tests.records.samples import (  # fmt: skip
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


def assert_rollout_side(batch: Logged, expected: list[tuple[int, int]]) -> None:
    assert batch.logp_rollout is not None
    assert torch.equal(batch.logp_rollout, values(expected, rollout_logp))
    assert torch.equal(batch.in_response, torch.tensor([t for _, t in expected]))
    assert batch.tokens is not None
    assert batch.tokens.tolist() == [RESPONSES[s][t] for s, t in expected]
    assert batch.step.tolist() == [STEP] * 3
    assert batch.row.tolist() == [1, 2, 3]
    assert batch.response_lengths.tolist() == [3, 1, 4]
    assert same_groups(batch.group_ids, GROUPS)


def assert_advantages(batch: Logged, expected: list[tuple[int, int]]) -> None:
    assert batch.advantages is not None
    assert torch.equal(batch.advantages, values(expected, lambda s, t: ADVANTAGES[s]))


def test_prime_rl() -> None:
    # The trainer's log-prob of sequence 1's only token was -inf, which prime-rl writes as null.
    left = places(without=[(1, 0)])
    batch = one(LOGS / "prime_rl")
    assert_rollout_side(batch, left)
    assert_advantages(batch, left)
    assert batch.logp is not None
    assert torch.equal(batch.logp, values(left, trainer_logp))
    assert batch.logp_old is None
    assert batch.entropy is not None
    assert batch.entropy.tolist() == [0.5] * 6
    assert unscored(batch) == {"logp/missing": 1}


def test_the_episodes_of_prime_rl() -> None:
    found, (batch,), bad = read_all(LOGS / "prime_rl_traces")
    assert (found.framework, found.format, bad) == ("prime-rl", "prime-rl-traces", [])
    assert_rollout_side(batch, places())
    assert_advantages(batch, places())
    assert batch.rewards is not None
    assert batch.rewards.tolist() == REWARDS
    assert batch.rollout_version is not None
    assert batch.rollout_version.tolist() == [6] * 7
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [0, 0, 1]


def test_nemo_rl() -> None:
    # Python wrote the engine's log-prob of sequence 1's only token as a bare NaN.
    left = places(without=[(1, 0)])
    batch = one(LOGS / "nemo_rl")
    assert_rollout_side(batch, left)
    assert_advantages(batch, left)
    assert batch.logp_old is not None
    assert torch.equal(batch.logp_old, values(left, trainer_logp))
    assert batch.rewards is not None
    assert batch.rewards.tolist() == REWARDS
    assert batch.prompts == ("1+1?", "1+1?", "2+2?")
    assert batch.completions == TEXTS
    assert unscored(batch) == {"logp_rollout/missing": 1}


@pytest.mark.parametrize("framework", ["slime", "miles", "skyrl"])
def test_train_dumps(framework: str) -> None:
    found, (batch,), bad = read_all(LOGS / framework)
    assert found.framework == framework
    assert bad == []
    assert_rollout_side(batch, places())
    assert_advantages(batch, places())
    assert batch.logp_old is not None
    assert torch.equal(batch.logp_old, values(places(), trainer_logp))
    assert batch.logp_ref is not None
    assert torch.equal(batch.logp_ref, values(places(), rollout_logp) - 0.25)
    if framework == "slime":
        assert batch.rewards is not None
        assert batch.rewards.tolist() == REWARDS


def test_rollout_dumps() -> None:
    found, (batch,), bad = read_all(LOGS / "slime" / "rollout_data")
    assert (found.format, bad) == ("slime-rollout", [])
    assert_rollout_side(batch, places())
    assert batch.logp_old is None
    assert batch.rollout_version is not None
    assert batch.rollout_version.tolist() == [6] * 7
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [0, 0, 1]
    assert batch.completions == TEXTS
    assert "evaluation" in found.said


def test_the_dashboard_columns_of_miles() -> None:
    found, (batch,), _ = read_all(LOGS / "miles" / "dashboard_columns")
    assert (found.framework, found.format) == ("miles", "miles-columns")
    assert_rollout_side(batch, places())


def test_slices_of_sequences_are_not_taken_for_sequences() -> None:
    with pytest.raises(RecordError, match="one of 2 context-parallel slices"):
        detect([str(LOGS / "miles_cp")])


def test_open_instruct() -> None:
    batch = one(LOGS / "open_instruct")
    assert_rollout_side(batch, places(masked=False))
    assert_advantages(batch, places(masked=False))
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [0, 0, 1]


def test_areal() -> None:
    found, batches, bad = read_all(LOGS / "areal")
    assert (found.framework, bad) == ("areal", [])
    assert [b.step.tolist() for b in batches] == [[7, 7], [7]]
    assert [b.length_unit for b in batches] == ["character"] * 2
    assert [x for b in batches for x in b.response_lengths.tolist()] == [3, 1, 4]
    assert batches[0].logp_rollout is None


def verl_writer() -> Any:
    """verl's own function, without the packages that the rest of its module needs."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("verl is not installed")
    source = Path(spec.origin).parent / "trainer" / "ppo" / "ray_trainer.py"
    tree = ast.parse(source.read_text())
    own = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_write_generations")  # fmt: skip
    own.decorator_list = []
    scope: dict[str, Any] = {"os": os, "json": json}
    exec(compile(ast.Module([own], []), str(source), "exec"), scope)
    return scope["_write_generations"]


def test_verl(tmp_path: Path) -> None:
    write = verl_writer()
    for step in (2, 10):
        extras = {"acc": REWARDS, "request_id": ["a", "b", "c"]}
        write(["q", "q", "r"], list(TEXTS), ["2", "2", "4"], REWARDS, extras, str(tmp_path), step)
    found, batches, bad = read_all(tmp_path)
    assert (found.framework, bad) == ("verl", [])
    assert [Path(f).name for f in found.files] == ["2.jsonl", "10.jsonl"]
    assert [b.step.tolist() for b in batches] == [[2] * 3, [10] * 3]
    batch = batches[0]
    assert batch.logp_rollout is None
    assert batch.completions == TEXTS
    assert batch.response_lengths.tolist() == [len(t) for t in TEXTS]
    assert batch.length_unit == "character"
    assert batch.rewards is not None
    assert batch.rewards.tolist() == REWARDS
    assert same_groups(batch.group_ids, GROUPS)
    assert "no log-probs" in found.said


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
    found, (batch,), bad = read_all(tmp_path)
    assert (found.framework, found.format, bad) == ("trl", "trl", [])
    assert [Path(f).name for f in found.files] == ["completions_00007.parquet"]
    assert batch.step.tolist() == [STEP] * 3
    assert batch.completions == TEXTS
    assert batch.rewards is not None
    assert batch.rewards.tolist() == REWARDS
    assert same_groups(batch.group_ids, GROUPS)
    assert (batch.logp_rollout, batch.num_tokens) == (None, 0)


@pytest.mark.filterwarnings("ignore")
def test_trl_with_logged_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = [[rollout_logp(s, t) for t in range(len(r))] for s, r in enumerate(RESPONSES)]
    trainer = [[trainer_logp(s, t) for t in range(len(r))] for s, r in enumerate(RESPONSES)]
    trl_log(tmp_path, monkeypatch, logp_rollout=rollout, mine=trainer, tokens=RESPONSES)
    batch = one(tmp_path, columns={"logp_old": "mine"})
    everywhere = places(masked=False)
    assert_rollout_side(batch, everywhere)
    assert_advantages(batch, everywhere)
    assert batch.logp_old is not None
    assert torch.equal(batch.logp_old, values(everywhere, trainer_logp))


def test_own_rollouts(tmp_path: Path) -> None:
    store.write(rollouts(), tmp_path / "rollouts" / f"{STEP:05d}.parquet")
    found, (batch,), bad = read_all(tmp_path)
    assert (found.framework, found.format, bad) == ("offdrift", "offdrift-rollouts", [])
    assert_rollout_side(batch, places(masked=False))
    assert batch.rollout_version is not None
    assert batch.rollout_version.tolist() == [5] * 8
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [0, 0, 1]
    assert batch.completions == TEXTS


def test_the_own_log_is_read_where_it_lies_beside_the_rollouts(tmp_path: Path) -> None:
    store.write(rollouts(), tmp_path / "rollouts" / "00000.parquet")
    write_log(ragged(3), tmp_path / "logs" / "00000.parquet")
    found, (batch,), _ = read_all(tmp_path)
    assert (found.framework, found.format) == ("offdrift", "plain")
    assert batch.logp is not None
    assert "not reading 1 file of this library's rollout records" in found.said
