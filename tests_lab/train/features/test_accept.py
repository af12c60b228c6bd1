"""A step that fails its test is undone bit for bit, is counted, and costs little where none fails."""

from __future__ import annotations

import copy
import math
import time

import pytest
import torch
from accelerate import Accelerator

from offdrift.advantages import advantages
from offdrift.engines.hf import TransformersEngine
from offdrift.errors import RecipeError
from offdrift.methods import METHODS
from offdrift.models import load_model
from offdrift.records import Sampling
from offdrift.segments import Segments
from offdrift.stats import summarize
from offdrift_lab.train.features.accept import Acceptance, inference_gap
from offdrift_lab.train.features.table import features_of
from offdrift_lab.train.loop.batch import Batch
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.run_folder import ArmFolder
from offdrift_lab.train.settings.optim import AcceptSettings
from tests_lab.train.conftest import short_arms, small_recipe
from tests_lab.train.loop.test_loop import rows, weights
from tests_lab.train.steps import stepped

ALWAYS, NEVER = 1e9, 1e-12


@pytest.fixture(scope="module")
def world():
    model = load_model("tiny-qwen3", seed=0)[0]
    engine = TransformersEngine(copy.deepcopy(model), dtype="float32")
    rollouts = engine.generate([[5, 6, 7]] * 6, Sampling(max_tokens=6, stop_token_ids=(1,)), seed=1, evidence="full")
    rollouts = rollouts.with_(rewards=torch.arange(6.0) % 4, group_ids=torch.arange(6) // 3)
    return model, Batch(rollouts=rollouts, advantages=advantages(rollouts.rewards, rollouts.segments))


class Steps:
    """Steps of AdamW on the batch, each with a test of its own or without one."""

    def __init__(self, world):
        self.model, self.batch = copy.deepcopy(world[0]), world[1]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def take(self, feature=None):
        features = () if feature is None else (feature,)
        return stepped(
            Accelerator(cpu=True), self.model, self.optimizer, self.batch, METHODS["none"], features=features
        )

    def state(self):
        """Weights and all that the optimizer holds of them."""
        held = [dict(self.optimizer.state.get(p, {})) for p in self.model.parameters()]
        numbers = [x for entry in held for _, x in sorted(entry.items())]
        return [x.clone() for x in (*self.model.parameters(), *numbers)]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("test", ["kl", "certificate"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_step_that_fails_leaves_weights_means_and_counters_as_they_were(world, test, before):
    """Also the first, before which the optimizer holds nothing; and what follows is as if it had never been taken."""
    run, never = Steps(world), Steps(world)
    for _ in range(before):
        run.take()
        never.take()
    start = run.state()
    update = run.take(Acceptance(AcceptSettings(test=test, limit=NEVER)))
    assert not update.taken
    assert update.method == METHODS["none"]
    assert same(run.state(), start)
    assert len(run.optimizer.state) == (0 if before == 0 else len(list(run.model.parameters())))
    numbers = summarize(update.stats)
    assert numbers["optim/undone"] == 1
    assert numbers["optim/accept_test"] > numbers["optim/accept_limit"] == NEVER
    run.take()
    never.take()
    assert same(run.state(), never.state())


def test_a_step_that_passes_is_the_step(world):
    run, plain = Steps(world), Steps(world)
    acceptance = Acceptance(AcceptSettings(test="kl", limit=ALWAYS))
    for _ in range(3):
        drawn = torch.get_rng_state()
        update = run.take(acceptance)
        assert torch.equal(torch.get_rng_state(), drawn)
        plain.take()
        assert update.taken
    assert same(run.state(), plain.state())
    assert run.model.training


def test_the_gap_is_what_its_formula_says_by_hand():
    """Two prompts with two answers each, of lengths 1, 2, 1, 2: advantages +-1, and geometric means of ratios."""
    engine, trainer = torch.zeros(6), torch.tensor([0.2, 0.3, -0.1, 0.0, 0.4, 0.2])
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    found = inference_gap(engine, trainer, rewards, segments=Segments.from_lengths([1, 2, 1, 2]), samples=2)
    rho = [math.exp(0.2), math.exp(0.1), math.exp(0.0), math.exp(0.3)]
    assert float(found) == pytest.approx(-(rho[0] - rho[1] - rho[2] + rho[3]) / 4, rel=1e-5)
    alike = inference_gap(engine, engine, rewards, segments=Segments.from_lengths([1, 2, 1, 2]), samples=2)
    assert float(alike) == pytest.approx(0.0, abs=1e-12)


FRESH = {"lag": {"sync_every": 1}, "rollout__dtype": "bfloat16", "batches": 4}
GAP = {"test": "gap", "prompts": 2, "samples": 4}


def test_the_engines_gap_decides_in_a_run_and_what_is_undone_is_counted(tmp_path, monkeypatch):
    short_arms(monkeypatch)
    recipes = {
        "plain": {},
        "accepts": {"optim__accept": {**GAP, "limit": ALWAYS, "final": ALWAYS}},
        "mipu": {"optim__accept": {**GAP, "limit": NEVER}},
    }
    for name, changes in recipes.items():
        train(small_recipe(**FRESH, **changes), tmp_path / name)
    found = {name: rows(tmp_path / name) for name in recipes}
    assert [r["optim/grad_norm"] for r in found["plain"]] == [r["optim/grad_norm"] for r in found["accepts"]]
    for name, w in weights(tmp_path / "plain").items():
        assert torch.equal(w, weights(tmp_path / "accepts")[name]), "a test that passes changes no bit"
    tested = found["mipu"]
    assert len({r["optim/accept_test"] for r in tested}) == 4, "the engine is given every candidate"
    assert [r["optim/undone"] for r in tested] == [
        float(r["optim/accept_test"] < -r["optim/accept_limit"]) for r in tested
    ]
    undone = sum(r["optim/undone"] for r in tested)
    assert 0 < undone < 4
    notes = ArmFolder(tmp_path / "mipu/arms/trm_max").summary()["notes"]
    assert f"{undone:.0f} of 4 steps failed" in " ".join(notes)
    lags = {r["version_lag/max"] for r in tested}
    assert lags == {0}, "the next batch is drawn by the weights that training goes on from"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lag": {"sync_every": 2}, "optim__accept": {}}, "sync_every"),
        ({"optim__accept": {"test": "certificate"}, "rollout__evidence": "sampled"}, "rollout.evidence"),
    ],
)
def test_a_test_that_cannot_act_is_refused_by_name(changes, said):
    recipe = small_recipe(**changes, arms={"plain": {"method": "none"}})
    (feature,) = features_of(recipe, "plain")
    with pytest.raises(RecipeError, match=said):
        feature.check(recipe, None)


def test_what_it_costs_where_no_step_fails(tmp_path, monkeypatch):
    """CPU seconds of keeping the state and of the test, over those of the whole run without them."""
    short_arms(monkeypatch)
    spent = {"own": 0.0}

    def timed(hook):
        def call(self, *args):
            start = time.process_time()
            try:
                return hook(self, *args)
            finally:
                spent["own"] += time.process_time() - start

        return call

    for name in ("stepping", "accepts"):
        monkeypatch.setattr(Acceptance, name, timed(getattr(Acceptance, name)))
    recipe = small_recipe(
        batches=6,
        lag={"sync_every": 1},
        rollout={"prompts": 16, "samples": 8, "max_tokens": 14},
        optim__accept={"test": "kl", "limit": ALWAYS},
    )
    start = time.process_time()
    train(recipe, tmp_path / "run")
    share = spent["own"] / (time.process_time() - start - spent["own"])
    assert 0 < share < 0.10, share
