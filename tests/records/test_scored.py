"""Placeholders and holes are counted by field and never compared; honest numbers stay."""

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from offdrift.logprobs import UNSCORED_BELOW
from tests.records.samples import one, read_all, unscored

NAN, INF = math.nan, math.inf


def log(tmp_path: Path, **columns: list[list[float | None]]) -> Path:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


@pytest.mark.parametrize("hole", [None, NAN, INF, -INF, 1.0, -9999.0, -1e9, 1e-2])
@pytest.mark.parametrize("name", ["logp_rollout", "logp_old", "logp", "logp_ref"])
def test_what_no_log_prob_can_be(tmp_path: Path, name: str, hole: float | None) -> None:
    columns = {n: [[-1.0, -2.0, -3.0], [-4.0]] for n in ("logp_rollout", "logp_old", "logp", "logp_ref")}
    columns[name] = [[-1.0, hole, -3.0], [-4.0]]
    batch = read_all(log(tmp_path, **columns))[1][0]
    if name == "logp_ref":  # no policy that is compared
        assert batch.logp_ref is None
        return
    assert {n.partition("/")[0]: k for n, k in unscored(batch).items()} == {name: 1}
    assert batch.trainable.tolist() == [3, 1]
    assert batch.cu_seqlens.tolist() == [0, 2, 3]
    assert batch.in_response.tolist() == [0, 2, 0]
    assert batch.response_lengths.tolist() == [3, 1]
    for other in columns:
        assert getattr(batch, other).tolist() == [-1.0, -3.0, -4.0]
    batch.logprobs()


@pytest.mark.parametrize("value", [0.0, -0.0, 5e-4, -1e-30, -800.0, -999.0])
def test_honest_log_probs_stay(tmp_path: Path, value: float) -> None:
    batch = one(log(tmp_path, logp_rollout=[[-1.0, value]], logp=[[value, -1.0]]))
    assert batch.unscored == {}
    assert batch.num_tokens == 2


@pytest.mark.parametrize("value", [UNSCORED_BELOW, -9998.0])
def test_only_what_drew_a_token_finds_it_possible(tmp_path: Path, value: float) -> None:
    batch = one(log(tmp_path, logp_rollout=[[-1.0, value]], logp=[[value, -1.0]]))
    assert unscored(batch) == {"logp_rollout/placeholder": 1}
    assert batch.logp.tolist() == [value]


@pytest.mark.parametrize("hole", [None, NAN, INF])
@pytest.mark.parametrize("name", ["advantages", "entropy", "kl_rollout_current", "logp_ref"])
def test_holes_in_other_fields_cost_no_tokens(tmp_path: Path, name: str, hole: float | None) -> None:
    path = log(tmp_path, logp_rollout=[[-1.0, -2.0], [-3.0]], **{name: [[-2.0, hole], [-0.5]]})
    _, (without, having), bad = read_all(path)
    assert bad == []
    assert (without.num_tokens, having.num_tokens) == (2, 1)
    assert (unscored(without), unscored(having)) == ({}, {})
    held = having.divergences.get(name, getattr(having, name, None))
    assert held.tolist() == [-0.5]
    assert without.divergences.get(name, getattr(without, name, None)) is None


def test_holes_among_integers(tmp_path: Path) -> None:
    logp, tokens, versions = [[-1.0, -2.0], [-3.0, -4.0]], [[5, None], [6, 7]], [[1, 2], [3, None]]
    path = log(tmp_path, logp_rollout=logp, tokens=tokens, rollout_version=versions)
    _, (first, second), _ = read_all(path)
    assert first.tokens is None
    assert first.rollout_version.tolist() == [1, 2]
    assert second.tokens.tolist() == [6, 7]
    assert second.rollout_version is None


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
    assert unscored(batch) == {"logp_rollout/zero": 8}
    assert batch.cu_seqlens.diff().tolist() == [0, 8, 8, 8, 7]


def test_a_row_that_lacks_a_field_is_counted(tmp_path: Path) -> None:
    path = log(tmp_path, logp_rollout=[[-3.0], [-1.0, -2.0]], logp=[None, [-1.5, -2.5]])
    batch = one(path)
    assert unscored(batch) == {"logp/absent": 1}
    assert batch.cu_seqlens.tolist() == [0, 0, 2]
    assert batch.logp.tolist() == [-1.5, -2.5]


def test_a_field_that_no_row_has_is_absent(tmp_path: Path) -> None:
    table = pa.table({"logp_rollout": [[-1.0]], "logp": pa.array([None], pa.list_(pa.float32()))})
    pq.write_table(table, tmp_path / "a.parquet")
    batch = one(tmp_path / "a.parquet")
    assert batch.logp is None
    assert batch.unscored == {}


def test_a_version_that_is_missing_leaves_no_lag(tmp_path: Path) -> None:
    table = pa.table({"logp_rollout": [[-1.0], [-2.0]], "rollout_version": [3, 4], "version": [5, None]})
    pq.write_table(table, tmp_path / "a.parquet")
    _, (batch, without), _ = read_all(tmp_path / "a.parquet")
    assert (batch.num_tokens, without.num_tokens) == (1, 1)
    assert without.lag is None
    assert torch.equal(batch.lag, torch.tensor([2]))
