"""Methods for tinker's `forward_backward_custom`, differentiated by tinker's own client where it is installed."""

import importlib.util
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters.contrib.tinker import loss_of
from offdrift.errors import EvidenceError, MethodError, ShapeError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS
from tests.adapters.hooked import Batch, batch, code, unscored

LENGTHS = [11, 7, 9, 4, 11, 5]


@dataclass
class TensorData:
    x: Tensor

    def to_torch(self) -> Tensor:
        return self.x


def data_of(of: Batch) -> list[Any]:
    """Datums as tinker-cookbook builds them: lists of different lengths, floats for the mask."""
    fields = {"logprobs": of.rollout, "advantages": of.advantages, "mask": of.mask.float()}
    data = []
    for i, n in enumerate(LENGTHS):
        inputs = {name: TensorData(x[i, :n]) for name, x in fields.items()}
        data.append(SimpleNamespace(loss_fn_inputs={"target_tokens": TensorData(torch.arange(n)), **inputs}))
    return data


def rows(x: Tensor) -> list[Tensor]:
    return [row[:n].clone() for row, n in zip(x, LENGTHS, strict=True)]


def by_hand(data: list[Any], of: Batch, loss: Any) -> tuple[float, list[Tensor], dict[str, float]]:
    """What tinker's client does with the loss: its value, minus the gradient as weights, and the metrics."""
    leaves = [row.requires_grad_() for row in rows(of.current)]
    value, metrics = loss(data, leaves)
    value.backward()
    assert all(leaf.grad is not None for leaf in leaves)
    return float(value.detach()), [-leaf.grad for leaf in leaves], metrics  # type: ignore[operator]


def through_tinker(data: list[Any], of: Batch, loss: Any) -> tuple[float, list[Tensor], dict[str, float]]:
    """The same by tinker's own code, on its own types."""
    import tinker
    from tinker.lib.public_interfaces.training_client import TrainingClient

    def sent(inputs: dict[str, TensorData]) -> dict[str, Any]:
        return {name: tinker.TensorData.from_torch(x.x) for name, x in inputs.items()}

    empty = tinker.ModelInput.from_ints([1, 2])
    data = [tinker.Datum(model_input=empty, loss_fn_inputs=sent(datum.loss_fn_inputs)) for datum in data]
    outputs = [{"logprobs": tinker.TensorData.from_torch(row)} for row in rows(of.current)]
    result = TrainingClient._compute_custom_loss(data, loss, SimpleNamespace(loss_fn_outputs=outputs))  # type: ignore
    weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in result.data]
    return result.loss_sum, weights, result.metrics


RUNS = {"by hand": by_hand}
if importlib.util.find_spec("tinker") is not None:
    RUNS["tinker"] = through_tinker


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["token_tis", "ppo_clip", "cispo", "ipo"])
def test_loss_and_gradient_are_the_librarys(run: str, name: str) -> None:
    of, row = batch(spread=0.6), METHODS[name]
    short = Batch(of.rollout, of.old, of.current, of.advantages, of.mask.clone())
    for i, n in enumerate(LENGTHS):
        short.mask[i, n:] = False
    old = "current" if row.needs_old else "absent"
    value, weights, metrics = RUNS[run](data_of(of), of, loss_of(name, old=old))
    current = of.current.clone().requires_grad_()
    anchor = current.detach() if old == "current" else None
    packed = LogProbs.pack(short.rollout, current, anchor, mask=short.mask)
    own = policy_loss(packed, row, packed.like_caller(of.advantages)).loss
    own.backward()
    assert value == pytest.approx(float(own.detach()), rel=1e-5)
    assert current.grad is not None
    padded = torch.zeros_like(of.current)
    for i, x in enumerate(weights):
        padded[i, : len(x)] = -x
    torch.testing.assert_close(padded, current.grad, rtol=1e-5, atol=1e-7)
    assert int((padded != 0).sum()) > 5
    assert metrics["offdrift/full/k3"] > 0


def test_a_method_of_a_whole_step_is_served_and_what_is_masked_or_unscored_has_no_gradient() -> None:
    of = batch(spread=0.5)
    assert METHODS["ac_mis_po"].needs_whole_step or METHODS["bapo"].needs_whole_step
    whole = next(n for n, m in METHODS.items() if m.needs_whole_step and not m.needs_old and not m.needs)
    by_hand(data_of(of), of, loss_of(whole))
    absent, _ = unscored(of, -9999.0)
    _, weights, _ = by_hand(data_of(absent), absent, loss_of("token_tis"))
    for i, x in enumerate(weights):
        gone = ~of.mask[i, : len(x)] | (absent.rollout[i, : len(x)] < -1000)
        assert not bool(x[gone].any())
    nothing = Batch(of.rollout, of.old, of.current, of.advantages, torch.zeros_like(of.mask))
    value, weights, metrics = by_hand(data_of(nothing), nothing, loss_of("token_tis"))
    assert (value, metrics) == (0.0, {})
    assert not any(bool(x.any()) for x in weights)


def test_what_tinker_does_not_hand_over_is_named() -> None:
    with pytest.raises(EvidenceError, match=r'logp_old.*old="current"'):
        loss_of("icepop")
    with pytest.raises(MethodError, match="adapts from step to step"):
        loss_of(next(n for n, m in METHODS.items() if adapts(n, m)), old="current")
    with pytest.raises(MethodError, match="give horizon="):
        loss_of("dppo_tv")
    of = batch()
    data = data_of(of)
    del data[2].loss_fn_inputs["mask"]
    with pytest.raises(EvidenceError, match="datum 2 holds target_tokens, logprobs, advantages, but no mask"):
        by_hand(data, of, loss_of("token_tis"))
    data = data_of(of)
    data[1].loss_fn_inputs["advantages"] = TensorData(torch.ones(3))
    with pytest.raises(ShapeError, match="advantages of the data have lengths"):
        by_hand(data, of, loss_of("token_tis"))
    zeros = Batch(torch.zeros_like(of.rollout), of.old, of.current, of.advantages, of.mask)
    with pytest.raises(EvidenceError, match="placeholder; sample with tinker"):
        by_hand(data_of(zeros), zeros, loss_of("token_tis"))


def adapts(name: str, method: Any) -> bool:
    """Whether a method keeps something from step to step, and needs nothing else that tinker lacks."""
    if not any(hasattr(part, "next") for part in method.parts):
        return False
    try:
        loss_of(name, old="current")
    except EvidenceError:
        return False
    except MethodError as e:
        return "adapts" in str(e)
    return False


def test_the_snippet_of_the_page_is_a_loss() -> None:
    (snippet,) = code("tinker.md", "python")
    names: dict[str, Any] = {}
    exec(compile(snippet, "tinker.md", "exec"), names)
    assert by_hand(data_of(batch()), batch(), names["loss"])[2]["offdrift/full/k3"] > 0


def test_what_could_not_be_proved_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    loss, of = loss_of("ipo"), batch()
    with caplog.at_level("WARNING", "offdrift.tinker"):
        for _ in range(2):
            by_hand(data_of(of), of, loss)
    assert caplog.text.count("could not prove itself against it") == 1
    assert "tinker's server" in caplog.text
