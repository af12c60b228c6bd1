"""A feature is one file and one row: a dummy one uses every hook, and noise in the gradient is written below."""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from offdrift.advantages import advantages
from offdrift.engines.hf import TransformersEngine
from offdrift.methods import METHODS
from offdrift.models import load_model
from offdrift.records import Sampling
from offdrift.stats import summarize
from offdrift_lab.train.features import table
from offdrift_lab.train.features.align import Alignment
from offdrift_lab.train.features.base import Feature, Metrics
from offdrift_lab.train.features.skip_empty import SkipEmpty
from offdrift_lab.train.features.table import FEATURES, features_of
from offdrift_lab.train.loop.batch import Batch
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.optim import AlignSettings
from tests_lab.train.conftest import short_arms, small_recipe
from tests_lab.train.loop.test_loop import Stop, rows, stop_at, weights
from tests_lab.train.steps import stepped

HOOKS = {name for name, x in vars(Feature).items() if callable(x) or isinstance(x, classmethod)}


@pytest.fixture
def short(monkeypatch):
    short_arms(monkeypatch)
    monkeypatch.setattr(table, "FEATURES", list(FEATURES))


class Everything(Feature):
    """Uses every hook: counts its calls, and what a hook returns shows in the run."""

    adds_term = True
    called: dict[str, int] = {}  # noqa: RUF012  of all objects of the class

    def __init__(self):
        self.scale = torch.nn.Linear(1, 1)
        self.inside, self.steps = 0, 0

    def note(self, hook):
        self.called[hook] = self.called.get(hook, 0) + 1

    @classmethod
    def of(cls, recipe, arm):
        cls.called["of"] = cls.called.get("of", 0) + 1
        return cls()

    def check(self, recipe, model):
        self.note("check")
        assert model.config.num_hidden_layers == 2

    def prepare(self, run, model):
        self.note("prepare")
        model.get_output_embeddings().weight.requires_grad_(False)  # and with it the tied table

    def modules(self):
        self.note("modules")
        return (self.scale,)

    def start(self, arm):
        self.note("start")
        self.scale = arm.accelerator.prepare(self.scale)

    def drawing(self, arm):
        self.note("drawing")

    def drawn(self, arm, batch, source):
        self.note("drawn")
        return {"component/drawn": torch.tensor(float(batch.rollouts.num_sequences))}

    def stepping(self, arm):
        self.note("stepping")

    @contextmanager
    def scoring(self, arm, piece):
        self.note("scoring")
        self.inside += 1
        yield
        self.inside -= 1

    def term(self, arm, piece, *, tokens, counts):
        self.note("term")
        assert self.inside == 1, "a piece is scored outside of `scoring`"
        return self.scale(torch.ones(1)).sum() * len(piece.scored.logp) / tokens

    def gradients(self, arm, parameters):
        self.note("gradients")
        assert self.inside == 0
        return Metrics(maxima={"optim/gradient_cosine": torch.tensor(0.25)})

    def leaves_out(self, arm, norm):
        self.note("leaves_out")
        return arm.version == 1

    def step_scale(self, arm, stats):
        self.note("step_scale")
        return 1.0

    def accepts(self, arm, batch):
        self.note("accepts")
        assert batch.rollouts.num_sequences
        return True

    def stepped(self, arm, update):
        self.note("stepped")
        assert update.taken == (arm.version != 1)
        self.steps += 1
        return Metrics(maxima={"grid/noise_sigma": float(self.steps)})

    @property
    def rate_scale(self):
        return 0.5

    @contextmanager
    def publishing(self, arm, model):
        self.note("publishing")
        yield

    def recorded(self, arm, row):
        self.note("recorded")

    def save(self, folder):
        self.note("save")
        (folder / "everything.json").write_text(json.dumps(self.steps))

    def load(self, folder):
        self.note("load")
        self.steps = json.loads((folder / "everything.json").read_text())

    def finished(self, arm):
        self.note("finished")
        (arm.files.path / "everything").touch()


def test_a_feature_is_a_row_and_uses_every_hook(short, tmp_path):
    table.FEATURES.append(Everything)
    Everything.called.clear()
    recipe = small_recipe(batches=4, lag={"sync_every": 1}, log__checkpoint_every=1)
    with pytest.raises(Stop):
        train(recipe, tmp_path / "cut", watch=stop_at("trm_max", 4))
    train(recipe, tmp_path / "cut", resume=True)
    train(recipe, tmp_path / "whole")
    assert set(Everything.called) == HOOKS
    found = rows(tmp_path / "cut")
    assert [row["optim/step_skipped"] for row in found] == [0, 1, 0, 0]
    assert [row["grid/noise_sigma"] for row in found] == [1, 2, 3, 4], "what was saved was loaded"
    assert {row["optim/gradient_cosine"] for row in found} == {0.25}
    assert {row["optim/lr"] for row in found} == {1e-4}, "half of the recipe's"
    assert (tmp_path / "cut/arms/trm_max/everything").exists()
    start = dict(load_model("tiny-qwen3", seed=0)[0].named_parameters())
    trained = weights(tmp_path / "cut")
    moved = {name for name, w in trained.items() if not torch.equal(w, start[name])}
    assert "model.embed_tokens.weight" not in moved
    assert "model.layers.0.mlp.up_proj.weight" in moved
    assert all(torch.equal(w, weights(tmp_path / "whole")[name]) for name, w in trained.items())


class GradientNoise(Feature):
    """Gaussian noise in the gradient, the same in every process and in a resumed run."""

    sigma = 1e-3

    @classmethod
    def of(cls, recipe, arm):
        return cls()

    def gradients(self, arm, parameters):
        generator = torch.Generator().manual_seed(arm.version)
        for p in parameters.values():
            p.grad += self.sigma * torch.randn(p.shape, generator=generator).to(p.grad.device)
        return Metrics(maxima={"grid/noise_sigma": self.sigma})


def test_noise_in_the_gradient_is_one_file_and_one_row(short, tmp_path):
    recipe = small_recipe(batches=4, lag={"sync_every": 1}, log__checkpoint_every=1)
    train(recipe, tmp_path / "plain")
    table.FEATURES.append(GradientNoise)
    train(recipe, tmp_path / "noisy")
    with pytest.raises(Stop):
        train(recipe, tmp_path / "cut", watch=stop_at("trm_max", 3))
    train(recipe, tmp_path / "cut", resume=True)
    plain, noisy, cut = (rows(tmp_path / run) for run in ("plain", "noisy", "cut"))
    assert plain[0]["reward/mean"] == noisy[0]["reward/mean"]
    assert plain[0]["optim/grad_norm"] != noisy[0]["optim/grad_norm"]
    assert [row["optim/grad_norm"] for row in noisy] == [row["optim/grad_norm"] for row in cut]
    assert all(torch.equal(w, weights(tmp_path / "cut")[n]) for n, w in weights(tmp_path / "noisy").items())


def test_an_arm_has_the_features_that_its_recipe_asks_for():
    recipe = small_recipe(
        arms={"grid": {"method": "none", "quantized": {"forward": True}}, "plain": {"method": "none"}},
        rollout__quantization="int8",
        optim={"align": {}, "skip_empty": True, "length_guard": {}, "dtype": "float16", "advantage": "gae"},
    )
    names = {arm: [type(x).__name__ for x in features_of(recipe, arm)] for arm in recipe.arms}
    shared = ["EngineGrid", "OwnCritic", "Alignment", "LossScaling", "SkipEmpty", "LengthWatch"]
    assert names == {"grid": ["TrainerGrid", *shared], "plain": shared}
    assert features_of(small_recipe(), "trm_max") == ()
    made = features_of(recipe, "plain")
    assert all(a is not b for a, b in zip(made, features_of(recipe, "plain"), strict=True)), "an arm has its own"


@pytest.fixture(scope="module")
def world():
    """A model, and a batch that a coarser copy of it drew."""
    model = load_model("tiny-qwen3", seed=0)[0]
    engine = TransformersEngine(copy.deepcopy(model), dtype="bfloat16")
    rollouts = engine.generate([[5, 6, 7]] * 6, Sampling(max_tokens=6, stop_token_ids=(1,)), seed=1, evidence="full")
    rollouts = rollouts.with_(rewards=torch.arange(6.0) % 4, group_ids=torch.arange(6) // 3)
    return model, Batch(rollouts=rollouts, advantages=advantages(rollouts.rewards, rollouts.segments))


def moved(world, features, *, steps=2):
    """Weights after steps of SGD, and the last step's metrics."""
    model = copy.deepcopy(world[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        update = stepped(
            Accelerator(cpu=True), model, optimizer, world[1], METHODS["none"], features=features, token_budget=40
        )
    return [p.detach() for p in model.parameters()], summarize(update.stats)


def test_hooks_that_do_nothing_change_no_bit(world):
    plain, with_hooks = moved(world, ()), moved(world, (Feature(), SkipEmpty()))
    assert all(torch.equal(a, b) for a, b in zip(plain[0], with_hooks[0], strict=True))
    assert {k: v for k, v in with_hooks[1].items() if k != "optim/step_skipped"} == plain[1]


def test_a_feature_in_the_list_is_the_feature_called_by_hand(world):
    by_list, found = moved(world, (Alignment(AlignSettings(threshold=-1.0)),))

    class ByHand(Feature):
        align = Alignment(AlignSettings(threshold=-1.0))

        def gradients(self, arm, parameters):
            self.align.project(parameters)
            return Metrics()

    by_hand, _ = moved(world, (ByHand(),))
    assert all(torch.equal(a, b) for a, b in zip(by_list, by_hand, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(by_list, moved(world, ())[0], strict=True))
    assert found["optim/gradient_cosine"] > 0.5


def test_every_feature_is_documented_and_has_a_row():
    folder = Path(table.__file__).parent
    in_files = {
        x for x in Feature.__subclasses__() if Path(__import__(x.__module__, fromlist=["x"]).__file__).parent == folder
    }
    assert in_files == set(FEATURES)
    assert all(kind.__doc__ for kind in FEATURES)
