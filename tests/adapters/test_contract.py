"""The contract of every contributed adapter that returns a loss, on stand-ins for the frameworks.

The loss and its gradient are the library's, with the step's denominators. Masked positions, order and
micro-batches do not matter; what cannot be trained on contributes nothing; what cannot be served is
refused by name; steps end with the optimizer's, with metrics, liveness and records. What only one
framework has is in the test file of that framework, beside its stand-in.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from offdrift.adapters.hooks import LossHook
from offdrift.errors import BadValueError, EvidenceError, FrameworkError, LivenessError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS, Method, override
from tests.adapters import test_areal as areal
from tests.adapters import test_nemo_rl as nemo_rl
from tests.adapters import test_openrlhf as openrlhf
from tests.adapters import test_prime_rl as prime_rl
from tests.adapters import test_roll as roll
from tests.adapters import test_skyrl as skyrl
from tests.adapters import test_slime as slime
from tests.adapters import test_trinity as trinity
from tests.adapters.hooked import (
    HORIZON,
    SOME,
    UNSCORED,
    Batch,
    Correcting,
    Framework,
    Outcome,
    batch,
    counts,
    filled,
    optimizer_step,
    rows,
    unscored,
)
from tests.records.samples import read_all

FRAMEWORKS: list[Framework] = [
    *(prime_rl.FRAMEWORK, skyrl.FRAMEWORK, slime.FRAMEWORK, nemo_rl.FRAMEWORK, areal.FRAMEWORK),
    trinity.FRAMEWORK,
    *roll.FRAMEWORKS,
    *openrlhf.FRAMEWORKS,
]


@pytest.fixture(params=FRAMEWORKS, ids=lambda f: f.name)
def framework(request: Any, monkeypatch: pytest.MonkeyPatch, process: list[LossHook]) -> Iterator[Framework]:
    with request.param.stand_in(monkeypatch):
        yield request.param


def row_of(framework: Framework, name: str, settings: Mapping[str, Any] = {}) -> Method:
    """The row as the framework aggregates it."""
    row = override(METHODS[name], settings)
    return row if framework.own_aggregate else replace(row, aggregate="token_mean")


def expected(method: Method, of: Batch, tokens: float, sequences: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of the library itself, with the step's denominators."""
    current = of.current.clone().requires_grad_()
    logprobs = LogProbs.pack(of.rollout, current, of.old, mask=of.mask)
    count = {"token_mean": tokens, "fixed": sequences * HORIZON}.get(method.aggregate, sequences)
    loss = policy_loss(logprobs, method, logprobs.like_caller(of.advantages), normalizer=count).loss
    (gradient,) = torch.autograd.grad(loss, current)
    return loss.detach(), gradient


def same(actual: Any, wanted: Any) -> None:
    torch.testing.assert_close(actual[0].double(), wanted[0].double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual[1], wanted[1], rtol=1e-4, atol=1e-6)


def learns(result: Any) -> None:
    assert int((result[1] != 0).sum()) > 5


def a_method(framework: Framework, name: str) -> str:
    """The method, or one of its kind that reads the full ratio where there is no old policy."""
    return name if framework.has_old else {"icepop": "token_mis", "geo_mask": "seq_tis", "grpo": "token_tis"}[name]


@pytest.fixture(params=["icepop", "geo_mask", "grpo"])
def run(request: Any, framework: Framework) -> partial[Outcome]:
    """Runs of a method whose parts act by token, by sequence, or not at all."""
    name = a_method(framework, request.param)
    return partial(framework.run, name, settings=SOME.get(name, {}))


class Served(Exception):
    """The outcome of a method that was not refused."""


@pytest.mark.slow
def test_every_method_is_the_librarys_or_refused_by_name(framework: Framework) -> None:
    """Also those whose aggregate is another: the framework's denominators are in the loss."""
    of, served = batch(3, 8, spread=0.01), 0
    refusal = "hands its hook no|acts on a whole step|not proportional|give horizon="
    for name, row in METHODS.items():
        with pytest.raises((EvidenceError, MethodError, Served)) as outcome:
            raise Served(framework.run(name, of, *counts(of)))
        if not isinstance(outcome.value, Served):
            assert re.search(refusal, str(outcome.value)), name
            continue
        served += 1
        reads_lag = any("lag" in part.formula for part in row.correction.gates) or "version_lag" in row.needs
        if row.penalty is None and not reads_lag:
            same(outcome.value.args[0], expected(row_of(framework, name), of, *counts(of)))
    assert served == framework.served


@pytest.mark.parametrize("name", ["dapo", "grpo", "seq_tis", "gspo", "trm_max_k2"])
def test_loss_and_gradient_are_the_librarys(framework: Framework, name: str) -> None:
    of = batch(spread=3e-4)  # within what the strictest gates let through
    if METHODS[name].needs_old and not framework.has_old:
        pytest.skip("it hands over no log-probs of an old policy")
    got = framework.run(name, of, *counts(of))
    learns(got)
    assert float(got.loss) != 0
    same(got, expected(row_of(framework, name), of, *counts(of)))


def test_settings_change_the_method_and_may_stand_in_the_environment(
    framework: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, settings = batch(), {"weight.cap": 1.05}
    changed = framework.run("token_tis", of, *counts(of), settings=settings)
    same(changed, expected(row_of(framework, "token_tis", settings), of, *counts(of)))
    assert changed.loss != framework.run("token_tis", of, *counts(of)).loss
    if framework.by_environment:
        with pytest.raises(MethodError, match="OFFDRIFT_METHOD"):
            framework.run(None, of, *counts(of))
        monkeypatch.setenv("OFFDRIFT_METHOD", "token_tis")
        monkeypatch.setenv("OFFDRIFT_SETTINGS", "weight.cap=1.05")
        assert framework.run(None, of, *counts(of), settings=None).loss == changed.loss


def test_masked_positions_do_not_matter(run: partial[Outcome]) -> None:
    of = batch()
    result = run(of, *counts(of))
    learns(result)
    assert int((~of.mask).sum()) > 15
    assert not bool(result.gradient[~of.mask].any())
    for value in (math.nan, 1e9, -math.inf):
        again = run(filled(of, value), *counts(of))
        assert torch.equal(again.loss, result.loss)
        assert torch.equal(again.gradient, result.gradient)


def test_order_and_micro_batches_do_not_matter(run: partial[Outcome]) -> None:
    """Parts of a step add up, one of them without a trainable token; permuting rows permutes gradients."""
    of, order = batch(), [3, 5, 0, 4, 1, 2]
    whole = run(of, *counts(of))
    learns(whole)
    moved = run(rows(of, order), *counts(of))
    same(moved, (whole.loss, whole.gradient[order]))
    cuts = [[0, 3], [1], [2, 4], [5]]
    parts = [run(rows(of, i), *counts(of)) for i in cuts]
    gradient = torch.zeros_like(whole.gradient)
    for i, part in zip(cuts, parts, strict=True):
        gradient[i] = part.gradient
    same((torch.stack([p.loss.double() for p in parts]).sum(), gradient), whole)


def test_nothing_to_train_on_is_zero_with_a_graph(run: partial[Outcome]) -> None:
    of = batch()
    result = run(filled(replace(of, mask=torch.zeros_like(of.mask)), math.nan), 7.0, 3.0)
    assert float(result.loss) == 0
    assert not bool(result.gradient.any())


def test_everything_rejected_is_zero_and_finite(framework: Framework) -> None:
    of = batch()
    result = framework.run("trm_max_k2", of, *counts(of), settings={"gate.high": 1e-12})
    assert float(result.loss) == 0
    assert not bool(result.gradient.any())


def test_a_token_that_no_engine_scored_trains_nothing(framework: Framework) -> None:
    """It decides nothing, and stays in the denominator."""
    of = batch()
    for name in ("icepop", "geo_mask", "grpo"):
        name = a_method(framework, name)
        run = partial(framework.run, name, settings={**SOME.get(name, {}), "aggregate": "token_mean"})
        for value in UNSCORED:
            with_them, without = unscored(of, value)
            result = run(with_them, *counts(of))
            learns(result)
            same(result, run(without, *counts(of)))
            assert all(bool(torch.as_tensor(x).isfinite().all()) for x in result.metrics.values())


def test_numbers_that_no_policy_produces_are_named(framework: Framework) -> None:
    of = batch()
    place = 0, int(of.mask[0].nonzero()[1])
    for field, name, values in (
        ("advantages", "advantages", (math.nan, math.inf, -math.inf)),
        ("rollout", "logp_rollout of sequence 0", (math.nan, 0.5)),
    ):
        for value in values:
            wrong = getattr(of, field).clone()
            wrong[place] = value
            with pytest.raises(BadValueError, match=name):
                framework.run("token_tis", replace(of, **{field: wrong}), *counts(of))


def test_an_optimizer_step_ends_the_step(
    framework: Framework, process: list[LossHook], caplog: pytest.LogCaptureFixture
) -> None:
    of = batch()
    logger = f"offdrift.{framework.name.partition(' ')[0]}"
    with caplog.at_level("INFO", logger):
        for piece in ([0, 1, 2], [3, 4, 5]):
            framework.run("token_tis", rows(of, piece), *counts(of), on_idle="error")
        optimizer_step()
        (hook,) = process
        assert hook.step == 1
    drift = (of.current - of.rollout)[of.mask]
    assert hook.metrics["offdrift/batch/tokens"] == int(of.mask.sum())
    assert hook.metrics["offdrift/full/k3"] == pytest.approx(float((drift.expm1() - drift).mean()), rel=1e-5)
    assert any(r.name == logger and "weight" in r.message and "acted" in r.message for r in caplog.records)
    optimizer_step()  # an optimizer that had nothing to do with it
    assert hook.step == 1
    framework.run("token_tis", of, *counts(of), on_idle="error")
    optimizer_step()
    assert hook.step == 2


def test_copies_of_log_probs_end_the_run(framework: Framework) -> None:
    of = batch()
    copies = replace(of, rollout=of.current, old=of.current)
    framework.run("token_tis", copies, *counts(of), on_idle="error")
    with pytest.raises(LivenessError, match="cannot act"):
        optimizer_step()
    framework.run("token_tis", copies, *counts(of), on_idle="warn")
    optimizer_step()


def test_the_record_is_what_was_trained_on(framework: Framework, process: list[LossHook], tmp_path: Path) -> None:
    if not framework.records:
        pytest.skip("another hook records")
    of = batch()
    framework.run("token_tis", of, *counts(of), record=str(tmp_path))
    optimizer_step()
    process[-1].adapter.recorder.close()
    _, (record,), bad = read_all(tmp_path)
    assert not bad
    assert set(record.step.tolist()) == {1}
    fields = {"logp_rollout": of.rollout, "logp": of.current}
    for name, x in (fields | {"logp_old": of.old} if framework.has_old else fields).items():
        torch.testing.assert_close(getattr(record, name), x[of.mask])
    columns = torch.arange(of.mask.shape[1]).expand(of.mask.shape)
    first = [row.nonzero()[0].expand(int(row.sum())).squeeze() for row in of.mask if row.any()]
    assert torch.equal(record.position, columns[of.mask] - torch.cat([x.reshape(-1) for x in first]))
    lengths = [int(row.nonzero()[-1] - row.nonzero()[0]) + 1 for row in of.mask if row.any()]
    assert [n for n in record.response_lengths.tolist() if n] == lengths


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda f: f.name)
def test_an_old_version_is_refused(framework: Framework, monkeypatch: pytest.MonkeyPatch, process: Any) -> None:
    of = batch()
    older = rf"{framework.name.partition(' ')[0]} 0\.0\.1 is older"
    with framework.stand_in(monkeypatch, "0.0.1"), pytest.raises(FrameworkError, match=older):
        framework.run("token_tis", of, *counts(of))


CORRECTING: list[Correcting] = [slime.CORRECTING, areal.CORRECTING, roll.CORRECTING]


@pytest.fixture(params=CORRECTING, ids=lambda f: f.name)
def correcting(request: Any, monkeypatch: pytest.MonkeyPatch, process: list[LossHook]) -> Iterator[Correcting]:
    with request.param.stand_in(monkeypatch):
        yield request.param


def test_every_method_corrects_or_is_refused_by_name(correcting: Correcting) -> None:
    """Weights and gates on the mismatch of the engines are the library's."""
    of, served = batch(3, 8), 0
    for name, row in METHODS.items():
        parts = (*row.correction.gates, *row.correction.weights)
        alone = all(p.on == "mismatch" and getattr(p, "advantage", "any") == "any" for p in parts)
        if not (parts and alone and row.anchor is None) or row.needs_whole_step:
            reason = "nothing to do|no current ones|version_lag|acts on a whole step|hands its hook no"
            with pytest.raises((EvidenceError, MethodError), match=reason):
                correcting.correct(name, of)
            continue
        packed = LogProbs.pack(of.rollout, None, of.old, mask=of.mask)
        weight, mask = correcting.correct(name, of)
        wanted = row.correction(packed)
        torch.testing.assert_close(weight, packed.unpack(wanted.weight.where(wanted.keep, 0.0)))
        keep = of.mask if correcting.mask_is_kept and row.gate_scope == "policy" else packed.unpack(wanted.keep)
        assert torch.equal(mask != 0, keep)
        served += 1
    assert 25 <= served < len(METHODS)


def test_correction_by_hand(correcting: Correcting) -> None:
    """Ratios 1, 2; 8 (outside of [0.5, 5]), masked. A weight of 0 is no gate."""
    rollout = torch.full((2, 2), -3.0)
    old = rollout + torch.tensor([[0.0, math.log(2)], [math.log(8), math.nan]])
    mask = torch.tensor([[True, True], [True, False]])
    weight, left = correcting.correct("icepop", Batch(rollout, old, old, old, mask))
    assert weight.flatten().tolist() == pytest.approx([1.0, 2.0, 0.0, 0.0])
    assert torch.equal(left != 0, mask)


def test_whole_sequences_are_rejected_and_masked_positions_do_not_matter(correcting: Correcting) -> None:
    of = batch()
    mean = (of.old - of.rollout).where(of.mask, 0.0).sum(1) / of.mask.sum(1).clamp(min=1)
    keep = of.mask & ((mean.exp() >= 0.9) & (mean.exp() <= 1.1))[:, None]
    assert 0 < int(keep.sum()) < int(of.mask.sum())
    nothing = replace(of, mask=torch.zeros_like(of.mask))
    for one, kept in ((of, keep), (filled(of, math.nan), keep), (filled(of, 1e9), keep), (nothing, nothing.mask)):
        weight, left = correcting.correct("geo_mask", one, settings=SOME["geo_mask"])
        assert torch.equal(weight, kept.float())
        assert torch.equal(left != 0, one.mask if correcting.mask_is_kept else kept)


def test_a_token_that_no_engine_scored_is_not_corrected(correcting: Correcting) -> None:
    of = batch()
    for value in UNSCORED:
        with_them, without = unscored(of, value)
        weight, left = correcting.correct("icepop", with_them)
        assert torch.equal(weight, correcting.correct("icepop", without)[0])
        assert correcting.mask_is_kept or not bool((left != 0)[of.mask & ~without.mask].any())
        assert int((weight > 0).sum()) > 5


def test_a_correction_of_copies_ends_the_run(correcting: Correcting, process: list[LossHook]) -> None:
    of = batch()
    correcting.correct("icepop", of, on_idle="error")
    process[-1].end_step()
    assert process[-1].metrics["offdrift/batch/tokens"] == int(of.mask.sum())
    correcting.correct("geo_mask", replace(of, rollout=of.old), on_idle="error")
    with pytest.raises(LivenessError, match="cannot act"):
        process[-1].end_step()
