"""ms-swift's GRPO trainer under the adapter: its own functions where the wheel is, else a stand-in of its contract.

The functions of ms-swift 4.6.0 are compiled from the wheel's file alone: importing it takes datasets and templates that
no correction touches.
"""

import ast
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters.contrib import ms_swift
from offdrift.adapters.frameworks import WAITING
from offdrift.errors import EvidenceError, FrameworkError, LivenessError, MethodError
from tests.adapters.hooked import SOME, Batch, batch, code, heard, install, optimizer_step, unscored

SPEC = importlib.util.find_spec("swift")
FILE = Path(next(iter(SPEC.submodule_search_locations or ()), "")) / "rlhf_trainers" if SPEC else Path()
OWN = ("_get_rollout_is_correction", "_apply_rollout_importance_sampling", "_compute_sequence_level_ratios")


def weights_of(self: Any, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The two token modes of the contract."""
    ratio, threshold = log_ratio.clamp(-20, 20).exp(), self.rollout_importance_sampling_threshold
    if self.rollout_importance_sampling_mode == "token_truncate":
        return ratio.clamp(max=threshold)
    return ratio.where(ratio <= threshold, 0.0)


def correction_of(self: Any, old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return old - rollout, self._apply_rollout_importance_sampling(old - rollout, mask)


def functions() -> dict[str, Any]:
    if not (FILE / "grpo_trainer.py").is_file():
        return {OWN[0]: correction_of, OWN[1]: weights_of}
    tree = ast.parse((FILE / "grpo_trainer.py").read_text())
    (trainer,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "GRPOTrainer")
    body: list[ast.stmt] = [n for n in trainer.body if isinstance(n, ast.FunctionDef) and n.name in OWN]
    assert len(body) == len(OWN)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(body, []), "grpo_trainer.py", "exec"), names)  # ms-swift's own functions
    return {name: names[name] for name in OWN}


def created(self: Any, mode: str | None = "token_truncate", threshold: float = 2.0) -> None:
    self.rollout_importance_sampling_mode, self.rollout_importance_sampling_threshold = mode, threshold
    self.disable_rollout_importance_sampling = False


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, process: Any) -> Iterator[type]:
    """`GRPOTrainer`, imported after the plugin."""
    made = type("GRPOTrainer", (), {"__init__": created, **functions()})
    install(monkeypatch, "4.6.0", {ms_swift.TRAINER: {"GRPOTrainer": made}})
    yield made
    ms_swift.uninstall()
    for module in (ms_swift.TRAINER, ms_swift.MEGATRON):
        WAITING.queues.pop(module, None)


def weights(made: Any, of: Batch, **options: Any) -> Tensor:
    ratio, found = made(**options)._get_rollout_is_correction(of.old, of.rollout, of.mask)
    torch.testing.assert_close(ratio, of.old - of.rollout, equal_nan=True)
    return found * of.mask


TOKEN = {
    "token_truncate": ("decoupled_token_is", {"weight.cap": 1.1}),
    "token_mask": ("decoupled_token_is", {"weight.cap": 1.1, "weight.outside": "mask"}),
}


@pytest.mark.parametrize("mode", TOKEN)
def test_the_two_token_modes_are_weights_of_ours(trainer: Any, mode: str) -> None:
    of = batch(spread=0.6)
    own = weights(trainer, of, mode=mode, threshold=1.1)
    assert 5 < int((own == (1.1 if mode == "token_truncate" else 0.0))[of.mask].sum()) < int(of.mask.sum()) - 5
    name, settings = TOKEN[mode]
    ms_swift.install(name, settings=settings)
    torch.testing.assert_close(weights(trainer, of), own, rtol=1e-6, atol=0)
    ms_swift.uninstall()
    assert torch.equal(weights(trainer, of, mode=mode, threshold=1.1), own)


def test_gates_reject_padding_does_not_matter_and_metrics_are_of_a_step(trainer: Any, process: Any) -> None:
    of = batch(spread=0.5)
    ms_swift.install("geo_mask", settings=SOME["geo_mask"])
    found = weights(trainer, of)
    rows = [bool((row == 0).all()) for row in found]
    assert 1 < sum(rows) < len(rows)
    padded = Batch(*(x.where(of.mask, torch.nan) for x in (of.rollout, of.old, of.current, of.advantages)), of.mask)
    again = trainer()._get_rollout_is_correction(padded.old, padded.rollout, of.mask)[1]
    assert torch.equal(again * of.mask, found)
    optimizer_step()
    assert 0 < process[-1].metrics["offdrift/gate/drop_frac_token"] < 1
    absent, masked = unscored(of, -9999.0)
    assert torch.equal(weights(trainer, absent) * masked.mask, weights(trainer, masked))
    empty = trainer()._get_rollout_is_correction(of.old, of.rollout, torch.zeros_like(of.mask))
    assert not bool(empty[1].any())


def test_weights_that_are_not_known_are_refused_at_the_first_batch(
    trainer: Any, process: Any, monkeypatch: Any, caplog: Any
) -> None:
    of = batch()
    ms_swift.install("icepop", on_idle="warn")
    with heard(logging.getLogger("offdrift.ms-swift"), caplog):
        weights(trainer, of)
    assert "_apply_rollout_importance_sampling: loss" in caplog.text
    own = trainer._apply_rollout_importance_sampling
    monkeypatch.setattr(trainer, OWN[1], lambda self, ratio, mask: own(self, -ratio, mask))
    weights(trainer, of)  # once per process
    process[-1].proved = False
    for _ in range(2):  # a loop that catches the first refusal meets another
        with pytest.raises(FrameworkError, match=r"ms-swift: swift.*_apply_rollout_importance_sampling is a loss that"):
            weights(trainer, of)


def test_what_would_do_nothing_is_refused(trainer: Any, monkeypatch: Any) -> None:
    with pytest.raises(EvidenceError, match="current ones and no advantages"):
        ms_swift.install("token_tis")
    with pytest.raises(MethodError, match="no advantages to record"):
        ms_swift.install("icepop", record="folder")
    ms_swift.install("icepop")
    with pytest.raises(MethodError, match="--rollout_importance_sampling_mode token_truncate"):
        trainer(mode=None)
    of = batch()
    with pytest.raises(EvidenceError, match="--use_vllm true"):
        trainer()._get_rollout_is_correction(of.old, torch.zeros_like(of.old), of.mask)
    weights(trainer, Batch(of.old, of.old, of.current, of.advantages, of.mask))
    with pytest.raises(LivenessError, match="cannot act"):
        optimizer_step()
    module = ModuleType(ms_swift.MEGATRON)
    with pytest.raises(MethodError, match="Megatron trainer has another loss"):
        ms_swift._rebind(module)


def test_the_plugin_of_the_page_installs(trainer: Any) -> None:
    (plugin,) = code("ms-swift.md", "python")
    exec(compile(plugin, "offdrift_plugin.py", "exec"), {})
    assert trainer._get_rollout_is_correction is ms_swift.correction
