"""NeMo-RL's loss function, against the contract of NeMo-RL 0.7.0 and of its main branch (7ea279abf).

The stand-in is written from that contract: `LossType`, `LossInputType`, `MetricNormalizer`; the loss
is called by keyword per micro-batch with the step's counts, parts and metrics are added. Where NeMo-RL
itself can be imported, the same tests run against its enums, `prepare_loss_input` and packing wrapper.
"""

import enum
import importlib
import importlib.util
import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel, create_model
from torch import Tensor

from offdrift.adapters.contrib import nemo_rl
from offdrift.adapters.contrib.nemo_rl import FULL, TOP_IDS, TOP_LOGP
from offdrift.adapters.hooks import LossHook
from offdrift.errors import EvidenceError, FrameworkError, MethodError, ShapeError
from tests.adapters.hooked import (
    HORIZON,
    SOME,
    Batch,
    Framework,
    Outcome,
    batch,
    counts,
    install,
    optimizer_step,
    outcome,
    ppo,
    rows,
)

REAL = importlib.util.find_spec("nemo_rl") is not None
VOCAB = 7


ENUMS = {
    "LossType": enum.Enum("LossType", ["TOKEN_LEVEL", "SEQUENCE_LEVEL"]),
    "LossInputType": enum.Enum("LossInputType", ["LOGIT", "LOGPROB"]),
    "MetricNormalizer": enum.Enum("MetricNormalizer", ["TOKENS", "SEQUENCES", "NONE"]),
}


class ClippedPGLossFn:
    """NeMo-RL's own loss without corrections: PPO's clip over the step's counts."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        assert not any((cfg.reference_policy_kl_penalty, cfg.use_cispo, cfg.use_importance_sampling_correction))

    def __call__(self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any:
        rows, sequences = data["token_mask"][:, 1:], data["sample_mask"]
        columns = (data[name][:, 1:] for name in ("prev_logprobs", "advantages"))
        losses = ppo(next_token_logprobs, *columns, self.cfg.ratio_clip_min, self.cfg.ratio_clip_max)
        if self.cfg.token_level_loss:
            total = (losses * rows * sequences[:, None]).sum() / (global_valid_toks + 1e-8)
        else:
            means = (losses * rows).sum(1) / (rows.sum(1) + 1e-8)
            total = (means * sequences).sum() / (global_valid_seqs + 1e-8)
        return total, {}


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch, version: str = "0.7.0") -> Iterator[None]:
    losses = {"ClippedPGLossFn": ClippedPGLossFn, "ClippedPGLossConfig": ClippedPGLossConfig}
    modules = {"nemo_rl.algorithms.loss.interfaces": ENUMS, nemo_rl.LOSSES: losses}
    install(monkeypatch, version, {} if REAL else modules)
    yield


@pytest.fixture(autouse=True)
def nemo(monkeypatch: pytest.MonkeyPatch, process: Any) -> Iterator[None]:
    with stand_in(monkeypatch):
        yield


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`nemo_rl.algorithms.grpo`, as far as `setup` is concerned."""
    install(monkeypatch, "0.7.0", {"nemo_rl.algorithms.grpo": {"ClippedPGLossFn": object}})
    yield importlib.import_module("nemo_rl.algorithms.grpo")
    nemo_rl.uninstall()


def fields(of: Batch) -> dict[str, Tensor]:
    """NeMo-RL's data: index 0 of every field is padding, here NaN where it may not be read."""

    def shifted(x: Tensor, pad: float) -> Tensor:
        return torch.cat([torch.full_like(x[:, :1], pad), x], 1)

    ids = torch.arange(of.mask.numel()).reshape(of.mask.shape) % VOCAB
    return {
        "input_ids": shifted(ids, 0),
        "token_mask": shifted(of.mask.float(), 1),
        "sample_mask": of.mask.any(1).float(),
        "advantages": shifted(of.advantages, torch.nan),
        "prev_logprobs": shifted(of.old, torch.nan),
        "reference_policy_logprobs": shifted(of.old, torch.nan),
        "generation_logprobs": shifted(of.rollout, torch.nan),
    }


def run(method: str | None, of: Batch, tokens: float, sequences: float, **options: Any) -> Outcome:
    """A micro-batch through the loss, with the counts of its step."""
    current = of.current.clone().requires_grad_()
    loss, metrics = nemo_rl.loss(method, **{"on_idle": "warn", "horizon": HORIZON, **options})(
        data=fields(of),
        global_valid_seqs=torch.tensor(sequences),
        global_valid_toks=torch.tensor(tokens),
        next_token_logprobs=current,
    )
    assert all(type(x) is float for x in metrics.values())
    assert metrics["num_valid_samples"] == int(of.mask.any(1).sum())
    assert metrics["loss"] == float(loss.detach())
    return outcome(loss, current, metrics)


FRAMEWORK = Framework("nemo-rl", stand_in, run, served=107, own_aggregate=True)


@pytest.mark.parametrize("name", ["dapo", "grpo"])  # a mean over tokens, and over sequences
def test_a_loss_that_is_not_known_is_refused_at_the_first_batch(
    name: str, monkeypatch: pytest.MonkeyPatch, process: list[LossHook], caplog: pytest.LogCaptureFixture
) -> None:
    of = batch()
    with caplog.at_level(logging.INFO, "offdrift.nemo-rl"):
        run(name, of, *counts(of))
    assert f"{nemo_rl.LOSSES}.ClippedPGLossFn: loss" in caplog.text
    own = importlib.import_module(nemo_rl.LOSSES).ClippedPGLossFn
    called = own.__call__
    monkeypatch.setattr(own, "__call__", lambda *x, **y: (1.001 * (found := called(*x, **y))[0], *found[1:]))
    run(name, of, *counts(of))  # once per process
    process[-1].proved = False
    with pytest.raises(FrameworkError, match="ClippedPGLossFn is a loss"):
        run(name, of, *counts(of))


def test_metrics_add_up_to_those_of_the_step(process: list[LossHook]) -> None:
    of, settings = batch(), SOME["geo_mask"]
    made = nemo_rl.loss("geo_mask", settings=settings)
    parts = [run("geo_mask", rows(of, i), *counts(of), settings=settings).metrics for i in ([0, 3], [1], [2, 4], [5])]
    optimizer_step()
    step = process[-1].metrics
    names = {k for part in parts for k in part} - {"loss", "num_valid_samples"}
    assert len(names) >= 7
    assert parts[-1] == {"loss": 0.0, "num_valid_samples": 0.0}
    for name in names:
        assert sum(p.get(name, 0.0) for p in parts) == pytest.approx(step[name], rel=1e-5)
    assert names <= set(made.metric_normalizations)
    assert step["offdrift/gate/drop_frac_token"] > 0


def test_types_say_what_it_reads_and_divides_by() -> None:
    kinds = importlib.import_module("nemo_rl.algorithms.loss.interfaces")
    by_token, by_sequence = nemo_rl.loss("dapo"), nemo_rl.loss("grpo")
    assert by_token.loss_type is kinds.LossType.TOKEN_LEVEL
    assert by_sequence.loss_type is kinds.LossType.SEQUENCE_LEVEL
    assert by_token.input_type is kinds.LossInputType.LOGPROB
    assert nemo_rl.loss("dapo", reads="logit", vocab=VOCAB).input_type is kinds.LossInputType.LOGIT
    assert by_sequence.metric_normalizations["loss"] is kinds.MetricNormalizer.SEQUENCES
    assert by_sequence.metric_normalizations["offdrift/full/k3"] is kinds.MetricNormalizer.TOKENS


def test_it_travels_as_a_value_and_has_one_hook_per_process(process: list[LossHook]) -> None:
    made = nemo_rl.loss("geo_mask", settings={"gate.high": 3.0})
    copy = pickle.loads(pickle.dumps(made))  # our own bytes
    assert copy == made
    assert call(copy, fields(batch())) == call(made, fields(batch()))
    (hook,) = process
    assert hook.method.correction.gates[0].high == 3.0  # type: ignore[attr-defined]


def scored(of: Batch, seed: int = 1) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Data and logits whose sampled log-probs are those of two hand-made policies.

    Returns: the data; the current policy's logits `[b, t + 1, v]`, position t about token t + 1; the
        rollout policy's, aligned likewise.
    """
    draw = torch.Generator().manual_seed(seed)
    shape = (*of.mask.shape, VOCAB)
    mu = torch.randn(shape, generator=draw)
    pi = mu + 0.3 * torch.randn(shape, generator=draw)
    data = fields(of)
    ids = data["input_ids"][:, 1:, None]
    for name, z in (("generation_logprobs", mu), ("prev_logprobs", mu + 0.01 * pi)):
        data[name] = data[name].clone()
        data[name][:, 1:] = z.log_softmax(-1).gather(2, ids).squeeze(2)

    def as_model(z: Tensor) -> Tensor:
        return torch.cat([z, torch.full_like(z[:, :1], torch.nan)], 1)  # the last position is unused

    return data, as_model(pi), as_model(mu)


def aligned(z: Tensor) -> Tensor:
    """A model's logits as data: index t is about token t."""
    return torch.cat([torch.full_like(z[:, :1], torch.nan), z[:, :-1]], 1)


def step_of(data: dict[str, Tensor]) -> dict[str, Tensor]:
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": mask.sum()}


def test_logits_give_the_loss_that_log_probs_give() -> None:
    data, pi, _ = scored(batch())
    z = pi.clone().requires_grad_()
    made = nemo_rl.loss("icepop", reads="logit", vocab=VOCAB)
    loss, metrics = made(data=data, **step_of(data), logits=z)
    loss.backward()
    y = pi.clone().requires_grad_()
    logp = y[:, :-1].log_softmax(-1).gather(2, data["input_ids"][:, 1:, None]).squeeze(2)
    want, _ = nemo_rl.loss("icepop")(data=data, **step_of(data), next_token_logprobs=logp)
    want.backward()
    assert float(want.detach()) != 0
    assert "offdrift/full/k3" in metrics
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(z.grad, y.grad.nan_to_num())
    assert not bool(z.grad[~data["token_mask"].bool().roll(-1, 1)].any())


def test_exact_kl_is_the_enumerated_one() -> None:
    data, pi, mu = scored(batch())
    data[FULL] = aligned(mu)
    made = nemo_rl.loss("trm_max", reads="logit", vocab=VOCAB)
    _loss, metrics = made(data=data, **step_of(data), logits=pi)
    mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).bool()
    p, q = (z[:, :-1][mask].double().softmax(-1) for z in (mu, pi))
    kl, tv = (p * (p / q).log()).sum(-1), (p - q).abs().sum(-1) / 2
    assert len(kl) > 30
    assert metrics["offdrift/divergence/kl_rollout_current_mean"] == pytest.approx(float(kl.mean()), rel=1e-6)
    assert metrics["offdrift/divergence/tv_rollout_current_mean"] == pytest.approx(float(tv.mean()), rel=1e-5)
    # The gate reads them: a threshold between the largest KL of two sequences tells them apart.
    worst = [float(kl[mask.nonzero()[:, 0] == i].max()) for i in range(5)]
    between = (sorted(worst)[2] + sorted(worst)[3]) / 2
    gated = nemo_rl.loss("trm_max", reads="logit", vocab=VOCAB, settings={"gate.high": between})
    z = pi.clone().requires_grad_()
    gated(data=data, **step_of(data), logits=z)[0].backward()
    kept = z.grad.abs().sum((1, 2)) > 0
    assert kept.tolist() == [w < between for w in worst] + [False]


def test_top_k_gives_intervals_around_the_exact_numbers() -> None:
    data, pi, mu = scored(batch())
    exact = {**data, FULL: aligned(mu)}
    log_mu = mu[:, :-1].log_softmax(-1)
    top = log_mu.topk(3)
    pad = torch.zeros_like(top.values[:, :1])
    some = {**data, TOP_IDS: torch.cat([pad.long(), top.indices], 1), TOP_LOGP: torch.cat([pad, top.values], 1)}
    key = "offdrift/divergence/kl_rollout_current_mean"
    made = nemo_rl.loss("trm_max", reads="logit", vocab=VOCAB)
    lower, value = (made(data=d, **step_of(data), logits=pi)[1][key] for d in (some, exact))
    assert 0 < lower < value


def test_logits_need_evidence_and_a_whole_vocabulary() -> None:
    data, pi, _ = scored(batch())
    made = nemo_rl.loss("trm_max", reads="logit", vocab=VOCAB)
    with pytest.raises(EvidenceError, match="generation_logits"):
        made(data=data, **step_of(data), logits=pi)
    with pytest.raises(ShapeError, match="tensor_model_parallel_size=1"):
        made(data=data, **step_of(data), logits=pi[..., : VOCAB // 2])
    with pytest.raises(MethodError, match="vocab="):
        nemo_rl.loss("dapo", reads="logit")
    with pytest.raises(EvidenceError, match='reads="logit"'):
        nemo_rl.loss("trm_max")
    # Entropies are the current policy's.
    assert torch.isfinite(
        nemo_rl.loss("espo", reads="logit", old="current", vocab=VOCAB)(data=data, **step_of(data), logits=pi)[0]
    )
    with pytest.raises(EvidenceError, match="entropy"):
        nemo_rl.loss("espo")


def test_all_masked_logits() -> None:
    data, pi, _ = scored(batch())
    z = torch.full_like(pi, torch.nan).requires_grad_()
    made = nemo_rl.loss("icepop", reads="logit", vocab=VOCAB)
    masked = {**data, "sample_mask": torch.zeros(6)}
    loss, metrics = made(data=masked, **step_of(data), logits=z)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not bool(z.grad.any())
    assert metrics == {"loss": 0.0, "num_valid_samples": 0.0}


def call(made: nemo_rl.OffdriftLoss, data: dict[str, Tensor]) -> Tensor:
    return made(data=data, **step_of(data), next_token_logprobs=batch().current)[0]


def test_placeholders_are_not_log_probs() -> None:
    data = fields(batch())
    made = nemo_rl.loss("icepop")
    for name in ("prev_logprobs", "generation_logprobs"):
        with pytest.raises(EvidenceError, match=name):
            call(made, {**data, name: torch.zeros_like(data[name])})
        with pytest.raises(EvidenceError, match=f"{name} are missing"):
            call(made, {k: x for k, x in data.items() if k != name})


def test_old_may_be_the_current_policy_and_reference_kl_needs_the_reference() -> None:
    data, of = fields(batch()), replace(batch(), old=batch().current)
    data["prev_logprobs"] = torch.zeros_like(data["prev_logprobs"])
    wanted = call(nemo_rl.loss("icepop"), fields(of))
    assert float(call(nemo_rl.loss("icepop", old="current"), data)) == pytest.approx(float(wanted), rel=1e-5)
    data = fields(batch())
    ref = data.pop("reference_policy_logprobs")
    made = nemo_rl.loss("deepseek_v32")
    with pytest.raises(EvidenceError, match="skip_reference_policy_logprobs_calculation"):
        call(made, data)
    assert torch.isfinite(call(made, {**data, "reference_policy_logprobs": ref}))


class ClippedPGLossConfig(BaseModel):
    """NeMo-RL's fields and defaults, but for the KL penalty, which is 0.01 there."""

    disable_ppo_ratio: bool = False
    token_level_loss: bool = True
    sequence_level_importance_ratios: bool = False
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    reference_policy_kl_penalty: float = 0.0
    reference_policy_kl_type: str = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    use_kl_in_reward: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    use_on_policy_kl_approximation: bool = False
    force_on_policy_ratio: bool = False
    use_cispo: bool = False
    positive_example_nll_weight: float = 0.0


def config(**changed: Any) -> Any:
    if REAL:
        ours = importlib.import_module("nemo_rl.algorithms.loss.loss_functions").ClippedPGLossConfig
        return ours(**{"reference_policy_kl_penalty": 0.0, **changed})
    return ClippedPGLossConfig(**changed)


def test_every_field_of_their_loss_is_known() -> None:
    known = {*nemo_rl.OWN_TERMS, *nemo_rl.STOOD_IN_FOR, *nemo_rl.FOLLOWED}
    assert known == set(type(config()).model_fields)
    assert len(known) == len([*nemo_rl.OWN_TERMS, *nemo_rl.STOOD_IN_FOR, *nemo_rl.FOLLOWED])
    assert {k: getattr(config(), k) for k in nemo_rl.OWN_TERMS} == nemo_rl.OWN_TERMS


ASKED = {
    "positive_example_nll_weight": 0.1,
    "disable_ppo_ratio": True,
    "sequence_level_importance_ratios": True,
    "use_cispo": True,
    "ratio_clip_c": 3.0,
    "truncated_importance_sampling_type": "tis",
    "use_on_policy_kl_approximation": True,
}


def test_terms_of_their_loss_are_refused_by_name(grpo: Any) -> None:
    nemo_rl.install("icepop")
    assert ASKED.keys() == nemo_rl.OWN_TERMS.keys()
    for name, value in ASKED.items():
        with pytest.raises(MethodError, match=rf"loss_fn\.{name}={value}"):
            grpo.ClippedPGLossFn(config(**{name: value}))


def test_a_later_version_and_the_dictionary_of_0_6_are_read_as_well(grpo: Any) -> None:
    nemo_rl.install("icepop")
    later = create_model("Later", __base__=ClippedPGLossConfig, some_new_weight=(float, 0.0))
    assert grpo.ClippedPGLossFn(later()).config.method == "icepop"
    with pytest.raises(MethodError, match=r"loss_fn\.some_new_weight=0\.5"):
        grpo.ClippedPGLossFn(later(some_new_weight=0.5))
    plain = {"reference_policy_kl_penalty": 0.0, "ratio_clip_c": None, "force_on_policy_ratio": True}
    assert grpo.ClippedPGLossFn(plain).old == "current"
    for name, value in (("reference_policy_kl_penalty", 0.1), ("ratio_clip_c", 3.0), ("new", 0.5)):
        with pytest.raises(MethodError, match=rf"loss_fn\.{name}={value}"):
            grpo.ClippedPGLossFn({**plain, name: value})


def test_install_has_setup_build_it(grpo: Any, caplog: pytest.LogCaptureFixture) -> None:
    original = grpo.ClippedPGLossFn
    nemo_rl.install("icepop")
    with caplog.at_level(logging.INFO, "offdrift.nemo-rl"):
        grpo.ClippedPGLossFn(config(ratio_clip_max=0.28))
    assert "ratio_clip_max=0.28" in caplog.text
    kept = config(reference_policy_kl_penalty=0.1, use_kl_in_reward=True)  # KL in the reward is theirs
    assert grpo.ClippedPGLossFn(kept).config.method == "icepop"
    newest = grpo.ClippedPGLossFn(config(), opd_full=None, seq_logprob_error_threshold=2.0)
    assert not newest.requires_survivor_normalization
    assert grpo.ClippedPGLossFn(config(), opd_full=SimpleNamespace(enabled=False)) == newest
    with pytest.raises(MethodError, match="opd_full"):
        grpo.ClippedPGLossFn(config(), opd_full=SimpleNamespace(enabled=True))
    with pytest.raises(FrameworkError, match=r"nemo-rl passes of_tomorrow=1 to ClippedPGLossFn"):
        grpo.ClippedPGLossFn(config(), of_tomorrow=1)
    made = grpo.ClippedPGLossFn(config(), use_fused_linear_logprobs=True)
    assert made == nemo_rl.loss("icepop", use_fused_linear_logprobs=True)
    assert grpo.ClippedPGLossFn(config(force_on_policy_ratio=True)).old == "current"
    with pytest.raises(MethodError, match=r"reference_policy_kl_penalty=0\.1"):
        grpo.ClippedPGLossFn(config(reference_policy_kl_penalty=0.1))
    nemo_rl.install("deepseek_v32")
    assert grpo.ClippedPGLossFn(config(reference_policy_kl_penalty=0.1)).config.method == "deepseek_v32"
    nemo_rl.uninstall()
    assert grpo.ClippedPGLossFn is original


@pytest.mark.skipif(not REAL, reason="NeMo-RL is not installed")
@pytest.mark.parametrize("reads", ["logprob", "logit"])
def test_its_own_packing_wrapper(reads: Any) -> None:
    """NeMo-RL packs rows end to end, and calls the loss one sequence at a time."""
    if reads == "logprob" and not torch.cuda.is_available():
        pytest.skip("NeMo-RL computes log-probs on CUDA alone")
    from nemo_rl.algorithms.loss.utils import prepare_loss_input
    from nemo_rl.algorithms.loss.wrapper import SequencePackingLossWrapper
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    data, pi, _ = scored(batch())
    data = {k: x.nan_to_num() for k, x in data.items()}
    pi = pi.nan_to_num()
    made = nemo_rl.loss("grpo", reads=reads, vocab=VOCAB)
    loss_input, _ = prepare_loss_input(pi, BatchedDataDict(data), made)
    whole, metrics = made(data=data, **step_of(data), **loss_input)
    b, t, _ = pi.shape
    cuts = torch.arange(b + 1) * t
    packed = pi.reshape(1, b * t, VOCAB)
    wrapper = SequencePackingLossWrapper(made, prepare_loss_input, cuts)
    loss, added = wrapper(packed, BatchedDataDict(data), *step_of(data).values())
    torch.testing.assert_close(loss, whole)
    assert added["offdrift/full/k3"] == pytest.approx(metrics["offdrift/full/k3"], rel=1e-5)
    assert len(added) == len(metrics) >= 7
