"""The token log: the step's own numbers, each sequence once, and nothing stale after a resume."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
import torch
from tests.records.samples import one

from offdrift.advantages import advantages
from offdrift.audit.tally import Tally
from offdrift.engines.score import score
from offdrift.logprobs import LogProbs
from offdrift.models import load_model
from offdrift.records.batch import Logged
from offdrift.records.store import read as read_rollouts
from offdrift.segments import Segments
from offdrift.stats import DriftStats, summarize
from offdrift_lab.train.loop.loop import train
from tests_lab.train.conftest import small_recipe
from tests_lab.train.loop.test_loop import Stop, rows, stop_at

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ARM = "trm_max"


def logs(run, arm: str = ARM) -> list[Logged]:
    """The arm's token logs, in the order of the batches, as an audit reads them."""
    return [one(file) for file in sorted((run / "arms" / arm / "log").glob("*.parquet"))]


def values(log: Logged) -> dict[str, object]:
    """Everything in a log, tensors as lists."""
    fields = {k: v for k, v in vars(log).items() if k in log.__dataclass_fields__}
    fields |= fields.pop("divergences")
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in fields.items()}


def test_a_batchs_log_is_what_the_first_step_saw(tmp_path):
    recipe = small_recipe(batches=3, lag={"sync_every": 3})
    train(recipe, tmp_path / "run")
    found, metrics = logs(tmp_path / "run"), rows(tmp_path / "run")
    assert len(found) == 3
    for index, (log, row) in enumerate(zip(found, metrics, strict=True)):
        drawn = read_rollouts(tmp_path / "run" / "arms" / ARM / "rollouts" / f"batch-{index:06d}.parquet")
        for name in ("tokens", "logp_rollout", "rewards", "rollout_version"):
            assert torch.equal(getattr(log, name).double(), getattr(drawn, name).double()), name
        assert log.prompts == drawn.prompts
        assert log.completions == drawn.completions
        assert log.truncated.tolist() == [f == "length" for f in drawn.finish]
        assert log.step.tolist() == [row["update"]] * 16
        assert log.lag.tolist() == [row["version_lag/max"]] * log.num_tokens
        assert row["version_lag/max"] == index
        again = summarize(DriftStats.of(log.logprobs()))
        compared = [k for k in again if k.startswith(("full/", "rollout/", "current/"))]
        assert len(compared) >= 23
        for name in compared:
            assert again[name] == pytest.approx(row[name], rel=1e-4, abs=1e-6, nan_ok=True), name
        assert float(log.entropy.mean()) == pytest.approx(row["current/entropy"], rel=1e-5)
        kl = log.divergences["kl_rollout_current"]
        assert float(kl.max()) == pytest.approx(row["divergence/kl_rollout_current_max"], rel=1e-5)


def test_the_log_probs_are_those_before_the_update(tmp_path):
    train(small_recipe(batches=1), tmp_path / "run")
    (log,) = logs(tmp_path / "run")
    model, _ = load_model("tiny-qwen3", seed=0)
    drawn = read_rollouts(tmp_path / "run" / "arms" / ARM / "rollouts" / "batch-000000.parquet")
    with torch.no_grad():
        expected = score(model.eval(), drawn).logp
    assert log.logp_last is None, "one epoch"
    assert len(expected) > 50
    torch.testing.assert_close(log.logp, expected, rtol=1e-4, atol=1e-5)


def test_minibatches_and_epochs_log_each_sequence_at_its_first_use(tmp_path):
    optim = {"lr": 1e-2, "epochs": 2, "minibatches": 2, "advantage": "grpo"}
    arm = {"method": "token_tis", "override": {"weight.on": "mismatch"}}
    train(small_recipe(batches=2, optim=optim, arms={"tis": arm}), tmp_path / "run")
    metrics = rows(tmp_path / "run", "tis")
    files = sorted((tmp_path / "run" / "arms" / "tis" / "log").glob("*.parquet"))
    for log, file, first in zip(logs(tmp_path / "run", "tis"), files, (1, 5), strict=True):
        assert sorted(log.step.tolist()) == [first] * 8 + [first + 1] * 8
        for update in (first, first + 1):
            part = log.select((log.step == update).nonzero().squeeze(1))
            again = summarize(DriftStats.of(part.logprobs()))
            row = metrics[update - 1]
            for name in ("staleness/k3", "mismatch/k3", "full/k3", "full/abs_log_ratio_max"):
                assert again[name] == pytest.approx(row[name], rel=1e-3, abs=1e-7), name
            assert part.num_tokens == row["batch/tokens"]
        assert log.rewards.unique().numel() > 2
        # As it was written: a reader keeps equal group ids of different steps apart.
        groups = torch.tensor(pq.read_table(file, columns=["group_id"])["group_id"].to_pylist())
        assert sorted(groups.tolist()) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
        expected = advantages(log.rewards, Segments(log.cu_seqlens, group_ids=groups), how="grpo")
        torch.testing.assert_close(log.advantages, expected, rtol=1e-4, atol=1e-6)
        assert metrics[first]["staleness/k3"] > 1e-6, "the second minibatch sees a moved policy"
        # The second epoch: other minibatches of the same tokens.
        assert log.updates_before.tolist() == (log.step - first).tolist()
        again = metrics[first + 1 : first + 3]
        assert [row["batch/epoch"] for row in again] == [1, 1]
        seen = sum(row["full/k3"] * row["batch/tokens"] for row in again) / log.num_tokens
        last = DriftStats.of(LogProbs.pack(log.logp_rollout, log.logp_last, segments=log.segments))
        assert summarize(last)["full/k3"] == pytest.approx(seen, rel=1e-3)
        moved = (log.logp_last - log.logp).double()
        told = Tally.of(log).as_dict()["overall"]
        assert told["reuse/k3"] == pytest.approx(float((moved.expm1() - moved).mean()), rel=1e-6)
        assert told["batch/updates_before"] == pytest.approx(
            float((log.step == first + 1)[log.segments.seq_ids].double().mean())
        )


def test_the_switch_leaves_no_log_and_changes_nothing_else(tmp_path):
    for name, tokens in (("with", True), ("without", False)):
        recipe = small_recipe(batches=3)
        recipe = recipe.model_copy(update={"log": recipe.log.model_copy(update={"tokens": tokens})})
        train(recipe, tmp_path / name)
    assert len(logs(tmp_path / "with")) == 3
    assert not (tmp_path / "without" / "arms" / ARM / "log").exists()
    assert rows(tmp_path / "with") == rows(tmp_path / "without")
    assert rows(tmp_path / "with", file="samples") == rows(tmp_path / "without", file="samples")


@pytest.mark.parametrize(("sync_every", "kept"), [(1, True), (2, False)])
def test_every_batch_of_a_run_logs_the_same_divergences(tmp_path, sync_every, kept):
    """A batch that the current weights drew knows the old policy's, which the others of a lagging run do not."""
    arms = {"gspo": {"method": "gspo"}}
    train(small_recipe(batches=3, lag={"sync_every": sync_every}, arms=arms), tmp_path / "run")
    names = [set(log.divergences) for log in logs(tmp_path / "run", "gspo")]
    assert len(names) == 3
    assert names[0] == names[1] == names[2]
    assert "kl_rollout_current" in names[0]
    assert ("kl_rollout_old" in names[0]) is kept


def test_interval_evidence_is_not_logged_as_exact(tmp_path):
    train(small_recipe(batches=1, rollout__evidence=8), tmp_path / "run")
    (log,) = logs(tmp_path / "run")
    assert log.divergences == {}
    assert rows(tmp_path / "run")[0]["divergence/kl_rollout_current_max"] > 0


def test_a_resumed_run_leaves_the_log_of_an_uninterrupted_one(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(small_recipe(), whole)
    with pytest.raises(Stop):
        train(small_recipe(), cut, watch=stop_at(ARM, 6))
    folder = cut / "arms" / ARM / "log"
    assert len(list(folder.glob("*.parquet"))) == 5, "the last batch was not finished"
    stale = folder / "batch-000007.parquet"
    stale.write_bytes((folder / "batch-000000.parquet").read_bytes())
    train(small_recipe(), cut, resume=True)
    a, b = logs(whole), logs(cut)
    assert [len(a), len(b)] == [6, 6], "what stood beyond the checkpoint is gone"
    assert [values(x) for x in a] == [values(x) for x in b]
    assert len(values(a[0])) >= 19
