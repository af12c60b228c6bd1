"""AReaL's loss and rejection sampling, against the contract of AReaL 1.0.4 (4aef98d8d) and 2.0.0 (cbff54d64).

The stand-in is written from that contract: `PPOActor._ppo_update` hands `grpo_loss_fn`, by the name in
its own module, to the engine, which weighs micro-batches by their tokens; `ppo_actor_loss_fn` calls
`apply_rejection_sampling` likewise. Where AReaL itself can be imported, the tests run against it.
"""

import functools
import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters.contrib import areal
from offdrift.adapters.frameworks import WAITING
from offdrift.adapters.hooks import LossHook
from offdrift.errors import FrameworkError, LivenessError, MethodError, ShapeError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import method
from offdrift.segments import Segments
from tests.adapters.hooked import (
    SOME,
    Batch,
    Correcting,
    Framework,
    Outcome,
    batch,
    counts,
    fake_site,
    install,
    outcome,
    ppo,
    rows,
)
from tests.records.samples import one

REAL = importlib.util.find_spec("areal") is not None
OPTIONS = {
    **dict.fromkeys(("eps_clip_higher", "c_clip", "rejection_sampling", "m2_threshold")),
    **{"eps_clip": 0.2, "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05},
    **{"importance_sampling_level": "token", "prox_logp_method": "recompute"},
    **{"use_sapo_loss": False, "use_decoupled_loss": True},
}


@dataclass
class RejectionSamplingResult:
    loss_mask: Tensor
    behave_imp_weight: Tensor
    filtered_fraction: float


class Tracker:
    """Statistics as AReaL keeps them: denominators are masks, the others name one."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def denominator(self, **masks: Tensor) -> None:
        assert all(m.dtype is torch.bool for m in masks.values())
        self.kept.update(masks)

    def stat(self, denominator: str, **values: Tensor) -> None:
        assert all(v.shape == self.kept[denominator].shape for v in values.values())
        assert all(v.dtype is torch.float32 for v in values.values())
        self.kept.update(values)

    def scalar(self, **values: float) -> None:
        self.kept.update({k: float(v) for k, v in values.items()})


PLANTED: dict[str, Any] = {"factor": 1.0}
"""What the stand-in does beside the contract."""


def theirs(
    logprobs: Tensor, entropy: Tensor, data: dict[str, Any], *, eps_clip: float, c_clip: float | None, **_: Any
) -> Tensor:
    """AReaL's own plain loss: what the adapter holds itself against, and nothing else calls."""
    sys.modules[areal.ACTOR].stats_tracker.stat(x=logprobs, denominator="never defined")  # must not be kept
    mask = data["loss_mask"].bool()
    losses = ppo(logprobs, data["prox_logp"], data["advantages"], eps_clip, eps_clip, c_clip)
    return PLANTED["factor"] * losses.where(mask, 0.0).sum() / mask.count_nonzero()


def their_weights(proximal: Tensor, old: Tensor, mask: Tensor, cuts: Any, config: Any) -> RejectionSamplingResult:
    """AReaL's own weights of tokens, clamped."""
    assert (config.action, config.level) == ("clamp", "token")
    weights = (PLANTED["factor"] * (proximal - old)).exp().clamp(max=config.upper)
    return RejectionSamplingResult(mask, weights, 0.0)


def resolve(prox_logp_gt: Tensor | None, prox_logp_method: str, old_logp: Tensor, **_: Any) -> Any:
    """The proximal log-probs as given (the other ways are AReaL's business)."""
    assert prox_logp_method in ("recompute", "reuse_train_logp")
    assert prox_logp_gt is not None
    return prox_logp_gt


class PPOActor:
    def __init__(self, config: Any, engine: Any) -> None:
        self.config, self.engine, self.m2_threshold = config, engine, None

    def _ppo_update(self, data: dict[str, Any]) -> None:
        module = sys.modules[areal.ACTOR]
        options = {k: getattr(self.config, k) for k in OPTIONS}
        version = self.engine.get_version()
        loss = functools.partial(module.grpo_loss_fn, current_version=version, **options)  # type: ignore[attr-defined]
        self.engine.train_batch(data, loss, lambda x: x["loss_mask"].count_nonzero())


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch, version: str = "1.0.4") -> Iterator[Any]:
    """`areal.trainer.ppo.actor`."""
    modules: dict[str, dict[str, Any]] = {}
    if not REAL:
        modules = {
            areal.FUNCTIONAL: {
                "apply_rejection_sampling": their_weights,
                "RejectionSamplingResult": RejectionSamplingResult,
            },
            areal.ACTOR: {
                "grpo_loss_fn": theirs,
                "PPOActor": type("PPOActor", (), dict(vars(PPOActor))),
                "stats_tracker": Tracker(),
                "_resolve_proximal_logp": resolve,
            },
        }
    install(monkeypatch, version, modules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what AReaL's trackers and servers warn of when imported
        module = importlib.import_module(areal.ACTOR)
    yield module
    areal.uninstall()
    if REAL:
        module.stats_tracker.export_all()  # which also forgets
    for name in (areal.ACTOR, areal.FUNCTIONAL):
        WAITING.queues.pop(name, None)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch, process: Any) -> Iterator[Any]:
    with stand_in(monkeypatch) as module:
        yield module


def packed(of: Batch, *, pad: int = 3) -> dict[str, Any]:
    """AReaL's micro-batch: rows end to end, each after a prompt of `pad` tokens.

    Log-probs, masks and advantages stand where a token is predicted, ids and versions where it is.
    """
    b, t = of.mask.shape

    def at_prediction(x: Tensor, fill: float) -> Tensor:
        rows = torch.full((b, pad + t), fill, dtype=x.dtype)
        rows[:, pad - 1 : pad - 1 + t] = x
        return rows.reshape(-1)

    ids = torch.arange(b * (pad + t)).reshape(b, -1)
    versions = torch.full((b, pad + t), -1, dtype=torch.int32)
    versions[:, pad:] = torch.arange(t) % 4
    return {
        "input_ids": ids.reshape(-1),
        "versions": versions.reshape(-1),
        "loss_mask": at_prediction(of.mask.float(), 0.0),
        "logprobs": at_prediction(of.rollout, torch.nan),
        "prox_logp": at_prediction(of.old, torch.nan),
        "advantages": at_prediction(of.advantages, torch.nan),
        "cu_seqlens": torch.arange(b + 1, dtype=torch.int32) * (pad + t),
    }


def pushed(
    of: Batch, tokens: float, *, without: tuple[str, ...] = (), turn_ids: Tensor | None = None, **changed: Any
) -> Outcome:
    """The step's loss as AReaL's engine adds it up: loss times tokens over the step's tokens."""
    actor, pad = sys.modules[areal.ACTOR], 3
    current = of.current.clone().requires_grad_()
    before, after = (torch.full((len(current), n), torch.nan) for n in (pad - 1, 1))
    logprobs = torch.cat([before, current, after], 1).reshape(-1)
    data = {name: x for name, x in packed(of, pad=pad).items() if name not in without}
    data |= {} if turn_ids is None else {"turn_ids": turn_ids}
    entropy = torch.ones_like(logprobs, requires_grad=True)
    options = {**OPTIONS, "current_version": 5, "vocab_min_logits": None, "vocab_max_logits": None, **changed}
    loss = actor.grpo_loss_fn(logprobs, entropy, data, **options)
    return outcome(loss * data["loss_mask"].count_nonzero() / tokens, current, {})


def run(method: str | None, of: Batch, tokens: float, sequences: float = 1, **options: Any) -> Outcome:
    areal.install(method, **{"on_idle": "warn", **options})
    return pushed(of, tokens)


def correct(method: str, of: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    areal.install(method, **{"keep": "loss", "on_idle": "warn", **options})
    decided = functional().apply_rejection_sampling(of.old, of.rollout, of.mask, None, None)
    assert decided.loss_mask.dtype is torch.bool
    kept = (decided.behave_imp_weight > 0).sum() / of.mask.sum().clamp(min=1)
    assert decided.filtered_fraction >= float(1 - kept) - 1e-6 or not bool(of.mask.any())
    return decided.behave_imp_weight, decided.loss_mask


FRAMEWORK = Framework("areal", stand_in, run, served=109)
CORRECTING = Correcting("areal", stand_in, correct)


def plant(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change AReaL's own loss and weights: those of the stand-in, or of the real modules."""
    monkeypatch.setitem(PLANTED, "factor", factor)
    if not REAL:
        return
    module, made = sys.modules[areal.ACTOR], functional().RejectionSamplingResult
    own = module.ppo_actor_loss_fn

    def loss(*given: Any, **named: Any) -> Any:
        value, stat = own(*given, **named)
        return factor * value, stat

    monkeypatch.setattr(module, "ppo_actor_loss_fn", loss)
    monkeypatch.setattr(functional(), "RejectionSamplingResult", lambda mask, weight, f: made(mask, factor * weight, f))


@pytest.mark.parametrize("keep", ["nothing", "loss"])
def test_a_loss_that_is_not_known_is_refused_at_the_first_batch(
    actor: Any, keep: Any, monkeypatch: Any, process: Any
) -> None:
    of = batch()
    bounds = SimpleNamespace(action="mask", level="sequence", upper=2.0, lower=None, metric="ratio", agg="mean")

    def step() -> None:
        if keep == "nothing":
            pushed(of, counts(of)[0], c_clip=3.0)
        else:
            functional().apply_rejection_sampling(of.old, of.rollout, of.mask, None, bounds)

    areal.install("icepop", keep=keep, on_idle="warn")
    step()
    (hook,) = process
    assert hook.proved
    assert bounds.action == "mask"
    plant(1.01, monkeypatch)
    step()  # once per process
    hook.proved = False
    with pytest.raises(FrameworkError, match=r"areal: areal\..* is a loss that this adapter does not know"):
        step()


def test_padded_rows_are_the_packed_ones(actor: Any) -> None:
    areal.install("geo_mask", settings=SOME["geo_mask"])
    of = batch()
    data = packed(of)
    shape = (len(of.mask), -1)
    padded = {k: x.reshape(shape) for k, x in data.items() if k != "cu_seqlens"}
    current = torch.full_like(padded["logprobs"], torch.nan)
    current[:, 2:-1] = of.current
    loss_fn = functools.partial(actor.grpo_loss_fn, current_version=5, **OPTIONS)
    one = loss_fn(current.reshape(-1), torch.ones_like(current.reshape(-1)), data)
    two = loss_fn(current, torch.ones_like(current), padded)
    torch.testing.assert_close(one, two)
    del data["cu_seqlens"]
    with pytest.raises(ShapeError, match="cu_seqlens"):
        loss_fn(current.reshape(-1), torch.ones_like(current.reshape(-1)), data)


def test_ids_and_versions_are_those_of_the_predicted_tokens(
    actor: Any, process: list[LossHook], tmp_path: Path
) -> None:
    """`a3po` reads the version lag."""
    of = batch()
    result = run("a3po", of, *counts(of), record=tmp_path)
    process[-1].end_step()
    process[-1].adapter.recorder.close()
    record, versions = one(tmp_path), (torch.arange(of.mask.shape[1]) % 4).expand(of.mask.shape)[of.mask]
    assert torch.equal(record.rollout_version, versions)
    ids = packed(of)["input_ids"].reshape(len(of.mask), -1)[:, 3:]
    assert torch.equal(record.tokens, ids[of.mask])
    assert process[-1].metrics["offdrift/version_lag/mean"] == pytest.approx(float((5 - versions).float().mean()))
    assert bool(result.gradient.any())


class Engine:
    """An engine of one weight, which shifts every log-prob."""

    def __init__(self, of: Batch, pieces: list[list[int]]) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.of, self.pieces = of, pieces

    def get_version(self) -> int:
        return 5

    def train(self) -> None: ...

    def train_batch(self, mb: Any, loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        self.optimizer.zero_grad()
        total = max(1.0, float(self.of.mask.sum()))
        for index in self.pieces:
            piece = rows(self.of, index)
            data = {k: x.nan_to_num() for k, x in packed(piece).items()}
            current = torch.zeros(len(index), 3 + piece.mask.shape[1])
            current[:, 2:-1] = piece.current
            logprobs = current.reshape(-1) + self.weight
            loss = loss_fn(logprobs, torch.ones_like(logprobs), data)
            (loss * loss_weight_fn(data) / total).backward()
        self.optimizer.step()
        return {}


def update(actor: Any, of: Batch | None = None, **changed: Any) -> Any:
    """One `_ppo_update` of the batch, in two micro-batches; returns AReaL's statistics."""
    of = batch() if of is None else of
    own = {"use_cispo_loss": False, "log_agent_stats": False, "mask_no_eos_with_zero": False, "ppo_n_minibatches": 1}
    config = SimpleNamespace(**{**OPTIONS, **own, **changed})
    made = object.__new__(actor.PPOActor)
    made.config, made.m2_threshold = config, None
    made.engine = Engine(of, [[0, 1, 2], [3, 4, 5]])
    b, t = of.mask.shape
    padded = {k: x.reshape(b, -1) for k, x in packed(of).items() if k != "cu_seqlens"}
    extra = {"attention_mask": torch.ones(b, 3 + t), "rewards": torch.ones(b)}
    zero = torch.zeros(b, 3 + t)
    made._ppo_update({**padded, **extra, "kl_rewards": zero, "tot_rewards": zero})
    tracker = actor.stats_tracker
    return tracker.kept if isinstance(tracker, Tracker) else tracker.export_all()


def test_an_update_reports_metrics_and_what_contradicts_is_refused(actor: Any) -> None:
    areal.install("geo_mask", settings=SOME["geo_mask"])
    metrics = update(actor)
    (tokens,) = (x for name, x in metrics.items() if name.endswith("offdrift/batch/tokens"))
    (rejected,) = (x for name, x in metrics.items() if name.endswith("offdrift/gate/drop_frac_token"))
    assert tokens == float(batch().mask.sum())
    assert 0 < rejected < 1


@pytest.mark.parametrize(
    "changed",
    [
        {"use_sapo_loss": True},
        {"use_cispo_loss": True},
        {"m2_threshold": 0.1},
        {"rejection_sampling": object()},
        {"importance_sampling_level": "sequence"},
    ],
)
def test_settings_that_choose_areals_own_loss_are_refused_by_name(actor: Any, changed: dict[str, Any]) -> None:
    areal.install("geo_mask", settings=SOME["geo_mask"], on_idle="warn")
    with pytest.raises(MethodError, match=f"{next(iter(changed))}=.*turn it off"):
        pushed(batch(), 1.0, **changed)
    off = {"use_cispo_loss": False, "a_switch_of_tomorrow": False, "a_number_of_tomorrow": None}
    assert bool(pushed(batch(), 1.0, **off).gradient.any())


def test_arguments_that_the_adapter_has_never_heard_of_are_refused_by_name(actor: Any) -> None:
    areal.install("geo_mask", settings=SOME["geo_mask"], on_idle="warn")
    with pytest.raises(FrameworkError, match=r"areal passes tau_of_tomorrow=0\.5 to grpo_loss_fn"):
        pushed(batch(), 1.0, tau_of_tomorrow=0.5)
    with pytest.raises(MethodError, match="prox_logp_method='guess'"):
        pushed(batch(), 1.0, prox_logp_method="guess")


def test_what_was_proved_is_heard_under_areals_logging(actor: Any, monkeypatch: Any, capsys: Any) -> None:
    """At each logger of its own AReaL starts with a new root, at WARNING, without handlers."""
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging.Logger, "root", root)
    monkeypatch.setattr(logging.Logger, "manager", logging.Manager(root))
    monkeypatch.setitem(sys.modules, areal.LOGGING, ModuleType(areal.LOGGING))
    areal.install("geo_mask", settings=SOME["geo_mask"], on_idle="warn")
    pushed(batch(), 1.0)
    assert "offdrift.areal INFO: areal.trainer.ppo.actor.grpo_loss_fn: loss" in capsys.readouterr().out
    pushed(batch(), 1.0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["TokenMean", "SequenceMean"])
def test_another_mean_than_over_tokens_is_refused(actor: Any, name: str) -> None:
    """`actor.loss_aggregation`, which AReaL's main branch binds to each micro-batch."""
    areal.install("geo_mask", settings=SOME["geo_mask"], on_idle="warn")
    step = SimpleNamespace(bind=lambda data: type(name, (), {})())
    if name == "TokenMean":
        assert bool(pushed(batch(), 1.0, loss_step=step).gradient.any())
        return
    with pytest.raises(MethodError, match=rf"loss_aggregation.*{name}"):
        pushed(batch(), 1.0, loss_step=step)


def test_with_reused_logprobs_the_policy_at_this_update_is_the_proximal_one(actor: Any) -> None:
    """AReaL 2.0's `reuse_train_logp`: no forward pass of its own, so that there is no `prox_logp`."""
    if REAL and "reuse_train_logp" not in importlib.import_module("areal.utils.constants").PROX_LOGP_METHODS_ALL:
        pytest.skip("this AReaL is older than 2.0")
    areal.install("decoupled_ppo", on_idle="warn")
    of = batch()
    reused = pushed(of, *counts(of)[:1], prox_logp_method="reuse_train_logp", without=("prox_logp",))
    same = pushed(replace(of, old=of.current), *counts(of)[:1])
    assert torch.equal(reused.loss, same.loss)
    assert torch.equal(reused.gradient, same.gradient)
    assert not torch.equal(same.gradient, pushed(of, *counts(of)[:1]).gradient)


def test_turns_of_areal_are_turns(actor: Any) -> None:
    """AReaL 2.0 says of each token which turn it belongs to, where it is; the loss is about the next one."""
    of = batch()
    turns = torch.full((len(of.mask), 3 + of.mask.shape[1]), -1)
    turns[:, 3:] = torch.arange(of.mask.shape[1]) // 4
    areal.install("segment_tis", on_idle="warn")
    told = pushed(of, *counts(of)[:1], turn_ids=turns.reshape(-1))
    segments = Segments.from_lengths(of.mask.sum(1)).with_turns(turns[:, 3:][of.mask])
    logp = of.current[of.mask].clone().requires_grad_()
    lp = LogProbs.pack(of.rollout[of.mask], logp, of.old[of.mask], segments=segments)
    policy_loss(lp, replace(method("segment_tis"), aggregate="token_mean"), of.advantages[of.mask]).loss.backward()
    torch.testing.assert_close(told.gradient[of.mask], logp.grad)
    assert not torch.allclose(told.gradient, pushed(of, *counts(of)[:1]).gradient)


def test_scores_of_the_vocabulary_go_into_areals_statistics(actor: Any) -> None:
    areal.install("geo_mask", settings=SOME["geo_mask"], on_idle="warn")
    size = (3 + batch().mask.shape[1]) * len(batch().mask)
    pushed(batch(), 1.0, vocab_min_logits=torch.full((size,), -7.0))
    tracker = actor.stats_tracker
    kept = tracker.kept if isinstance(tracker, Tracker) else tracker.export_all()
    assert any("vocab_min_logits" in name for name in kept)


def test_areals_second_controller_whose_workers_we_do_not_start_is_refused(
    actor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = type("PPOActorControllerV2", (), {"ppo_update": lambda self, *_: "theirs"})
    monkeypatch.setattr(actor, "PPOActorControllerV2", controller, raising=False)
    areal.install("geo_mask")
    with pytest.raises(MethodError, match=r"actor\._version: v2.*set actor\._version: v1"):
        controller().ppo_update([])
    areal.uninstall()
    assert controller().ppo_update([]) == "theirs"


def functional() -> Any:
    return importlib.import_module(areal.FUNCTIONAL)


def test_packed_tokens_are_corrected_by_their_cuts(actor: Any) -> None:
    areal.install("geo_mask", keep="loss", settings=SOME["geo_mask"])
    of = batch()
    decide, cuts = functional().apply_rejection_sampling, torch.arange(7) * of.mask.shape[1]
    padded = decide(of.old, of.rollout, of.mask, None, None)
    packed = decide(of.old.flatten(), of.rollout.flatten(), of.mask.flatten(), cuts, None)
    assert torch.equal(packed.loss_mask, padded.loss_mask.flatten())
    assert packed.filtered_fraction == pytest.approx(1 - float(padded.loss_mask.sum() / of.mask.sum()))


def test_a_correction_that_is_never_called_is_dead(actor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not REAL:
        monkeypatch.setattr(actor, "grpo_loss_fn", lambda x, *_, **__: (x * 0).nan_to_num().sum())
    areal.install("geo_mask", keep="loss")
    with pytest.raises(LivenessError, match="never called"):
        update(actor)  # rejection_sampling is not set


@pytest.mark.parametrize("keep", ["nothing", "loss"])
def test_a_share_without_a_trainable_token_is_no_dead_part(
    actor: Any, monkeypatch: pytest.MonkeyPatch, keep: Any
) -> None:
    areal.install("geo_mask", keep=keep)
    of = replace(batch(), mask=torch.zeros_like(batch().mask))
    if keep == "loss":
        functional().apply_rejection_sampling(of.old, of.rollout, of.mask, None, None)
        if not REAL:
            monkeypatch.setattr(actor, "grpo_loss_fn", lambda x, *_, **__: (x * 0).nan_to_num().sum())
    assert not [name for name in update(actor, of) if "offdrift" in name]


def test_uninstall_gives_their_functions_back(actor: Any) -> None:
    before = actor.grpo_loss_fn, actor.PPOActor._ppo_update
    decide = functional().apply_rejection_sampling
    areal.install("dapo")
    assert actor.grpo_loss_fn is not before[0]
    areal.install("geo_mask", keep="loss")  # takes the place of the first
    assert actor.grpo_loss_fn is before[0]
    assert functional().apply_rejection_sampling is not decide
    areal.uninstall()
    assert (actor.grpo_loss_fn, actor.PPOActor._ppo_update) == before
    assert functional().apply_rejection_sampling is decide


def test_the_command_installs_and_goes_on_as_areals_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, with a stand-in for AReaL's server that says what it finds."""
    server = "import sys\nfrom offdrift.adapters.contrib import areal\n"
    server += "print(__name__, sys.argv[1:], areal._INSTALLED[0][0].method)\n"
    path = fake_site(tmp_path, "areal", "1.0.4", {"infra/rpc/rpc_server.py": server})
    done = subprocess.run(
        [sys.executable, "-m", "offdrift.adapters.contrib.areal", "--port", "0"],
        env={**os.environ, "PYTHONPATH": path, "OFFDRIFT_METHOD": "a3po"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "__main__ ['--port', '0'] a3po\n", done.stderr
