"""Compiled passes beside the plain ways: the same numbers, on every kind of batch and number of threads."""

import logging
import math
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offdrift.compiled import build, compiled_passes, passes
from offdrift.correction import Correction, Gate, Weight
from offdrift.logprobs import LogProbs
from offdrift.numerics import clamped
from offdrift.segments import Segments
from offdrift.stats import Histogram
from offdrift.stats.digits import rounded, rounded_logs
from offdrift.stats.drift import TOKEN_MAXIMA, TOKEN_SUMS, DriftStats, _joined_blocks
from offdrift.stats.histogram import LOG_RATIO
from offdrift.stats.metrics import summarize

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="there is no C++ compiler"
)

N = 2 * passes.THREADS_FROM + 5
"""Tokens of a batch that several threads share, and that no vector divides."""

DTYPES = [torch.float32, torch.float64]


def pair(n: int, dtype: torch.dtype = torch.float32, *, wide: float = 0.01, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Log-probs of a first policy, and log-ratios of which a share is far from 0."""
    g = torch.Generator().manual_seed(seed)
    first = -torch.empty(n).exponential_(2.0, generator=g)
    raw = 0.05 * torch.randn(n, generator=g) * (1 + 60 * (torch.rand(n, generator=g) < wide))
    return first.to(dtype), raw.to(dtype)


def swept(first: Tensor, raw: Tensor, lengths: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Log-ratios of a sweep, as the dtype rounds them, and the sums, maxima and logs that it found."""
    cuts = Segments.from_lengths([len(raw)] if lengths is None else lengths).cu_seqlens
    found = passes.sweep(first, first + raw, cuts)
    assert torch.equal(found.log_ratio, (first + raw) - first) or bool(raw.isnan().any() | raw.isinf().any())
    added, in_logs = rounded(found.digits[: len(TOKEN_SUMS)]), rounded_logs(found.digits[-4:-2])
    return found.log_ratio, torch.cat([added, found.maxima[: len(TOKEN_MAXIMA)], in_logs])


def truth_of(first: Tensor, raw: Tensor) -> Tensor:
    return torch.cat(_joined_blocks(first.double(), raw.double()))


def batch(n: int, lengths: list[int], dtype: torch.dtype = torch.float32) -> LogProbs:
    first, raw = pair(n, dtype)
    return LogProbs.pack(first, logp_old=(first + raw).clamp(max=0), segments=Segments.from_lengths(lengths))


TOKEN = Gate(statistic="ratio", on="mismatch", unit="token", low=0.5, high=2.0)
WORST = Gate(statistic="k2", on="mismatch", unit="seq_max", high=0.5)
MEAN = Gate(statistic="k3", on="mismatch", unit="seq_mean", high=0.01)
NOTHING = Gate(statistic="ratio", on="mismatch", unit="seq_sum", low=1e8, high=1e8)
CORRECTIONS = {
    "truncate": Correction(weights=(Weight(on="mismatch", cap=2.0),)),
    "mask": Correction((MEAN,), (Weight(on="mismatch", cap=1.1, floor=0.9, outside="mask"),)),
    "gates": Correction((TOKEN, WORST, MEAN), (Weight(on="mismatch", unit="sequence", cap=3.0, floor=0.1),)),
    "all rejected": Correction((NOTHING,), (Weight(on="mismatch"),)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [0.0, 0.01, 0.5])
def test_token_sums_are_nearer_to_the_truth_than_the_plain_way(compiled: None, dtype: torch.dtype, wide: float) -> None:
    first, raw = pair(20_003, dtype, wide=wide)
    raw[::5000] *= 1000 * wide  # beyond the limit of 20 nats
    raw, ours = swept(first, raw)
    truth, plain = truth_of(first, raw), torch.cat(_joined_blocks(first, raw))
    allowed = (1e-9 if dtype is torch.float32 else 1e-13) * (1 + truth.abs())
    assert bool(((ours - truth).abs() <= allowed).all()), (ours - truth) / truth
    assert bool(((ours - truth).abs() <= (plain - truth).abs() + allowed).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -2e4, 21.0])
@pytest.mark.parametrize("n", [1, 7, 8, 4097])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_out_of_range_end_where_the_plain_way_ends(
    compiled: None, dtype: torch.dtype, n: int, value: float
) -> None:
    first, raw = pair(n, torch.float64)
    first, raw = first.to(dtype), raw.to(dtype)
    raw[n // 2] = value
    raw, ours = swept(first, raw)
    torch.testing.assert_close(ours, truth_of(first, raw), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("n", [0, 1, 5, 8, 9, 4096, 4103])
def test_batches_of_any_size(compiled: None, n: int) -> None:
    first, raw = pair(n, wide=0)
    raw -= 1  # no maximum of log-ratios may come from what a vector is filled up with
    raw, ours = swept(first, raw)
    torch.testing.assert_close(ours, truth_of(first, raw), rtol=1e-8, atol=1e-8)
    weight = raw.exp()
    digits, changed, largest = passes.weight_sums(weight, Segments.from_lengths([n]).cu_seqlens)
    sums = torch.stack([weight.double().sum(), weight.double().square().sum()])
    torch.testing.assert_close(rounded(digits), sums, rtol=1e-12, atol=0)
    assert changed == n
    assert largest.tolist() == ([float(raw.exp().max()), -float(raw.exp().min())] if n else [-math.inf] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[0], [3, 0, 17], [0, 0, 40, 1], [4100, 8, 16]])
@pytest.mark.parametrize("of", ["itself", "ratio", "k2", "k3", "abs_log_ratio", "ratio_error"])
@pytest.mark.parametrize("beyond", [0.0, 30.0])
def test_sums_of_segments(
    compiled: None, beyond: float, of: passes.Statistic, lengths: list[int], dtype: torch.dtype
) -> None:
    first, raw = pair(sum(lengths), dtype, wide=0.3)
    raw[:1] += beyond
    raw, cuts = (first + raw) - first, Segments.from_lengths(lengths).cu_seqlens
    l = clamped(raw.double())  # noqa: E741
    terms = {"itself": raw.double(), "ratio": l, "k2": l * l / 2, "k3": l.expm1() - l, "abs_log_ratio": l.abs()}
    expected = [float(part.sum()) for part in terms.get(of, l.expm1().abs()).split(lengths)]
    if of == "itself":
        found = passes.segment_sums(raw, cuts)
    else:
        found = passes.sweep(first, first + raw, cuts).segment_sums(of)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cuts", [[0, 9], [0, 5, 3, 8], [-1, 8], []])
def test_cuts_of_another_batch_are_left_to_the_plain_way(compiled: None, cuts: list[int]) -> None:
    assert passes.segment_sums(torch.zeros(8), torch.tensor(cuts, dtype=torch.int64)) is None
    assert passes.sweep(torch.zeros(8), torch.zeros(8), torch.tensor(cuts, dtype=torch.int64)) is None


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_a_correction_and_its_metrics_agree_with_the_plain_way(compiled: None, name: str, dtype: torch.dtype) -> None:
    logprobs = batch(6000, [0, 1, 999, 0, 5000], dtype)
    ours = CORRECTIONS[name](logprobs)
    metrics = summarize(DriftStats.of(logprobs, ours))
    with compiled_passes(False):
        plain = CORRECTIONS[name](batch(6000, [0, 1, 999, 0, 5000], dtype))
        expected = summarize(DriftStats.of(logprobs, plain))
    assert torch.equal(ours.keep, plain.keep)
    assert bool(ours.keep.any()) == (name != "all rejected")
    assert torch.equal(ours.limited, plain.limited)
    assert [*map(torch.Tensor.tolist, ours.rejected_by.values())] == [
        *map(torch.Tensor.tolist, plain.rejected_by.values())
    ]
    torch.testing.assert_close(ours.weight, plain.weight, rtol=2e-7, atol=0)
    assert metrics == pytest.approx(expected, rel=2e-6, abs=2e-6, nan_ok=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_histogram_has_the_bits_of_the_plain_way(compiled: None, dtype: torch.dtype) -> None:
    _, raw = pair(70_001, dtype, wide=0.3)
    raw[:4] = torch.tensor([0.0, -0.0, 1e3, -1e3], dtype=dtype)
    ours = Histogram.of(raw, LOG_RATIO)
    with compiled_passes(False):
        plain = Histogram.of(raw, LOG_RATIO)
    assert (ours.counts == plain.counts).all()
    assert (ours.moments == plain.moments).all()
    assert (ours.low, ours.high, ours.n) == (plain.low, plain.high, 70_001)


def test_no_bit_depends_on_the_number_of_threads(compiled: None, threads: Callable[[int], None]) -> None:
    first, raw = pair(N)
    cuts = Segments.from_lengths([N // 3, 1, 0, N - N // 3 - 1]).cu_seqlens
    found = []
    for count in (1, 2, 3, 7):
        threads(count)
        weights = passes.limited_weights(raw, cap=2.0, floor=None, mask=False)
        found.append([
            *passes.sweep(first, first + raw, cuts), passes.segment_sums(raw, cuts), *weights,
            *passes.weight_sums(weights[0], cuts), passes.inside(raw, "ratio", low=-0.1, high=0.1),
        ])  # fmt: skip
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def test_a_sequence_has_the_same_bits_in_every_batch(compiled: None) -> None:
    logprobs = batch(3000, [1000, 7, 1993])
    whole = logprobs.segments.total(logprobs.logp_rollout)
    pieces = [Segments.from_lengths([len(x)]).total(x) for x in logprobs.logp_rollout.split([1000, 7, 1993])]
    assert torch.equal(whole, torch.cat(pieces))


@pytest.mark.parametrize(
    "raw",
    [torch.zeros(9, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.long), torch.zeros(3, 3),
     torch.zeros(9).to_sparse(), torch.empty(9, device="meta")],
    ids=["bfloat16", "integers", "matrix", "sparse", "meta"],
)  # fmt: skip
def test_tensors_without_a_pass_are_left_to_the_plain_way(compiled: None, raw: Tensor) -> None:
    assert passes._pass("weight_sums", torch.zeros(9)) is not None
    assert passes._pass("weight_sums", raw) is None
    assert passes._pass("sweep", torch.zeros(9), torch.zeros(8)) is None


def test_what_does_not_lie_side_by_side_is_copied(compiled: None) -> None:
    first, raw = pair(40)
    apart, together = swept(first[::2], raw[::2]), swept(first[::2].clone(), raw[::2].clone())
    assert all(map(torch.equal, apart, together))


def test_transformed_tensors_take_the_plain_way(compiled: None) -> None:
    def total(x: Tensor) -> Tensor:
        assert passes.digits(x) is None
        return x.sum()

    torch.func.vmap(total)(torch.ones(2, 3))


# When it is built, and what happens if it cannot be.


def test_nothing_is_built_unless_it_is_asked_for(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as m:
        m.setattr(build, "built", lambda name: pytest.fail("built without being asked"))
        DriftStats.of(batch(100, [100]))
        monkeypatch.setenv("OFFDRIFT_COMPILE", "1")
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
        with compiled_passes():
            DriftStats.of(batch(100, [100]))
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    assert build.library("passes") is not None


def test_a_library_is_built_once_and_only_its_owner_may_write_there(fresh: None, folder: Path) -> None:
    path = build.built("passes")
    written = path.stat().st_mtime_ns
    assert build.built("passes") == path
    assert path.stat().st_mtime_ns == written
    assert [x.name for x in path.parent.glob("passes*")] == [path.name]
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_that_others_may_write_to_is_not_loaded_from(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "offdrift").mkdir()
    (tmp_path / "offdrift").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PermissionError):
        build.built("passes")


@pytest.mark.parametrize(
    "compiler",
    ["/no/such/compiler", "#!/bin/sh\necho 'no room left' >&2\nexit 1\n", '#!/bin/sh\necho > "$9"\n'],
    ids=["absent", "fails", "writes no library"],
)
def test_a_failure_is_one_line_and_the_plain_numbers(
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    compiler: str,
) -> None:
    if compiler.startswith("#!"):
        script = tmp_path / "c++"
        script.write_text(compiler)
        script.chmod(0o700)
        compiler = str(script)
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = summarize(DriftStats.of(batch(100, [100])))
    with caplog.at_level(logging.WARNING), compiled_passes():
        for _ in range(2):
            assert summarize(DriftStats.of(batch(100, [100]))) == pytest.approx(plain, nan_ok=True, rel=0, abs=0)
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
