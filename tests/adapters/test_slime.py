"""slime's and miles' function paths, against the contract of slime 0.3.1 (624b824) and miles 0.1.0.

The stand-in is written from that contract: a PPO token loss, the TIS function on lists of responses,
one reducer over precomputed denominators, and context-parallel shares in the zigzag layout. The same
adapter was run once against slime's real modules of that commit over megatron-core, with one process
and with two that share each sequence; see docs/integrations/slime.md.
"""

import itertools
import logging
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters import hooks
from offdrift.adapters.contrib import slime
from offdrift.errors import BadValueError, EvidenceError, FrameworkError, MethodError
from tests.adapters.hooked import (
    Batch,
    Correcting,
    Framework,
    Outcome,
    batch,
    choose,
    code,
    install,
    optimizer_step,
    outcome,
)
from tests.adapters.hooked import ppo as plain
from tests.records.samples import one

LENGTHS = [11, 7, 9, 4, 11, 5]
PROMPTS = [3, 5, 2, 6, 1, 4]


def options(**changed: Any) -> Any:
    """slime's arguments, as far as the hooks see them."""
    defaults = {"use_tis": True, "calculate_per_token_loss": False, "entropy_coef": 0.0, "context_parallel_size": 1}
    defaults |= {"use_kl_loss": False, "kl_loss_coef": 0.0, "n_samples_per_prompt": 2}
    defaults |= {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None}
    return SimpleNamespace(**(defaults | changed))


def listed(x: Tensor, lengths: list[int] = LENGTHS) -> list[Tensor]:
    return [row[:n] for row, n in zip(x, lengths, strict=True)]


class Shares:
    """Context parallelism over `size` ranks, of which this process plays one after the other.

    Rank r holds chunks r and 2 size - 1 - r of each padded sequence, prompt included, and of those the
    log-probs of response tokens; a log-prob sits one place before its token.
    """

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.whole = size, 0, {}

    def places(self, total: int, response: int, rank: int) -> list[int]:
        chunk = -(-total // (2 * self.size))
        own = [r * chunk + i for r in (rank, 2 * self.size - 1 - rank) for i in range(chunk)]
        return [i + 1 - (total - response) for i in own if total - response <= i + 1 < total]

    def slice_log_prob_with_cp(self, x: Tensor, total: int, response: int) -> Tensor:
        assert len(x) == response
        return x[self.places(total, response, self.rank)]

    def all_gather_with_cp(self, x: Tensor, total: int, response: int) -> Tensor:
        whole = self.whole[tuple(x.tolist()), total]
        assert len(x) == len(self.places(total, response, self.rank))
        return whole.clone().requires_grad_()

    def share(self, xs: list[Tensor]) -> list[Tensor]:
        if self.size == 1:
            return xs
        parts = []
        for x, p in zip(xs, PROMPTS, strict=True):
            parts.append(self.slice_log_prob_with_cp(x, p + len(x), len(x)))
            self.whole[tuple(parts[-1].tolist()), p + len(x)] = x
        return parts


def reducer(masks: list[Tensor], sums: list[Tensor], *, per_token: bool) -> Callable[[Tensor], Tensor]:
    """Sum over samples of masked sums, each over its denominator."""

    def reduce(x: Tensor) -> Tensor:
        pieces = x.split([len(m) for m in masks])
        over = [torch.ones(()) if per_token else n.clamp(min=1) for n in sums]
        return torch.stack([(p * m).sum() / n for p, m, n in zip(pieces, masks, over, strict=True)]).sum()

    return reduce


def model(logits: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """`get_log_probs_and_entropy`, where the "logits" are the log-probs themselves."""
    assert kwargs["with_entropy"]
    flat = logits[0, :, 0].split(kwargs["response_lengths"])
    return torch.empty(0), {"log_probs": list(flat), "entropy": [torch.ones_like(x) for x in flat]}


PLANTED = {"factor": 1.0}
"""What the stand-in does beside the contract."""


def vanilla(args: Any, *, pg_loss: Tensor, **lists: Any) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """slime's own TIS function: weights of tokens between two bounds."""
    ratio = PLANTED["factor"] * (torch.cat(lists["train_log_probs"]) - torch.cat(lists["rollout_log_probs"]))
    return pg_loss * ratio.exp().clamp(args.tis_clip_low, args.tis_clip), lists["loss_masks"], {}


def policy_loss(args: Any, data: Mapping[str, Any], logits: Tensor, mean: Any) -> tuple[Tensor, dict[str, Any]]:
    """slime's own policy loss without corrections, over the log-probs of its forward pass."""
    assert not any((args.use_tis, args.get_mismatch_metrics, args.use_kl_loss, args.use_opsm))
    _, found = import_module(slime.LOSSES["slime"]).get_log_probs_and_entropy(logits)
    columns = (torch.cat(list(x)) for x in (found["log_probs"], data["log_probs"], data["advantages"]))
    losses = plain(*columns, args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    return PLANTED["factor"] * mean(losses), {}


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch, version: str = "0.3.1") -> Iterator[Shares]:
    shares = Shares(1)
    gather = {
        name: lambda *x, name=name: getattr(shares, name)(*x)
        for name in ("all_gather_with_cp", "slice_log_prob_with_cp")
    }
    one_process = SimpleNamespace(get_tensor_model_parallel_rank=lambda: 0, is_pipeline_last_stage=lambda: True)
    theirs = {"get_log_probs_and_entropy": model, "get_rollout_top_p_logprob_kwargs": lambda args, batch: {}}
    theirs |= {"vanilla_tis_function": vanilla, "policy_loss_function": policy_loss}
    modules = {
        "slime.backends.megatron_utils.cp_utils": gather,
        "slime.backends.megatron_utils.loss": theirs,
        "megatron.core": {"mpu": one_process},
    }
    install(monkeypatch, version, modules)
    forget()
    yield shares
    forget()


def forget() -> None:
    for cached in (slime._hook, slime._recorder):
        cached.cache_clear()


def loss_step(of: Batch, lengths: list[int] = LENGTHS, *, sums: list[Tensor] | None = None, **changed: Any) -> Outcome:
    """A micro-batch through the custom loss."""
    args, current = options(**changed), of.current.clone().requires_grad_()
    masks = [m.int() for m in listed(of.mask, lengths)]
    sums = sums or [m.sum().float() for m in masks]
    fields = {"log_probs": of.old, "rollout_log_probs": of.rollout, "advantages": of.advantages}
    data = {
        "unconcat_tokens": [],
        "total_lengths": [p + n for p, n in zip(PROMPTS, lengths, strict=False)],
        "response_lengths": lengths,
        "loss_masks": masks,
        "rollout_mask_sums": sums,
        **{name: listed(x, lengths) for name, x in fields.items()},
    }
    mean = reducer(masks, sums, per_token=args.calculate_per_token_loss)
    loss, metrics = slime.loss(args, data, torch.cat(listed(current, lengths))[None, :, None], mean)
    assert all(x.dim() == 0 and not x.requires_grad for x in metrics.values())
    return outcome(loss, current, metrics)


def run(method: str | None, of: Batch, tokens: float, sequences: float = 1, **options: Any) -> Outcome:
    """Part of a step through the custom loss, summed by token and divided by the step's tokens."""
    with pytest.MonkeyPatch.context() as environment:
        if method is not None:
            chosen(environment, method, **options)
        forget()  # as a process that reads the environment now
        part = replace(of, advantages=of.advantages / tokens)
        return loss_step(part, [of.mask.shape[1]] * len(of.mask), calculate_per_token_loss=True)


def chosen(monkeypatch: pytest.MonkeyPatch, name: str, settings: Mapping[str, Any] = {}, **options: Any) -> None:
    choose(monkeypatch, name, settings, **options)
    forget()


def correct(method: str, of: Batch, **options_: Any) -> tuple[Tensor, Tensor]:
    """What the TIS function makes of token losses of 1, and the masks."""
    with pytest.MonkeyPatch.context() as environment:
        chosen(environment, method, **options_)
        weight, kept, _ = slime.tis(
            options(),
            pg_loss=torch.ones(of.mask.numel()),
            train_log_probs=list(of.old),
            rollout_log_probs=list(of.rollout),
            loss_masks=list(of.mask.int()),
            total_lengths=[1 + len(row) for row in of.mask],
            response_lengths=[len(row) for row in of.mask],
        )
    return weight.reshape(of.mask.shape), torch.stack(kept)


FRAMEWORK = Framework("slime", stand_in, run, served=103, records=False)
CORRECTING = Correcting("slime", stand_in, correct, mask_is_kept=True)


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch, process: Any) -> Iterator[Shares]:
    chosen(monkeypatch, "decoupled_ppo")
    with stand_in(monkeypatch) as shares:
        yield shares


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("per_token", [True, False])
def test_a_loss_that_is_not_known_is_refused_at_the_first_batch(
    whole: bool, per_token: bool, monkeypatch: Any, process: Any, caplog: Any
) -> None:
    chosen(monkeypatch, "icepop")
    name = "policy_loss_function" if whole else "vanilla_tis_function"

    def step() -> None:
        if whole:
            loss_step(batch(), calculate_per_token_loss=per_token)
        else:
            tis_step(batch(), calculate_per_token_loss=per_token)

    with caplog.at_level("INFO", "offdrift.slime"):
        step()
    assert f"{name}: loss" in caplog.text
    hook = process[-1]
    assert hook.proved
    assert import_module(slime.LOSSES["slime"]).get_log_probs_and_entropy is model
    monkeypatch.setitem(PLANTED, "factor", 1.001)
    step()  # once per process
    hook.proved = False
    with pytest.raises(FrameworkError, match=f"slime: slime.backends.megatron_utils.loss.{name} is a loss that"):
        step()


def masks_of(of: Batch) -> list[Tensor]:
    return [m.int() for m in listed(of.mask)]


def ppo(of: Batch, current: Tensor, *, high: float = 0.2) -> Tensor:
    r = torch.cat(listed((current - of.old).exp()))
    a = torch.cat(listed(of.advantages))
    return -torch.min(r * a, r.clamp(0.8, 1 + high) * a)


def tis_step(of: Batch, shares: Shares | None = None, **changed: Any) -> tuple[Outcome, list[Tensor]]:
    """A micro-batch through slime's policy loss, and the masks; ranks of a context-parallel group are added up."""
    shares = shares or Shares(1)
    args = options(context_parallel_size=shares.size, **changed)
    current = of.current.clone().requires_grad_()
    masks, total = masks_of(of), [p + n for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    sums, loss, kept, metrics = [m.sum().float() for m in masks], torch.zeros(()), [], {}
    for rank in range(shares.size):
        shares.rank = rank
        local = shares.share(list(ppo(of, current).split(LENGTHS)))
        old, rollout = (shares.share(listed(x)) for x in (of.old, of.rollout))
        pg_loss, kept, by_token = slime.tis(
            args,
            pg_loss=torch.cat(local),
            train_log_probs=old,
            rollout_log_probs=rollout,
            loss_masks=masks,
            total_lengths=total,
            response_lengths=LENGTHS,
        )
        assert [len(m) for m in kept] == LENGTHS
        loss = loss + reducer(shares.share(kept), sums, per_token=False)(pg_loss)
        for name, x in by_token.items():
            metrics[name] = metrics.get(name, 0) + reducer(shares.share(masks), sums, per_token=True)(x)
    return outcome(loss, current, metrics), kept


def weighted(of: Batch, weight: Tensor) -> Outcome:
    """slime's PPO loss times weights, reduced by hand."""
    current = of.current.clone().requires_grad_()
    x = (ppo(of, current) * torch.cat(listed(weight))).split(LENGTHS)
    parts = [p[m > 0].sum() / max(int(m.sum()), 1) for p, m in zip(x, masks_of(of), strict=True)]
    return outcome(torch.stack(parts).sum(), current, {})


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("decoupled_ppo", lambda w: w.clamp(max=2.0)),
        ("icepop", lambda w: w.where((w >= 0.5) & (w <= 5), 0.0)),
        ("measured", torch.ones_like),
    ],
)
def test_slimes_own_corrections(monkeypatch: pytest.MonkeyPatch, name: str, rule: Callable[[Tensor], Tensor]) -> None:
    """The last only measures, as `--get-mismatch-metrics` without `--use-tis` does, and changes nothing."""
    of, measured = batch(spread=0.8), name == "measured"
    chosen(monkeypatch, "decoupled_ppo" if measured else name)
    result, kept = tis_step(of, use_tis=not measured)
    w = (of.old - of.rollout).exp()
    torch.testing.assert_close(result[:2], weighted(of, rule(w))[:2])
    assert int((result.gradient != 0).sum()) > 10
    drift = torch.cat([w_i[m > 0] for w_i, m in zip(listed(w), masks_of(of), strict=True)]).log()
    torch.testing.assert_close(result.metrics["offdrift/mismatch/k3"], (drift.expm1() - drift).sum())
    weight = drift.exp().clamp(max=2.0) if measured else rule(drift.exp())
    torch.testing.assert_close(result.metrics["offdrift/weight"], weight.sum())
    assert all(torch.equal(a, b) for a, b in zip(kept, masks_of(of), strict=True))


@pytest.mark.parametrize(("use_tis", "state"), [(True, "acted"), (False, "measured, not applied")])
def test_a_part_that_is_only_measured_is_not_said_to_act(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, use_tis: bool, state: str
) -> None:
    chosen(monkeypatch, "decoupled_geo_rs_token_tis")
    with caplog.at_level(logging.INFO, "offdrift.slime"):
        tis_step(batch(spread=0.8), use_tis=use_tis)
        optimizer_step()
    parts = [r.message for r in caplog.records if r.message.startswith(("gate", "weight"))]
    assert len(parts) == 2
    assert all(f": {state}, " in part for part in parts)
    verb = "changed" if use_tis else "would change"
    assert all(part.endswith(f"tokens {verb}") for part in parts)


@pytest.mark.parametrize("scope", ["policy", "all"])
def test_masks_lose_what_is_rejected_only_where_gates_govern_everything(
    monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    of = batch()
    chosen(monkeypatch, "decoupled_geo", {"gate_scope": scope})
    result, kept = tis_step(of)
    rejected = int(result.metrics["offdrift/rejected"])
    assert rejected > 0
    lost = sum(int((a - b).sum()) for a, b in zip(masks_of(of), kept, strict=True))
    assert lost == (rejected if scope == "all" else 0)


@pytest.mark.parametrize("name", ["decoupled_ppo", "decoupled_geo", "decoupled_seq_is_rs", "segment_tis"])
@pytest.mark.parametrize("size", [2, 3])
def test_context_parallel_shares_add_up_to_whole_sequences(
    monkeypatch: pytest.MonkeyPatch, framework: Shares, name: str, size: int
) -> None:
    of = batch()
    chosen(monkeypatch, name)
    whole, _ = tis_step(of)
    framework.__init__(size)
    covered = [framework.places(p + n, n, r) for p, n in zip(PROMPTS, LENGTHS, strict=True) for r in range(size)]
    assert sum(map(len, covered)) == sum(LENGTHS)
    shared, _ = tis_step(of, framework)
    torch.testing.assert_close(shared, whole)
    with pytest.raises(MethodError, match="qkv-format bshd"):
        tis_step(of, framework, qkv_format="bshd")


class Group(Shares):
    """The ranks of a context-parallel group at once, each in a thread: what they gather is exchanged."""

    def __init__(self, size: int, flipped: bool = False) -> None:
        self.local, self.flipped = threading.local(), flipped
        super().__init__(size)
        self.parts, self.barrier = {}, threading.Barrier(size, timeout=30)

    @property
    def rank(self) -> int:
        return self.local.rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self.local.rank = rank

    def all_gather_with_cp(self, x: Tensor, total: int, response: int) -> Tensor:
        self.parts[self.rank] = x
        self.barrier.wait()
        whole = x.new_zeros(response)
        for rank, part in self.parts.items():
            whole[self.places(total, response, rank)] = part
        self.barrier.wait()
        return whole.flip(0) if self.flipped else whole


def run_group(group: Group, each: list[Any]) -> list[BaseException | None]:
    """The first micro-batch of all ranks, each with a hook of its own; what each ended with."""
    of, total = batch(), [p + n for p, n in zip(PROMPTS, LENGTHS, strict=True)]

    def rank(i: int) -> BaseException | None:
        group.rank = i
        old, rollout = (group.share(listed(x)) for x in (of.old, of.rollout))
        lists = {"train_log_probs": old, "rollout_log_probs": rollout, "loss_masks": masks_of(of)}
        lists |= {"total_lengths": total, "response_lengths": LENGTHS, "pg_loss": torch.ones(sum(map(len, old)))}
        try:
            slime.tis(options(context_parallel_size=group.size), **lists)
        except FrameworkError as error:
            return error
        return None

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(group.size) as pool:
        module = import_module(slime.CONTEXT_PARALLEL["slime"])
        for name in ("all_gather_with_cp", "slice_log_prob_with_cp"):
            patch.setattr(module, name, getattr(group, name))
        patch.setattr(slime, "_hook", lambda framework: each[group.rank])
        return list(pool.map(rank, range(group.size)))


@pytest.mark.parametrize(("factor", "flipped"), [(1.0, False), (1.001, False), (1.0, True)])
def test_each_rank_of_a_context_parallel_group_proves_its_share(
    factor: float, flipped: bool, monkeypatch: Any, caplog: Any
) -> None:
    """Refused by all: another weight, and whole sequences that are gathered in another order."""
    monkeypatch.setitem(PLANTED, "factor", factor)
    chosen(monkeypatch, "icepop")
    each = []
    for _ in range(2):
        hooks.hook_of.cache_clear()
        each.append(slime._hook.__wrapped__("slime"))
    with caplog.at_level("INFO", "offdrift.slime"):
        errors = run_group(Group(2, flipped), each)
    if (factor, flipped) == (1.0, False):
        assert errors == [None, None]
        assert caplog.text.count("vanilla_tis_function: loss") == 2
        assert [hook.proved for hook in each] == [True, True]
    else:
        assert all("vanilla_tis_function is a loss" in str(e) for e in errors)
        assert [hook.proved for hook in each] == [False, False]


def test_token_losses_without_weight_are_zero_whatever_they_were() -> None:
    """slime multiplies by the mask, and 0 times NaN is NaN."""
    of = batch()
    for mask in (masks_of(of), [0 * m for m in masks_of(of)]):
        pg_loss, _, _ = slime.tis(
            options(),
            pg_loss=torch.cat([torch.ones(len(m)).where(m > 0, float("nan")) for m in mask]),
            train_log_probs=listed(of.old),
            rollout_log_probs=listed(of.rollout),
            loss_masks=mask,
            total_lengths=[n + 1 for n in LENGTHS],
            response_lengths=LENGTHS,
        )
        assert torch.isfinite(pg_loss).all()
        assert int((pg_loss > 0).sum()) == sum(int(m.sum()) for m in mask)


def test_bad_and_missing_log_probs_are_named() -> None:
    of = batch()
    of.rollout[0, of.mask[0].nonzero()[0]] = float("nan")
    with pytest.raises(BadValueError, match="logp_rollout of sequence 0 is nan"):
        tis_step(of)
    empty = {"rollout_log_probs": None, "loss_masks": [torch.ones(3)], "total_lengths": [4], "response_lengths": [3]}
    with pytest.raises(EvidenceError, match=r"Sample\.rollout_log_probs"):
        slime.tis(options(), pg_loss=torch.zeros(3), train_log_probs=[torch.zeros(3)], **empty)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_whole_loss_has_slimes_denominators(per_token: bool, shared: bool) -> None:
    """decoupled PPO at clips of 0.2, over each sample's tokens, its rollout's, or none."""
    of = batch(spread=0.5)
    own = [m.sum().float() for m in masks_of(of)]
    sums = [own[i] + own[i ^ 1] for i in range(6)] if shared else own
    result = loss_step(of, sums=sums, calculate_per_token_loss=per_token)
    current = of.current.clone().requires_grad_()
    w = torch.cat(listed((of.old - of.rollout).exp())).clamp(max=2.0)
    wanted = outcome(reducer(masks_of(of), sums, per_token=per_token)(ppo(of, current) * w), current, {})
    torch.testing.assert_close(result[:2], wanted[:2])
    assert int((result.gradient != 0).sum()) > 10


def test_the_entropy_bonus_is_kept() -> None:
    plain, bonus = (loss_step(batch(), entropy_coef=x) for x in (0.0, 0.5))
    torch.testing.assert_close(bonus.loss, plain.loss - 0.5 * plain.metrics["entropy_loss"])
    assert plain.metrics["entropy_loss"] > 0


def test_what_the_whole_loss_refuses() -> None:
    with pytest.raises(MethodError, match="context parallelism"):
        loss_step(batch(), context_parallel_size=2)
    with pytest.raises(MethodError, match="--use-kl-loss"):
        loss_step(batch(), use_kl_loss=True, kl_loss_coef=0.001)
    loss_step(batch(), use_kl_loss=True)  # only measured, as slime's examples do


def rollout_data(of: Batch) -> dict[str, Any]:
    tokens = [torch.arange(p + n) + 100 * i for i, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True))]
    fields = {"log_probs": of.old, "rollout_log_probs": of.rollout, "advantages": of.advantages}
    return {
        "tokens": tokens,
        "response_lengths": LENGTHS,
        "loss_masks": masks_of(of),
        **{name: listed(x) for name, x in fields.items()},
        "sample_indices": [4, 5, 6, 7, 8, 9],
        "raw_reward": [float(i) for i in range(20)],
        "partition": [10, 11, 12, 13, 14, 15],
        "truncated": [1, 0, 0, 0, 0, 0],
    }


def test_the_record_holds_tokens_and_both_log_probs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of = batch()
    monkeypatch.setenv("OFFDRIFT_RECORD", str(tmp_path))
    slime.record(options(), 7, rollout_data(of))
    slime._recorder(str(tmp_path)).close()
    record, mask = one(tmp_path), torch.cat(listed(of.mask))
    tokens = torch.cat([torch.arange(n) + p + 100 * i for i, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True))])
    assert torch.equal(record.tokens, tokens[mask])
    for name, x in (("logp_rollout", of.rollout), ("logp_old", of.old), ("advantages", of.advantages)):
        torch.testing.assert_close(getattr(record, name), torch.cat(listed(x))[mask])
    assert set(record.step.tolist()) == {7}
    assert record.rewards.tolist() == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]
    assert record.truncated.tolist() == [1, 0, 0, 0, 0, 0]
    groups = record.group_ids.tolist()
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_what_cannot_be_recorded_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="OFFDRIFT_RECORD"):
        slime.record(options(), 1, rollout_data(batch()))
    monkeypatch.setenv("OFFDRIFT_RECORD", str(tmp_path))
    for changed, error, match in (
        ({"log_probs": None}, EvidenceError, "--get-mismatch-metrics"),
        ({"rollout_log_probs": None}, EvidenceError, r"Sample\.rollout_log_probs"),
        ({"context_parallel_size": 2}, MethodError, "context parallelism"),
    ):
        with pytest.raises(error, match=match):
            slime.record(options(**changed), 1, rollout_data(batch()) | changed)


def test_flags_of_the_page_name_functions_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = 0
    runs = {
        "--custom-tis-function-path": (slime.tis, tis_step),
        "--custom-loss-function-path": (slime.loss, loss_step),
        "--rollout-data-postprocess-path": (slime.record, lambda _: None),
    }
    for block in code("slime.md", "bash"):
        words = shlex.split(block.replace("\\\n", " "), comments=True)
        env = dict(w.split("=", 1) for w in words if w.startswith("OFFDRIFT_"))
        chosen(monkeypatch, env["OFFDRIFT_METHOD"])
        monkeypatch.setenv("OFFDRIFT_SETTINGS", env.get("OFFDRIFT_SETTINGS", ""))
        for flag, path in itertools.pairwise(words):
            if flag.endswith("-path"):
                module, _, name = path.rpartition(".")
                function, step = runs[flag]
                assert getattr(import_module(module), name) is function
                step(batch())
                paths += 1
    assert paths >= 3
