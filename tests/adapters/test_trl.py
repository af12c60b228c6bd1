"""TRL's own trainer, run: generation, accumulation, several iterations, tools, records, findings."""

import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offdrift.adapters import frameworks
from offdrift.errors import FrameworkError, LivenessError, MethodError
from tests.adapters.trl_runs import Client, Deaf, Sampler, steps, tiny_model, trainer
from tests.adapters.trl_worker import DRAWN, SPREAD, one_of_two, spread
from tests.records.samples import one, read_all

kinds = ("UserWarning", "FutureWarning", "DeprecationWarning")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in kinds]
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OFFDRIFT_METRICS": "all"}
ENVIRONMENT |= {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}


def weights(run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def test_metrics_stand_in_trls_logs_and_say_what_the_rollouts_were(tmp_path):
    """The sampler misreports by 0.2 nats per token, normally distributed."""
    run = trainer(tmp_path, method="decoupled_token_is", rollout_func=Sampler(0.2))
    run.train()
    rows = steps(run)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        expected = 0.2 * math.sqrt(2 / math.pi)
        assert row["offdrift/mismatch/abs_log_ratio_mean"] == pytest.approx(expected, rel=0.25)
        assert row["offdrift/staleness/k3"] == 0  # one update per generation
        assert row["offdrift/batch/tokens"] == 2 * (12 + 11 + 10 + 12)
        assert row["offdrift/reward/mean"] == pytest.approx(row["reward"])
        assert row["offdrift/optim/loss"] == pytest.approx(row["loss"], abs=1e-6)
        assert row["offdrift/unscored_tokens"] == 0
        assert row["offdrift/weight/max"] > 1.1
        assert "sampling/importance_sampling_ratio/mean" not in row


@pytest.mark.parametrize(("method", "mode"), SPREAD)
def test_accumulation_gives_the_step_of_the_whole(tmp_path, method, mode):
    """16 sequences at once, or in four micro-batches of 4 of unequal lengths."""
    from tests.adapters import trl_runs as runs

    sizes = ({"per_device_train_batch_size": 16}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4})
    whole, cut = (
        spread(trainer, runs.Sampler, tmp_path / str(i), method, mode, **size) for i, size in enumerate(sizes)
    )
    assert whole.args.gradient_accumulation_steps == 1
    start = torch.cat([p.detach().flatten() for p in tiny_model().parameters()])
    assert float((weights(whole) - start).abs().max()) > 1e-4
    torch.testing.assert_close(weights(cut), weights(whole), rtol=0, atol=2e-7)
    (a,), (b,) = steps(whole), steps(cut)
    shared = [name for name in a if name.startswith("offdrift/")]
    assert len(shared) > 80
    for name in shared:
        assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name


def test_several_iterations_and_late_updates_keep_the_old_policy(tmp_path):
    """Two passes over a generation of two updates: lags 0, 1, 2, 3, and 0 again."""
    config = {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 5}
    sampler = Sampler(0.01)
    run = trainer(
        tmp_path,
        method="decoupled_geo_rs",
        settings={"gate.low": 0.9, "gate.high": 1.1},
        rollout_func=sampler,
        config=config,
    )
    run.train()
    rows = steps(run)
    assert [row["offdrift/version_lag/mean"] for row in rows] == [0, 1, 2, 3, 0]
    assert [row["offdrift/staleness/k3"] > 1e-4 for row in rows] == [False, True, True, True, False]
    for row in rows:  # the old policy is the one that drew
        assert row["offdrift/mismatch/abs_log_ratio_max"] < 0.05


def test_recording_alone_changes_no_step_of_trl(tmp_path):
    from trl import GRPOTrainer

    plain = trainer(tmp_path / "plain", base=GRPOTrainer, rollout_func=Sampler(0.1))
    plain.train()
    run = trainer(tmp_path / "ours", method="disabled", rollout_func=Sampler(0.1), record=True)
    run.train()
    assert torch.equal(weights(run), weights(plain))
    _, batches, _ = read_all(tmp_path / "ours" / "rollouts")
    assert sum(batch.num_sequences for batch in batches) == 16
    assert all(float((batch.logp_rollout - batch.logp_old).abs().mean()) > 0.05 for batch in batches)
    with pytest.raises(MethodError, match=r"neither gates nor weights.*record=True"):
        trainer(tmp_path / "none", method="disabled", rollout_func=Sampler(0.1))


@pytest.mark.parametrize("passes", [1, 2])
def test_without_an_engine_no_metric_and_no_column_is_a_copy_of_the_trainers(tmp_path, caplog, passes):
    """Transformers draws within the trainer: TRL has no log-probs of what drew, and old ones for a second pass alone."""
    run = trainer(tmp_path, method="disabled", record=True, config={"num_iterations": passes}, metrics="all")
    run.train()
    for row in steps(run):
        assert not [name for name in row if name.split("/")[1:2] in (["mismatch"], ["full"], ["rollout"])]
        assert row["offdrift/batch/tokens"] > 0
    assert [row["offdrift/staleness/k3"] > 0 for row in steps(run)] == [False, passes == 2]
    said = [r.message for r in caplog.records if r.name == "offdrift.trl" and "no mismatch is logged" in r.message]
    assert len(said) == 1
    assert "use_vllm=True" in said[0]
    _, batches, _ = read_all(tmp_path / "rollouts")
    for batch in batches:
        assert batch.logp_rollout is None
        assert (batch.logp_old is None) == (passes == 1)


def test_tools_write_no_token_that_trains(tmp_path):
    """The environment's tokens are in no statistic, although their log-probs are NaN."""
    config = {"gradient_accumulation_steps": 2, "max_steps": 1}
    for mode in ("correct", "loss"):
        sampler = Sampler(holes=slice(3, 6))
        run = trainer(tmp_path / mode, method="segment_tis", mode=mode, rollout_func=sampler, config=config)
        run.train()
        (row,) = steps(run)
        assert row["offdrift/batch/tokens"] == sum(len(ids) - 3 for ids, _ in sampler.said)
        assert row["offdrift/unscored_tokens"] == 0
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0


def test_records_hold_what_was_drawn(tmp_path):
    sampler = Sampler(0.1)
    config = {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "beta": 0.1}
    config |= {"log_completions": True, "num_completions_to_print": 0}
    run = trainer(tmp_path, method="decoupled_token_is", rollout_func=sampler, record=True, config=config)
    run.train()
    (file,) = (tmp_path / "rollouts").glob("*.parquet")
    batch = one(file)
    assert batch.num_sequences == 4 * 16
    assert sorted(set(batch.step.tolist())) == [1, 2, 3, 4]
    assert batch.version.tolist() == (batch.step - 1).tolist()
    assert sorted(set(batch.lag.tolist())) == [0, 1]
    assert batch.response_lengths.tolist() == batch.segments.lengths.tolist()
    said = {tuple(ids): logps for ids, logps in sampler.said}
    cuts = batch.cu_seqlens.tolist()
    for i, (start, stop) in enumerate(itertools.pairwise(cuts)):
        logps = said[tuple(batch.tokens[start:stop].tolist())]
        assert batch.logp_rollout[start:stop].tolist() == pytest.approx(logps, abs=1e-6), i
    first = batch.select((batch.step == 1).nonzero().squeeze(-1))
    assert torch.equal(first.logp, first.logp_old)
    second = batch.select((batch.step == 2).nonzero().squeeze(-1))
    assert float((second.logp - second.logp_old).abs().mean()) > 1e-3
    # One group is one prompt of four completions; the next generation has other groups.
    ids = first.group_ids.tolist()
    assert sorted(ids.count(g) for g in set(ids)) == [4, 4, 4, 4]
    assert len({(g, p) for g, p in zip(ids, first.prompts, strict=True)}) == 4
    third = batch.select((batch.step == 3).nonzero().squeeze(-1))
    assert not set(third.group_ids.tolist()) & set(ids)
    rewards = first.segments.groups.mean(first.rewards)
    centered = first.rewards - first.segments.groups.spread(rewards)
    assert (first.advantages[first.cu_seqlens[:-1]].sign() == centered.sign()).all()
    assert list((tmp_path / "completions").glob("*.parquet"))


def test_findings_are_in_the_logs(tmp_path, caplog):
    """Log-probs that are reported one token late are found, with TRL's words for the repair."""
    caplog.set_level(logging.INFO, logger="offdrift.trl")
    config = {"per_device_train_batch_size": 16, "max_steps": 4}
    run = trainer(tmp_path, method="decoupled_token_is", rollout_func=Sampler(0.0, shift=True), config=config)
    run.train()
    assert steps(run)[-1]["offdrift/findings_stop"] >= 1
    (found,) = (f for f in run.offdrift.findings if f.cause == "misaligned")
    assert found.severity == "stop"
    assert "neighboring token" in found.explanation
    said = [r for r in caplog.records if r.name == "offdrift.trl"]
    assert 'mode="correct"' in said[0].message
    assert any("acted" in r.message for r in said)
    assert any(r.levelno == logging.WARNING and r.message.startswith("stop") for r in said)


@pytest.mark.parametrize("config", [{}, {"num_iterations": 2, "steps_per_generation": 2}], ids=str)
@pytest.mark.parametrize(("client", "wrong"), [(Client, False), (Deaf, True)])
def test_an_engine_that_never_gets_weights_is_named(tmp_path, monkeypatch, client, wrong, config):
    """`vllm_mode="server"` by its contract: the real client needs a GPU for its weight sync.

    Updates between generation and use are no excuse: they are in the staleness, not in the mismatch.
    """
    import trl.generation.vllm_generation as module

    monkeypatch.setattr(module, "VLLMClient", client)
    monkeypatch.setattr(module, "is_vllm_available", lambda: True)
    config = {"use_vllm": True, "vllm_mode": "server", "max_steps": 8, "learning_rate": 3e-3, **config}
    run = trainer(tmp_path, method="decoupled_token_is", config=config)
    run.train()
    rows, late = steps(run), "num_iterations" in config
    assert [row["offdrift/version_lag/mean"] for row in rows] == ([0, 1, 2, 3] * 2 if late else [0] * 8)
    assert {row["offdrift/old/version_lag"] for row in rows} == {0}
    assert run.vllm_generation.vllm_client.synced == (2 if late else 8)
    assert rows[0]["offdrift/mismatch/k3"] < 0.002  # before the first update nobody can tell
    for row in () if wrong else rows:  # weights arrive: the mismatch is the noise and nothing else
        assert row["offdrift/mismatch/abs_log_ratio_mean"] == pytest.approx(0.04, rel=0.3)
        assert row["offdrift/weight/max"] > 1
    assert (rows[-1]["offdrift/mismatch/k3"] > 0.05) is wrong
    assert ("wrong_weights" in {f.cause for f in run.offdrift.findings}) is wrong


def test_a_first_step_without_a_token_that_trains_goes_on(tmp_path):
    """Every completion of an untrained model is truncated, and TRL was told to mask those."""
    config = {"mask_truncated_completions": True}
    run = trainer(tmp_path, method="decoupled_token_is", rollout_func=Sampler(0.2), config=config)
    run.train()
    assert [row["completions/clipped_ratio"] for row in steps(run)] == [1, 1]
    assert not any("offdrift/mismatch/k3" in row for row in steps(run))


def test_a_correction_that_cannot_act_ends_the_run(tmp_path, caplog):
    with pytest.raises(LivenessError, match="TRL's own generation returns no log-probs"):
        trainer(tmp_path, method="decoupled_token_is")
    silent = Sampler()

    def without(prompts, trainer):
        return {**silent(prompts, trainer), "logprobs": None}

    with pytest.raises(LivenessError, match="the generation returned no log-probs"):
        trainer(tmp_path, method="decoupled_token_is", rollout_func=without).train()
    run = trainer(tmp_path, method="decoupled_token_is", rollout_func=without, on_idle="warn")
    run.train()
    assert "cannot act" in caplog.text
    assert len(steps(run)) == 2


def test_a_trl_that_scores_elsewhere_is_refused(tmp_path, monkeypatch):
    """A version whose loss makes its own forward pass would ignore every correction."""
    run = trainer(tmp_path, method="decoupled_token_is", rollout_func=Sampler())
    from trl import GRPOTrainer

    monkeypatch.setattr(
        GRPOTrainer, "_compute_loss", lambda self, model, inputs: model(inputs["completion_ids"]).logits.sum()
    )
    with pytest.raises(FrameworkError, match="scores tokens in another place"):
        run.train()


@pytest.mark.parametrize("where", ["_compute_loss", "compute_loss"])
@pytest.mark.parametrize("options", [{"method": "decoupled_token_is"}, {"method": "disabled", "record": True}])
def test_a_subclass_with_a_loss_of_its_own_ends_the_run_before_its_first_step(tmp_path, where, options):
    from offdrift.adapters.trl import OffdriftGRPOTrainer

    def own(self, model, inputs, **_):
        return model(inputs["completion_ids"]).logits.sum()

    base = type("Mine", (OffdriftGRPOTrainer,), {where: own})
    run = trainer(tmp_path, base=base, rollout_func=Sampler(), on_idle="warn", **options)
    before = weights(run)
    with pytest.raises(FrameworkError, match=rf"Mine\.{where} computes a loss that this adapter does not know"):
        run.train()
    assert torch.equal(before, weights(run))


def test_without_trl_the_module_loads_and_the_trainer_says_what_to_install():
    program = (
        "import sys\nsys.modules['trl'] = None\nimport offdrift.adapters.trl as t\n"
        "assert 'transformers' not in sys.modules and 'vllm' not in sys.modules\n"
        "try: t.OffdriftGRPOTrainer\n"
        "except ImportError as e: print(type(e).__name__, e)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("FrameworkError")
    assert frameworks.FRAMEWORKS["trl"].install in done.stdout


@pytest.mark.slow
def test_two_processes_take_the_step_of_one(tmp_path, monkeypatch):
    """The same 16 sequences, 8 in each process: weights and metrics are those of the whole."""
    from tests.adapters import trl_runs as runs

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    processes = multiprocessing.get_context("forkserver")
    # Imported once, before the server forks: imports take longer than the steps.
    processes.set_forkserver_preload(
        ["trl.trainer.grpo_trainer", "offdrift.adapters.trl", "offdrift.records.recorder", "tests.adapters.trl_runs"]
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = processes.Queue()
    ranks = [processes.Process(target=one_of_two, args=(i, port, tmp_path / "two", answers)) for i in (0, 1)]
    for rank in ranks:
        rank.start()
    whole = {
        method: spread(trainer, runs.Sampler, tmp_path / "one" / method, method, mode, per_device_train_batch_size=16)
        for method, mode in SPREAD
    }
    both = dict(answers.get(timeout=240) for _ in ranks)
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    for method, run in whole.items():
        squares = [float(p.detach().double().square().sum()) for p in run.model.parameters()]
        for rank in (0, 1):
            assert both[rank][method]["weights"] == pytest.approx(squares, rel=1e-6), method
        (a,), (b,) = steps(run), both[0][method]["steps"]
        shared = [name for name in a if name.startswith("offdrift/")]
        assert len(shared) > 80
        for name in shared:
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), (method, name)
        assert len(list((tmp_path / "two" / method / "rollouts").glob("*.parquet"))) == 2


@pytest.mark.vllm
@pytest.mark.slow
def test_ten_steps_with_vllm(tmp_path):
    """Rewards rise, because every update reaches the engine: its log-probs stay bfloat16's."""
    command = [sys.executable, "-m", "tests.adapters.trl_worker", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    rows = found["steps"]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[0]["reward"] < 0.3
    assert rows[-1]["reward"] > 0.7
    for row in rows:
        assert 1e-4 < row["offdrift/mismatch/abs_log_ratio_mean"] < 0.02
        assert row["offdrift/findings_stop"] == 0
    assert found["compared"] > 50
    assert found["gap"] < 0.02
    records = list((tmp_path / "rollouts").glob("*.parquet"))
    assert sum(one(file).num_sequences for file in records) == 10 * 32


PAGE = (ROOT / "docs" / "integrations" / "trl.md").read_text()
EXAMPLE = ROOT / "examples" / "trl_grpo.py"
SCRIPT = """
import runpy, sys
from tests.adapters.trl_worker import small_cache
small_cache()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script as it is, but for the memory that vLLM takes."""


@pytest.mark.vllm
@pytest.mark.slow
def test_the_script_of_the_page_runs(tmp_path):
    """It is the example's, to the letter."""
    (script,) = re.findall(r"```python\n(# examples/trl_grpo.py\n.*?)```", PAGE, re.DOTALL)
    assert script.partition("\n")[2] == EXAMPLE.read_text()
    command = [sys.executable, "-c", SCRIPT, str(EXAMPLE), "--out", str(tmp_path), "--steps", "2", "--warm-start", "0"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT | DRAWN, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step   1  reward" in done.stdout  # the second step draws nothing
    assert f"findings; offdrift audit {tmp_path}/rollouts" in done.stdout
    assert 'mode="correct"' in done.stderr
