"""Phase times from runs and audits: known rates come back, sources stand on each other, and nothing is unsaid."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offdrift.errors import RecipeError, RecordError
from offdrift.records import store
from offdrift.records.provenance import Provenance, Sampling
from offdrift.records.rollouts import Rollouts
from offdrift.segments import cumulative
from offdrift_lab.plan.drift import measured_fit
from offdrift_lab.plan.measured import LENGTHS, SKIPPED, Draws, correlation_of, fit_rates, gather, lengths_of
from offdrift_lab.plan.phases import EXAMPLE, Lengths, Phases
from offdrift_lab.plan.simulate import simulate
from offdrift_lab.schedules import SCHEDULES

T0, T1, PREFILL = 0.012, 0.0004, 3e-5


def ends_of(lengths, prompt: int, *, t0=T0, t1=T1, prefill=PREFILL, steps=1, call=0.0) -> np.ndarray:
    """When responses end that begin together, token by token; ends are seen after every `steps` tokens."""
    now, ends = prefill * prompt, np.full(len(lengths), np.nan)
    for token in range(1, max(lengths) + 1):
        now += call * (token % steps == 1 or steps == 1)
        now += t0 + t1 * sum(n >= token for n in lengths)
        if token % steps == 0 or token == max(lengths):
            ends[np.isnan(ends) & (np.asarray(lengths) <= token)] = now
    return ends


def batches_of(count: int, seed: int = 0, noise: float = 0.0, **rates: Any) -> list[Draws]:
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        lengths = np.clip(np.exp(4 + 0.8 * rng.standard_normal(rng.integers(8, 48))), 1, 400).astype(int)
        prompt = int(rng.integers(2_000, 20_000))
        factors = 1 + noise * (rng.standard_normal() + 0.3 * rng.standard_normal(len(lengths)))
        batches.append(Draws(lengths, factors * ends_of(lengths.tolist(), prompt, **rates), prompt))
    return batches


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(
    ("t0", "t1", "prefill"),
    [(T0, T1, PREFILL), (0.05, 1e-5, 1e-6), (0.002, 0.01, 1e-4), (T0, T1, 0.0), (0.0, T1, 0.0), (T0, 0.0, 0.0)],
)
def test_known_rates_come_back(t0, t1, prefill, steps):
    rates = fit_rates(batches_of(12, t0=t0, t1=t1, prefill=prefill, steps=steps), steps=steps)
    assert rates[:3] == pytest.approx((t0, t1, prefill), rel=1e-6, abs=1e-9)
    assert ("told" in rates.words) == (0.0 in (t0, t1, prefill))


def test_known_rates_come_back_from_noise():
    """4 % of noise that a batch shares, over 200 batches: within five of its standard errors."""
    rates = fit_rates(batches_of(200, noise=0.04, steps=4), steps=4)
    assert rates[:3] == pytest.approx((T0, T1, PREFILL), rel=0.15)
    assert rates[:3] != pytest.approx((T0, T1, PREFILL), rel=1e-4)


def test_calls_that_are_left_out_of_account_would_be_seen():
    assert fit_rates(batches_of(12, steps=8), steps=1).t0 != pytest.approx(T0, rel=0.02)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_of_responses_as_long_as_each_other_only_the_sum_is_known(noise):
    rng = np.random.default_rng(3)
    alike = []
    for _ in range(30):
        lengths = np.full(16, 50)
        alike.append(Draws(lengths, (1 + noise * rng.standard_normal()) * ends_of(lengths.tolist(), 1000), 1000))
    rates = fit_rates(alike)
    assert rates.t0 == rates.prefill == 0.0
    assert "t0 and prefill not to be told from the rest" in rates.words
    assert 50 * 16 * rates.t1 == pytest.approx(ends_of([50] * 16, 1000)[0], rel=0.05)


def test_the_last_end_alone_tells_the_rates_too():
    """Of a run without workers, one number a batch is known: when its last response ended."""
    whole = batches_of(60)
    rates = fit_rates([d._replace(seconds=d.seconds.max(keepdims=True)) for d in whole])
    assert rates[:3] == pytest.approx((T0, T1, PREFILL), rel=1e-6)


# -- lengths ---------------------------------------------------------------------------------------


def rollouts_of(lengths, *, group=4, prompt=7, seconds=None, workers=None) -> Rollouts:
    """Responses of these lengths to prompts of `prompt` tokens, `group` to each."""
    n, b = int(sum(lengths)), len(lengths)
    return Rollouts(
        tokens=torch.zeros(n, dtype=torch.int32),
        logp_rollout=torch.zeros(n),
        cu_seqlens=cumulative(torch.tensor([int(x) for x in lengths])),
        rollout_version=torch.zeros(n, dtype=torch.int32),
        prompt_tokens=torch.zeros(b * prompt, dtype=torch.int32),
        prompt_cu_seqlens=prompt * torch.arange(b + 1),
        group_ids=torch.arange(b) // group,
        finish=("stop",) * b,
        provenance=Provenance("transformers", "1", "tiny", "float32", None, Sampling(max_tokens=400)),
        workers=workers,
        queue_seconds=None if seconds is None else torch.zeros(b),
        generation_seconds=None if seconds is None else torch.tensor(np.asarray(seconds), dtype=torch.float32),
    )


def test_lengths_are_those_that_occurred():
    told = lengths_of([rollouts_of([3, 5, 5, 9]), rollouts_of([5, 3, 1, 3], prompt=11)])
    assert (told["values"], told["weights"], told["prompt"]) == ([1, 3, 5, 9], [1, 3, 3, 1], 9)
    lengths = np.random.default_rng(0).integers(1, 5000, 8000)
    many = Lengths(**lengths_of([rollouts_of(lengths)]))
    assert len(many.values) <= LENGTHS
    assert sum(many.weights) == 8000
    assert np.average(many.values, weights=many.weights) == pytest.approx(lengths.mean(), abs=1)


@pytest.mark.parametrize("correlation", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("values", [tuple(range(1, 300)), (2, 3, 5, 700)])
def test_the_correlation_within_groups_survives(correlation, values):
    """What is drawn with a correlation is read with it: at few values less, since ties hide some of it."""
    law = Lengths(kind="histogram", values=values, correlation=correlation)
    drawn = law.draw(np.random.default_rng(1), 4000, 4)
    read = correlation_of([drawn.ravel()], [np.arange(16_000) // 4])
    assert read == pytest.approx(correlation, abs=0.03 if len(values) > 10 else 0.12)
    # Groups of different batches are different ones.
    halves = drawn.reshape(2, -1)
    again = correlation_of(list(halves), [np.arange(8_000) // 4] * 2)
    assert again == pytest.approx(read, abs=1e-9)


def test_a_histogram_that_is_correlated_keeps_its_shares():
    law = Lengths(kind="histogram", values=(90, 10, 50), weights=(1, 2, 1), correlation=0.8)
    drawn = law.draw(np.random.default_rng(2), 100_000, 2)
    for value, share in ((10, 0.5), (50, 0.25), (90, 0.25)):
        assert (drawn == value).mean() == pytest.approx(share, abs=0.01)


# -- runs ------------------------------------------------------------------------------------------

TRAIN, LOAD, EXTRA, CALL = 2.5, 0.2, 0.3, 0.02
"""Seconds of an update, of loading, of the wait beyond the last response, which loading is part of, and of a call
beside the engine's."""


def a_run(folder: Path, arm: str = "sync", *, schedule: str | None = "sync", updates: int = 12, **more: Any) -> Path:
    """A run as its files would be, on two workers, from the rates above; the first updates are slow, one is half
    written, and after the eighth there was an evaluation."""
    rng = np.random.default_rng(7)
    recipe: dict[str, Any] = {
        "name": "made",
        "rollout": {"prompts": 8, "samples": 4},
        "optim": {"accumulate": 1, "epochs": 1, "minibatches": 1},
        "pipeline": None if schedule is None else {"workers": 2, "slots": 64, "steps": 4, "schedule": "areal"},
        "arms": {arm: {"schedule": schedule, "rules": {}}, "zz": {}},
        **more,
    }
    (folder / "arms" / arm).mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"format": 1, "recipe": recipe}))
    rows = []
    for index in range(updates):
        lengths = np.clip(np.exp(3.5 + 0.7 * rng.standard_normal(32)), 1, 200).astype(int)
        names = np.array(["worker-0", "worker-1"])[np.arange(32) % 2]
        seconds = np.zeros(32)
        ends, calls = [], 0
        for name in np.unique(names) if schedule else ("",):
            own = names == name if schedule else np.ones(32, bool)
            told = {"steps": 4, "call": CALL} if schedule else {}
            seconds[own] = ends_of(lengths[own].tolist(), 7 * int(own.sum()), **told)
            ends.append(seconds[own].max())
            calls += -(-int(lengths[own].max()) // 4)
        slow = 40.0 if index < SKIPPED else 0.0
        evaluation = 25.0 if index == 8 else 0.0  # in what the driver's clock says alone
        rollouts = rollouts_of(lengths)
        if schedule:
            rollouts = replace(rollouts, workers=tuple(names.tolist()), generation_seconds=torch.tensor(seconds))
            waited = max(ends) + EXTRA + slow
            span = waited + TRAIN
            engine = sum(ends) - CALL * calls
            row = {
                "pipeline/trainer_idle": waited / (span + evaluation),
                "pipeline/worker_idle": 1 - (engine + 2 * LOAD) / (2 * (span + evaluation)),
                "pipeline/sync_seconds": 2 * LOAD,
            }
        else:
            waited, span = max(ends) + slow, max(ends) + slow + TRAIN + LOAD
            row = {"throughput/draw_seconds": waited, "throughput/publish_seconds": LOAD}
        store.write(rollouts, folder / "arms" / arm / "rollouts" / f"batch-{index:06d}.parquet")
        rows.append({"update": index + 1, "batch": index, "throughput/seconds": span, **row})
    lines = [json.dumps(row) for row in rows]
    (folder / "arms" / arm / "metrics.jsonl").write_text("\n".join([*lines, lines[0][:20]]))
    (folder / "arms" / arm / "eval.jsonl").write_text('{"update": 0, "reward": 0.1}\n{"update": 8, "reward": 0.2}\n')
    return folder


def test_a_run_with_workers_says_all_of_its_phases(tmp_path):
    inputs = gather([a_run(tmp_path / "run")])
    phases = inputs.phases
    assert (phases.rollout.workers, phases.rollout.slots, phases.rollout.devices) == (2, 64, 1)
    assert (phases.batch.groups, phases.batch.samples, phases.trainer.devices) == (8, 4, 1)
    rates = (phases.rollout.t0, phases.rollout.t1, phases.rollout.prefill)
    assert rates == pytest.approx((T0 + CALL / 4, T1, PREFILL), rel=1e-4)
    assert (phases.rollout.steps, phases.rollout.overhead) == (4, pytest.approx(CALL / 4, rel=1e-4))
    assert 8 * phases.trainer.group + phases.trainer.update == pytest.approx(TRAIN)
    assert phases.lengths.kind == "histogram"
    assert phases.lengths.prompt == 7
    assert phases.sync.load == pytest.approx(LOAD)
    # The slower of two workers decides: the mean over workers ends earlier than the batch.
    assert phases.sync.push == pytest.approx(EXTRA, rel=1e-4)
    origin = inputs.origins["rollout.t1"]
    assert origin.source == f"{tmp_path / 'run' / 'arms' / 'sync'}, 7 batches"
    assert "fitted to ends of responses within 0.0%" in origin.how
    assert set(inputs.assumed) == {"trainer.scaling"}


def test_a_simulation_of_a_run_takes_as_long_as_the_run(tmp_path):
    """The same batches in expectation: one that is simulated takes what was measured, within the spread of lengths."""
    phases = gather([a_run(tmp_path / "run", updates=60)], ["run.updates=200"]).phases
    table = [json.loads(x) for x in (tmp_path / "run/arms/sync/metrics.jsonl").read_text().split("\n")[SKIPPED:-1]]
    measured = np.mean([row["throughput/seconds"] for row in table if row["update"] != 9])
    assert simulate(SCHEDULES["sync"], phases).seconds == pytest.approx(measured, rel=0.05)


def test_a_run_without_workers_says_them_too(tmp_path):
    inputs = gather([a_run(tmp_path / "run", "alone", schedule=None, updates=40)])
    phases = inputs.phases
    assert (phases.rollout.workers, phases.batch.groups) == (1, 8)
    assert (phases.rollout.t0, phases.rollout.t1) == pytest.approx((T0, T1), rel=0.2)
    assert 8 * phases.trainer.group == pytest.approx(TRAIN)
    assert phases.sync.push == phases.sync.load == phases.colocated.switch == pytest.approx(LOAD)
    assert "rollout.slots" in inputs.assumed


def test_of_overlapping_arms_the_engine_is_known_as_a_whole(tmp_path):
    inputs = gather([a_run(tmp_path / "run", "fast", schedule="areal")])
    rollout = inputs.phases.rollout
    assert (rollout.t0, rollout.prefill, rollout.overhead) == (0, 0, 0)
    assert rollout.t1 > 0
    assert "true at this run's number of responses" in inputs.origins["rollout.t1"].how
    assert inputs.origins["sync.push"].how == "loading alone"
    assert inputs.phases.sync.push == pytest.approx(LOAD)


def test_of_several_arms_the_one_that_takes_turns_is_read(tmp_path):
    folder = a_run(tmp_path / "run", "a", schedule="areal")
    arms = {
        "a": {"schedule": "areal"},
        "b": {"schedule": "sync"},
        "c": {"schedule": "sync", "rules": {"admission.eta": 2}},
    }
    for arm in ("b", "c"):
        a_run(folder, arm, schedule=arms[arm]["schedule"], arms=arms)
    assert gather([folder]).origins["rollout.t1"].source.startswith(str(folder / "arms" / "b"))
    assert gather([folder / "arms" / "c"]).origins["rollout.t1"].source.startswith(str(folder / "arms" / "c"))
    assert "fitted" not in gather([folder / "arms" / "c"]).origins["rollout.t1"].how


def test_more_responses_than_slots_do_not_run_together(tmp_path):
    folder = a_run(tmp_path / "run")
    head = json.loads((folder / "run.json").read_text())
    head["recipe"]["pipeline"]["slots"] = 8
    (folder / "run.json").write_text(json.dumps(head))
    assert "true at this run's number of responses" in gather([folder]).origins["rollout.t1"].how


def test_a_run_from_before_phases_were_recorded_still_says_its_lengths(tmp_path):
    folder = a_run(tmp_path / "run", "old", schedule=None)
    file = folder / "arms" / "old" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    kept = [{k: v for k, v in row.items() if "draw" not in k and "publish" not in k} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    inputs = gather([folder])
    assert inputs.phases.lengths.kind == "histogram"
    assert {"rollout.t0", "rollout.t1", "trainer.group", "sync.push"} <= set(inputs.assumed)


# -- sources on top of each other ------------------------------------------------------------------


def test_later_sources_stand_on_earlier_ones(tmp_path):
    (tmp_path / "more.toml").write_text("[sync]\npush = 9\n[trainer]\nscaling = 0.5\n")
    run = a_run(tmp_path / "run")
    inputs = gather(
        [run, tmp_path / "more.toml"], ["trainer.devices=4", "name=mine", "lengths.mean=50", "lengths.cap=90"]
    )
    phases, origins = inputs.phases, inputs.origins
    assert (phases.name, phases.sync.push, phases.sync.load) == ("mine", 9, pytest.approx(LOAD))
    assert origins["sync.push"].source == str(tmp_path / "more.toml")
    assert origins["sync.load"].source.startswith(str(run))
    # Four devices in place of the one that was measured, at a scaling of one half.
    assert 8 * phases.trainer.group == pytest.approx(TRAIN / 2)
    assert origins["trainer.group"] == ("--set", "scaled from 1 to 4 devices")
    # Another distribution takes the place of the measured lengths, and what it lacks is assumed.
    assert (phases.lengths.kind, phases.lengths.mean, phases.lengths.prompt) == ("lognormal", 50, 7)
    assert inputs.assumed == {"lengths.sigma": EXAMPLE.lengths.sigma}
    assert "lengths.values" not in origins


def test_seconds_that_are_said_with_their_devices_are_not_scaled(tmp_path):
    (tmp_path / "a.toml").write_text("[trainer]\ndevices = 8\ngroup = 2.0\n")
    (tmp_path / "b.toml").write_text("[trainer]\ndevices = 4\ngroup = 3.0\n")
    assert gather([tmp_path / "a.toml", tmp_path / "b.toml"]).phases.trainer.group == 3.0
    assert gather([tmp_path / "a.toml"], ["trainer.devices=4"]).phases.trainer.group == 4.0
    assert gather([tmp_path / "a.toml"], ["trainer.devices=4", "trainer.group=1"]).phases.trainer.group == 1.0


def test_an_overhead_goes_with_its_t0(tmp_path):
    run = a_run(tmp_path / "run")
    assert gather([run], ["rollout.t0=0.001"]).phases.rollout.overhead == 0
    kept = gather([run], ["rollout.t0=0.5", "rollout.overhead=0.25"]).phases.rollout
    assert (kept.t0, kept.overhead) == (0.5, 0.25)
    with pytest.raises(RecipeError, match=r"rollout.overhead = 0.25 is above rollout.t0 = 0.1"):
        gather([run], ["rollout.t0=0.1", "rollout.overhead=0.25"])


def test_nothing_said_is_the_example():
    inputs = gather([])
    assert inputs.phases == EXAMPLE
    assert inputs.origins == {}
    assert {"rollout.t1", "trainer.group", "sync.push", "lengths.mean"} <= set(inputs.assumed)
    assert not {"rollout.restart", "rollout.overhead", "run.updates", "lengths.values"} & set(inputs.assumed)
    assert "rollout.restart" in gather([], ["rollout.crashes_per_hour=1"]).assumed


MISTAKES = {
    "--set 'trainer.group': expected part.key=value": ["trainer.group"],
    "--set 'group=1': expected part.key=value": ["group=1"],
    "--set: unknown key 'trainer.speed'; trainer has devices, group": ["trainer.speed=1"],
    "--set: rollout.workers = 0": ["rollout.workers=0"],
    "--set: trainer.group = 'fast'": ["trainer.group=fast"],
    "lengths.sigma = 1 says nothing of kind = \"constant\"": ["lengths.kind=constant", "lengths.sigma=1.0"],
    "lengths.mean = 9 says nothing of kind = \"histogram\"": ["lengths.kind=histogram", "lengths.values=[4]", "lengths.mean=9"],
}  # fmt: skip


@pytest.mark.parametrize("words", MISTAKES)
def test_a_wrong_value_is_named(words):
    with pytest.raises(RecipeError) as e:
        gather([], MISTAKES[words])
    assert words in str(e.value)


def test_what_is_no_source_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "lonely").mkdir()
    (tmp_path / "lonely" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "check.json").write_text('{"kind": "check"}')
    (tmp_path / "cut.json").write_text('{"kind": "au')
    for name, words in {
        "empty": "holds no run.json, no metrics.jsonl and no audit.json; give",
        "run": "holds no arm with metrics yet",
        "lonely": "belongs to no run",
        "check.json": "is no audit; give what `offdrift audit` wrote",
        "cut.json": "cannot read",
    }.items():
        with pytest.raises(RecordError) as e:
            gather([tmp_path / name])
        assert words in str(e.value), name


def test_an_audit_says_lengths_workers_and_drift(tmp_path):
    lag = [{"low": i, "high": i, "full/k1": 0.01 + 0.02 * i, "tokens": 100} for i in range(4)]
    audit = {
        "kind": "audit",
        "facets": {
            "length": [
                {"label": "1-64", "sequences": 30, "tokens": 1200},
                {"label": "65-128", "sequences": 0, "tokens": 0},
                {"label": "129-256", "sequences": 10, "tokens": 2000},
            ],
            "worker": [{"label": "worker-0"}, {"label": "worker-1"}, {"label": "(no name)"}],
            "lag": lag,
        },
    }
    (tmp_path / "audit.json").write_text(json.dumps(audit))
    inputs = gather([tmp_path], ["rollout.slots=4"])
    lengths = inputs.phases.lengths
    assert (lengths.values, lengths.weights) == ((40, 200), (30, 10))
    assert inputs.phases.rollout.workers == 2
    assert measured_fit(inputs.drift).kl(2) == pytest.approx(0.05, rel=1e-3)
    assert {"rollout.t0", "trainer.group", "lengths.prompt", "batch.groups"} <= set(inputs.assumed)
    assert "rollout.slots" not in inputs.assumed
    assert math.isclose(
        Phases(lengths=lengths).lengths.draw(np.random.default_rng(0), 9000, 1).mean(), 80, rel_tol=0.05
    )
