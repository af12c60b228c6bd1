"""Real workers on Ray, driven by every schedule: what arrives was drawn by the weights that it says, once each."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import ray
import torch
from tests.engines.models import CACHE_MIB, need_vllm, tiny

from offdrift.engines.score import score
from offdrift.engines.stream import DrawJob, rollouts_of
from offdrift.errors import EngineError, RecipeError
from offdrift.records import store
from offdrift.records.provenance import Sampling
from offdrift_lab.schedules import SCHEDULES, override, schedule
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.run_folder import ArmFolder
from offdrift_lab.train.pipeline.driver import Driver, name_of
from offdrift_lab.train.pipeline.scoring import RewardSpec, Score
from offdrift_lab.train.pipeline.source import load_drawn, save_drawn
from offdrift_lab.train.pipeline.worker import EngineSpec, published
from offdrift_lab.train.pipeline.workers import Workers, start_ray
from offdrift_lab.train.settings.recipe import check_recipe
from offdrift_lab.train.settings.sections import PipelineSettings
from tests_lab.train.conftest import short_arms, small_recipe

SAMPLING = Sampling(max_tokens=24, top_k=50, stop_token_ids=(3, 7))
UPDATES, BATCH, SAMPLES = 6, 3, 2
SETTINGS = PipelineSettings(workers=2, cpus=0.5, slots=4, steps=3, hang_seconds=20.0)
EXACT = 1e-4  # of the engines' contract, nats


@pytest.fixture(scope="module")
def models():
    """What the trainer's model is after so many updates."""
    result = [tiny("dense") for _ in range(UPDATES + 1)]
    for version, model in enumerate(result):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * version * weight.roll(1, 0))
    return result


@pytest.fixture(scope="module")
def cluster(models, tmp_path_factory):
    """Two workers that stay for all tests."""
    folder = tmp_path_factory.mktemp("engine")
    models[0].save_pretrained(folder)
    options, rewards = {"dtype": "float32", "batch_size": 8}, RewardSpec("backwards", "exact", str(folder))
    spec = EngineSpec("transformers", str(folder), options, SAMPLING, "sampled", rewards=rewards)
    start_ray(SETTINGS.model_copy(update={"workers": 8}), 1.0)  # room for the trainer's own workers, too
    workers = Workers(SETTINGS, spec, weights_mib=1.0)
    yield workers
    workers.close()
    ray.shutdown()


@pytest.fixture
def workers(cluster):
    cluster.settings = SETTINGS
    cluster.start()
    return cluster


def job(key):
    rng = random.Random(key.group)
    prompt = tuple(rng.randrange(1, 40) for _ in range(rng.randint(1, 6)))
    return DrawJob(name_of(key), prompt, seed=hash((key.group, key.sibling, key.attempt)) % 2**63)


def scorer(group, attempt, tokens):
    """Asks for the rewards of responses of which the first alone is right."""
    texts = tuple(" ".join(map(str, row)) for row in tokens)
    return Score(group, attempt, texts, tuple(Problem("", texts[0] if i == 0 else "no") for i in range(len(texts))))


class Trainer:
    """Takes groups and moves on through the models; every wait of it is a chance for the workers."""

    def __init__(self, row, workers, models, *, settings=SETTINGS, delay=0.0, steps=1, updates=UPDATES, scorer=scorer):
        self.row, self.models, self.delay, self.steps, self.updates = row, models, delay, steps, updates
        self.workers = workers
        sizes = {"batch": BATCH, "samples": SAMPLES, "updates": updates, "steps": steps}
        self.driver = Driver(row, workers, **sizes, settings=settings, job=job, scorer=scorer)
        self.groups, self.lags, self.stored, self.rewarded = {}, [], [], []
        self.version = 0

    def start(self, snapshot=None):
        if snapshot is not None:
            self.version = snapshot.scheduler["version"]
            self.driver.load(snapshot)
        self.driver.start(self.weights())
        return self

    def weights(self):
        return published(self.models[self.version].named_parameters(), self.version * self.steps)

    def run(self, until=None, *, snapshot_at=None):
        taken = None
        until = self.updates if until is None else until
        try:
            while self.version < until:
                self.update()
                published = self.version % self.row.sync_every == 0 and self.version < self.updates
                future = self.driver.trained(
                    weights=self.weights() if published else None, snapshot=self.version == snapshot_at
                )
                taken = taken if future is None else self.driver.snapshot(future)
        finally:
            self.driver.stop()
        sent = [rewards.total for rewards in self.rewarded if rewards is not None]
        if self.rewarded:
            assert len(self.rewarded) == len(self.groups)
            assert set(sent) == {(1.0, *[0.0] * (SAMPLES - 1))}
        return taken

    def update(self):
        while True:
            ready = self.driver.take()
            self.rewarded += self.driver.rewards(ready)
            for number, group in ready.groups:
                assert number not in self.groups, "a group is trained on twice"
                self.groups[number] = group
                oldest = min(d.version for response in group for d in response.deltas)
                self.lags.append(self.version * self.steps - oldest)
            self.stored.append(self.driver.sums()["stored"])
            time.sleep(self.delay)
            if ready.last:
                break
            self.driver.accumulated()
        self.version += 1

    def rollouts(self):
        drawn = [response for number in sorted(self.groups) for response in self.groups[number]]
        provenance = replace(self.workers.provenance, cache=self.row.weights.cache)
        return rollouts_of([d.job for d in drawn], {d.job.key: d.deltas for d in drawn}, provenance)


def gap(rollouts, models, *, steps=1):
    """Largest difference of a recorded log-prob and the one that its version gives the token on its support."""
    result = torch.full_like(rollouts.logp_rollout, torch.inf)
    for version in rollouts.rollout_version.unique().tolist():
        of_version = rollouts.rollout_version == version
        with torch.no_grad():
            logp = score(models[version // steps], rollouts).logp
        result[of_version] = (logp - rollouts.logp_rollout).abs()[of_version]
    return float(result.max())


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_trains_on_each_group_once_with_the_weights_that_are_recorded(name, workers, models):
    row = schedule(name)
    row = override(row, {"dispatch.slice_tokens": 5}) if row.dispatch.slice_tokens else row
    trainer = Trainer(row, workers, models, delay=0.05).start()
    trainer.run()
    assert len(trainer.groups) == UPDATES * BATCH
    assert all(len(group) == SAMPLES for group in trainer.groups.values())
    if row.too_old.action != "drop":
        most = row.admission.ahead(row.sync_every)
        assert max(trainer.groups) < (UPDATES + most + 1) * BATCH if most < 100 else True
    if row.max_lag is not None:
        assert max(trainer.lags) <= row.max_lag
    rollouts = trainer.rollouts()
    versions = rollouts.segments
    same = versions.min(rollouts.rollout_version.double()) == versions.max(rollouts.rollout_version.double())
    assert bool(same.all()) or row.weights.mixes
    assert gap(rollouts, models) < EXACT


def test_interrupted_responses_go_on_and_lose_no_token(workers, models):
    # The trainer is fast and workers are slow, so that weights change within most responses.
    row = override(schedule("unbounded"), {"admission.rule": "InFlight", "admission.alpha": 3.0})
    settings = SETTINGS.model_copy(update={"steps": 1, "slots": 2})
    trainer = Trainer(row, workers, models, settings=settings).start()
    trainer.run()
    rollouts = trainer.rollouts()
    spans = [len({d.version for d in r.deltas}) for g in trainer.groups.values() for r in g]
    assert max(spans) >= 2
    assert gap(rollouts, models) < EXACT
    for group in trainer.groups.values():
        for response in group:
            assert all(a.version <= b.version for a, b in itertools.pairwise(response.deltas))
            assert [d.finish for d in response.deltas[:-1]] == [None] * (len(response.deltas) - 1)
            assert response.deltas[-1].finish is not None


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_vllm_draws_each_token_with_the_weights_that_are_recorded(cluster, models, tmp_path, delay):
    need_vllm()
    models[0].save_pretrained(tmp_path)
    options = {"dtype": "float32", "max_model_len": 64, "kv_cache_mib": CACHE_MIB}
    settings = SETTINGS.model_copy(update={"workers": 1, "steps": 1, "slots": 6, "hang_seconds": 120.0})
    sampling = replace(SAMPLING, stop_token_ids=())
    spec = replace(cluster.spec, kind="vllm", model=str(tmp_path), options=options, sampling=sampling)
    workers = Workers(settings, spec, weights_mib=1.0)
    try:
        workers.start()
        row = override(schedule("unbounded"), {"admission.rule": "InFlight", "admission.alpha": 3.0})
        trainer = Trainer(row, workers, models, settings=settings, delay=delay).start()
        trainer.run()
    finally:
        workers.close()
    rollouts = trainer.rollouts()
    spans = [len({d.version for d in response.deltas}) for group in trainer.groups.values() for response in group]
    assert sum(span > 1 for span in spans) >= 6
    assert rollouts.rollout_version.max() >= 2
    assert rollouts.provenance.engine == "vllm"
    assert gap(rollouts, models) < EXACT


def test_kept_caches_are_a_policy_that_no_version_has(workers, models):
    row = override(schedule("unbounded"), {"admission": {"rule": "InFlight", "alpha": 3.0}, "weights.cache": "keep"})
    settings = SETTINGS.model_copy(update={"steps": 1, "slots": 2})
    trainer = Trainer(row, workers, models, settings=settings).start()
    trainer.run()
    assert gap(trainer.rollouts(), models) > 100 * EXACT


def test_versions_count_optimizer_steps(workers, models):
    trainer = Trainer(schedule("one_step_off"), workers, models, steps=4).start()
    trainer.run()
    rollouts = trainer.rollouts()
    assert set(rollouts.rollout_version.tolist()) <= {0, 4, 8, 12, 16}
    assert max(trainer.lags) == 4
    assert gap(rollouts, models, steps=4) < EXACT


@pytest.mark.parametrize("name", ["one_step_off", "areal", "dora"])
def test_a_killed_worker_loses_nothing_that_has_arrived(name, workers, models):
    row, rng = schedule(name), random.Random(name)
    trainer = Trainer(row, workers, models, delay=0.1).start()
    before, arrived = trainer.driver.lost, []

    def kill():
        time.sleep(rng.uniform(0.05, 0.4))
        victim = rng.choice(sorted(workers.actors))
        pid = ray.get(workers.actors[victim].ready.remote()).pid
        with trainer.driver.lock:
            arrived.extend(
                (d.job.key, [t for x in d.deltas for t in x.tokens.tolist()])
                for g in trainer.driver.groups.values()
                for d in g.values()
                if d.deltas and d.deltas[-1].finish is not None
            )
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    trainer.run()
    killer.join()
    assert trainer.driver.lost == before + 1
    assert len(trainer.groups) == UPDATES * BATCH
    assert gap(trainer.rollouts(), models) < EXACT
    final = {d.job.key: [t for x in d.deltas for t in x.tokens.tolist()] for g in trainer.groups.values() for d in g}
    if row.too_old.action == "train":
        assert [final[key] for key, _ in arrived if key in final] == [tokens for key, tokens in arrived if key in final]


def test_a_worker_that_hangs_is_replaced(workers, models):
    settings = SETTINGS.model_copy(update={"hang_seconds": 5.0})
    pids = {name: ray.get(actor.ready.remote()).pid for name, actor in workers.actors.items()}
    trainer = Trainer(schedule("sync"), workers, models, settings=settings).start()
    stopped = None
    while stopped is None:
        with trainer.driver.lock:
            busy = [name for name, worker in trainer.driver.scheduler.workers.items() if worker.running]
            if busy:
                stopped = busy[0]
                os.kill(pids[stopped], signal.SIGSTOP)
    trainer.run()
    assert stopped not in workers.actors
    assert trainer.driver.lost >= 1
    assert len(trainer.groups) == UPDATES * BATCH
    assert gap(trainer.rollouts(), models) < EXACT


def test_a_full_store_stops_the_workers(workers, models):
    settings = SETTINGS.model_copy(update={"store": BATCH + 1})
    trainer = Trainer(schedule("unbounded"), workers, models, settings=settings, delay=0.2).start()
    trainer.run()
    assert max(trainer.stored) <= BATCH + 1


def test_an_error_in_a_worker_reaches_the_trainer(workers, models):
    trainer = Trainer(schedule("sync"), workers, [tiny("moe")] * (UPDATES + 1)).start()
    with pytest.raises(EngineError, match="not one of this model's"):
        trainer.run()


ROUNDS = SETTINGS.model_copy(update={"update_rounds": 3})


@pytest.mark.parametrize("name", ["one_step_off", "verl_partial", "roll_flash", "dora", "unbounded"])
def test_on_the_virtual_clock_a_resumed_run_is_the_uninterrupted_one(name, workers, models, tmp_path):
    row = schedule(name)
    whole = Trainer(row, workers, models, settings=ROUNDS, delay=0.02).start()
    snapshot = whole.run(snapshot_at=3)
    again = Trainer(row, workers, models, settings=ROUNDS, scorer=None).start()  # rewards change nothing else
    again.run(snapshot_at=3)
    save_drawn(tmp_path, snapshot.groups)
    restored = snapshot._replace(groups=load_drawn(tmp_path, job))
    check_drawn(snapshot.groups, restored.groups)
    resumed = Trainer(row, workers, models, settings=ROUNDS, delay=0.05).start(restored)
    resumed.run()
    part = {number: group for number, group in whole.groups.items() if number in resumed.groups}
    assert part
    assert len(resumed.groups) == (UPDATES - 3) * BATCH
    for run, groups in ((again, whole.groups), (resumed, part)):
        assert list(run.groups) == list(groups)
        for number, group in groups.items():
            for first, second in zip(group, run.groups[number], strict=True):
                assert first.job == second.job
                for a, b in zip(flat(first), flat(second), strict=True):
                    assert torch.equal(a, b)


def check_drawn(groups, restored):
    """What was stored of responses in progress came back, delta for delta."""
    for number, group in groups.items():
        for place, drawn in group.items():
            for a, b in zip(drawn.deltas, restored[number][place].deltas, strict=True):
                assert torch.equal(a.tokens, b.tokens)
                assert torch.equal(a.support.ids, b.support.ids)
                assert torch.equal(a.support.cu_seqlens, b.support.cu_seqlens)


def flat(drawn):
    """Tokens, log-probs and versions of a response, in one row each."""
    counts = torch.tensor([len(d.tokens) for d in drawn.deltas])
    versions = torch.tensor([d.version for d in drawn.deltas]).repeat_interleave(counts)
    return torch.cat([d.tokens for d in drawn.deltas]), torch.cat([d.logp for d in drawn.deltas]), versions


# -- the whole trainer


@pytest.fixture
def short(monkeypatch):
    short_arms(monkeypatch)


def piped(arms, **changes):
    settings = {"workers": 2, "cpus": 0.1, "slots": 6, "steps": 2, "update_rounds": 2} | changes.pop("pipeline", {})
    arms = {name: {"method": "token_tis", "schedule": name} if isinstance(x, str) else x for name, x in arms.items()}
    return small_recipe(lag={}, pipeline=settings, arms=arms, rollout__dtype="float32", **changes)


CLOCKS = ("throughput", "seconds", "idle", "sync_seconds")


def rows(run, arm):
    """Metrics of an arm but for what a clock says."""
    found = ArmFolder(run / "arms" / arm).rows("metrics")
    return [{k: x for k, x in row.items() if not any(word in k for word in CLOCKS)} for row in found]


def test_a_run_that_is_interrupted_and_resumed_equals_an_uninterrupted_one(short, workers, tmp_path):
    arms, filters = {"areal": "areal", "verl_stale": "verl_stale"}, {"rollout__top_p": 0.8}
    train(piped(arms, **filters), tmp_path / "whole")

    def stop(event):
        if event.kind == "update" and event.arm == "verl_stale" and event.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(piped(arms, **filters), tmp_path / "cut", watch=stop)
    before = threading.active_count()
    train(piped(arms, **filters), tmp_path / "cut", resume=True)
    assert threading.active_count() <= before
    for arm in arms:
        whole, cut = rows(tmp_path / "whole", arm), rows(tmp_path / "cut", arm)
        assert [row["update"] for row in cut] == [1, 2, 3, 4, 5, 6]
        assert cut == whole
        for index in range(6):
            first, second = (
                store.read(tmp_path / run / f"arms/{arm}/rollouts/batch-{index:06d}.parquet")
                for run in ("whole", "cut")
            )
            assert torch.equal(first.tokens, second.tokens)
            assert torch.equal(first.rollout_version, second.rollout_version)
            assert torch.equal(first.support.ids, second.support.ids)
            left_out = first.support.left_out(slice(None), 64)
            assert torch.equal(left_out, first.evidence.logp.isinf())
            assert left_out.any(1).double().mean() > 0.9
    lags = [row["version_lag/mean"] for row in rows(tmp_path / "whole", "verl_stale")]
    assert max(lags) > 0


def test_streamed_groups_give_the_synchronous_update(short, workers, tmp_path):
    train(piped({"sync": "sync", "periodic": "periodic"}, optim={"lr": 1e-3}), tmp_path)
    whole, streamed = rows(tmp_path, "sync"), rows(tmp_path, "periodic")
    for a, b in zip(whole, streamed, strict=True):
        for name in ("reward/mean", "optim/grad_norm", "optim/loss", "full/k3", "batch/tokens", "version_lag/max"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-7), name
    assert whole[0]["reward/mean"] != whole[-1]["reward/mean"]
    first, second = (store.read(tmp_path / f"arms/{arm}/rollouts/batch-000005.parquet") for arm in ("sync", "periodic"))
    assert sorted(first.prompts) == sorted(second.prompts)
    assert sorted(first.completions) == sorted(second.completions)


def test_records_say_who_drew_a_response_and_when_it_waited(short, workers, tmp_path):
    train(piped({"one_step_off": "one_step_off"}, pipeline={"update_rounds": None}), tmp_path)
    rollouts = store.read(tmp_path / "arms/one_step_off/rollouts/batch-000003.parquet")
    assert set(rollouts.workers) <= {f"worker-{i}" for i in range(8)}
    assert (rollouts.queue_seconds >= 0).all()
    assert (rollouts.generation_seconds > 0).all()
    metrics = ArmFolder(tmp_path / "arms/one_step_off").rows("metrics")
    for row in metrics:
        assert 0 <= row["pipeline/worker_idle"] <= 1
        assert 0 <= row["pipeline/trainer_idle"] <= 1
        assert sum(row["pipeline/lag_counts"]) == 16
    assert metrics[0]["pipeline/stale_frac"] == 0
    assert max(row["version_lag/max"] for row in metrics) == 1
    assert metrics[2]["pipeline/sync_bytes"] > 1000


def test_first_finished_first_taken_gets_no_certificate(short, workers, tmp_path):
    train(piped({"unbounded": "unbounded", "areal": "areal"}), tmp_path)
    chosen, ordered = (ArmFolder(tmp_path / "arms" / arm).rows("metrics") for arm in ("unbounded", "areal"))
    assert all("on how long their responses took" in row["certificate/verdict"] for row in chosen)
    assert all("independent prompts, where J changed" in row["certificate/verdict"] for row in ordered)
    assert [row["certificate/fresh"] for row in (*chosen, *ordered)] == [False] * 6 + [True] * 6
    rollouts = store.read(tmp_path / "arms/unbounded/rollouts/batch-000003.parquet")
    assert rollouts.provenance.selected


# -- rewards by the workers


def test_rewards_of_workers_are_those_of_the_trainer(short, workers, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "import os\n\n\ndef score(completion):\n    return {'reward': len(completion) / 7, 'by': os.getpid()}\n"
    )
    settings = {"rewards": "workers", "workers": 1}
    train(piped({"areal": "areal"}, task="backwards", reward=f"{file}:score", batches=3, pipeline=settings), tmp_path)
    batches = [store.read(path) for path in sorted((tmp_path / "arms/areal/rollouts").glob("batch-*.parquet"))]
    assert [len(batch.rewards) for batch in batches] == [16] * 3
    for batch in batches:
        assert batch.rewards.tolist() == pytest.approx([len(text) / 7 for text in batch.completions])
    assert len(torch.cat([batch.rewards for batch in batches]).unique()) > 1
    by = torch.cat([batch.components["by"] for batch in batches]) != os.getpid()
    assert by.double().mean() > 0.5  # the others finished before a checkpoint and are trained on after it
    metrics = ArmFolder(tmp_path / "arms/areal").rows("metrics")
    assert sum(row["pipeline/reward_seconds"] for row in metrics) > 0


def test_a_worker_without_a_model_or_without_room_is_named(workers, tmp_path):
    one = SETTINGS.model_copy(update={"workers": 1})
    without = Workers(one, replace(workers.spec, model=str(tmp_path / "gone")), weights_mib=1.0)
    with pytest.raises(
        EngineError, match=r"worker-0 did not start: .*EngineError: the node .* has no folder .*/gone, "
    ):
        without.start()
    nowhere = one.model_copy(update={"resources": {"nvme": 2.0}})
    said = r'no node .* resources = \{"nvme": 2\.0\}: the most that one has is [1-9]\d* CPU, 0 nvme; lower them, or add'
    with pytest.raises(EngineError, match=said):
        Workers(nowhere, workers.spec, weights_mib=1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lag": {"sync_every": 4}}, r"lag has no place beside \[pipeline\]: the schedule says"),
        ({"draws": {"dynamic": True}}, r"draws has no place"),
        ({"pipeline": {"schedule": "areel"}}, r"unknown schedule 'areel'; did you mean areal"),
        ({"pipeline": {"rules": {"admission.etta": 2}}}, r"'admission.etta': BoundedStaleness has no 'etta', only eta"),
        ({"pipeline": {"rules": {"weights.on_new": "stop"}}}, r"must be 'drain' or 'interrupt' or 'finish'"),
        ({"pipeline": {"rules": {"admission.eta": -1}}}, r"admission.eta = -1: must be a whole number, 0 or more"),
        ({"pipeline": {"rules": {"admission.rule": "Quota"}}}, r"'Quota' needs admission.staleness"),
        ({"pipeline": {"schedule": "areal"}, "method": "none"}, r"leaves old tokens to a method that corrects"),
        ({"pipeline": {"schedule": "verl_stale"}, "optim": {"epochs": 2}}, r"streams groups .* and optim.epochs x optim.minibatches = 2; set rules"),
        (
            {"pipeline": {"schedule": "verl_stale"}, "optim": {"advantage": "reinforce_plus_plus_baseline"}},
            r"takes statistics over the whole batch; set rules",
        ),
        ({"pipeline": {"rewards": "workers"}, "reward": "judge"}, r"workers have no judge"),
        ({"rollout": {"evidence": "hidden"}}, r"mixes versions in a batch"),
        ({"pipeline": {"resources": {"GPU": 1}}}, r"resources.GPU is a name of Ray's own; use pipeline.cpus"),
        ({"pipeline": {"resources": {"rollout": 0}}}, r"pipeline.resources.rollout"),
        ({"rollout": {"engine": "vllm"}, "pipeline": {"schedule": "dora"}}, r"keeps several versions on a worker"),
    ],
)  # fmt: skip
def test_what_a_schedule_cannot_do_is_refused(changes, message):
    content = {"pipeline": {}, "method": "token_tis"} | changes
    with pytest.raises(RecipeError, match=message):
        check_recipe({"name": "x", "model": "tiny-qwen3", "batches": 2, **content}, source="test")


def test_ray_is_imported_where_a_recipe_asks_for_it_alone():
    code = "import sys, offdrift_lab.train.loop.loop, offdrift_lab.cli.train; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
