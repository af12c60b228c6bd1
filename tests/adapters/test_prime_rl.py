"""prime-rl's custom loss, against the contract of prime-rl 0.8.0 (559b447) as `compute_loss` calls it.

The stand-in below is written from that contract: one call per sequence, results added, one division
by the number of loss tokens of the step, metrics stacked if scalar and joined if per token. The same
adapter was run once against the real module of that commit; see docs/integrations/prime-rl.md.
"""

from __future__ import annotations

import inspect
import json
import logging
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from offdrift.adapters.contrib import prime_rl
from offdrift.errors import BadValueError, EvidenceError, FrameworkError, LivenessError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS, override
from tests.adapters import loss_laws as laws
from tests.adapters.hooked import Batch, batch, code, install, optimizer_step, process

__all__ = ["process"]


@dataclass
class LossInputs:
    """One sequence, `[seq]` each."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    """A scalar, and metrics: scalars or one value per token."""

    loss: Tensor
    metrics: dict[str, Tensor]


@pytest.fixture(autouse=True)
def prime(monkeypatch: pytest.MonkeyPatch, process: None) -> Iterator[None]:
    names = {"LossInputs": LossInputs, "LossOutputs": LossOutputs}
    install(monkeypatch, "0.8.0", prime_rl__trainer__rl__loss=names)
    prime_rl._hook.cache_clear()
    yield
    prime_rl._hook.cache_clear()


def step(
    given: Batch, *, weights: Tensor | None = None, ref: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """One training step as prime-rl takes it: loss, gradient to the log-probs, metrics."""
    kwargs = {"method": "token_tis", "on_idle": "warn", **kwargs}
    current = given.current.clone().requires_grad_()
    total, metrics = current[0].sum() * 0.0, {}
    for i in range(len(current)):
        mask = given.mask[i]
        if weights is not None:
            mask = mask & (weights[i] != 0)
            if not bool(mask.any()):
                continue
        inputs = LossInputs(
            current[i],
            given.rollout[i],
            None if ref is None else ref[i],
            given.advantages[i],
            mask,
            None if weights is None else weights[i],
        )
        out = prime_rl.loss(inputs, **kwargs)
        assert type(out) is LossOutputs
        assert out.loss.shape == ()
        total = total + out.loss
        for name, value in out.metrics.items():
            metrics.setdefault(name, []).append(value)
    tokens = given.mask if weights is None else given.mask & (weights != 0)
    loss = total / max(int(tokens.sum()), 1)
    loss.backward()
    assert current.grad is not None
    joined = {k: (torch.stack if v[0].dim() == 0 else torch.cat)(v) for k, v in metrics.items()}
    return loss.detach(), current.grad, joined


def ours(given: Batch, name: str, *, old: Tensor | None = None, settings: Any = None) -> Any:
    """The whole step at once by the library: token mean, gradient to the log-probs."""
    row = override(METHODS[name], settings or {})
    current = given.current.clone().requires_grad_()
    lp = LogProbs.pack(given.rollout, current, old, mask=given.mask)
    result = policy_loss(lp, replace(row, aggregate="token_mean"), lp.like_caller(given.advantages))
    result.loss.backward()
    return result, current.grad


# -- parity with prime-rl's own losses --------------------------------------------------------------


def by_hand(given: Batch, *, drop: Any, coefficient: float) -> tuple[Tensor, Tensor]:
    """-A r over kept tokens plus coefficient (log r)^2 over all of them, over the number of tokens."""
    current = given.current.clone().requires_grad_()
    ratio, n = current - given.rollout, given.mask.sum()
    moved = current.exp() - given.rollout.exp()
    keep = given.mask & ~drop(moved.detach(), given.advantages)
    loss = (coefficient * ratio.square()[given.mask].sum() - (given.advantages * ratio.exp())[keep].sum()) / n
    loss.backward()
    assert current.grad is not None
    return loss.detach(), current.grad


@pytest.mark.parametrize(
    ("name", "drop"),
    [("prime_rl", lambda d, a: torch.where(a > 0, d > 0.2, d < -0.2)), ("prime_rl_ipo", lambda d, a: d.abs() > 0.1)],
)
def test_prime_rls_own_losses_are_rows_of_the_table(name: str, drop: Any) -> None:
    given = batch(spread=0.5)
    loss, grad, metrics = step(given, method=name)
    expected, expected_grad = by_hand(given, drop=drop, coefficient=1e-3)
    assert 0 < metrics["offdrift/rejected"].sum() < given.mask.sum()
    assert grad.numel() == 66
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)


# -- every method is served or refused ---------------------------------------------------------------


@pytest.mark.parametrize("old", ["absent", "current"])
def test_every_method_is_the_librarys_or_refused_by_name(old: str) -> None:
    given, served, refused = batch(4), 0, 0
    ref = given.old if old == "current" else None
    for name, row in METHODS.items():
        lag = any(getattr(g, "statistic", "") == "version_lag" for g in row.correction.gates)
        old_needed = row.needs_old and old == "absent"
        wanted = old_needed or row.needs_divergences or row.needs or lag
        ahead = row.looks_ahead or row.lr_scale
        if wanted or ahead:
            with pytest.raises(EvidenceError if wanted else MethodError, match=r"prime-rl (hands|calls)"):
                step(given, method=name, old=old)
            refused += 1
        elif row.penalty is None:
            loss, grad, _ = step(given, method=name, old=old, ref=ref)
            whole, expected = ours(given, name, old=given.current if old == "current" else None)
            torch.testing.assert_close(loss, whole.loss.detach(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)
            served += 1
    penalized = sum(
        r.penalty is not None and not r.looks_ahead and (old == "current" or not r.needs_old) for r in METHODS.values()
    )
    assert served + refused + penalized == len(METHODS)
    assert served >= (34 if old == "absent" else 75)


def test_the_way_out_is_named() -> None:
    with pytest.raises(EvidenceError, match=r"logp_old.*old=\"current\""):
        step(batch(), method="icepop")


def test_current_stands_for_old() -> None:
    """IcePop in its first update: weight the mismatch ratio in [0.5, 5], objective -A with ratio 1."""
    given = batch(spread=0.8)
    _, grad, _ = step(given, method="icepop", old="current")
    w = (given.current - given.rollout).exp()
    keep = given.mask & (w >= 0.5) & (w <= 5)
    assert 0 < int(keep.sum()) < int(given.mask.sum())
    expected = (-given.advantages * w).where(keep, 0.0) / given.mask.sum()
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)


def test_the_denominator_is_prime_rls_whatever_the_method_was_published_with() -> None:
    """GRPO, a mean over each response, at its first update: the gradient of -A over all tokens."""
    given = batch()
    assert METHODS["grpo"].aggregate == "seq_mean_token_mean"
    _, grad, _ = step(given, method="grpo", old="current")
    expected = (-given.advantages / given.mask.sum()).where(given.mask, 0.0)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-8)


def test_a_penalty_reads_the_reference() -> None:
    given = batch()
    _, with_ref, _ = step(given, method="deepseek_v32", old="current", ref=given.old)
    _, same, _ = step(given, method="deepseek_v32", old="current", ref=given.current)
    assert int((with_ref != same).sum()) == int(given.mask.sum())


# -- laws ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), 1e9])
@pytest.mark.parametrize("name", ["token_tis", "seq_mis", "prime_rl", "trm_max_k2"])
def test_padding_and_masked_values_are_irrelevant(name: str, poison: float) -> None:
    given = batch()
    loss, grad, metrics = step(given, method=name)

    def wide(x: Tensor) -> Tensor:
        tail = torch.full((len(x), 4), poison)
        return torch.cat([x.where(given.mask, poison), tail], 1)

    padded = Batch(
        wide(given.rollout), wide(given.old), wide(given.current), wide(given.advantages),
        torch.nn.functional.pad(given.mask, (0, 4)),
    )  # fmt: skip
    loss_2, grad_2, metrics_2 = step(padded, method=name)
    # prime-rl's own anchor multiplies the first sequence by 0, and so makes NaN of NaN.
    clean = grad_2.nan_to_num(0.0)[:, :11]
    assert torch.equal(clean[given.mask], grad[given.mask])
    assert all(torch.equal(metrics_2[k], metrics[k]) for k in metrics)
    assert torch.isnan(loss_2) or torch.equal(loss, loss_2)


def test_our_part_of_the_loss_never_sees_masked_values() -> None:
    given = batch()
    current = given.current.where(given.mask, float("nan")).requires_grad_()
    inputs = LossInputs(
        current[0], given.rollout[0].where(given.mask[0], float("nan")), None,
        given.advantages[0], given.mask[0],
    )  # fmt: skip
    loss = prime_rl.loss(inputs, method="token_tis", on_idle="warn").loss
    loss.backward()
    assert current.grad is not None
    assert torch.isfinite(loss)
    assert torch.isfinite(current.grad).all()


def test_permuting_sequences_permutes_gradients() -> None:
    given, order = batch(), torch.tensor([3, 1, 5, 0, 4, 2])
    loss, grad, _ = step(given, method="seq_tis")
    moved = Batch(*(x[order] for x in vars(given).values()))
    loss_2, grad_2, _ = step(moved, method="seq_tis")
    torch.testing.assert_close(loss, loss_2)
    assert torch.equal(grad[order], grad_2)


def test_all_masked_is_zero_with_a_graph_and_metrics_of_no_token() -> None:
    given = batch()
    current = torch.full((11,), float("nan"), requires_grad=True)
    nothing = torch.zeros(11, dtype=torch.bool)
    out = prime_rl.loss(LossInputs(current, given.rollout[0], None, given.advantages[0], nothing), method="token_tis")
    out.loss.backward()
    assert current.grad is not None
    assert out.loss.item() == 0
    assert torch.equal(current.grad, torch.zeros(11))
    assert {k: tuple(v.shape) for k, v in out.metrics.items()} == {
        "offdrift/full/k3": (0,),
        "offdrift/weight": (0,),
        "offdrift/rejected": (0,),
        "offdrift/limited": (0,),
    }


def test_all_rejected_is_zero_and_reported() -> None:
    given = batch()
    loss, grad, metrics = step(given, method="seq_mis", settings={"weight.cap": 1e-6})
    assert loss == 0
    assert torch.equal(grad, torch.zeros_like(grad))
    assert (metrics["offdrift/weight"] == 0).sum() == given.mask.sum()
    loss, grad, metrics = step(given, method="trm_max_k2", settings={"gate.high": 1e-12})
    assert loss == 0
    assert torch.equal(grad, torch.zeros_like(grad))
    assert metrics["offdrift/rejected"].sum() == given.mask.sum()


def test_nan_on_a_loss_token_is_refused_by_name() -> None:
    given = batch()
    given.rollout[0, given.mask[0].nonzero()[0]] = float("nan")
    with pytest.raises(BadValueError, match="logp_rollout of sequence 0 is nan"):
        step(given)


def test_bad_advantages_are_named() -> None:
    laws.check_bad_advantages(lambda given, *_: step(given)[:2])  # type: ignore[arg-type, return-value]


def test_unscored_tokens() -> None:
    given = batch()
    _, whole, _ = step(given)
    for value in laws.UNSCORED:
        with_them, without = laws.unscored(given, value)
        loss, grad, metrics = step(with_them)
        torch.testing.assert_close(grad, whole.where(without.mask, 0.0))
        assert int((grad != 0).sum()) > 5
        assert bool(torch.isfinite(loss))
        assert all(bool(torch.isfinite(x).all()) for x in metrics.values())


# -- weights ------------------------------------------------------------------------------------------


def test_loss_weights_multiply_token_losses() -> None:
    given = batch()
    weights = torch.rand(6, 11, generator=torch.Generator().manual_seed(3)) + 0.5
    weights[1] = 0
    _, grad, _ = step(given, method="dapo", old="current", weights=weights)
    rest = replace(given, mask=given.mask & (weights != 0))
    _, plain, _ = step(rest, method="dapo", old="current")
    assert int(rest.mask.sum()) < int(given.mask.sum())
    torch.testing.assert_close(grad, plain * weights, rtol=1e-5, atol=1e-8)


def test_a_loss_that_is_not_proportional_takes_weights_of_1_alone() -> None:
    given, weights = batch(), torch.ones(6, 11)
    loss, grad, _ = step(given, method="prime_rl", weights=weights)
    plain, plain_grad, _ = step(given, method="prime_rl")
    assert torch.equal(loss, plain)
    assert torch.equal(grad, plain_grad)
    weights[0] = 0.5
    with pytest.raises(MethodError, match=r"rl_weights.*not proportional"):
        step(given, method="prime_rl", weights=weights)


# -- metrics, liveness, records -----------------------------------------------------------------------


def test_metrics_are_those_of_every_token() -> None:
    given = batch()
    _, _, metrics = step(given, method="token_tis")
    drift = (given.current - given.rollout)[given.mask]
    assert len(drift) == len(metrics["offdrift/full/k3"]) == int(given.mask.sum())
    torch.testing.assert_close(metrics["offdrift/full/k3"], drift.expm1() - drift)
    torch.testing.assert_close(metrics["offdrift/weight"], drift.exp().clamp(max=2))
    assert torch.equal(metrics["offdrift/limited"], (drift.exp() > 2).float())


def test_an_optimizer_step_closes_the_step(caplog: pytest.LogCaptureFixture) -> None:
    given = batch()
    step(given, method="token_tis", on_idle=None)
    hook = prime_rl._hook("token_tis", "null", "absent", None, None)
    with caplog.at_level(logging.INFO, "offdrift.prime-rl"):
        optimizer_step()
    assert hook.step == 1
    drift = (given.current - given.rollout)[given.mask]
    assert hook.metrics["offdrift/batch/tokens"] == int(given.mask.sum())
    assert hook.metrics["offdrift/full/k3"] == pytest.approx(float((drift.expm1() - drift).mean()), rel=1e-5)
    assert any("weight" in r.message and "acted" in r.message for r in caplog.records)
    optimizer_step()  # an optimizer that had nothing to do with it
    assert hook.step == 1
    step(given, method="token_tis", on_idle=None)
    optimizer_step()
    assert hook.step == 2


def test_copied_log_probs_end_the_run() -> None:
    given = batch()
    copied = replace(given, rollout=given.current.clone())
    step(copied, method="token_tis", on_idle="error")
    with pytest.raises(LivenessError, match="cannot act"):
        optimizer_step()
    step(copied, method="token_tis", on_idle="warn")
    optimizer_step()


def test_the_record_is_what_was_trained_on(tmp_path: Path) -> None:
    given = batch()
    step(given, method="token_tis", record=str(tmp_path))
    optimizer_step()
    hook = prime_rl._hook("token_tis", "null", "absent", str(tmp_path), "warn")
    hook.adapter.close()
    (file,) = tmp_path.glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert [r["step"] for r in rows] == [1] * 5
    assert sum(len(r["logp_rollout"]) for r in rows) == int(given.mask.sum())
    for i, row in enumerate(rows):
        kept = given.mask[i]
        torch.testing.assert_close(torch.tensor(row["logp_rollout"]), given.rollout[i][kept])
        torch.testing.assert_close(torch.tensor(row["logp"]), given.current[i][kept])
        torch.testing.assert_close(torch.tensor(row["advantages"]), given.advantages[i][kept])
        places = kept.nonzero().squeeze(1)
        assert row["position"] == (places - places[0]).tolist()
        assert row["response_length"] == int(places[-1] - places[0]) + 1


# -- settings and versions ----------------------------------------------------------------------------


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = batch()
    expected, _, _ = step(given, method="token_tis", settings={"weight.cap": 1.1})
    monkeypatch.setenv("OFFDRIFT_METHOD", "token_tis")
    monkeypatch.setenv("OFFDRIFT_SETTINGS", "weight.cap=1.1")
    loss, _, metrics = step(given, method=None)
    assert torch.equal(loss, expected)
    assert metrics["offdrift/weight"].max() == pytest.approx(1.1)
    monkeypatch.delenv("OFFDRIFT_METHOD")
    prime_rl._hook.cache_clear()
    with pytest.raises(MethodError, match="OFFDRIFT_METHOD"):
        step(given, method=None)


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.1.0", prime_rl__trainer__rl__loss={})
    with pytest.raises(FrameworkError, match=r"prime-rl 0\.1\.0 is older"):
        step(batch())


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(MethodError, match="old='yes'"):
        step(batch(), old="yes")


# -- the page -----------------------------------------------------------------------------------------


def test_configs_of_the_page_are_read_and_run() -> None:
    blocks = code("prime-rl.md", "toml")
    assert len(blocks) >= 2
    for text in blocks:
        table = tomllib.loads(text)
        loss = table.get("trainer", table)["loss"]
        assert loss["type"] == "custom"
        assert set(loss) <= {"type", "import_path", "kwargs"}
        module, _, name = loss["import_path"].rpartition(".")
        function = getattr(import_module(module), name)
        assert function is prime_rl.loss
        assert set(loss["kwargs"]) <= set(inspect.signature(function).parameters)
        json.dumps(loss["kwargs"])
        step(batch(), **{k: v for k, v in loss["kwargs"].items() if k != "record"})
