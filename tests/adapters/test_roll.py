"""ROLL's workers and correction, against the contract of ROLL 0.3.0 (8eb27cc2).

The stand-in is written from that contract: workers compute log-probs through their strategy and divide
by the step's counts in `meta_info`; they import `compute_train_infer_correction` by name, and pipelines
call it on the whole batch without counts. The configuration's `pg_variant` is None unless it is set, as
in ROLL, and the PG workers refuse None, as in ROLL. Where ROLL itself can be imported, the tests run
against it.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters.contrib import roll
from offdrift.errors import EvidenceError, FrameworkError, LivenessError, MethodError
from offdrift.methods import METHODS
from tests.adapters import loss_laws as laws
from tests.adapters.hooked import Batch, batch, install, optimizer_step, poisoned, process

__all__ = ["process"]

REAL = importlib.util.find_spec("roll") is not None


class BaseWorker:
    """ROLL's base worker, as far as a loss is concerned."""

    home = ""
    """The module whose `compute_train_infer_correction` the worker calls."""

    def get_old_log_probs_with_cache(self, data: Any, log_probs: Tensor) -> Tensor:
        return data.batch["old_log_probs"]

    def loss_func(self, data: Any, output_tensor: Tensor) -> Any:
        config = self.pipeline_config  # type: ignore[attr-defined]
        mask = data.batch["response_mask"][:, 1:].long()
        final = data.batch.get("final_response_mask", mask)
        tokens, samples = (data.meta_info[k]["response_mask"] for k in ("batch_num_tokens", "global_valid_samples"))
        logp = self.strategy.op_compute_log_probs(  # type: ignore[attr-defined]
            logits=output_tensor, input_ids=data.batch["input_ids"], attention_mask=data.batch["response_mask"]
        )
        old = self.get_old_log_probs_with_cache(data, logp)
        infer = data.batch.get("infer_logprobs", old)
        found = getattr(sys.modules[self.home], roll.COMPUTE)(
            cfg=config.train_infer_correction,
            response_mask=mask,
            old_log_probs=old,
            infer_log_probs=infer if len(infer) else old,
            global_valid_samples=samples,
            global_valid_tokens=tokens,
        )
        weight, keep, metrics = found
        each = self.token_loss(logp, old, data.batch["advantages"]) * weight
        assert config.loss_agg_mode == "seq-mean-token-mean"
        final = final.long() * keep.long()
        per = (each * final).sum(1) / (final.sum(1) + 1e-8)
        return per.sum() / (samples + 1e-8), metrics

    def token_loss(self, logp: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        ratio, clip = (logp - old).exp(), self.pipeline_config.pg_clip  # type: ignore[attr-defined]
        return -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)

    def compute_sample_weights(self, data: Any, response_mask: Tensor) -> Tensor:
        if not self.pipeline_config.difficulty_loss_weight:  # type: ignore[attr-defined]
            return torch.ones(len(response_mask))
        return data.non_tensor_batch["weights"]


class PG(BaseWorker):
    """A worker that reads `pg_variant`, which is there, and None unless it is set."""

    def token_loss(self, logp: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        config = self.pipeline_config  # type: ignore[attr-defined]
        variant = getattr(config.actor_train, "pg_variant", "vanilla")
        if variant == "ppo":
            return super().token_loss(logp, old, advantages)
        if variant == "vanilla":
            return -advantages * logp
        raise ValueError(f"Unsupported pg_variant: {variant}")


class ActorWorker(BaseWorker):
    home = roll.RLVR


class ActorPGWorker(PG):
    home = roll.RLVR_PG


class AgenticActorWorker(BaseWorker):
    home = roll.AGENTIC


class AgenticActorPGWorker(PG):
    home = roll.AGENTIC_PG


def theirs(*_: Any, **__: Any) -> Any:
    raise AssertionError("ROLL's own correction was called")


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch, process: None) -> Iterator[None]:
    modules: dict[str, dict[str, Any]] = {}
    if not REAL:
        compute = {roll.COMPUTE: theirs}
        workers = {
            roll.RLVR: {"ActorWorker": ActorWorker},
            roll.RLVR_PG: {"ActorPGWorker": ActorPGWorker},
            roll.AGENTIC: {"ActorWorker": AgenticActorWorker},
            roll.AGENTIC_PG: {"ActorWorker": AgenticActorPGWorker},
        }
        modules = {k.replace(".", "__"): {**v, **compute} for k, v in workers.items()}
        modules["roll__utils__train_infer_corrections"] = compute
    install(monkeypatch, "0.3.0", **modules)
    caches = roll._worker, roll._loss_hook, roll._correction_hook
    for cache in caches:
        cache.cache_clear()
    yield
    roll.uninstall()
    for cache in caches:
        cache.cache_clear()


def configured(**changed: Any) -> Any:
    own = SimpleNamespace(is_weight=SimpleNamespace(enabled=False), filters=[])
    plain = {
        "train_infer_correction": own,
        "use_kl_loss": False,
        "entropy_loss_coef": 0.0,
        "rl_loss_coef": 1.0,
        "difficulty_loss_weight": False,
        "length_loss_weight": False,
        "enable_old_logprobs_recompute": True,
        "actor_train": SimpleNamespace(pg_variant=None),  # `WorkerConfig`'s default
        "loss_agg_mode": "seq-mean-token-mean",
        "importance_sampling": "token",
        "ratio_type": "token",
        "use_pg_clip_range": False,
        "pg_clip": 0.2,
        "dual_clip_loss": False,
    }
    return SimpleNamespace(**{**plain, **changed})


class Strategy:
    """Log-probs as the strategies return them: of tokens 1, 2, ..."""

    def op_compute_log_probs(self, logits: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        assert logits.shape == input_ids.shape == attention_mask.shape
        return logits[:, :-1]

    def op_compute_entropy(self, logits: Tensor, attention_mask: Tensor) -> Tensor:
        return torch.zeros_like(logits[:, :-1])


def worker(name: str = "Worker", **changed: Any) -> Any:
    made = object.__new__(getattr(roll, name))
    made.strategy, made.pipeline_config = Strategy(), configured(**changed)
    # ROLL's constructors, which need Ray, set its PG workers' caches; metrics by trajectory need one.
    made._pg_config_cache, made._pg_variant_logged = {}, True
    made._get_pg_metrics = lambda *_, **__: {}
    return made


def data_of(given: Batch, tokens: float, sequences: float, *, final: bool = True) -> Any:
    """ROLL's `DataProto`: masks of whole rows, everything else of tokens 1, 2, ..."""
    b, t = given.mask.shape
    whole = torch.cat([torch.ones(b, 1, dtype=torch.long), given.mask.long()], 1)
    fields = {
        "input_ids": torch.arange(b * (t + 1)).reshape(b, -1),
        "response_mask": whole,
        "old_log_probs": given.old,
        "infer_logprobs": given.rollout,
        "ref_log_probs": given.old,
        "advantages": given.advantages,
    }
    if final:  # ROLL trains on this mask, and measures on the other
        fields["response_mask"] = torch.ones_like(whole)
        fields["final_response_mask"] = given.mask.long()
    named = "final_response_mask" if final else "response_mask"
    other = {"response_mask": -1.0} if final else {}
    meta = {"batch_num_tokens": {**other, named: tokens}, "global_valid_samples": {**other, named: sequences}}
    return SimpleNamespace(batch=fields, meta_info=meta, non_tensor_batch={})


def runner(made: Any, *, final: bool = True) -> laws.Run:
    def run(given: Batch, tokens: float, sequences: float) -> tuple[float, Tensor]:
        current = given.current.clone().requires_grad_()
        logits = torch.cat([current, torch.full_like(current[:, :1], torch.nan)], 1)
        loss, metrics = made.loss_func(data_of(given, tokens, sequences, final=final), logits)
        loss.backward()
        assert current.grad is not None
        assert all(type(x) is float for x in metrics.values())
        assert metrics["actor/offdrift/loss@sum"] == float(loss.detach())
        return float(loss.detach()), current.grad

    return run


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(method: str, **settings: Any) -> None:
        monkeypatch.setenv("OFFDRIFT_METHOD", method)
        text = ",".join(f"{k}={v}" for k, v in settings.items())
        monkeypatch.setenv("OFFDRIFT_SETTINGS", text)

    return choose


@pytest.mark.parametrize("name", ["Worker", "AgenticWorker"])
@pytest.mark.parametrize("method", ["dapo", "icepop", "grpo", "seq_tis"])
def test_loss_is_the_methods_over_the_steps_counts(choose: Any, name: str, method: str) -> None:
    choose(method)
    laws.check_loss(runner(worker(name), final=name == "Worker"), METHODS[method])


@pytest.mark.parametrize("method", ["icepop", "geo_mask"])
def test_laws(choose: Any, method: str) -> None:
    choose(method, **laws.SOME.get(method, {}))
    run = runner(worker())
    laws.check_padding(run)
    laws.check_order(run)
    laws.check_split(run)
    laws.check_all_masked(run)
    laws.check_bad_advantages(run)


@pytest.mark.parametrize("method", ["icepop", "geo_mask"])
def test_unscored_tokens(choose: Any, method: str) -> None:
    choose(method, **laws.SOME.get(method, {}))
    laws.check_unscored(runner(worker()))


def test_unscored_tokens_are_not_corrected(choose: Any) -> None:
    choose("icepop")
    roll.install()
    given = batch()
    for value in laws.UNSCORED:
        with_them, without = laws.unscored(given, value)
        weight, keep, _ = compute()(ON, given.mask.long(), given.old, with_them.rollout, 5, 30)
        rest = compute()(ON, without.mask.long(), given.old, given.rollout, 5, 30)
        assert torch.equal(weight, rest[0])
        assert not bool(weight[given.mask & ~without.mask].any())
        assert not bool(keep[given.mask & ~without.mask].any())


def test_all_rejected(choose: Any) -> None:
    choose("geo_mask", **laws.REJECTS_ALL)
    laws.check_all_rejected(runner(worker()))


def test_sample_weights_multiply_the_loss(choose: Any) -> None:
    choose("dapo")
    given = batch()
    data = data_of(given, *laws.counts(given))
    made = worker(difficulty_loss_weight=True)
    if REAL:
        pytest.skip("ROLL has weights of its own")
    data.non_tensor_batch["weights"] = torch.full((6,), 3.0)
    logits = torch.cat([given.current, given.current[:, :1]], 1)
    loss, _ = made.loss_func(data, logits)
    want, _ = laws.expected(METHODS["dapo"], given, *laws.counts(given))
    assert float(loss) == pytest.approx(3 * want, rel=1e-5)
    choose("prime_rl")  # its loss is not proportional to the advantage
    roll._loss_hook.cache_clear()
    with pytest.raises(MethodError, match="difficulty_loss_weight"):
        made.loss_func(data, logits)


def test_classes_can_be_named_and_travel(choose: Any) -> None:
    choose("icepop")
    assert pickle.loads(pickle.dumps(roll.Worker)) is roll.Worker  # our own bytes
    bases = {}
    for name, (module, base, _) in roll.WORKERS.items():
        bases[name] = getattr(importlib.import_module(module), base)
        assert getattr(roll, name).__mro__[2] is bases[name]
    assert bases["Worker"] is bases["CorrectingWorker"]
    assert bases["Worker"].__module__ in (roll.RLVR, __name__)
    assert roll.Worker.loss_func is not bases["Worker"].loss_func
    with pytest.raises(AttributeError, match="Wroker"):
        getattr(roll, "Wroker")  # noqa: B009


def test_metrics_add_up_to_those_of_the_step(choose: Any) -> None:
    choose("geo_mask", **laws.SOME["geo_mask"])
    made, given = worker(), batch()
    parts = []
    for i in ([0, 3], [1], [2, 4], [5]):
        piece = laws.rows(given, torch.tensor(i))
        logits = torch.cat([piece.current, piece.current[:, :1]], 1)
        parts.append(made.loss_func(data_of(piece, *laws.counts(given)), logits)[1])
    optimizer_step()
    step = roll._loss_hook().metrics
    names = {k for p in parts for k in p} - {"actor/offdrift/loss@sum"}
    assert len(names) >= 6
    for name in names:
        ours = name.removeprefix("actor/").removesuffix("@sum")
        assert sum(p.get(name, 0.0) for p in parts) == pytest.approx(step[ours], rel=1e-5)


def test_missing_log_probs_are_named(choose: Any) -> None:
    choose("icepop")
    given = batch()
    logits = torch.cat([given.current, given.current[:, :1]], 1)
    data = data_of(given, *laws.counts(given))
    del data.batch["infer_logprobs"]  # ROLL would compare the old policy with itself
    with pytest.raises(EvidenceError, match=r"infer_logprobs are missing.*generating_args\.logprobs: 1"):
        worker().loss_func(data, logits)
    data = data_of(given, *laws.counts(given))
    data.batch["infer_logprobs"] = data.batch["old_log_probs"]
    worker().loss_func(data, logits)
    with pytest.raises(LivenessError, match="cannot act"):
        optimizer_step()


@pytest.mark.parametrize(
    "changed",
    [
        {"use_kl_loss": True},
        {"entropy_loss_coef": 0.01},
        {"actor_train": SimpleNamespace(pg_variant="topr")},
        {"dual_clip_loss": True},
        {"importance_sampling": "seq"},
        {"ratio_type": "segment"},
    ],
)
def test_their_own_terms_are_refused(choose: Any, changed: dict[str, Any]) -> None:
    choose("icepop")
    given = batch()
    with pytest.raises(MethodError, match=next(iter(changed))):
        runner(worker(**changed))(given, *laws.counts(given))


def test_their_own_correction_is_refused(choose: Any) -> None:
    choose("icepop")
    given = batch()
    own = SimpleNamespace(is_weight=SimpleNamespace(enabled=True), filters=[SimpleNamespace(enabled=True)])
    with pytest.raises(MethodError, match=r"is_weight\.enabled, train_infer_correction\.filters"):
        runner(worker(train_infer_correction=own))(given, *laws.counts(given))


# -- the correction alone -------------------------------------------------------------------------

ON = SimpleNamespace(is_weight=SimpleNamespace(enabled=True), filters=[])


def compute() -> Any:
    return getattr(importlib.import_module(roll.CORRECTIONS), roll.COMPUTE)


def test_correction_by_hand(choose: Any) -> None:
    choose("icepop")
    roll.install()
    log2 = 0.6931471805599453
    infer = torch.tensor([[-3.0, -3.0], [-3.0, -3.0]])
    # ratios 1, 2; 8 (outside [0.5, 5]), masked
    old = infer + torch.tensor([[0.0, log2], [3 * log2, torch.nan]])
    mask = torch.tensor([[1, 1], [1, 0]])
    weight, keep, metrics = compute()(ON, mask, old, infer, 2, 3)
    assert weight.flatten().tolist() == pytest.approx([1.0, 2.0, 0.0, 0.0])
    assert torch.equal(keep, mask)
    assert metrics == {}


def test_rejected_tokens_weigh_nothing(choose: Any) -> None:
    """ROLL's token mean adds up whole rows whatever the mask says: the weight must reject."""
    choose("geo_mask", **laws.SOME["geo_mask"])
    roll.install()
    given = batch()
    weight, keep, metrics = compute()(ON, given.mask.long(), given.old, given.rollout)
    mean = (given.old - given.rollout).where(given.mask, 0.0).sum(1) / given.mask.sum(1).clamp(min=1)
    want = given.mask & ((mean.exp() >= 0.9) & (mean.exp() <= 1.1))[:, None]
    assert 0 < int(want.sum()) < int(given.mask.sum())
    assert torch.equal(keep, want.long())
    assert torch.equal(weight, want.float())
    share = 1 - float(want.sum() / given.mask.sum())
    assert metrics["actor/offdrift/gate/drop_frac_token"] == pytest.approx(share)
    nan = poisoned(given.old, given.mask, torch.nan), poisoned(given.rollout, given.mask, 1e9)
    again, its, _ = compute()(ON, given.mask.long(), *nan, 5, 30)
    assert torch.equal(again, weight)
    assert torch.equal(its, keep)
    none = torch.zeros_like(given.mask)
    weight, keep, metrics = compute()(ON, none, given.old, given.rollout)
    assert not bool(weight.any())
    assert not bool(keep.any())
    assert metrics == {}


CORRECTING = [name for name, (*_, ours) in roll.WORKERS.items() if ours is not roll._Loss]


@pytest.mark.parametrize("name", CORRECTING)
def test_a_correcting_worker_trains_rolls_loss_under_the_methods_weights(choose: Any, name: str) -> None:
    """From the default configuration; a PG worker needs its variant, and has no default."""
    choose("icepop")
    given = batch(spread=0.6)
    variant = {"actor_train": SimpleNamespace(pg_variant="ppo")} if "PG" in name else {}
    made = worker(name, train_infer_correction=ON, enable_old_logprobs_recompute=False, **variant)
    data = data_of(given, *laws.counts(given), final="Agentic" not in name)
    data.batch["response_mask"] = data_of(given, 0, 0, final=False).batch["response_mask"]
    tokens, samples = laws.counts(given)
    data.meta_info["batch_num_tokens"] = {"response_mask": tokens}
    data.meta_info["global_valid_samples"] = {"response_mask": samples}
    current = given.current.clone().requires_grad_()
    loss, _ = made.loss_func(data, torch.cat([current, current[:, :1]], 1))
    loss.backward()
    weight = (given.old - given.rollout).exp()
    keep = given.mask & (weight >= 0.5) & (weight <= 5)
    assert 0 < int(keep.sum()) < int(given.mask.sum())
    ratio, a = (given.current - given.old).exp(), given.advantages
    each = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) * weight.where(keep, 0.0)
    per = each.where(given.mask, 0.0).sum(1) / given.mask.sum(1).clamp(min=1)
    assert float(loss.detach()) == pytest.approx(float(per.sum() / samples), rel=1e-5)
    assert current.grad is not None
    assert not bool(current.grad[~keep].any())
    assert bool(current.grad[keep].any())


@pytest.mark.parametrize("name", CORRECTING)
def test_a_variant_is_named_where_it_is_read_and_nowhere_else(choose: Any, name: str) -> None:
    choose("icepop")
    given = batch()
    wrong = None if "PG" in name else "topr"
    made = worker(name, actor_train=SimpleNamespace(pg_variant=wrong), train_infer_correction=ON)
    data = data_of(given, *laws.counts(given))
    with pytest.raises(MethodError, match=r"actor_train\.pg_variant.*Correcting(PG)?Worker"):
        made.loss_func(data, torch.cat([given.current, given.current[:, :1]], 1))


def test_every_user_of_the_name_gets_it_and_gives_it_back(choose: Any) -> None:
    choose("geo_mask")
    names = [roll.CORRECTIONS, *roll.USERS]
    modules = [importlib.import_module(n) for n in names]
    before = [getattr(m, roll.COMPUTE) for m in modules]
    assert roll.CorrectingWorker is not None  # naming the class installs it in this process
    assert [getattr(m, roll.COMPUTE) for m in modules] == [roll._correction] * 5
    roll.uninstall()
    assert [getattr(m, roll.COMPUTE) for m in modules] == before


def test_a_correction_that_would_be_dropped_is_an_error(choose: Any) -> None:
    choose("icepop")
    roll.install()
    given = batch()
    with pytest.raises(LivenessError, match=r"is_weight\.enabled: true"):
        compute()(configured().train_infer_correction, given.mask, given.old, given.rollout)
    with pytest.raises(LivenessError, match="cannot act"):
        compute()(ON, given.mask, given.old, given.old)  # what ROLL does without infer_logprobs


def test_what_the_correction_cannot_have_is_refused(choose: Any) -> None:
    choose("seq_tis")
    with pytest.raises(EvidenceError, match="no current ones"):
        roll.install()
    choose("dapo")
    with pytest.raises(MethodError, match="class Worker"):
        roll.install()
    choose("a3po")  # its proximal policy is interpolated by lag
    with pytest.raises(EvidenceError, match="version_lag"):
        roll.install()


def test_another_package_called_roll_is_not_roll(choose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choose("dapo")
    monkeypatch.setitem(roll.WORKERS, "Worker", ("roll.no.such.module", "ActorWorker", roll._Loss))
    with pytest.raises(FrameworkError, match="PyPI is something else"):
        getattr(roll, "Worker")  # noqa: B009


@pytest.mark.skipif(not REAL, reason="ROLL is not installed")
def test_its_own_token_mean_ignores_the_mask() -> None:
    """Why `_correction` rejects by weight."""
    from roll.utils.functionals import agg_loss

    loss, mask = torch.ones(1, 4), torch.tensor([[1, 1, 0, 0]])
    assert float(agg_loss(loss, mask, "token-mean", batch_num_tokens=4)) == 1.0


def test_records(choose: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choose("icepop")
    monkeypatch.setenv("OFFDRIFT_RECORD", str(tmp_path))
    given = batch()
    runner(worker())(given, *laws.counts(given))
    optimizer_step()
    roll._loss_hook().adapter.close()
    assert len(list(tmp_path.glob("*.parquet"))) == 1
