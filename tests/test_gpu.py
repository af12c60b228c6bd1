"""On a CUDA device: every method's numbers are those of the CPU, and a step waits for the device a stated number of times."""

import warnings
from pathlib import Path

import pytest
import torch

from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS
from offdrift.segments import Segments
from offdrift.stats.metrics import summarize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def batches():
    """The benchmarks' batch with everything that a method may ask for, on the host and on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        from gpu import on
        from methods_batch import make_batch

        host = make_batch(16, 256)
        yield host, on(torch.device("cuda"), host)


@pytest.mark.parametrize("name", METHODS)
def test_loss_and_gradient_are_those_of_the_cpu(name, batches):
    from methods import loss

    (value, gradient), (expected, wanted) = loss(batches[1], METHODS[name]), loss(batches[0], METHODS[name])
    assert value.is_cuda
    assert torch.allclose(value.cpu(), expected, rtol=1e-5, atol=1e-7)
    assert float((gradient.cpu() - wanted).norm()) <= 1e-5 * float(wanted.norm())


@pytest.mark.parametrize("name", METHODS)
def test_a_step_waits_for_the_device_once_to_check_and_once_for_metrics(name, batches):
    batch = batches[1]
    log = batch.packed
    segments = Segments.from_lengths(
        batches[0].cu_seqlens.diff(), turns=Segments(batches[0].turns), group_ids=batches[0].groups
    )
    info = batch.batch_info_for(METHODS[name])
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as waits:
        warnings.filterwarnings("ignore")
        warnings.filterwarnings("always", message="called a synchronizing")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            lp = LogProbs.pack(
                log["rollout"],
                log["logp"].detach().requires_grad_(),
                log["old"],
                logp_ref=log["ref"],
                segments=segments,
            )
            packed = len(waits)
            out = policy_loss(lp, METHODS[name], log["advantages"], info, horizon=batch.horizon)
            torch.autograd.grad(out.loss, lp.current)
            pushed = len(waits) - packed
            summarize(out.stats)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts = (packed, pushed, len(waits) - packed - pushed)
    where = [f"{w.filename}:{w.lineno} {w.message}" for w in waits]
    assert counts[0] == 1, where
    assert counts[2] == 1, where
    assert counts[1] == 1, where


def test_segments_that_were_cut_on_the_host_follow_the_log_probs():
    x = -torch.rand(5, device="cuda")
    lp = LogProbs.pack(x, segments=Segments.from_lengths([2, 3]))
    assert lp.segments.cu_seqlens.is_cuda
    assert lp.segments.mean(x).shape == (2,)
