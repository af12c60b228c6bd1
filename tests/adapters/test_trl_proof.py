"""A trainer whose loss the adapter does not know is refused by name: when it is made, and by what its loss does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters.trl import OffdriftMixin
from offdrift.adapters.trl.proof import HOME, refuse_class
from offdrift.errors import FrameworkError
from offdrift.methods import METHODS
from tests.adapters.trl_bare import LOSSES, inputs_of, ours, pushed
from tests.parity.trl_trainer import load_trl, sequence_batch


def made(base: type, mode: str = "correct", **fields: Any) -> Any:
    return ours(sequence_batch(1), METHODS["decoupled_token_is"], mode, base=base, **fields)


@pytest.mark.parametrize("mode", ["correct", "loss"])
def test_a_geometric_mean_of_ratios_is_noticed_by_what_it_does(mode: str) -> None:
    """TRL's GMPO takes one advantage per sequence; with every weight 1 the mixin gave it another loss."""
    run = made(load_trl().gmpo, mode)
    with pytest.raises(FrameworkError, match=r"GMPOTrainer with loss_type='grpo'.* has a loss that this adapter"):
        pushed(run, inputs_of(run))


def spoiled(change: Any) -> type:
    """TRL's trainer with a loss that does something else with its inputs."""

    class Theirs(load_trl().grpo):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            return super()._compute_loss(model, change(dict(inputs)))

    return Theirs


SPOILED = {
    "is not linear in the advantages": lambda x: {
        **x,
        "advantages": x["advantages"].sign() * x["advantages"].abs().sqrt(),
    },
    "its loss is": lambda x: {**x, "advantages": x["advantages"] + (x["advantages"].ndim > 1)},
    "ends with ValueError": lambda x: (
        [][1]
        if x["advantages"].ndim > 2
        else (_ for _ in ()).throw(ValueError("no"))
        if x["advantages"].ndim > 1
        else x
    ),
}


@pytest.mark.parametrize("words", SPOILED)
def test_other_losses_are_noticed_by_what_they_do(words: str) -> None:
    run = made(spoiled(SPOILED[words]))
    with pytest.raises(FrameworkError, match=f"Theirs.*{words}"):
        pushed(run, inputs_of(run))


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_loss_of_trl_passes_and_nothing_of_the_proof_is_written_down(loss_type: str, level: str) -> None:
    fields = {"beta": 0.3, "_entropy_bonus_enabled": True, "use_adaptive_entropy": False, "entropy_coef": 0.1}
    run = made(load_trl().grpo, loss_type=loss_type, importance_sampling_level=level, **fields)
    inputs = inputs_of(run)
    silent = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}  # which proves nothing by itself
    pushed(run, silent)
    assert run.trainer._proved
    assert len(run.trainer._metrics["train"]["entropy"]) == 1
    calls = []
    run.trainer._prove = lambda *_: calls.append(1)
    pushed(run, inputs)
    assert calls == []


def test_a_first_batch_without_any_advantage_proves_something() -> None:
    run = made(spoiled(SPOILED["its loss is"]))
    inputs = inputs_of(run)
    with pytest.raises(FrameworkError, match="its loss is"):
        pushed(run, {**inputs, "advantages": torch.zeros_like(inputs["advantages"])})


def test_classes_that_are_not_known_are_refused_when_they_are_made() -> None:
    grpo, gmpo = load_trl().grpo, load_trl().gmpo

    def mixed(*bases: type) -> type:
        return type("Mine", (OffdriftMixin, *bases), {})

    refuse_class(mixed(grpo), OffdriftMixin)
    assert grpo._compute_loss.__module__ == HOME
    with pytest.raises(FrameworkError, match=r"gmpo_trainer\.GMPOTrainer\._compute_loss is a loss that this adapter"):
        mixed(gmpo)("model", method="decoupled_token_is")
    unsloth = type("UnslothGRPOTrainer", (grpo,), {"compute_loss": lambda *_: None, "__module__": "unsloth_compiled"})
    with pytest.raises(FrameworkError, match=r"Unsloth replaces TRL's loss.*UnslothGRPOTrainer\.compute_loss"):
        mixed(unsloth)("model", method="decoupled_token_is")
    # What is before the mixin is the user's own, and calls super().
    own = type("Own", (), {"_compute_loss": lambda self, *x: super(own, self)._compute_loss(*x)})
    refuse_class(type("Mine", (own, OffdriftMixin, grpo), {}), OffdriftMixin)


def test_trls_asynchronous_trainer_is_refused_and_the_message_says_what_to_use() -> None:
    theirs = pytest.importorskip("trl.experimental.async_grpo").AsyncGRPOTrainer
    mine = type("Mine", (OffdriftMixin, theirs), {})
    words = r"AsyncGRPOTrainer has no _compute_loss, _get_per_token.*Train with TRL's GRPOTrainer.*offdrift\.record"
    with pytest.raises(FrameworkError, match=words):
        mine("model", method="decoupled_token_is")
