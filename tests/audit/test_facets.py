"""Every facet and every metric in it, against its formula applied to one token at a time."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce

import pytest
import torch

from offdrift.audit import facets
from offdrift.audit.facets import AXES, LENGTH_CUTS, OTHERS, SEQUENCE_METRICS, TOKEN_METRICS, UNNAMED, Facets
from offdrift.records.batch import Logged
from tests.audit.logs import asynchronous, by_bucket, close, log_ratios, make_log, token_metrics


def length_label(log: Logged, i: int, t: int) -> str:
    low, length = 1, int(log.response_lengths[i])
    for cut in (64, 128, 256, 512):
        if length <= cut:
            return f"{low}-{cut}"
        low = cut + 1
    return "longer"


def position_label(log: Logged, i: int, t: int) -> str:
    if log.position is not None:
        t = int(log.position[int(log.cu_seqlens[i]) + t])
    low, high = 0, 15
    while t > high:
        low, high = high + 1, 2 * high + 1
    return f"{low}-{high}"


def advantage_label(log: Logged, i: int, t: int) -> str:
    a = float(log.advantages[int(log.cu_seqlens[i]) + t])
    return "negative" if a < 0 else "positive" if a > 0 else "zero"


def lag_label(log: Logged, i: int, t: int) -> str:
    lag = int(log.version[i]) - int(log.rollout_version[int(log.cu_seqlens[i]) + t])
    return str(lag) if lag <= 8 else "9-16" if lag <= 16 else "17-32" if lag <= 32 else "33+"


def class_label(log: Logged, i: int, t: int) -> str:
    if t == int(log.cu_seqlens[i + 1] - log.cu_seqlens[i]) - 1:
        return "last token"
    p = math.exp(float(log.logp_rollout[int(log.cu_seqlens[i]) + t]))
    return "sure" if p > 0.99 else "likely" if p >= 0.5 else "unsure" if p >= 0.05 else "rare"


LABELS = {
    "length": length_label,
    "position": position_label,
    "advantage": advantage_label,
    "lag": lag_label,
    "token_class": class_label,
}


def rows_of(log: Logged) -> dict[str, dict[str, Mapping]]:
    rows = Facets.of(log)[0].rows()
    return {axis: {r["label"]: r for r in held} for axis, held in rows.items()}


@pytest.mark.parametrize("axis", LABELS)
@pytest.mark.parametrize("on", ["mismatch", "full"])
def test_metrics_of_every_bucket(axis, on):
    log = make_log(3, lengths=[0, 1, 63, 64, 65, 130, 300, 17, 16, 15, 0, 8, 200, 40])
    rows, expected, compared = rows_of(log)[axis], by_bucket(log, on, LABELS[axis]), 0
    assert {k for k, r in rows.items() if r["tokens"]} == expected.keys()
    for label, held in expected.items():
        row = rows[label]
        assert row["tokens"] == len(held), label
        if axis != "length":
            assert row["sequences"] == len({i for i, _ in held}), label
        for name, value in token_metrics([x for _, x in held]).items():
            assert row[f"{on}/{name}"] == pytest.approx(value, rel=1e-9, abs=1e-12), (label, name)
            compared += 1
    assert compared == len(expected) * len(TOKEN_METRICS)
    assert len(expected) > {"advantage": 2, "length": 3}.get(axis, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_small_and_large_log_ratios_of_one_bucket_add_up(dtype):
    """Exponentials of the former are those of the excess; the latter are summed as logs."""
    log = make_log(6, lengths=[40, 3, 40, 40], dtype=dtype)
    sizes = torch.tensor([3.99, -4.01, 0.01, 4.01, -3.99, 9.0, -0.5], dtype=dtype)
    rollout = torch.full((log.num_tokens,), -10.0, dtype=dtype)
    log = replace(log, logp_rollout=rollout, logp_old=rollout + sizes.repeat(18)[: log.num_tokens])
    compared = 0
    for axis, label in LABELS.items():
        rows = rows_of(log)[axis]
        for bucket, held in by_bucket(log, "mismatch", label).items():
            for name, value in token_metrics([x for _, x in held]).items():
                near = {"rel": 1e-9} if dtype == torch.float64 else {"rel": 2e-5, "abs": 2e-6}
                assert rows[bucket][f"mismatch/{name}"] == pytest.approx(value, **near), (bucket, name)
                compared += 1
    assert compared > 10 * len(TOKEN_METRICS)


def test_acceptance_and_reward_by_length():
    log = make_log(1, lengths=[0, 3, 60, 64, 70, 100, 128, 150, 190, 220, 5, 66], drift=0.01)
    rows, compared = rows_of(log)["length"], 0
    for label, row in rows.items():
        inside = [i for i in range(log.num_sequences) if length_label(log, i, 0) == label]
        assert row["sequences"] == len(inside)
        if not inside:
            assert "reward/mean" not in row
            continue
        assert row["reward/mean"] == pytest.approx(float(log.rewards[inside].mean()))
        held = [ls for i in inside if (ls := log_ratios(log, "mismatch")[i])]
        accepted = {
            "sum": sum(abs(sum(ls)) <= math.log(2) for ls in held),
            "mean": sum(abs(sum(ls) / len(ls)) <= 0.01 for ls in held),
            "worst": sum(max(x * x / 2 for x in ls) <= 0.05 for ls in held),
        }
        for gate, kept in accepted.items():
            assert row[f"mismatch/acceptance_{gate}"] == pytest.approx(kept / len(held))
            compared += 1
    assert compared == 3 * len(SEQUENCE_METRICS)  # 1-64, 65-128, 129-256


def test_the_length_trap_shows():
    """Drift of one size at every token: a sum rejects what is long, a mean what is short."""
    g = torch.Generator().manual_seed(0)
    log = make_log(0, lengths=[32] * 60 + [2000] * 60, drift=0.0)
    noise = 0.03 * torch.randn(log.num_tokens, generator=g, dtype=torch.float64)
    rows = rows_of(replace(log, logp_old=log.logp_rollout + noise))["length"]
    short, long = rows["1-64"], rows["1025-2048"]
    # standard deviations: of the sum 0.03 sqrt(T), of the mean 0.03 / sqrt(T)
    assert short["mismatch/acceptance_sum"] == 1.0  # 0.17 against 0.69
    assert long["mismatch/acceptance_sum"] < 0.7  # 1.34 against 0.69: 39%
    assert short["mismatch/acceptance_mean"] < 0.97  # 0.0053 against 0.01: 94%
    assert long["mismatch/acceptance_mean"] == 1.0  # 0.0007 against 0.01


def test_exact_divergences_by_position():
    log = make_log(2)
    kl = log.divergences["kl_rollout_old"]
    rows, compared = rows_of(log)["position"], 0
    bucket = [position_label(log, i, t) for i in range(log.num_sequences) for t in range(int(log.cu_seqlens.diff()[i]))]
    for label, row in rows.items():
        own = kl[torch.tensor([b == label for b in bucket])]
        assert row["divergence/kl_rollout_old_mean"] == pytest.approx(float(own.mean()))
        compared += 1
    assert compared > 3


def test_position_in_the_response_where_tokens_were_dropped():
    log = make_log(0, lengths=[3, 2])
    log = replace(log, position=torch.tensor([0, 40, 99, 5, 6]), response_lengths=torch.tensor([100, 50]))
    rows = rows_of(log)
    assert {k: r["tokens"] for k, r in rows["position"].items()} == {"0-15": 3, "32-63": 1, "64-127": 1}
    assert rows["token_class"]["last token"]["tokens"] == 1  # the other response's end is unscored


def test_extreme_values_stay_finite():
    log = make_log(0, lengths=[4])
    log = replace(log, logp_old=log.logp_rollout + torch.tensor([-1e4, 30.0, -30.0, 0.0]))
    (row,) = (r for r in Facets.of(log)[0].rows()["length"] if r["tokens"])
    numbers = [v for v in row.values() if isinstance(v, float)]
    assert all(map(math.isfinite, numbers))
    assert len(numbers) > 20
    assert row["mismatch/abs_log_ratio_max"] == 1e4
    assert row["mismatch/k1"] == pytest.approx(-(-20 + 20 - 20 + 0) / 4)


@pytest.mark.parametrize("on", ["mismatch", "full"])
def test_workers_have_the_sums_of_their_sequences(on: str) -> None:
    log = make_log(3, lengths=[0, 1, 63, 64, 65, 130, 300, 17, 16, 15, 0, 8, 200, 40])
    rows = {r["label"]: r for r in Facets.of(log)[0].rows()["worker"]}
    ls = log_ratios(log, on)
    assert log.workers is not None
    for name, label in (("node-1/0", "node-1/0"), ("node-1/1", "node-1/1"), ("", UNNAMED), ("node-2", "node-2")):
        inside = [i for i, worker in enumerate(log.workers) if worker == name]
        row, flat = rows.pop(label), [x for i in inside for x in ls[i]]
        assert (row["sequences"], row["tokens"]) == (len(inside), len(flat))
        expected = token_metrics(flat)
        for metric in ("k1", "k3", "abs_log_ratio_max", "ratio_mean"):
            assert row[f"{on}/{metric}"] == pytest.approx(expected[metric], rel=1e-9, abs=1e-12), (label, metric)
        assert row["reward/mean"] == pytest.approx(float(log.rewards[inside].mean()))
        tokens = torch.cat([torch.arange(*log.cu_seqlens[i : i + 2].tolist()) for i in inside])
        assert row["version_lag/mean"] == pytest.approx(float(44 - log.rollout_version[tokens].double().mean()))
        kl = float(log.divergences["kl_rollout_old"][tokens].mean())
        assert row["divergence/kl_rollout_old_mean"] == pytest.approx(kl)
        own = [[math.expm1(x) for x in ls[i]] for i in inside if ls[i]]
        z = sum(map(sum, own)) / math.sqrt(sum(sum(s) ** 2 for s in own))
        assert row[f"{on}/ratio_mean_z"] == pytest.approx(z)
        k3 = [sum(math.expm1(x) - x for x in ls[i]) for i in inside if ls[i]]
        residuals = [s - expected["k3"] * len(e) for s, e in zip(k3, own, strict=True)]
        b = len(own)
        se = math.sqrt(b / (b - 1) * sum(r * r for r in residuals)) / len(flat)
        assert row[f"{on}/k3_se"] == pytest.approx(se)
    assert not rows


def test_the_standard_error_of_a_worker_is_the_scatter_of_its_mean() -> None:
    """Over 300 logs drawn alike, the mean k3 of a worker scatters as much as its error says."""
    rows = [Facets.of(asynchronous(seed, sequences=60, workers=2))[0].rows()["worker"][0] for seed in range(300)]
    means = torch.tensor([row["mismatch/k3"] for row in rows])
    errors = torch.tensor([row["mismatch/k3_se"] for row in rows])
    assert float(means.std() / errors.square().mean().sqrt()) == pytest.approx(1, abs=0.12)  # 3 of its own errors


def test_of_very_many_workers_the_first_by_name_have_rows_however_parts_are_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(facets, "NAMES", 3)
    log = replace(make_log(0, lengths=[5] * 12), workers=tuple("jklabcdefghi"))
    whole = Facets.of(log)[0]
    parts = [Facets.of(log.cut(i, i + 2))[0] for i in range(0, 12, 2)]
    for order in (parts, parts[::-1], [parts[0].merge(parts[1]), parts[2].merge(parts[3]), *parts[4:]]):
        rows = reduce(Facets.merge, order).rows()["worker"]
        assert [row["label"] for row in rows] == [OTHERS, "a", "b", "c"]
        close(rows, whole.rows()["worker"])
    assert whole.rows()["worker"][0]["sequences"] == 9
    long = replace(log, workers=("x" * 10**6,) * 12)
    (row,) = Facets.of(long)[0].rows()["worker"]
    assert row["label"] == "x" * facets.NAMED["worker"][1]


def test_a_nan_advantage_is_no_sign():
    log = make_log(0, lengths=[20], fields=("logp_old",))
    log = replace(log, advantages=torch.full((20,), math.nan, dtype=torch.float64))
    assert [r["label"] for r in Facets.of(log)[0].rows()["advantage"]] == ["zero"]


def test_what_a_log_lacks_has_no_rows():
    rows = Facets.of(make_log(0, fields=("logp_old",)))[0].rows()
    assert rows["lag"] == rows["advantage"] == rows["worker"] == []
    assert not any(name.startswith("full/") for r in rows["position"] for name in r)


def test_buckets_are_the_same_for_everybody():
    assert [h for h in AXES["length"].highs if h] == list(LENGTH_CUTS)
    assert AXES["length"].lows[-1] == LENGTH_CUTS[-1] + 1
    for axis in AXES.values():
        assert len(axis.labels) == len(axis.lows) == len(axis.highs)
    assert sum(map(len, AXES.values())) <= 63  # a bit of an int64 each
