"""The tap on vLLM's output head, on a stand-in for its model runner: order, discards, undone tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from offdrift.engines.vllm.taps import state_tap
from offdrift.errors import EngineError


class Processor(nn.Module):
    """What a logits processor of vLLM has and how it is called."""

    def __init__(self, **changes) -> None:
        super().__init__()
        self.__dict__ |= {
            "scale": 1.0,
            "soft_cap": None,
            "logits_as_input": False,
            "org_vocab_size": 5,
            "head_dtype": torch.bfloat16,
            **changes,
        }

    def forward(self, lm_head, hidden_states, embedding_bias=None):
        return hidden_states @ lm_head.weight.T.to(hidden_states.dtype)


class World:
    """A language model that is asked step by step, as vLLM's scheduler would."""

    def __init__(self, layer=None, **changes) -> None:
        weight = torch.arange(12.0).reshape(6, 2).bfloat16()  # the sixth row is padding
        self.layer = layer or SimpleNamespace(weight=weight, tp_size=1)
        self.runner = SimpleNamespace(
            model=SimpleNamespace(logits_processor=Processor(**changes)),
            input_batch=SimpleNamespace(req_ids=[]),
            discard_request_mask=SimpleNamespace(np=np.zeros(8, dtype=bool)),
            speculative_config=None,
        )
        worker = SimpleNamespace(model_runner=self.runner)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))

    def step(self, rows: dict[str, float], discarded: tuple[str, ...] = ()) -> None:
        """One forward pass: a state [x, x] for every request of the batch."""
        self.runner.input_batch.req_ids = list(rows)
        self.runner.discard_request_mask.np[: len(rows)] = [r in discarded for r in rows]
        states = torch.tensor([[x, x] for x in rows.values()], dtype=torch.bfloat16)
        self.runner.model.logits_processor(self.layer, states)


def test_states_come_back_by_request_without_what_was_thrown_away():
    world = World()
    with state_tap(world.llm) as tap:
        world.step({"7-aa": 10, "8-b-c": 20})
        world.step({"8-b-c": 21, "9-dd": -1, "7-aa": 11}, discarded=("9-dd",))  # half a prompt
        world.step({"9-dd": 30})
        world.step({"7-aa": 12, "9-dd": 31})  # request 7 had stopped: 12 is undone
    world.step({"7-aa": 99})
    states = tap.states(["7", "8-b", "9"], [2, 2, 2])
    assert states[:, 0].tolist() == [10, 11, 20, 21, 30, 31]
    assert states.dtype == torch.bfloat16
    assert tap.head.weight.tolist() == world.layer.weight[:5].tolist()
    assert tap.head.round_to == torch.bfloat16
    with pytest.raises(EngineError, match="request 1 has 2 draws for 3 tokens"):
        tap.states(["7", "8-b", "9"], [2, 3, 2])


def test_scale_cap_and_a_float32_head_are_recorded():
    world = World(scale=0.25, head_dtype=torch.float32)
    with state_tap(world.llm) as tap:
        world.step({"0-a": 1})
    assert (tap.head.scale, tap.head.soft_cap, tap.head.round_to) == (0.25, None, None)
    world = World(soft_cap=30.0)
    with state_tap(world.llm) as tap:
        world.runner.input_batch.req_ids = ["0-a"]
        named = {"hidden_states": torch.ones(1, 2), "embedding_bias": torch.arange(6.0)}
        world.runner.model.logits_processor(world.layer, **named)
    assert (tap.head.scale, tap.head.soft_cap) == (1.0, 30.0)
    assert tap.head.bias.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"soft_cap": 2.0, "scale": 0.5}, "scaled after they are capped"),
        ({"logits_as_input": True}, "is quantized"),
        ({"layer": SimpleNamespace(weight=torch.ones(6, 2, dtype=torch.int8), tp_size=1)}, "is quantized"),
        ({"layer": SimpleNamespace(weight=torch.ones(6, 2), tp_size=2)}, "several processes"),
    ],
    ids=["order", "no head", "int8", "parallel"],
)
def test_heads_that_cannot_be_recorded_are_refused_by_name(changes, words):
    world = World(**changes)
    with state_tap(world.llm), pytest.raises(EngineError, match=f"{words}.*transformers engine"):
        world.step({"0-a": 1})


def test_a_runner_without_what_the_tap_reads_is_refused_by_name():
    world = World()
    del world.runner.discard_request_mask
    with pytest.raises(EngineError, match=r"has no discard_request_mask.np"), state_tap(world.llm):
        pass
    elsewhere = SimpleNamespace(llm_engine=SimpleNamespace())
    with pytest.raises(EngineError, match="runs in another process"), state_tap(elsewhere):
        pass
    world = World()
    world.runner.speculative_config = object()
    with pytest.raises(EngineError, match="speculative"), state_tap(world.llm):
        pass
    world = World()
    world.runner.input_batch.req_ids = ["0-a", "1-b"]
    with state_tap(world.llm), pytest.raises(EngineError, match="1 states for 2 requests"):
        world.runner.model.logits_processor(world.layer, torch.zeros(1, 2).bfloat16())
