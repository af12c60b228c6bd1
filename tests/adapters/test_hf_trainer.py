"""A callback for any trainer of Hugging Face: real trainers on a tiny model, on CPUs."""

import logging

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer, TrainingArguments

from offdrift.adapters.hf_trainer import OffdriftCallback
from offdrift.errors import LivenessError, MethodError
from offdrift.logprobs import LogProbs
from tests.adapters.trl_runs import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")
SHIFT = 0.3
"""Nats by which the rollout's log-probs are off."""


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.delenv("OFFDRIFT_METRICS", raising=False)


def rows(count: int = 24) -> list[dict]:
    g = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 12, (9,), generator=g), "advantage": float(i % 3 - 1)} for i in range(count)]


def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
    ids = torch.stack([row["input_ids"] for row in batch])
    return {"input_ids": ids, "labels": ids, "advantage": torch.tensor([row["advantage"] for row in batch])}


class Drifting(Trainer):
    """Reinforcement learning in `compute_loss`, with an engine whose log-probs are off."""

    callback: OffdriftCallback

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["input_ids"]
        logp = model(input_ids=ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        rollout = (logp.detach() - SHIFT * (ids[:, 1:] % 2)).float()
        lp = LogProbs.pack(rollout, logp.float(), logp.detach().float(), mask=torch.ones_like(logp))
        advantages = inputs["advantage"][:, None].expand(logp.shape)
        return self.callback.offdrift.loss(lp, lp.like_caller(advantages), normalizer=float(logp.numel())).loss


def arguments(tmp_path, **options) -> TrainingArguments:
    more = {"max_steps": 6, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True}
    more |= {"per_device_train_batch_size": 4, "remove_unused_columns": False, "disable_tqdm": True} | options
    return TrainingArguments(output_dir=str(tmp_path / "out"), **more)


def train(callback: OffdriftCallback, kind: type[Trainer], tmp_path, *, attach: bool = True, **options) -> Trainer:
    trainer = kind(tiny_model(), arguments(tmp_path, **options), collate, train_dataset=rows(), callbacks=[callback])
    trainer.callback = callback
    if attach:
        callback.attach(trainer)
        callback.attach(trainer)
        assert trainer.callback_handler.callbacks.count(callback) == 1
    trainer.train()
    return trainer


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    (file,) = folder.rglob("events.out.tfevents*")
    events = EventAccumulator(str(file))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_metrics_of_a_loss_stand_in_the_log_and_with_every_tracker(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    callback = OffdriftCallback("decoupled_token_is")
    trainer = train(callback, Drifting, tmp_path, report_to=["tensorboard"])
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6]
    for row in logged:
        own = [name for name in row if name.startswith("offdrift/")]
        assert 9 <= len(own) <= 13
        assert 0.01 < row["offdrift/mismatch/k3"] < 0.05
    shown = scalars(tmp_path / "board")["train/offdrift/mismatch/k3"]
    assert shown == [(row["step"], pytest.approx(row["offdrift/mismatch/k3"])) for row in logged]
    assert callback.findings


def test_a_log_of_several_steps_holds_their_mean(tmp_path):
    each = train(OffdriftCallback("decoupled_token_is", metrics=["full/k3"]), Drifting, tmp_path / "a")
    some = train(OffdriftCallback("decoupled_token_is", metrics=["full/k3"]), Drifting, tmp_path / "b", logging_steps=3)
    values = [row["offdrift/full/k3"] for row in each.state.log_history if "loss" in row]
    means = [row["offdrift/full/k3"] for row in some.state.log_history if "loss" in row]
    assert means == pytest.approx([sum(values[:3]) / 3, sum(values[3:]) / 3])


def test_findings_are_handed_over_once_and_may_stop_training(tmp_path):
    found = []
    callback = OffdriftCallback("disabled", stop_on="act", on_finding=found.append)
    trainer = train(callback, Drifting, tmp_path)
    assert found
    assert len({f.rule for f in found}) == len(found)
    assert trainer.state.global_step == found[-1].step < 6
    free = OffdriftCallback("disabled", on_finding=found.append)
    assert train(free, Drifting, tmp_path / "b").state.global_step == 6


class Collapsing(Trainer):
    """Logs what TRL's GRPO logs, of a run whose engine is far from the trainer."""

    def log(self, logs, *arguments, **named):
        far = {"sampling/sampling_logp_difference/mean": 0.9, "sampling/sampling_logp_difference/max": 5.0}
        super().log({**logs, **(far if "loss" in logs else {})}, *arguments, **named)


def test_a_trainer_that_measures_nothing_is_judged_by_what_it_logs(tmp_path, caplog):
    caplog.set_level(logging.INFO, "offdrift.transformers")
    callback = OffdriftCallback()
    trainer = train(callback, Collapsing, tmp_path)
    assert callback.findings
    last = [row for row in trainer.state.log_history if "loss" in row][-1]
    count = sum(last[f"offdrift/findings_{level}"] for level in ("stop", "act"))
    assert count == sum(f.severity in ("stop", "act") for f in callback.findings)
    assert any(callback.findings[0].fix in record.getMessage() for record in caplog.records)


def test_a_plain_trainer_goes_on_as_before(tmp_path):
    with_callback = train(OffdriftCallback(), Trainer, tmp_path / "a")
    without = Trainer(tiny_model(), arguments(tmp_path / "b"), collate, train_dataset=rows())
    without.train()
    losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (with_callback, without)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_a_method_that_is_never_called_ends_the_run(tmp_path):
    with pytest.raises(LivenessError, match="never called"):
        train(OffdriftCallback("token_tis"), Trainer, tmp_path)


def test_trackers_that_had_logged_before_are_named(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    train(OffdriftCallback("decoupled_token_is"), Drifting, tmp_path, attach=False, report_to=["tensorboard"])
    warned = [record.getMessage() for record in caplog.records if "attach(trainer)" in record.getMessage()]
    assert len(warned) == 1
    assert "tensorboard" in warned[0]


def test_a_choice_that_is_none_is_refused():
    with pytest.raises(MethodError, match="stop_on"):
        OffdriftCallback(stop_on="never")
    with pytest.raises(MethodError, match="full/k3"):
        OffdriftCallback(metrics=["ful/k3"])
