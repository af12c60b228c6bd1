"""What the shape of drift says: each planted cause shows in its own number, against its formula."""

import itertools
import math
import statistics

import pytest
import torch
from torch import Tensor

from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from offdrift.stats import DriftStats, signature, summarize
from offdrift.stats.signature import shifted_sequences
from tests.oracles.fixtures import fx_a, ragged


def shape_of(lp: LogProbs, **facts: Tensor) -> dict[str, float]:
    return summarize(DriftStats.of(lp).plus(signature(lp, **facts)))


def pair(rollout: Tensor, second: Tensor, lengths: list[int]) -> LogProbs:
    return LogProbs.pack(rollout, logp_old=second, segments=Segments.from_lengths(lengths))


def draws(seed: int, b: int, time: int, vocabulary: int = 50) -> tuple[Tensor, Tensor]:
    """Logits of every position, and tokens sampled from them."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(b * time, vocabulary, generator=g, dtype=torch.float64)
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1)
    return logits, tokens


def logp(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)


def test_slope_and_correlations_by_the_textbook():
    lp = ragged(1, sequences=9, longest=30)
    x, y = lp.logp_rollout.tolist(), lp.old.tolist()
    got, line = shape_of(lp), statistics.linear_regression(x, y)
    assert got["mismatch/slope"] == pytest.approx(line.slope)
    assert got["mismatch/shift_corr"] == pytest.approx(statistics.correlation(x, y))
    assert got["mismatch/slope_r2"] == pytest.approx(statistics.correlation(x, y) ** 2)
    cuts = lp.segments.cu_seqlens.tolist()
    later = [t for a, b in itertools.pairwise(cuts) for t in range(a + 1, b)]
    earlier = [t - 1 for t in later]
    assert len(later) > 60
    before = statistics.correlation([x[t] for t in later], [y[t] for t in earlier])
    after = statistics.correlation([x[t] for t in earlier], [y[t] for t in later])
    assert got["mismatch/shift_corr_before"] == pytest.approx(before)
    assert got["mismatch/shift_corr_after"] == pytest.approx(after)


def test_neighbors_across_blocks_sequences_and_gaps():
    g = torch.Generator().manual_seed(0)
    n = 150_000  # more than two blocks
    x, y = (-torch.rand(2, n, generator=g, dtype=torch.float64)).unbind()
    lengths = [70_000, 0, 79_999, 1]
    position = torch.cat([torch.arange(n) for n in lengths])
    position[100:70_000] += 5  # tokens between two others were dropped
    got = shape_of(pair(x, y, lengths), position=position)
    joined = torch.ones(n, dtype=torch.bool)
    joined[[0, 100, 70_000, 149_999]] = False
    t = joined.nonzero().squeeze(-1)
    for where, (a, b) in {"before": (t, t - 1), "after": (t - 1, t)}.items():
        exact = torch.corrcoef(torch.stack([x[a], y[b]]))[0, 1]
        assert got[f"mismatch/shift_corr_{where}"] == pytest.approx(float(exact), abs=1e-9)


def test_a_temperature_left_out_is_the_slope():
    x = -torch.rand(4000, dtype=torch.float64) * 5
    assert shape_of(pair(x, x / 0.7, [4000]))["mismatch/slope"] == pytest.approx(1 / 0.7)


@pytest.mark.parametrize(("by", "where"), [(1, "before"), (-1, "after")])
def test_log_probs_off_by_one(by, where):
    logits, tokens = draws(0, 20, 30)
    x = logp(logits, tokens).view(20, 30)
    got = shape_of(pair(x.flatten(), x.roll(-by, 1).flatten(), [30] * 20))
    # second[t - 1] = x[t] where the second policy's are one early
    other = {"before": "after", "after": "before"}[where]
    assert got[f"mismatch/shift_corr_{where}"] > 0.999
    assert abs(got["mismatch/shift_corr"]) < 0.2
    assert abs(got[f"mismatch/shift_corr_{other}"]) < 0.2


def test_z_by_its_formula():
    lp = ragged(2, sequences=11)
    ls = (lp.old - lp.logp_rollout).tolist()
    cuts = lp.segments.cu_seqlens.tolist()
    s = [sum(math.expm1(x) for x in ls[a:b]) for a, b in itertools.pairwise(cuts)]
    got = shape_of(lp)
    assert got["mismatch/ratio_mean"] == pytest.approx(1 + sum(s) / len(ls))
    assert got["mismatch/ratio_mean_z"] == pytest.approx(sum(s) / math.sqrt(sum(x * x for x in s)))


def test_z_is_standard_normal_if_tokens_were_drawn_as_logged():
    """200 samples of a drifted second policy: mean 0 and variance 1 within four standard errors."""
    found = []
    for seed in range(200):
        logits, tokens = draws(seed, 40, 10, vocabulary=8)
        drift = 0.2 * torch.randn(
            logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 999)
        )
        lp = pair(logp(logits, tokens), logp(logits + drift, tokens), [10] * 40)
        found.append(shape_of(lp)["mismatch/ratio_mean_z"])
    assert abs(statistics.mean(found)) < 4 / math.sqrt(200)
    assert abs(statistics.variance(found) - 1) < 4 * math.sqrt(2 / 200)


def test_z_shows_tokens_drawn_from_another_distribution_than_logged():
    """Log-probs before the temperature that sampled: the log-probs' weight no longer has mean 1."""
    logits, _ = draws(0, 200, 20)
    g = torch.Generator().manual_seed(5)
    tokens = torch.multinomial((logits / 0.6).softmax(-1), 1, generator=g).squeeze(-1)
    drift = 0.2 * torch.randn(logits.shape, dtype=torch.float64, generator=g)
    got = shape_of(pair(logp(logits, tokens), logp(logits / 0.6 + drift, tokens), [20] * 200))
    assert got["mismatch/ratio_mean_z"] > 10
    honest = shape_of(pair(logp(logits / 0.6, tokens), logp(logits / 0.6 + drift, tokens), [20] * 200))
    assert abs(honest["mismatch/ratio_mean_z"]) < 4


def test_one_sided_drift():
    x = torch.full((100,), -1.0, dtype=torch.float64)
    l = torch.tensor([0.0] * 70 + [0.0009] * 5 + [-0.2] * 20 + [0.1] * 5, dtype=torch.float64)  # noqa: E741
    got = shape_of(pair(x, x + l, [60, 40]))
    assert got["mismatch/positive_frac"] == 0.05
    assert got["mismatch/negative_frac"] == 0.2


def test_clip_fraction_of_the_methods_table():
    """Entry metric.clipfrac: one of FX-A's seven tokens is clipped; without signs three are."""
    lp, advantages, _ = fx_a()
    assert shape_of(lp, advantages=advantages)["staleness/clip_frac"] == pytest.approx(1 / 7)
    # r = e^l at l = 0.05, 0.30, -0.25, 0.10, -0.15, 0.20, 0.02: outside [0.8, 1.2] are 0.30, -0.25, 0.20
    assert shape_of(lp)["staleness/clip_frac"] == pytest.approx(3 / 7)


def test_gates_accept_what_they_say():
    x = torch.full((6,), -1.0, dtype=torch.float64)
    l = torch.tensor([0.4, -0.4, 0.01, 0.008, 0.5, 0.3], dtype=torch.float64)  # noqa: E741
    got = shape_of(pair(x, x + l, [2, 2, 0, 2]))
    # sums 0, 0.018, 0.8 against log 2 = 0.69; means 0, 0.009, 0.4; largest l^2/2: 0.08, 0.00005, 0.125
    accepted = [got[f"mismatch/acceptance_{gate}"] for gate in ("sum", "mean", "worst")]
    assert accepted == pytest.approx([2 / 3, 2 / 3, 1 / 3])


def test_only_ratios_to_the_rollout_policy_have_an_expectation():
    got = shape_of(ragged(0))
    assert {"mismatch/ratio_mean", "full/ratio_mean"} <= got.keys()
    assert "staleness/ratio_mean" not in got
    assert "staleness/clip_frac" in got


def test_without_the_signature_its_metrics_are_absent_and_the_rest_is_unchanged():
    lp = ragged(0)
    plain, more = summarize(DriftStats.of(lp)), shape_of(lp)
    assert plain.items() <= more.items() | {
        ("mismatch/ratio_mean", plain["mismatch/ratio_mean"]),
        ("full/ratio_mean", plain["full/ratio_mean"]),
    }
    assert "mismatch/slope" not in plain
    assert len(more) - len(plain) == 27  # 13 without k3_top_share and ratio_mean, of two ratios, and clip_frac


def test_equal_policies_and_single_tokens():
    x = -torch.rand(50, dtype=torch.float64)
    got = shape_of(pair(x, x, [49, 1]))
    assert got["mismatch/slope"] == got["mismatch/ratio_mean"] == 1.0
    assert math.isnan(got["mismatch/ratio_mean_z"])  # 0 / 0
    one = shape_of(pair(x[:1], x[:1], [1]))
    for name in ("slope", "shift_corr", "shift_corr_before", "shift_corr_after"):
        assert math.isnan(one[f"mismatch/{name}"]), name


@pytest.mark.parametrize("by", [0, 1, -1, 2])
def test_sequences_that_are_shifted_by_one_are_counted(by):
    """Beside np.corrcoef of each; others, and those without a far token, are not."""
    g = torch.Generator().manual_seed(4)
    lengths = torch.tensor([40, 9, 60, 25, 0, 33])
    segments = Segments.from_lengths(lengths)
    x = -2 * torch.rand(int(lengths.sum()), generator=g, dtype=torch.float64).exp2().sub(1).mul(3)
    parts = list(x.split(lengths.tolist()))
    for i in (1, 2, 4, 5):  # short, long, empty, long
        parts[i] = parts[i].roll(by)
    y = torch.cat(parts) + 0.01 * torch.randn(len(x), generator=g, dtype=torch.float64)
    raw = y - x
    found = shifted_sequences(segments, x, raw, segments.largest(raw.abs()))
    assert int(found) == (2 if abs(by) == 1 else 0)
    stats = DriftStats.of(LogProbs.pack(x, y, segments=segments)).plus(
        signature(LogProbs.pack(x, y, segments=segments))
    )
    got = summarize(stats)
    assert got["full/shifted_seqs"] == int(found)
    assert got["full/shifted_frac"] == int(found) / 4
