"""A loop of one's own logs to any tracker, and hears what is wrong."""

import json
import logging

import pytest
import torch
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import offdrift
from offdrift.errors import MethodError
from offdrift.loss import policy_loss
from offdrift.stats import DriftStats, summarize
from tests.adapters.test_adapter import packed

METHOD = offdrift.method("decoupled_token_is")


def result(first: int = 0, last: int = 6, **options):
    return policy_loss(packed(first, last, **options)[0], METHOD, packed(first, last, **options)[1])


def test_micro_batches_are_added_up_and_logged_once():
    rows = []
    log = offdrift.log_to(lambda numbers, step: rows.append((step, numbers)), metrics="all")
    logged = log(7, result(0, 2), result(2, 3).stats, result(3, 6), also={"optim/grad_norm": 2.0})
    assert rows == [(7, logged)]
    expected = summarize(DriftStats.merge_all([result(0, 2).stats, result(2, 3).stats, result(3, 6).stats]))
    for name, value in expected.items():
        assert logged[f"offdrift/{name}"] == pytest.approx(value, nan_ok=True), name
    assert logged["offdrift/optim/grad_norm"] == log.numbers["optim/grad_norm"] == 2.0
    assert log(8) == {}
    assert len(rows) == 1


def test_tensorboard_gets_scalars_with_their_steps(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    log = offdrift.log_to(writer)
    values = [log(step, result(seed=step))["offdrift/full/k3"] for step in (1, 2, 3)]
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert 9 <= len(events.Tags()["scalars"]) <= 13
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("offdrift/full/k3")] == list(
        zip((1, 2, 3), values)
    )


def test_an_accelerator_writes_to_the_trackers_that_it_has_opened(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("run")
    log = offdrift.log_to(accelerator)
    value = log(4, result())["offdrift/full/k3"]
    accelerator.end_training()
    (file,) = tmp_path.rglob("events.out.tfevents*")
    events = EventAccumulator(str(file))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("offdrift/full/k3")] == [(4, pytest.approx(value))]


class Run:
    """A place with the method `log(numbers, step=...)` of W&B and trackio, or `log_metrics` of MLflow, which writes lines."""

    def __init__(self, file, name: str) -> None:
        setattr(self, name, self._write)
        self.file = file

    def _write(self, numbers: dict, step: int | None = None) -> None:
        with self.file.open("a") as f:
            f.write(json.dumps({"step": step, **numbers}) + "\n")


@pytest.mark.parametrize("name", ["log", "log_metrics"])
def test_an_object_with_a_method_that_logs_is_a_tracker(tmp_path, name):
    log = offdrift.log_to(Run(tmp_path / "rows", name), metrics=["full/k3"])
    value = log(5, result())["offdrift/full/k3"]
    assert json.loads((tmp_path / "rows").read_text()) == {"step": 5, "offdrift/full/k3": value}


def test_what_is_no_tracker_is_refused_by_its_type():
    for thing in (None, "wandb", 3, logging.getLogger("x")):
        with pytest.raises(MethodError, match=type(thing).__name__):
            offdrift.log_to(thing)


def test_findings_are_said_once_with_their_fix(caplog):
    caplog.set_level(logging.INFO, "offdrift.loop")
    log = offdrift.log_to(lambda numbers, step: None)
    for step in range(1, 9):
        logged = log(step, result(noise=2.0, seed=step))
    assert log.findings
    urgent = [f for f in log.findings if f.severity in ("stop", "act")]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == len(set(said)) >= len(urgent) > 0
    assert any(urgent[0].fix in text for text in said)
    assert logged["offdrift/findings_stop"] + logged["offdrift/findings_act"] == len(urgent)


def test_the_gradient_is_what_it_was_without_a_log():
    lp, advantages = packed(0, 6)
    current = lp.logp.clone().requires_grad_()
    made = policy_loss(
        offdrift.LogProbs.pack(lp.logp_rollout, current, lp.logp_old, segments=lp.segments), METHOD, advantages
    )
    (expected,) = torch.autograd.grad(made.loss, current, retain_graph=True)
    offdrift.log_to(lambda numbers, step: None)(1, made)
    made.loss.backward()
    assert torch.equal(current.grad, expected)
