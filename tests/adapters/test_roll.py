"""ROLL's workers and correction, against the contract of ROLL 0.3.0 (8eb27cc2).

The stand-in is written from that contract: workers compute log-probs through their strategy and divide
by the step's counts in `meta_info`; they import `compute_train_infer_correction` by name, and pipelines
call it on the whole batch without counts. The configuration's `pg_variant` is None unless it is set, as
in ROLL, and the PG workers refuse None, as in ROLL. Where ROLL itself can be imported, the tests run
against it.
"""

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.adapters.contrib import roll
from offdrift.adapters.hooks import LossHook
from offdrift.errors import EvidenceError, FrameworkError, LivenessError, MethodError
from tests.adapters.hooked import (
    SOME,
    Batch,
    Correcting,
    Framework,
    Outcome,
    batch,
    choose,
    counts,
    install,
    optimizer_step,
    outcome,
    rows,
)

REAL = importlib.util.find_spec("roll") is not None


PLANTED = {"power": 1}
"""What the stand-in does beside the contract."""


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
        counts = (data.meta_info[k] for k in ("batch_num_tokens", "global_valid_samples"))
        tokens, samples = (x.get("final_response_mask", x["response_mask"]) for x in counts)
        logp = self.strategy.op_compute_log_probs(  # type: ignore[attr-defined]
            logits=output_tensor, input_ids=data.batch["input_ids"], attention_mask=data.batch["response_mask"]
        )
        old = self.get_old_log_probs_with_cache(data, logp)
        infer = data.batch.get("infer_logprobs", old)
        if config.enable_old_logprobs_recompute:
            weight, keep, metrics = data.batch["train_infer_is_weight"], torch.ones_like(mask), {}
        else:
            weight, keep, metrics = getattr(sys.modules[self.home], roll.COMPUTE)(
                cfg=config.train_infer_correction,
                response_mask=mask,
                old_log_probs=old,
                infer_log_probs=infer if len(infer) else old,
                global_valid_samples=samples,
                global_valid_tokens=tokens,
            )
        each = self.token_loss(logp, old, data.batch["advantages"])
        each = each * weight ** PLANTED["power"] if config.train_infer_correction.is_weight.enabled else each
        each = each * self.compute_sample_weights(data, mask)[:, None]
        if config.loss_agg_mode == "token-mean":
            return each.sum() / tokens, metrics
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


ActorWorker, AgenticActorWorker = (type("ActorWorker", (BaseWorker,), {"home": x}) for x in (roll.RLVR, roll.AGENTIC))
ActorPGWorker, AgenticActorPGWorker = (type("PG", (PG,), {"home": x}) for x in (roll.RLVR_PG, roll.AGENTIC_PG))


def theirs(cfg: Any, response_mask: Tensor, old_log_probs: Tensor, infer_log_probs: Tensor, *_: Any) -> Any:
    """ROLL's own correction: weights of tokens, which only the adapter's proof asks for."""
    assert cfg.is_weight.enabled
    assert (cfg.is_weight.weight_type, cfg.is_weight.upper_bound, cfg.filters) == ("token", None, [])
    return (old_log_probs - infer_log_probs).exp(), torch.ones_like(response_mask), {}


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch, version: str = "0.3.0") -> Iterator[None]:
    modules: dict[str, dict[str, Any]] = {}
    if not REAL:
        compute = {roll.COMPUTE: theirs}
        modules = {
            roll.RLVR: {"ActorWorker": ActorWorker, **compute},
            roll.RLVR_PG: {"ActorPGWorker": ActorPGWorker, **compute},
            roll.AGENTIC: {"ActorWorker": AgenticActorWorker, **compute},
            roll.AGENTIC_PG: {"ActorWorker": AgenticActorPGWorker, **compute},
            roll.CORRECTIONS: compute,
        }
    install(monkeypatch, version, modules)
    forget()
    yield
    roll.uninstall()
    forget()


def forget() -> None:
    for cached in (roll._worker, roll._hook):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch, process: Any) -> Iterator[None]:
    with stand_in(monkeypatch):
        yield


def configured(**changed: Any) -> Any:
    own = SimpleNamespace(is_weight=SimpleNamespace(enabled=False), filters=[])
    off = ("use_kl_loss", "difficulty_loss_weight", "length_loss_weight", "use_pg_clip_range", "dual_clip_loss")
    plain = {
        "train_infer_correction": own,
        "actor_train": SimpleNamespace(pg_variant=None),  # `WorkerConfig`'s default
        "loss_agg_mode": "seq-mean-token-mean",
        "enable_old_logprobs_recompute": True,
        **dict.fromkeys(off, False),
        **dict.fromkeys(("importance_sampling", "ratio_type"), "token"),
        **{"entropy_loss_coef": 0.0, "rl_loss_coef": 1.0, "pg_clip": 0.2},
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


def data_of(of: Batch, tokens: float, sequences: float, *, final: bool = True) -> Any:
    """ROLL's `DataProto`: masks of whole rows, everything else of tokens 1, 2, ..."""
    b, t = of.mask.shape
    whole = torch.cat([torch.ones(b, 1, dtype=torch.long), of.mask.long()], 1)
    fields = {
        "input_ids": torch.arange(b * (t + 1)).reshape(b, -1),
        "response_mask": whole,
        "old_log_probs": of.old,
        "infer_logprobs": of.rollout,
        "ref_log_probs": of.old,
        "advantages": of.advantages,
    }
    if final:  # ROLL trains on this mask, and measures on the other
        fields["response_mask"] = torch.ones_like(whole)
        fields["final_response_mask"] = of.mask.long()
    named = "final_response_mask" if final else "response_mask"
    other = {"response_mask": -1.0} if final else {}
    meta = {"batch_num_tokens": {**other, named: tokens}, "global_valid_samples": {**other, named: sequences}}
    return SimpleNamespace(batch=fields, meta_info=meta, non_tensor_batch={})


def logits_of(current: Tensor) -> Tensor:
    """What `Strategy` makes the log-probs from."""
    return torch.cat([current, torch.full_like(current[:, :1], torch.nan)], 1)


def run(name: str, method: str | None, of: Batch, tokens: float, sequences: float, **options: Any) -> Outcome:
    """A micro-batch through one of the workers that have the method's loss."""
    with pytest.MonkeyPatch.context() as environment:
        if method is not None:
            choose(environment, method, **options)
        roll._hook.cache_clear()  # as a process that reads the environment now
        current = of.current.clone().requires_grad_()
        data = data_of(of, tokens, sequences, final=name == "Worker")
        loss, metrics = worker(name).loss_func(data, logits_of(current))
        assert all(type(x) is float for x in metrics.values())
        assert metrics["actor/offdrift/loss@sum"] == float(loss.detach())
        return outcome(loss, current, metrics)


ON = SimpleNamespace(is_weight=SimpleNamespace(enabled=True), filters=[])


def compute() -> Any:
    return getattr(importlib.import_module(roll.CORRECTIONS), roll.COMPUTE)


def correct(method: str, of: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    """As a worker calls it, with the counts of the step."""
    with pytest.MonkeyPatch.context() as environment:
        choose(environment, method, **options)
        roll._hook.cache_clear()
        roll.install()
        weight, keep, metrics = compute()(ON, of.mask.long(), of.old, of.rollout, *counts(of))
    assert metrics == {}
    return weight, keep


CORRECTING = Correcting("roll", stand_in, correct)
FRAMEWORKS = [
    Framework(f"roll {name}", stand_in, partial(run, name), served=102, own_aggregate=True)
    for name in ("Worker", "AgenticWorker")
]


@pytest.mark.parametrize("name", ["Worker", "AgenticWorker"])
@pytest.mark.parametrize("method", ["dapo", "grpo"])  # a mean over tokens, and over sequences
def test_a_loss_that_is_not_known_is_refused_at_the_first_batch(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch, process: list[LossHook], caplog: pytest.LogCaptureFixture
) -> None:
    of = batch()
    with caplog.at_level("INFO", "offdrift.roll"):
        run(name, method, of, *counts(of))
    assert "loss_func: loss" in caplog.text
    module, base, _ = roll.WORKERS[name]
    own = getattr(importlib.import_module(module), base)
    called = own.loss_func
    monkeypatch.setattr(own, "loss_func", lambda *x: (1.001 * (found := called(*x))[0], *found[1:]))
    run(name, method, of, *counts(of))  # once per process
    process[-1].proved = False
    with pytest.raises(FrameworkError, match="does not know"):
        run(name, method, of, *counts(of))


def test_a_correction_that_is_not_known_is_refused_at_the_first_batch(
    monkeypatch: pytest.MonkeyPatch, process: list[LossHook], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "offdrift.roll"):
        correct("icepop", batch())
    assert f"{roll.COMPUTE}: loss" in caplog.text
    own = roll._REPLACED.original(roll.COMPUTE)
    roll.uninstall()
    process[-1].proved = False

    def swapped(cfg: Any, mask: Tensor, old: Tensor, infer: Tensor, *counts: Any) -> Any:
        return own(cfg, mask, infer, old, *counts)

    monkeypatch.setattr(importlib.import_module(roll.CORRECTIONS), roll.COMPUTE, swapped)
    with pytest.raises(FrameworkError, match=f"{roll.COMPUTE} is a loss"):
        correct("icepop", batch())


@pytest.mark.skipif(REAL, reason="ROLL has weights of its own")
def test_sample_weights_multiply_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "dapo", on_idle="error")
    of = batch()
    data = data_of(of, *counts(of))
    data.non_tensor_batch["weights"] = torch.full((6,), 3.0)
    plain, weighted = (
        worker(difficulty_loss_weight=x).loss_func(data, logits_of(of.current))[0] for x in (False, True)
    )
    assert float(weighted) == pytest.approx(3 * float(plain), rel=1e-5)
    choose(monkeypatch, "prime_rl", on_idle="error")  # its loss is not proportional to the advantage
    roll._hook.cache_clear()
    with pytest.raises(MethodError, match="difficulty_loss_weight"):
        worker(difficulty_loss_weight=True).loss_func(data, logits_of(of.current))


def test_classes_can_be_named_and_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "icepop", on_idle="error")
    assert pickle.loads(pickle.dumps(roll.Worker)) is roll.Worker  # our own bytes
    bases = {}
    for name, (module, base, _) in roll.WORKERS.items():
        bases[name] = getattr(importlib.import_module(module), base)
        assert bases[name] in getattr(roll, name).__mro__[2:]
    assert bases["Worker"] is bases["CorrectingWorker"]
    assert bases["Worker"].__module__ in (roll.RLVR, __name__)
    assert roll.Worker.loss_func is not bases["Worker"].loss_func
    with pytest.raises(AttributeError, match="Wroker"):
        getattr(roll, "Wroker")  # noqa: B009


def test_metrics_add_up_to_those_of_the_step(process: list[LossHook]) -> None:
    of, run = batch(), partial(FRAMEWORKS[0].run, "geo_mask", settings=SOME["geo_mask"])
    parts = [run(rows(of, i), *counts(of)).metrics for i in ([0, 3], [1], [2, 4], [5])]
    optimizer_step()
    step, names = process[-1].metrics, {k for p in parts for k in p} - {"actor/offdrift/loss@sum"}
    assert len(names) >= 6
    for name in names:
        own = name.removeprefix("actor/").removesuffix("@sum")
        assert sum(p.get(name, 0.0) for p in parts) == pytest.approx(step[own], rel=1e-5)


OTHER_LOSSES = {
    "use_kl_loss": True,
    "entropy_loss_coef": 0.01,
    "actor_train": SimpleNamespace(pg_variant="topr"),
    "dual_clip_loss": True,
    "importance_sampling": "seq",
    "ratio_type": "segment",
    "train_infer_correction": SimpleNamespace(
        is_weight=SimpleNamespace(enabled=True), filters=[SimpleNamespace(enabled=True)]
    ),
}


def test_their_own_terms_and_correction_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "icepop", on_idle="error")
    of = batch()
    for name, value in OTHER_LOSSES.items():
        named = r"is_weight\.enabled, train_infer_correction\.filters" if "correction" in name else name
        with pytest.raises(MethodError, match=named):
            worker(**{name: value}).loss_func(data_of(of, *counts(of)), logits_of(of.current))
    data = data_of(of, *counts(of))
    del data.batch["infer_logprobs"]  # ROLL would compare the old policy with itself
    with pytest.raises(EvidenceError, match=r"infer_logprobs are missing.*generating_args\.logprobs: 1"):
        worker().loss_func(data, logits_of(of.current))


def test_a_pipeline_corrects_without_counts_and_that_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROLL's token mean adds up whole rows whatever the mask says: the weight must reject."""
    choose(monkeypatch, "geo_mask", SOME["geo_mask"], "error")
    roll.install()
    of = batch()
    weight, keep, metrics = compute()(ON, of.mask.long(), of.old, of.rollout)
    assert torch.equal(weight != 0, keep != 0)
    share = 1 - float(keep.sum() / of.mask.sum())
    assert metrics["actor/offdrift/gate/drop_frac_token"] == pytest.approx(share)
    assert 0 < share < 1


@pytest.mark.skipif(REAL, reason="the stand-in's loss is changed")
def test_a_variant_that_is_not_multiplied_by_the_weights_is_refused_at_the_first_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose(monkeypatch, "icepop", on_idle="warn")
    of = batch()
    made = worker("CorrectingPGWorker", train_infer_correction=ON, actor_train=SimpleNamespace(pg_variant="vanilla"))
    data = data_of(of, *counts(of))
    data.batch["train_infer_is_weight"] = torch.ones_like(of.old)
    monkeypatch.setitem(PLANTED, "power", 2)
    with pytest.raises(FrameworkError, match=r"loss_func with pg_variant='vanilla' is a loss"):
        made.loss_func(data, logits_of(of.current))
    monkeypatch.setitem(PLANTED, "power", 1)
    with caplog.at_level("INFO", "offdrift.roll"):
        made.loss_func(data, logits_of(of.current))
    assert "loss_func with pg_variant='vanilla': loss" in caplog.text


CORRECTING_WORKERS = [name for name, (*_, ours) in roll.WORKERS.items() if ours is not roll._Loss]


@pytest.mark.parametrize("name", CORRECTING_WORKERS)
def test_a_correcting_worker_trains_rolls_loss_under_the_methods_weights(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """From the default configuration; a PG worker needs its variant, and has no default."""
    choose(monkeypatch, "icepop", on_idle="error")
    of = batch(spread=0.6)
    variant = {"actor_train": SimpleNamespace(pg_variant="ppo")} if "PG" in name else {}
    made = worker(name, train_infer_correction=ON, enable_old_logprobs_recompute=False, **variant)
    data = data_of(of, *counts(of), final="Agentic" not in name)
    data.batch["response_mask"] = data_of(of, 0, 0, final=False).batch["response_mask"]
    tokens, samples = counts(of)
    data.meta_info["batch_num_tokens"] = {"response_mask": tokens}
    data.meta_info["global_valid_samples"] = {"response_mask": samples}
    current = of.current.clone().requires_grad_()
    loss, _ = made.loss_func(data, logits_of(current))
    loss.backward()
    weight = (of.old - of.rollout).exp()
    keep = of.mask & (weight >= 0.5) & (weight <= 5)
    assert 0 < int(keep.sum()) < int(of.mask.sum())
    ratio, a = (of.current - of.old).exp(), of.advantages
    each = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) * weight.where(keep, 0.0)
    per = each.where(of.mask, 0.0).sum(1) / of.mask.sum(1).clamp(min=1)
    assert float(loss.detach()) == pytest.approx(float(per.sum() / samples), rel=1e-5)
    assert not bool(current.grad[~keep].any())
    assert bool(current.grad[keep].any())


@pytest.mark.parametrize("name", CORRECTING_WORKERS)
def test_a_variant_is_named_where_it_is_read_and_nowhere_else(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    choose(monkeypatch, "icepop", on_idle="error")
    of = batch()
    wrong = None if "PG" in name else "topr"
    made = worker(name, actor_train=SimpleNamespace(pg_variant=wrong), train_infer_correction=ON)
    data = data_of(of, *counts(of))
    with pytest.raises(MethodError, match=r"actor_train\.pg_variant.*Correcting(PG)?Worker"):
        made.loss_func(data, logits_of(of.current))


def test_every_user_of_the_name_gets_it_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "geo_mask", on_idle="error")
    names = [roll.CORRECTIONS, roll.RLVR, roll.AGENTIC, roll.RLVR_PG, roll.AGENTIC_PG]
    modules = [importlib.import_module(n) for n in names]
    before = [getattr(m, roll.COMPUTE) for m in modules]
    assert roll.CorrectingWorker is not None  # naming the class installs it in this process
    assert [getattr(m, roll.COMPUTE) for m in modules] == [roll.train_infer_correction] * 5
    roll.uninstall()
    assert [getattr(m, roll.COMPUTE) for m in modules] == before


def test_a_correction_that_would_be_dropped_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "icepop", on_idle="error")
    roll.install()
    of = batch()
    with pytest.raises(LivenessError, match=r"is_weight\.enabled: true"):
        compute()(configured().train_infer_correction, of.mask, of.old, of.rollout)
    with pytest.raises(LivenessError, match="cannot act"):
        compute()(ON, of.mask, of.old, of.old)  # what ROLL does without infer_logprobs


def test_another_package_called_roll_is_not_roll(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "dapo", on_idle="error")
    monkeypatch.setitem(roll.WORKERS, "Worker", ("roll.no.such.module", "ActorWorker", roll._Loss))
    with pytest.raises(FrameworkError, match="PyPI is something else"):
        getattr(roll, "Worker")  # noqa: B009


@pytest.mark.skipif(not REAL, reason="ROLL is not installed")
def test_its_own_token_mean_ignores_the_mask() -> None:
    """Why `_correction` rejects by weight."""
    from roll.utils.functionals import agg_loss

    loss, mask = torch.ones(1, 4), torch.tensor([[1, 1, 0, 0]])
    assert float(agg_loss(loss, mask, "token-mean", batch_num_tokens=4)) == 1.0
