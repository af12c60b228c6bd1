"""Placeholders and holes are counted by field and never compared; honest numbers stay."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.integrations.samples import one

NAN, INF = math.nan, math.inf


def log(tmp_path: Path, **columns: list[list[float | None]]) -> Path:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


@pytest.mark.parametrize("hole", [None, NAN, INF, -INF, 1.0, -9999.0, -1e9, 1e-2])
@pytest.mark.parametrize("name", ["logp_rollout", "logp_old", "logp", "logp_ref"])
def test_what_no_log_prob_can_be(tmp_path: Path, name: str, hole: float | None) -> None:
    columns = {
        n: [[-1.0, -2.0, -3.0], [-4.0]] for n in ("logp_rollout", "logp_old", "logp", "logp_ref")
    }
    columns[name] = [[-1.0, hole, -3.0], [-4.0]]  # type: ignore[list-item]
    batch = one(log(tmp_path, **columns))  # type: ignore[arg-type]
    assert batch.unscored == {name: 1}
    assert batch.cu_seqlens.tolist() == [0, 2, 3]
    assert batch.in_response.tolist() == [0, 2, 0]
    assert batch.response_lengths.tolist() == [3, 1]
    for other in columns:
        assert getattr(batch, other).tolist() == [-1.0, -3.0, -4.0]
    batch.logprobs()


@pytest.mark.parametrize("value", [0.0, -0.0, 5e-4, -1e-30, -800.0, -9998.0])
def test_honest_log_probs_stay(tmp_path: Path, value: float) -> None:
    batch = one(log(tmp_path, logp_rollout=[[-1.0, value]], logp=[[value, -1.0]]))
    assert batch.unscored == {}
    assert batch.num_tokens == 2


@pytest.mark.parametrize("hole", [None, NAN, INF])
@pytest.mark.parametrize("name", ["advantages", "entropy", "kl_rollout_current"])
def test_other_fields_have_holes_too(tmp_path: Path, name: str, hole: float | None) -> None:
    batch = one(log(tmp_path, logp_rollout=[[-1.0, -2.0]], **{name: [[2.0, hole]]}))
    assert batch.unscored == {name: 1}
    assert batch.num_tokens == 1


def test_holes_among_integers(tmp_path: Path) -> None:
    batch = one(log(tmp_path, logp_rollout=[[-1.0, -2.0, -3.0]], tokens=[[5, None, 7]], rollout_version=[[1, 2, None]]))  # fmt: skip
    assert batch.unscored == {"tokens": 1, "rollout_version": 1}
    assert batch.tokens is not None
    assert batch.tokens.tolist() == [5]


def test_a_response_of_zeros_that_the_trainer_finds_unlikely_was_filled_in(tmp_path: Path) -> None:
    zeros = [0.0] * 8
    rows = [
        (zeros, [-0.5] * 8),  # filled in
        ([*zeros[:-1], -2.0], [-0.5] * 8),
        (zeros, zeros),  # certain under both
        (zeros, [-0.01] * 8),  # nearly certain under the other
        (zeros[:7], [-0.5] * 7),  # too short to tell
    ]
    batch = one(log(tmp_path, logp_rollout=[r for r, _ in rows], logp=[r for _, r in rows]))
    assert batch.unscored == {"logp_rollout": 8}
    assert batch.cu_seqlens.diff().tolist() == [0, 8, 8, 8, 7]


def test_a_row_that_lacks_a_field_is_counted(tmp_path: Path) -> None:
    path = log(tmp_path, logp_rollout=[[-3.0], [-1.0, -2.0]], logp=[None, [-1.5, -2.5]])  # type: ignore[list-item]
    batch = one(path)
    assert batch.unscored == {"logp": 1}
    assert batch.cu_seqlens.tolist() == [0, 0, 2]
    assert batch.logp is not None
    assert batch.logp.tolist() == [-1.5, -2.5]


def test_a_field_that_no_row_has_is_absent(tmp_path: Path) -> None:
    table = pa.table({"logp_rollout": [[-1.0]], "logp": pa.array([None], pa.list_(pa.float32()))})
    pq.write_table(table, tmp_path / "a.parquet")
    batch = one(tmp_path / "a.parquet")
    assert batch.logp is None
    assert batch.unscored == {}


def test_a_version_that_is_missing_leaves_no_lag(tmp_path: Path) -> None:
    table = pa.table(
        {"logp_rollout": [[-1.0], [-2.0]], "rollout_version": [3, 4], "version": [5, None]}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    batch = one(tmp_path / "a.parquet")
    assert batch.unscored == {"version": 1}
    assert batch.lag is not None
    assert torch.equal(batch.lag, torch.tensor([2]))
