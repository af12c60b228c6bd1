"""What hooks share: where a step ends, whatever happens at its end."""

from pathlib import Path

import pytest
import torch

from offdrift.adapters.hooks import HookConfig, hook_of
from offdrift.errors import RecordError
from offdrift.logprobs import LogProbs
from tests.adapters.hooked import batch, optimizer_step
from tests.records.samples import read_all


@pytest.mark.usefixtures("process")
def test_a_disk_that_fails_does_not_mix_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "log"
    hook = hook_of(HookConfig.of("plain", "token_tis", record=folder), divides=False)
    given = batch()
    logprobs = LogProbs.pack(given.rollout, given.current, given.old, mask=given.mask)
    n = float(given.mask.sum())

    def refuse(_: object) -> None:
        raise RecordError("the disk is full")

    def step() -> None:
        hook.loss(logprobs, given.advantages)
        optimizer_step()

    step()
    with monkeypatch.context() as full:
        full.setattr(hook.adapter.recorder, "add", refuse)
        with pytest.raises(RecordError, match="disk is full"):
            step()
    assert hook.metrics["offdrift/batch/tokens"] == n
    step()
    assert hook.metrics["offdrift/batch/tokens"] == n
    hook.adapter.recorder.close()
    _, batches, _ = read_all(folder)
    steps, sequences = torch.cat([b.step for b in batches]).unique(return_counts=True)
    assert steps.tolist() == [1, 3]  # all but the step whose call raised
    assert sequences.tolist() == [len(given.mask)] * 2
