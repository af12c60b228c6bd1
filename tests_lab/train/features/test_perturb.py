"""Noise in the layers' inputs: what the loss sees, what it learns, and what goes on being about the policy itself."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from offdrift.certificate import TrustRegion
from offdrift.certificate.batch import COLUMNS
from offdrift.engines.score import score
from offdrift.errors import RecipeError
from offdrift.methods import METHODS, override
from offdrift.stats import summarize
from offdrift_lab.train.features import perturb as module
from offdrift_lab.train.features.perturb import Perturbation, decoder_layers, perturbed
from offdrift_lab.train.settings.optim import PerturbSettings
from tests_lab.train.loop.test_learning_rate import run_of
from tests_lab.train.loop.test_step import drawing as drawing
from tests_lab.train.loop.test_step import taken
from tests_lab.train.loop.test_step import world as world

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def noisy(model, sigma: float = 0.05, **settings) -> Perturbation:
    return Perturbation(model, PerturbSettings(sigma=sigma, **settings), Accelerator(cpu=True), seed=3)


def test_the_golden_of_a_layer():
    """Methods table, loss.alp: W (h + sigma eps) under softmax, and the ratio to the clean policy."""
    w = torch.tensor([[1.3, -0.7], [0.2, 0.9], [-1.1, 0.4]])
    h, noise = torch.tensor([0.8, -0.5]), torch.tensor([0.5, -0.3])
    clean = (w @ h).log_softmax(-1)
    noisy = (w @ perturbed(h, torch.tensor(0.1).log(), noise)).log_softmax(-1)
    torch.testing.assert_close(clean, torch.tensor([-0.239772, -1.919772, -2.709772]), atol=1e-6, rtol=0)
    torch.testing.assert_close(noisy, torch.tensor([-0.21569, -1.99869, -2.83869]), atol=1e-6, rtol=0)
    ratio = torch.tensor([1.024374, 0.924115, 0.879046])
    torch.testing.assert_close((noisy - clean).exp(), ratio, atol=1e-6, rtol=0)


def test_noise_is_that_of_update_piece_and_layer_and_off_outside(world, monkeypatch):
    model, batch = copy.deepcopy(world[0]), world[1]
    perturb = noisy(model)

    def logp(version=None, piece=0):
        if version is None:
            return score(model, batch.rollouts).logp.detach()
        with perturb.on(version, piece):
            return score(model, batch.rollouts).logp.detach()

    clean, first = logp(), logp(7)
    assert torch.equal(first, logp(7))
    for other in (clean, logp(8), logp(7, 1)):
        assert (first - other).abs().max() > 1e-3
    assert torch.equal(clean, logp())
    drawn = []
    monkeypatch.setattr(module, "perturbed", lambda h, size, noise: (drawn.append(noise), perturbed(h, size, noise))[1])
    logp(7)
    assert len(drawn) == len(decoder_layers(model)) == 2
    assert abs(float(torch.cosine_similarity(*(x.flatten() for x in drawn), dim=0))) < 0.1


def test_sizes_have_the_gradient_of_the_loss_also_where_activations_are_computed_again(world):
    batch, gradients = world[1], []
    for recompute in (False, True):
        model = copy.deepcopy(world[0]).train()
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        perturb = noisy(model)
        with perturb.on(0, 0):
            score(model, batch.rollouts).logp.sum().backward()
        weights = torch.cat([p.grad.flatten() for p in model.parameters()])
        gradients.append((perturb.log_sigma.grad.clone(), weights))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)
    step = 1e-2
    for layer in range(2):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                perturb.log_sigma[layer] += sign * step
                with perturb.on(0, 0):
                    ends.append(score(model, batch.rollouts).logp.double().sum())
                perturb.log_sigma[layer] -= sign * step
        slope = float(ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx(float(gradients[0][0][layer]), rel=0.05, abs=0.02)


@pytest.mark.parametrize(("name", "budget"), [("token_is", 10_000), ("normalized_tis", 30)])
def test_the_loss_is_of_the_perturbed_policy_and_evidence_of_the_policy(world, name, budget):
    region = TrustRegion(horizon=9, delta=0.05)
    row = override(METHODS[name], {"weight.unit": "token"} if name == "normalized_tis" else {})
    plain = taken(copy.deepcopy(world[0]), world[1], row, token_budget=budget, view=True, region=region)
    model = copy.deepcopy(world[0])
    perturb = noisy(model, sigma=0.1, lr=0.5)
    before = perturb.log_sigma.detach().clone()
    update = taken(model, world[1], row, token_budget=budget, view=True, region=region, perturb=perturb)
    ours, theirs = summarize(update.stats), summarize(plain.stats)
    assert abs(ours["full/k3"] - theirs["full/k3"]) > 1e-4
    assert abs(ours["optim/grad_norm"] - theirs["optim/grad_norm"]) > 1e-3
    assert ours["perturb/sigma_max"] == pytest.approx(0.1)
    if name == "normalized_tis":  # the pass that looks ahead saw the noise of the loss: its mean divides to 1
        assert ours["weight/mean"] == pytest.approx(1.0, rel=1e-5)
    compared = 0
    for key in ("current/entropy", "divergence/kl_rollout_current_mean", "divergence/tv_rollout_current_max"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-6)
        compared += 1
    assert compared == 3
    for column in ("logp", "entropy"):
        assert torch.equal(getattr(update.tokens, column), getattr(plain.tokens, column))
    assert plain.evidence.columns.shape == (12, len(COLUMNS))
    assert torch.equal(update.evidence.columns.nan_to_num(7.0), plain.evidence.columns.nan_to_num(7.0))
    assert ((perturb.log_sigma - before).abs() - 0.5).abs().max() < 1e-3  # Adam's first step is its learning rate


def test_a_run_learns_sizes_and_is_resumed(tmp_path, monkeypatch):
    changes = {"batches": 6, "lag": {"sync_every": 1}, "arms": {"ppo": {"method": "decoupled_ppo"}}}
    noise = {"changes": changes, "perturb": {"sigma": 1e-2, "lr": 0.1}}
    cut = tmp_path / "cut"
    whole, _ = run_of(tmp_path / "whole", monkeypatch, cut=(5, cut), **noise)
    sizes = [r["perturb/sigma_mean"] for r in whole]
    assert sizes[0] == pytest.approx(1e-2)
    assert len(set(sizes)) == 6
    # Without lag the old policy is the current one but for the noise, which only the current one has.
    assert all(r["staleness/k3"] > 1e-6 and r["version_lag/max"] == 0 for r in whole)
    again, _ = run_of(cut, monkeypatch, resume=True, **noise)
    for name in ("perturb/sigma_mean", "optim/grad_norm", "full/k3"):
        assert [r[name] for r in again] == [r[name] for r in whole]


def test_a_model_without_a_list_of_layers_is_refused():
    with pytest.raises(RecipeError, match="no list of decoder layers"):
        decoder_layers(nn.Linear(2, 2))
