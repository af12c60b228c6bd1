"""AReaL's own configuration and writer; its update and losses run in tests/adapters/test_areal.py,
which takes AReaL's modules where they are installed."""

import asyncio
import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.adapters.hooked import code
from tests.foreign import real
from tests.records.samples import read_all

pytestmark = [
    pytest.mark.foreign,
    # What its trackers and servers say while they are imported.
    pytest.mark.filterwarnings("ignore"),
]


def test_defaults_and_keys_of_the_page() -> None:
    arguments = real.module("areal", "areal.api.cli_args")
    fields = {f.name: f for f in dataclasses.fields(arguments.InferenceEngineConfig)}
    assert fields["dump_to_file"].default is False
    (block,) = (yaml.safe_load(b)["actor"] for b in code("areal.md", "yaml") if "actor" in b)
    actor = {f.name for f in dataclasses.fields(arguments.PPOActorConfig)}
    assert set(block) <= actor
    specs = {f.name for f in dataclasses.fields(arguments.SchedulingSpec)}
    assert all(set(spec) <= specs for spec in block["scheduling_spec"])


class Tokenizer:
    """Texts of ids."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + i) for i in ids)


@pytest.mark.slow
def test_its_dump_is_read(tmp_path: Path) -> None:
    executor = real.module("areal", "areal.infra.workflow_executor").WorkflowExecutor
    made = object.__new__(executor)
    made._get_dump_dir = lambda is_eval: str(tmp_path / "rollout")
    made._get_tokenizer = Tokenizer
    made.logger, made.inference_engine = logging.getLogger(__name__), SimpleNamespace()
    trajectory = {
        "input_ids": torch.tensor([[0, 1, 2, 3], [0, 1, 4, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "loss_mask": torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]),
        "rewards": torch.tensor([1.0, 0.0]),
        "versions": torch.tensor([[-1, -1, 7, 7], [-1, -1, 7, -1]]),
    }
    assert asyncio.run(made._dump_trajectory(trajectory, 3, False)) == (True, "")
    found, (one,), bad = read_all(tmp_path)
    assert (found.framework, bad) == ("areal", [])
    assert one.completions == ("cd", "e")
    assert one.rewards.tolist() == [1.0, 0.0]
    assert one.step.tolist() == [7, 7]
    assert one.response_lengths.tolist() == [2, 1]
