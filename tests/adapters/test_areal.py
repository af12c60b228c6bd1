"""AReaL's loss and rejection sampling, against the contract of AReaL 1.0.4 (4aef98d8d).

The stand-in is written from that contract: `PPOActor._ppo_update` hands `grpo_loss_fn`, by the name in
its own module, to the engine, which weighs micro-batches by their tokens; `ppo_actor_loss_fn` calls
`apply_rejection_sampling` likewise. Where AReaL itself can be imported, the tests run against it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters.contrib import areal
from offdrift.adapters.frameworks import WAITING
from offdrift.errors import EvidenceError, LivenessError, MethodError, ShapeError
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS, override
from tests.adapters import loss_laws as laws
from tests.adapters.hooked import ROOT, Batch, batch, install, poisoned, process

__all__ = ["process"]

REAL = importlib.util.find_spec("areal") is not None
OPTIONS = {
    "eps_clip": 0.2,
    "eps_clip_higher": None,
    "c_clip": None,
    "rejection_sampling": None,
    "m2_threshold": None,
    "importance_sampling_level": "token",
    "prox_logp_method": "recompute",
    "use_sapo_loss": False,
    "sapo_tau_pos": 1.0,
    "sapo_tau_neg": 1.05,
    "use_decoupled_loss": True,
}


@dataclass
class RejectionSamplingResult:
    loss_mask: Tensor
    behave_imp_weight: Tensor
    filtered_fraction: float


class Tracker:
    """Statistics as AReaL keeps them: denominators are masks, the others name one."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def denominator(self, **masks: Tensor) -> None:
        assert all(m.dtype is torch.bool for m in masks.values())
        self.seen.update(masks)

    def stat(self, denominator: str, **values: Tensor) -> None:
        assert all(v.shape == self.seen[denominator].shape for v in values.values())
        assert all(v.dtype is torch.float32 for v in values.values())

    def scalar(self, **values: float) -> None:
        self.seen.update({k: float(v) for k, v in values.items()})


def theirs(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("AReaL's own function was called")


def resolve(prox_logp_gt: Tensor | None, prox_logp_method: str, old_logp: Tensor, **_: Any) -> Any:
    """The proximal log-probs as given (the other ways are AReaL's business)."""
    assert prox_logp_method == "recompute"
    assert prox_logp_gt is not None
    return prox_logp_gt


class PPOActor:
    def __init__(self, config: Any, engine: Any) -> None:
        self.config, self.engine, self.m2_threshold = config, engine, None

    def _ppo_update(self, data: dict[str, Any]) -> None:
        module = sys.modules[areal.ACTOR]
        given = {k: getattr(self.config, k) for k in OPTIONS}
        version = self.engine.get_version()
        loss = functools.partial(module.grpo_loss_fn, current_version=version, **given)  # type: ignore[attr-defined]
        self.engine.train_batch(data, loss, lambda x: x["loss_mask"].count_nonzero())


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch, process: None) -> Iterator[Any]:
    """`areal.trainer.ppo.actor`."""
    modules: dict[str, dict[str, Any]] = {}
    if not REAL:
        modules = {
            "areal__utils__functional__functional": {
                "apply_rejection_sampling": theirs,
                "RejectionSamplingResult": RejectionSamplingResult,
            },
            "areal__trainer__ppo__actor": {
                "grpo_loss_fn": theirs,
                "PPOActor": type("PPOActor", (), dict(vars(PPOActor))),
                "stats_tracker": Tracker(),
                "_resolve_proximal_logp": resolve,
            },
        }
    install(monkeypatch, "1.0.4", **modules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what AReaL's trackers and servers warn of when imported
        module = importlib.import_module(areal.ACTOR)
    yield module
    areal.uninstall()
    if REAL:
        module.stats_tracker.export_all()  # which also forgets
    for name in (areal.ACTOR, areal.FUNCTIONAL):
        WAITING.queues.pop(name, None)


def packed(given: Batch, *, pad: int = 3) -> dict[str, Any]:
    """AReaL's micro-batch: rows end to end, each after a prompt of `pad` tokens.

    Log-probs, masks and advantages stand where a token is predicted, ids and versions where it is.
    """
    b, t = given.mask.shape

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
        "loss_mask": at_prediction(given.mask.float(), 0.0),
        "logprobs": at_prediction(given.rollout, torch.nan),
        "prox_logp": at_prediction(given.old, torch.nan),
        "advantages": at_prediction(given.advantages, torch.nan),
        "cu_seqlens": torch.arange(b + 1, dtype=torch.int32) * (pad + t),
    }


def runner(actor: Any, *, pad: int = 3, **changed: Any) -> laws.Run:
    """The step's loss as AReaL's engine adds it up: loss times tokens over the step's tokens."""

    def run(given: Batch, tokens: float, sequences: float) -> tuple[float, Tensor]:
        current = given.current.clone().requires_grad_()
        b, _t = given.mask.shape
        before = torch.full((b, pad - 1), torch.nan)
        logprobs = torch.cat([before, current, torch.full((b, 1), torch.nan)], 1).reshape(-1)
        data = packed(given, pad=pad)
        loss_fn = functools.partial(actor.grpo_loss_fn, current_version=5, **{**OPTIONS, **changed})
        entropy = torch.ones_like(logprobs, requires_grad=True)
        loss = loss_fn(logprobs, entropy, data, vocab_min_logits=None, vocab_max_logits=None)
        loss = loss * data["loss_mask"].count_nonzero() / tokens
        loss.backward()
        assert current.grad is not None
        return float(loss.detach()), current.grad

    return run


def by_token(name: str, settings: dict[str, Any] | None = None) -> Any:
    """The row as AReaL has it: a token mean."""
    return override(METHODS[name], {**(settings or {}), "aggregate": "token_mean"})


@pytest.mark.parametrize("name", ["dapo", "icepop", "seq_tis", "gspo", "trm_max_k2"])
def test_loss_is_a_token_mean_of_the_method(actor: Any, name: str) -> None:
    areal.install(name)
    laws.check_loss(runner(actor), by_token(name))


@pytest.mark.parametrize("name", ["icepop", "geo_mask", "seq_tis"])
def test_laws(actor: Any, name: str) -> None:
    areal.install(name, settings=laws.SOME.get(name, {}))
    run = runner(actor)
    laws.check_padding(run)
    laws.check_order(run)
    laws.check_split(run)
    laws.check_all_masked(run)
    laws.check_bad_advantages(run)


@pytest.mark.parametrize("name", ["icepop", "geo_mask", "seq_tis"])
def test_unscored_tokens(actor: Any, name: str) -> None:
    areal.install(name, settings=laws.SOME.get(name, {}))
    laws.check_unscored(runner(actor))


def test_all_rejected(actor: Any) -> None:
    areal.install("geo_mask", settings=laws.REJECTS_ALL)
    laws.check_all_rejected(runner(actor))


def test_padded_rows_are_the_packed_ones(actor: Any) -> None:
    areal.install("geo_mask", settings=laws.SOME["geo_mask"])
    given = batch()
    data = packed(given)
    shape = (len(given.mask), -1)
    padded = {k: x.reshape(shape) for k, x in data.items() if k != "cu_seqlens"}
    current = torch.full_like(padded["logprobs"], torch.nan)
    current[:, 2:-1] = given.current
    loss_fn = functools.partial(actor.grpo_loss_fn, current_version=5, **OPTIONS)
    one = loss_fn(current.reshape(-1), torch.ones_like(current.reshape(-1)), data)
    two = loss_fn(current, torch.ones_like(current), padded)
    torch.testing.assert_close(one, two)
    del data["cu_seqlens"]
    with pytest.raises(ShapeError, match="cu_seqlens"):
        loss_fn(current.reshape(-1), torch.ones_like(current.reshape(-1)), data)


def test_versions_are_those_of_the_predicted_tokens(actor: Any) -> None:
    areal.install("a3po")  # reads version_lag
    given = batch()
    data = packed(given)
    logprobs = LogProbs.pack(data["logprobs"], logp_old=data["prox_logp"], mask=data["loss_mask"], segments=areal.Segments(data["cu_seqlens"].long()))  # fmt: skip
    also, version_lag = areal._per_token(data, logprobs, 5)
    want = (torch.arange(given.mask.shape[1]) % 4).expand(given.mask.shape)[given.mask]
    assert len(want) > 30
    assert torch.equal(also["rollout_version"], want)
    assert torch.equal(version_lag, 5 - want)
    columns = torch.arange(given.mask.numel()).reshape(given.mask.shape)
    ids = data["input_ids"].reshape(len(given.mask), -1)[:, 3:].reshape(-1)[columns[given.mask]]
    assert torch.equal(also["tokens"], ids)
    loss, gradient = runner(actor)(given, *laws.counts(given))
    assert loss != 0
    assert bool(gradient.any())


class Engine:
    """An engine of one weight, which shifts every log-prob."""

    def __init__(self, given: Batch, pieces: list[list[int]]) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.given, self.pieces = given, pieces

    def get_version(self) -> int:
        return 5

    def train(self) -> None: ...

    def train_batch(self, mb: Any, loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        self.optimizer.zero_grad()
        total = max(1.0, float(self.given.mask.sum()))
        for rows in self.pieces:
            piece = laws.rows(self.given, torch.tensor(rows))
            data = {k: x.nan_to_num() for k, x in packed(piece).items()}
            current = torch.zeros(len(rows), 3 + piece.mask.shape[1])
            current[:, 2:-1] = piece.current
            logprobs = current.reshape(-1) + self.weight
            loss = loss_fn(logprobs, torch.ones_like(logprobs), data)
            (loss * loss_weight_fn(data) / total).backward()
        self.optimizer.step()
        return {}


def update(actor: Any, given: Batch | None = None, **changed: Any) -> Any:
    """One `_ppo_update` of the batch, in two micro-batches; returns AReaL's statistics."""
    given = batch() if given is None else given
    own = {"log_agent_stats": False, "mask_no_eos_with_zero": False, "ppo_n_minibatches": 1}
    config = SimpleNamespace(**{**OPTIONS, **own, **changed})
    made = object.__new__(actor.PPOActor)
    made.config, made.m2_threshold = config, None
    made.engine = Engine(given, [[0, 1, 2], [3, 4, 5]])
    b, t = given.mask.shape
    rows = {k: x.reshape(b, -1) for k, x in packed(given).items() if k != "cu_seqlens"}
    extra = {"attention_mask": torch.ones(b, 3 + t), "rewards": torch.ones(b)}
    zero = torch.zeros(b, 3 + t)
    made._ppo_update({**rows, **extra, "kl_rewards": zero, "tot_rewards": zero})
    tracker = actor.stats_tracker
    return tracker.seen if isinstance(tracker, Tracker) else tracker.export_all()


def test_an_update_reports_metrics_and_records(actor: Any, tmp_path: Path) -> None:
    areal.install("geo_mask", settings=laws.SOME["geo_mask"], record=tmp_path)
    seen = update(actor)
    name = next(k for k in seen if k.endswith("offdrift/batch/tokens"))
    assert seen[name] == float(batch().mask.sum())
    name = next(k for k in seen if k.endswith("offdrift/gate/drop_frac_token"))
    assert 0 < seen[name] < 1
    areal._hook().adapter.close()
    assert len(list(tmp_path.glob("*.parquet"))) == 1


def test_copies_of_log_probs_are_dead_parts(actor: Any) -> None:
    areal.install("icepop")
    given = batch()
    same = Batch(given.old, given.old, given.current, given.advantages, given.mask)
    runner(actor)(same, *laws.counts(same))
    with pytest.raises(LivenessError, match="cannot act"):
        areal._hook().end_step()


# -- the correction alone -------------------------------------------------------------------------


def functional() -> Any:
    return importlib.import_module(areal.FUNCTIONAL)


def test_correction_alone_by_hand(actor: Any) -> None:
    areal.install("icepop", keep="loss")
    decide = functional().apply_rejection_sampling
    log2 = 0.6931471805599453
    behave = torch.tensor([-3.0, -3.0, -3.0, -3.0, torch.nan])
    # ratios 1, 2, 1/4 (outside [0.5, 5]), 8 (outside), masked
    proximal = behave + torch.tensor([0.0, log2, -2 * log2, 3 * log2, torch.nan])
    mask = torch.tensor([True, True, True, True, False])
    found = decide(proximal, behave, mask, torch.tensor([0, 2, 5]), None)
    assert found.behave_imp_weight.tolist() == pytest.approx([1.0, 2.0, 0.0, 0.0, 0.0])
    assert found.loss_mask.tolist() == [True, True, True, True, False]  # a weight of 0 is no gate
    assert found.loss_mask.dtype is torch.bool


def test_gates_alone_keep_whole_sequences(actor: Any) -> None:
    areal.install("geo_mask", keep="loss", settings=laws.SOME["geo_mask"])
    given = batch()
    decide = functional().apply_rejection_sampling
    found = decide(given.old, given.rollout, given.mask, None, None)
    mean = (given.old - given.rollout).where(given.mask, 0.0).sum(1) / given.mask.sum(1).clamp(min=1)
    inside = (mean.exp() >= 0.9) & (mean.exp() <= 1.1)
    want = given.mask & inside[:, None]
    assert 0 < int(want.sum()) < int(given.mask.sum())
    assert torch.equal(found.loss_mask, want)
    assert torch.equal(found.behave_imp_weight, want.float())
    assert found.filtered_fraction == pytest.approx(1 - float(want.sum() / given.mask.sum()))
    nan = poisoned(given.old, given.mask, torch.nan), poisoned(given.rollout, given.mask, torch.inf)
    again = decide(*nan, given.mask, None, None)
    assert torch.equal(again.loss_mask, want)
    none = decide(given.old, given.rollout, torch.zeros_like(given.mask), None, None)
    assert not bool(none.loss_mask.any())
    assert none.filtered_fraction == 0.0


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
    given = replace(batch(), mask=torch.zeros_like(batch().mask))
    if keep == "loss":
        functional().apply_rejection_sampling(given.old, given.rollout, given.mask, None, None)
        if not REAL:
            monkeypatch.setattr(actor, "grpo_loss_fn", lambda x, *_, **__: (x * 0).nan_to_num().sum())  # fmt: skip
    assert not [name for name in update(actor, given) if "offdrift" in name]


def test_what_the_correction_cannot_have_is_refused(actor: Any) -> None:
    with pytest.raises(EvidenceError, match=r'version_lag.*use keep="nothing"'):
        areal.install("a3po", keep="loss")  # its proximal policy is interpolated by lag
    with pytest.raises(EvidenceError, match="no current ones"):
        areal.install("seq_tis", keep="loss")
    with pytest.raises(MethodError, match="nothing to do"):
        areal.install("dapo", keep="loss")


# -- set-up ---------------------------------------------------------------------------------------


def test_refusals(actor: Any) -> None:
    with pytest.raises(EvidenceError, match="divergences"):
        areal.install("trm_max")
    with pytest.raises(MethodError, match="whole step"):
        areal.install("m2po")
    areal.install("dapo")
    given = batch()
    for changed in ({"use_sapo_loss": True}, {"m2_threshold": 0.1}, {"rejection_sampling": object()}):
        with pytest.raises(MethodError, match="turn them off"):
            runner(actor, **changed)(given, *laws.counts(given))


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
    server = tmp_path / "areal" / "infra" / "rpc"
    server.mkdir(parents=True)
    (tmp_path / "areal" / "__init__.py").touch()
    (server / "rpc_server.py").write_text(
        "import sys\nfrom offdrift.adapters.contrib import areal\n"
        "print(__name__, sys.argv[1:], areal._INSTALLED[0][0].method)\n"
    )
    info = tmp_path / "areal-1.0.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: areal\nVersion: 1.0.4\n")
    path = f"{tmp_path}:{ROOT / 'src'}"
    done = subprocess.run(
        [sys.executable, "-m", "offdrift.adapters.contrib.areal", "--port", "0"],
        env={**os.environ, "PYTHONPATH": path, "OFFDRIFT_METHOD": "a3po"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "__main__ ['--port', '0'] a3po\n", done.stderr
