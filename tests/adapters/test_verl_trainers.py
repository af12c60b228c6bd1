"""verl's real trainers call us: the step between log-probs and update, v0-style and v1."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.verl_trainers import LENGTHS, REWARDS, tokens
from tests.records.samples import flat, read_all

NEEDED = {"v0": ("torchdata", "peft", "uvicorn"), "v1": ("torchdata", "peft", "uvicorn", "transfer_queue")}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["v0", "v1"])
def test_the_advantage_step_of_a_trainer(trainer, tmp_path):
    """geo_mask rejects the third sequence: weight 0, mask whole, out of its siblings' baseline."""
    absent = [m for m in NEEDED[trainer] if importlib.util.find_spec(m) is None]
    if absent:
        pytest.skip(f"verl's {trainer} trainer imports {', '.join(absent)}")
    path = os.pathsep.join([str(Path("src").resolve()), str(Path().resolve()), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.adapters.verl_trainers", trainer, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    width = max(LENGTHS)
    mask = [[1] * n + [0] * (width - n) for n in LENGTHS]
    assert found["response_mask"] == mask
    weights = [[float(x) for x in row] for row in mask]
    weights[2] = [0.0] * width
    assert found["rollout_is_weights"] == weights
    # Means over kept siblings: (1 + 0) / 2, and (0 + 1 + 1) / 3; the rejected one against the kept.
    baselines = [0.5, 0.5, 0.5, 2 / 3, 2 / 3, 2 / 3]
    for row, reward, baseline, n in zip(found["advantages"], REWARDS, baselines, LENGTHS, strict=True):
        assert row == pytest.approx([reward - baseline] * n + [0.0] * (width - n), abs=1e-6)
    assert found["metrics"]["offdrift/gate/acceptance_seq"] == pytest.approx(5 / 6)
    assert found["metrics"]["offdrift/batch/tokens"] == sum(LENGTHS)
    assert "weight [" not in ran.stderr
    assert "gate [keep if" in ran.stderr
    _, batches, bad = read_all(tmp_path)
    record, (rollout, old) = flat(batches), tokens()
    assert not bad
    assert record["lengths"] == LENGTHS
    assert record["step"] == [7] * 6
    assert record["rewards"] == REWARDS
    assert record["tokens"] == [t for n in LENGTHS for t in range(n)]
    assert record["logp_rollout"] == pytest.approx([float(x) for r in rollout for x in r])
    assert record["logp_old"] == pytest.approx([float(x) for r in old for x in r])
    assert record["advantages"] == pytest.approx(
        [x for row, n in zip(found["advantages"], LENGTHS, strict=True) for x in row[:n]]
    )
    if trainer == "v1":
        assert record["version"] == [6] * 6
        assert record["rollout_version"] == [5 + i % 2 for i, n in enumerate(LENGTHS) for _ in range(n)]
    else:
        assert "rollout_version" not in record
