"""slime's and miles' function paths, against the contract of slime 0.3.1 (624b824) and miles 0.1.0.

The stand-in below is written from that contract: a PPO token loss, the TIS function on lists of
responses, one reducer over precomputed denominators, and context-parallel shares in the zigzag layout.
The same adapter was run once against slime's real modules of that commit over megatron-core, with one
process and with two that share each sequence; see docs/integrations/slime.md.
"""

from __future__ import annotations

import itertools
import logging
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from offdrift.adapters.contrib import slime
from offdrift.adapters.hooks import proportional
from offdrift.errors import BadValueError, EvidenceError, FrameworkError, LivenessError, MethodError
from offdrift.methods import METHODS
from tests.adapters import loss_laws as laws
from tests.adapters.hooked import Batch, batch, code, install, optimizer_step, process

__all__ = ["process"]

LENGTHS = [11, 7, 9, 4, 11, 5]
PROMPTS = [3, 5, 2, 6, 1, 4]


def options(**changed: Any) -> Any:
    """slime's arguments, as far as the hooks see them."""
    known = {
        "use_tis": True, "calculate_per_token_loss": False, "entropy_coef": 0.0, "use_kl_loss": False,
        "kl_loss_coef": 0.0, "context_parallel_size": 1, "n_samples_per_prompt": 2,
    }  # fmt: skip
    return SimpleNamespace(**(known | changed))


def listed(x: Tensor) -> list[Tensor]:
    return [row[:n] for row, n in zip(x, LENGTHS, strict=True)]


class Shares:
    """Context parallelism over `size` ranks, of which this process plays one after the other.

    Rank r holds chunks r and 2 size - 1 - r of each padded sequence, prompt included, and of those the
    log-probs of response tokens; a log-prob sits one place before its token.
    """

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.whole = size, 0, {}

    def places(self, total: int, response: int, rank: int) -> list[int]:
        chunk = -(-total // (2 * self.size))
        mine = [r * chunk + i for r in (rank, 2 * self.size - 1 - rank) for i in range(chunk)]
        return [i + 1 - (total - response) for i in mine if total - response <= i + 1 < total]

    def slice_log_prob_with_cp(self, x: Tensor, total: int, response: int) -> Tensor:
        assert len(x) == response
        return x[self.places(total, response, self.rank)]

    def all_gather_with_cp(self, x: Tensor, total: int, response: int) -> Tensor:
        whole = self.whole[tuple(x.tolist()), total]
        assert len(x) == len(self.places(total, response, self.rank))
        return whole.clone().requires_grad_()

    def share(self, xs: list[Tensor]) -> list[Tensor]:
        found = []
        for x, p in zip(xs, PROMPTS, strict=True):
            found.append(self.slice_log_prob_with_cp(x, p + len(x), len(x)))
            self.whole[tuple(found[-1].tolist()), p + len(x)] = x
        return found


def reducer(masks: list[Tensor], sums: list[Tensor], *, per_token: bool) -> Callable[[Tensor], Tensor]:
    """Sum over samples of masked sums, each over its denominator."""

    def reduce(x: Tensor) -> Tensor:
        pieces = x.split([len(m) for m in masks])
        over = [torch.ones(()) if per_token else n.clamp(min=1) for n in sums]
        return torch.stack([(p * m).sum() / n for p, m, n in zip(pieces, masks, over, strict=True)]).sum()

    return reduce


def model(_: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """`get_log_probs_and_entropy`, where the "logits" are the log-probs themselves."""
    assert kwargs["with_entropy"]
    flat = _[0, :, 0].split(kwargs["response_lengths"])
    return torch.empty(0), {"log_probs": list(flat), "entropy": [-x.detach() for x in flat]}


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch, process: None) -> Iterator[Shares]:
    shares = Shares(1)
    install(
        monkeypatch,
        "0.3.1",
        slime__backends__megatron_utils__cp_utils={
            "all_gather_with_cp": lambda *x: shares.all_gather_with_cp(*x),
            "slice_log_prob_with_cp": lambda *x: shares.slice_log_prob_with_cp(*x),
        },
        slime__backends__megatron_utils__loss={
            "get_log_probs_and_entropy": model,
            "get_rollout_top_p_logprob_kwargs": lambda args, batch: {},
        },
        megatron__core={
            "mpu": SimpleNamespace(get_tensor_model_parallel_rank=lambda: 0, is_pipeline_last_stage=lambda: True)
        },
    )
    monkeypatch.setenv("OFFDRIFT_METHOD", "decoupled_ppo")
    monkeypatch.setenv("OFFDRIFT_ON_IDLE", "warn")
    forget()
    yield shares
    forget()


def forget() -> None:
    for cached in (slime._tis_hook, slime._loss_hook, slime._recorder):
        cached.cache_clear()


def choose(monkeypatch: pytest.MonkeyPatch, name: str, settings: str = "") -> None:
    monkeypatch.setenv("OFFDRIFT_METHOD", name)
    monkeypatch.setenv("OFFDRIFT_SETTINGS", settings)
    forget()


def masks_of(given: Batch) -> list[Tensor]:
    return [m.int() for m in listed(given.mask)]


def ppo(given: Batch, current: Tensor, *, high: float = 0.2) -> Tensor:
    r = torch.cat(listed((current - given.old).exp()))
    a = torch.cat(listed(given.advantages))
    return -torch.min(r * a, r.clamp(0.8, 1 + high) * a)


def tis_step(
    given: Batch, shares: Shares | None = None, **changed: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor], list[Tensor]]:
    """A micro-batch through slime's policy loss; ranks of a context-parallel group are added up."""
    shares = shares or Shares(1)
    args = options(context_parallel_size=shares.size, **changed)
    current = given.current.clone().requires_grad_()
    masks, total, found = (masks_of(given), [p + n for p, n in zip(PROMPTS, LENGTHS, strict=True)], {})
    sums, loss, kept = [m.sum().float() for m in masks], torch.zeros(()), []
    for rank in range(shares.size):
        shares.rank = rank
        whole = ppo(given, current).split(LENGTHS)
        mine = shares.share(list(whole)) if shares.size > 1 else list(whole)
        lists = [listed(x) for x in (given.old, given.rollout)]
        if shares.size > 1:
            lists = [shares.share(x) for x in lists]
        pg_loss, kept, metrics = slime.tis(
            args,
            pg_loss=torch.cat(mine),
            train_log_probs=lists[0],
            rollout_log_probs=lists[1],
            loss_masks=masks,
            total_lengths=total,
            response_lengths=LENGTHS,
            ignored="other arguments",
        )
        assert [len(m) for m in kept] == LENGTHS
        pieces = [shares.slice_log_prob_with_cp(m, t, n) if shares.size > 1 else m
                  for m, t, n in zip(kept, total, LENGTHS, strict=True)]  # fmt: skip
        loss = loss + reducer(pieces, sums, per_token=False)(pg_loss)
        local = [shares.slice_log_prob_with_cp(m, t, n) if shares.size > 1 else m
                 for m, t, n in zip(masks, total, LENGTHS, strict=True)]  # fmt: skip
        for name, x in metrics.items():
            found[name] = found.get(name, 0) + reducer(local, sums, per_token=True)(x)
    loss.backward()
    assert current.grad is not None
    return loss.detach(), current.grad, found, kept


def weighted(given: Batch, weight: Tensor) -> tuple[Tensor, Tensor]:
    """slime's PPO loss times weights, reduced by hand."""
    current = given.current.clone().requires_grad_()
    x = (ppo(given, current) * torch.cat(listed(weight))).split(LENGTHS)
    parts = [p[m > 0].sum() / max(int(m.sum()), 1) for p, m in zip(x, masks_of(given), strict=True)]
    loss = torch.stack(parts).sum()
    loss.backward()
    assert current.grad is not None
    return loss.detach(), current.grad


# -- the TIS function ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule"),
    [("decoupled_ppo", lambda w: w.clamp(max=2.0)), ("icepop", lambda w: w.where((w >= 0.5) & (w <= 5), 0.0))],
)
def test_slimes_own_corrections(monkeypatch: pytest.MonkeyPatch, name: str, rule: Callable[[Tensor], Tensor]) -> None:
    given = batch(spread=0.8)
    choose(monkeypatch, name)
    loss, grad, metrics, kept = tis_step(given)
    w = (given.old - given.rollout).exp()
    expected, expected_grad = weighted(given, rule(w))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected_grad)
    assert int((grad != 0).sum()) > 10
    inside = [w_i[m > 0] for w_i, m in zip(listed(w), masks_of(given), strict=True)]
    drift = torch.cat(inside).log()
    torch.testing.assert_close(metrics["offdrift/mismatch/k3"], (drift.expm1() - drift).sum())
    torch.testing.assert_close(metrics["offdrift/weight"], rule(drift.exp()).sum())
    assert all(torch.equal(a, b) for a, b in zip(kept, masks_of(given), strict=True))


def test_measuring_alone_changes_nothing() -> None:
    given = batch(spread=0.8)
    loss, grad, metrics, kept = tis_step(given, use_tis=False)
    expected, expected_grad = weighted(given, torch.ones(6, 11))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected_grad)
    assert metrics["offdrift/limited"] > 0
    assert all(torch.equal(a, b) for a, b in zip(kept, masks_of(given), strict=True))


@pytest.mark.parametrize(("use_tis", "said"), [(True, "acted"), (False, "measured, not applied")])
def test_a_part_that_is_only_measured_is_not_said_to_act(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, use_tis: bool, said: str
) -> None:
    """`--get-mismatch-metrics` without `--use-tis` changes nothing, whatever the method would do."""
    choose(monkeypatch, "decoupled_geo_rs_token_tis")
    with caplog.at_level(logging.INFO, "offdrift.slime"):
        tis_step(batch(spread=0.8), use_tis=use_tis)
        optimizer_step()
    parts = [r.message for r in caplog.records if r.message.startswith(("gate", "weight"))]
    assert len(parts) == 2
    assert all(f": {said}, " in part for part in parts)
    verb = "changed" if use_tis else "would change"
    assert all(part.endswith(f"tokens {verb}") for part in parts)


@pytest.mark.parametrize(("name", "scope"), [("decoupled_geo", "policy"), ("decoupled_geo", "all")])
def test_masks_lose_what_is_rejected_only_where_gates_govern_everything(
    monkeypatch: pytest.MonkeyPatch, name: str, scope: str
) -> None:
    given = batch()
    choose(monkeypatch, name, f"gate_scope={scope}")
    _, _, metrics, kept = tis_step(given)
    gone = [int((a - b).sum()) for a, b in zip(masks_of(given), kept, strict=True)]
    assert int(metrics["offdrift/rejected"]) > 0
    assert sum(gone) == (int(metrics["offdrift/rejected"]) if scope == "all" else 0)


def test_every_method_is_served_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given, served, refused = batch(), 0, 0
    for name, row in METHODS.items():
        parts = (*row.correction.gates, *row.correction.weights)
        alone = all(p.on == "mismatch" and getattr(p, "advantage", "any") == "any" for p in parts)
        choose(monkeypatch, name)
        if parts and alone and row.anchor is None:
            loss, _, _, _ = tis_step(given)
            assert torch.isfinite(loss)
            served += 1
            continue
        with pytest.raises((EvidenceError, MethodError), match=r"slime|nothing to do"):
            tis_step(given)
        refused += 1
    assert served + refused == len(METHODS)
    assert served >= 25


@pytest.mark.parametrize("name", ["decoupled_ppo", "decoupled_geo", "decoupled_seq_is_rs", "segment_tis"])
@pytest.mark.parametrize("size", [2, 3])
def test_context_parallel_shares_add_up_to_whole_sequences(
    monkeypatch: pytest.MonkeyPatch, framework: Shares, name: str, size: int
) -> None:
    given = batch()
    choose(monkeypatch, name)
    loss, grad, metrics, _ = tis_step(given)
    framework.__init__(size)
    covered = [framework.places(p + n, n, r) for p, n in zip(PROMPTS, LENGTHS, strict=True) for r in range(size)]  # fmt: skip
    assert sum(map(len, covered)) == sum(LENGTHS)
    shared, shared_grad, shared_metrics, _ = tis_step(given, framework)
    torch.testing.assert_close(shared, loss)
    torch.testing.assert_close(shared_grad, grad)
    for key, value in metrics.items():
        torch.testing.assert_close(shared_metrics[key], value)


def test_masked_values_all_masked_and_all_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    given = batch()
    loss, grad, metrics, _ = tis_step(given)
    for poison in (float("nan"), 1e9):
        dirty = replace(given, rollout=given.rollout.where(given.mask, poison))
        again, again_grad, found, _ = tis_step(dirty)
        assert torch.equal(again, loss)
        assert torch.equal(again_grad, grad)
        assert all(torch.equal(found[k], metrics[k]) for k in metrics)
    nothing = replace(given, mask=torch.zeros_like(given.mask), rollout=given.rollout * float("nan"))
    loss, grad, found, _ = tis_step(nothing)
    assert loss == 0
    assert torch.equal(grad, torch.zeros(6, 11))
    assert set(found) == set(metrics)
    choose(monkeypatch, "decoupled_geo", "gate.low=0.999999,gate.high=1.000001")
    loss, grad, found, _ = tis_step(given)
    assert loss == 0
    assert torch.equal(grad, torch.zeros(6, 11))
    assert found["offdrift/rejected"] == sum(int(m.sum()) for m in masks_of(given))


def test_token_losses_without_weight_are_zero_whatever_they_were() -> None:
    """slime multiplies by the mask, and 0 times NaN is NaN."""
    given = batch()
    for mask in (masks_of(given), [0 * m for m in masks_of(given)]):
        pg_loss, _, _ = slime.tis(
            options(),
            pg_loss=torch.cat([torch.ones(len(m)).where(m > 0, float("nan")) for m in mask]),
            train_log_probs=listed(given.old),
            rollout_log_probs=listed(given.rollout),
            loss_masks=mask,
            total_lengths=[n + 1 for n in LENGTHS],
            response_lengths=LENGTHS,
        )
        assert torch.isfinite(pg_loss).all()
        assert int((pg_loss > 0).sum()) == sum(int(m.sum()) for m in mask)


def test_bad_and_missing_log_probs_are_named() -> None:
    given = batch()
    given.rollout[0, given.mask[0].nonzero()[0]] = float("nan")
    with pytest.raises(BadValueError, match="logp_rollout of sequence 0 is nan"):
        tis_step(given)
    with pytest.raises(EvidenceError, match=r"Sample\.rollout_log_probs"):
        slime.tis(
            options(), pg_loss=torch.zeros(3), train_log_probs=[torch.zeros(3)],
            rollout_log_probs=None, loss_masks=[torch.ones(3)], total_lengths=[4],
            response_lengths=[3],
        )  # fmt: skip


def test_another_layout_under_context_parallelism_is_refused() -> None:
    with pytest.raises(MethodError, match="qkv-format bshd"):
        tis_step(batch(), Shares(2), qkv_format="bshd")


@pytest.mark.parametrize("size", [1, 2])
def test_unscored_tokens_are_not_corrected(monkeypatch: pytest.MonkeyPatch, framework: Shares, size: int) -> None:
    """They lose their loss and stay in slime's denominators; metrics stay finite."""
    given = batch()
    choose(monkeypatch, "icepop")
    framework.__init__(size)
    _, whole, _, _ = tis_step(given, framework if size > 1 else None)
    for value in laws.UNSCORED:
        with_them, without = laws.unscored(given, value)
        _, grad, metrics, _ = tis_step(with_them, framework if size > 1 else None)
        torch.testing.assert_close(grad, whole.where(without.mask, 0.0))
        assert int((grad != 0).sum()) > 5
        assert all(bool(torch.isfinite(x)) for x in metrics.values())
        gone = int((given.mask & ~without.mask)[:, :].sum())
        assert 0 < int(metrics["offdrift/rejected"]) <= gone


def test_steps_close_and_copied_log_probs_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given = batch()
    tis_step(given)
    optimizer_step()
    hook = slime._tis_hook("slime")
    assert hook.step == 1
    assert hook.metrics["offdrift/batch/tokens"] == sum(int(m.sum()) for m in masks_of(given))
    monkeypatch.setenv("OFFDRIFT_ON_IDLE", "error")
    forget()
    tis_step(replace(given, rollout=given.old))
    with pytest.raises(LivenessError, match="cannot act"):
        optimizer_step()


# -- the whole loss -----------------------------------------------------------------------------------


def loss_step(
    given: Batch, *, sums: list[Tensor] | None = None, **changed: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    args = options(**changed)
    current = given.current.clone().requires_grad_()
    logits = torch.cat(listed(current))[None, :, None]
    masks = masks_of(given)
    sums = sums or [m.sum().float() for m in masks]
    data = {
        "unconcat_tokens": [], "total_lengths": [p + n for p, n in zip(PROMPTS, LENGTHS, strict=True)],
        "response_lengths": LENGTHS, "loss_masks": masks, "rollout_mask_sums": sums,
        "log_probs": listed(given.old), "rollout_log_probs": listed(given.rollout),
        "advantages": listed(given.advantages),
    }  # fmt: skip
    mean = reducer(masks, sums, per_token=args.calculate_per_token_loss)
    loss, metrics = slime.loss(args, data, logits, mean)
    assert all(x.dim() == 0 and not x.requires_grad for x in metrics.values())
    loss.backward()
    assert current.grad is not None
    return loss.detach(), current.grad, metrics


def test_bad_advantages_are_named_by_the_whole_loss() -> None:
    laws.check_bad_advantages(lambda given, *_: loss_step(given)[:2])  # type: ignore[arg-type, return-value]


def test_the_whole_loss_leaves_unscored_tokens_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given = batch()
    choose(monkeypatch, "icepop")
    _, whole, _ = loss_step(given)
    for value in laws.UNSCORED:
        with_them, without = laws.unscored(given, value)
        loss, grad, metrics = loss_step(with_them)
        torch.testing.assert_close(grad, whole.where(without.mask, 0.0))
        assert all(bool(torch.isfinite(x)) for x in (loss, *metrics.values()))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_whole_loss_has_slimes_denominators(per_token: bool, shared: bool) -> None:
    """decoupled PPO at clips of 0.2, over each sample's tokens, its rollout's, or none."""
    given = batch(spread=0.5)
    own = [m.sum().float() for m in masks_of(given)]
    sums = [own[i] + own[i ^ 1] for i in range(6)] if shared else own
    loss, grad, _ = loss_step(given, sums=sums, calculate_per_token_loss=per_token)
    current = given.current.clone().requires_grad_()
    w = torch.cat(listed((given.old - given.rollout).exp())).clamp(max=2.0)
    mean = reducer(masks_of(given), sums, per_token=per_token)
    expected = mean(ppo(given, current) * w)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad, current.grad)
    assert int((grad != 0).sum()) > 10


def test_the_entropy_bonus_is_kept() -> None:
    given = batch()
    plain, _, metrics = loss_step(given)
    loss, _, _ = loss_step(given, entropy_coef=0.5)
    torch.testing.assert_close(loss, plain - 0.5 * metrics["entropy_loss"])
    assert metrics["entropy_loss"] > 0


def test_the_whole_loss_serves_every_method_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    given, served = batch(), 0
    for name, row in METHODS.items():
        choose(monkeypatch, name)
        lag = any(getattr(g, "statistic", "") == "version_lag" for g in row.correction.gates)
        lacking = row.needs_divergences or row.needs or row.penalty or lag
        if lacking or row.looks_ahead or row.lr_scale or not proportional(row):
            with pytest.raises(EvidenceError if lacking else MethodError, match="slime"):
                loss_step(given)
            continue
        loss, grad, _ = loss_step(given)
        assert torch.isfinite(loss)
        assert torch.isfinite(grad).all()
        served += 1
    assert served >= 75


def test_the_whole_loss_of_nothing_has_a_graph() -> None:
    given = batch()
    nothing = replace(given, mask=torch.zeros_like(given.mask))
    loss, grad, metrics = loss_step(nothing)
    assert loss == 0
    assert torch.equal(grad, torch.zeros(6, 11))
    assert set(metrics) == set(loss_step(given)[2])


def test_what_the_whole_loss_refuses() -> None:
    given = batch()
    with pytest.raises(MethodError, match="context parallelism"):
        loss_step(given, context_parallel_size=2)
    with pytest.raises(MethodError, match="--use-kl-loss"):
        loss_step(given, use_kl_loss=True, kl_loss_coef=0.001)
    loss_step(given, use_kl_loss=True)  # only measured, as slime's examples do


# -- records ------------------------------------------------------------------------------------------


def rollout_data(given: Batch) -> dict[str, Any]:
    tokens = [torch.arange(p + n) + 100 * i for i, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True))]  # fmt: skip
    return {
        "tokens": tokens, "response_lengths": LENGTHS, "loss_masks": masks_of(given),
        "log_probs": listed(given.old), "rollout_log_probs": listed(given.rollout),
        "advantages": listed(given.advantages), "sample_indices": [4, 5, 6, 7, 8, 9],
        "raw_reward": [float(i) for i in range(20)], "partition": [10, 11, 12, 13, 14, 15],
        "truncated": [1, 0, 0, 0, 0, 0],
    }  # fmt: skip


def test_the_record_holds_tokens_and_both_log_probs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = batch()
    monkeypatch.setenv("OFFDRIFT_RECORD", str(tmp_path))
    slime.record(options(), 7, rollout_data(given))
    slime._recorder().close()
    (file,) = tmp_path.glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    compared = 0
    assert [r["step"] for r in rows] == [7] * len(rows)
    for i, row in enumerate(r for r in rows if r["logp_rollout"]):
        kept = listed(given.mask)[i]
        for mine, theirs in [("logp_rollout", given.rollout), ("logp_old", given.old)]:
            torch.testing.assert_close(torch.tensor(row[mine]), listed(theirs)[i][kept])
        assert row["tokens"] == (torch.arange(LENGTHS[i]) + PROMPTS[i] + 100 * i)[kept].tolist()
        assert row["reward"] == 10.0 + i
        compared += len(row["tokens"])
    assert compared == sum(int(m.sum()) for m in masks_of(given))
    groups = [r["group_id"] for r in rows]
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_what_cannot_be_recorded_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = rollout_data(batch())
    with pytest.raises(MethodError, match="OFFDRIFT_RECORD"):
        slime.record(options(), 1, data)
    monkeypatch.setenv("OFFDRIFT_RECORD", str(tmp_path))
    with pytest.raises(EvidenceError, match="--get-mismatch-metrics"):
        slime.record(options(), 1, data | {"log_probs": None})
    with pytest.raises(EvidenceError, match=r"Sample\.rollout_log_probs"):
        slime.record(options(), 1, data | {"rollout_log_probs": None})
    with pytest.raises(MethodError, match="context parallelism"):
        slime.record(options(context_parallel_size=2), 1, data)


# -- versions and the page ----------------------------------------------------------------------------


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.1.0")
    with pytest.raises(FrameworkError, match=r"slime 0\.1\.0 is older"):
        tis_step(batch())


def test_no_method_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFDRIFT_METHOD")
    forget()
    with pytest.raises(MethodError, match="OFFDRIFT_METHOD"):
        tis_step(batch())


def test_flags_of_the_page_name_functions_and_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = 0
    for block in code("slime.md", "bash"):
        words = shlex.split(block.replace("\\\n", " "), comments=True)
        env = dict(w.split("=", 1) for w in words if w.startswith("OFFDRIFT_"))
        choose(monkeypatch, env["OFFDRIFT_METHOD"], env.get("OFFDRIFT_SETTINGS", ""))
        for flag, path in itertools.pairwise(words):
            if not flag.endswith("-path"):
                continue
            module, _, name = path.rpartition(".")
            function = getattr(import_module(module), name)
            run = {
                "--custom-tis-function-path": (slime.tis, tis_step),
                "--custom-loss-function-path": (slime.loss, loss_step),
                "--rollout-data-postprocess-path": (slime.record, None),
            }[flag]
            assert function is run[0]
            if run[1] is not None:
                run[1](batch())
            paths += 1
    assert paths >= 3
