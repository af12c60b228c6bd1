"""SkyRL's own registry, losses and configuration beside the adapter."""

import dataclasses
import logging
import shlex
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters.contrib import skyrl
from offdrift.errors import FrameworkError
from offdrift.judge import load_rules
from tests.adapters.hooked import Batch, code, heard
from tests.foreign import real

pytestmark = pytest.mark.foreign


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch, process: None) -> Iterator[Any]:
    """`skyrl.backends.skyrl_train.utils.ppo_utils`."""
    real.typed_dicts(monkeypatch)
    return real.module("skyrl", "skyrl.backends.skyrl_train.utils.ppo_utils")


def run(loss: Any, one: Batch, config: Any) -> tuple[Tensor, Tensor]:
    current = one.current.clone().requires_grad_()
    advantages, mask = one.advantages / one.mask.sum(), one.mask.double()
    total, metrics = loss(current, one.old, advantages, config=config, loss_mask=mask, rollout_logprobs=one.rollout)
    assert all(type(x) is float for x in metrics.values())
    total.backward()
    assert current.grad is not None
    return total.detach(), current.grad


GEOMETRIC = {"gate.low": 0.9, "gate.high": 1.1}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ppo_clip", {}, {}),
    ("flashrl", {}, {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0}),
    ("geo_mask", GEOMETRIC, {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1}),
    ("icepop_binary", {}, {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 5.0}),
]


@pytest.mark.parametrize(("name", "settings", "correction"), CASES)
def test_losses_and_gradients_are_skyrls(
    theirs: Any, name: str, settings: Any, correction: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its regular loss with its own correction, and the method through its registry, which proves itself."""
    from skyrl.train.config.config import AlgorithmConfig, OffPolicyCorrectionConfig

    one = real.doubles()
    own = OffPolicyCorrectionConfig(**correction)
    own = AlgorithmConfig(policy_loss_type="regular", eps_clip_low=0.2, eps_clip_high=0.2, off_policy_correction=own)
    expected, its = run(theirs.PolicyLossRegistry.get("regular"), one, own)
    registered = skyrl.register(name, settings=settings, on_idle="warn")
    try:
        ours = theirs.PolicyLossRegistry.get(registered)
        with heard(logging.getLogger("offdrift.skyrl"), caplog):
            total, gradient = run(ours, one, AlgorithmConfig())
    finally:
        theirs.PolicyLossRegistry.unregister(registered)
    assert "ppo_policy_loss: loss" in caplog.text
    assert int((its != 0).sum()) > 5
    # SkyRL's safe_exp_delta exponentiates in float32.
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, its, rtol=1e-6, atol=1e-7)


def test_its_loss_with_a_change_is_refused(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl.train.config.config import AlgorithmConfig

    reduce = theirs.reduce_loss
    monkeypatch.setattr(theirs, "reduce_loss", lambda *x: 1.001 * reduce(*x))
    registered = skyrl.register("ppo_clip", on_idle="warn")
    try:
        with pytest.raises(FrameworkError, match="ppo_policy_loss is a loss"):
            run(theirs.PolicyLossRegistry.get(registered), real.doubles(), AlgorithmConfig())
    finally:
        theirs.PolicyLossRegistry.unregister(registered)


def test_every_switch_of_its_correction_is_known(theirs: Any) -> None:
    """What is None until it is set is a switch; the rest are numbers that a switch reads."""
    from skyrl.train.config.config import OffPolicyCorrectionConfig

    fields = dataclasses.fields(OffPolicyCorrectionConfig)
    assert {f.name for f in fields if f.default is None} == set(skyrl.OWN)


def reaches(config: Any, path: str) -> bool:
    """Whether the dotted path names a field of the nested configuration."""
    for name in path.split("."):
        hints = typing.get_type_hints(config) if dataclasses.is_dataclass(config) else {}
        if name not in hints:
            return False
        kinds = [hints[name], *typing.get_args(hints[name])]
        config = next((k for k in kinds if dataclasses.is_dataclass(k)), None)
    return True


def test_keys_of_snippets_and_of_the_page_are_skyrls(theirs: Any) -> None:
    from skyrl.train.config.config import SkyRLTrainConfig

    snippets = [f.snippets["skyrl"] for f in load_rules().fixes.values() if "skyrl" in f.snippets]
    commands = code("skyrl.md", "bash")
    words = [w for text in (*snippets, *commands) for w in shlex.split(text, comments=True)]
    keys = {w.partition("=")[0] for w in words if "=" in w and not w.startswith("OFFDRIFT")}
    assert len(keys) > 20
    # Read off the command line before anything parses it.
    entrypoint = "trainer.override_entrypoint"
    main = real.folder("skyrl") / "train" / "entrypoints" / "main_base.py"
    assert f'"{entrypoint}="' in main.read_text()
    assert {key for key in keys if not reaches(SkyRLTrainConfig, key)} == {entrypoint}
