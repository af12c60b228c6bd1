"""The adapter adds up what losses and decisions saw, whatever way a step is cut."""

import itertools
import logging
import sys

import pytest
import torch

from offdrift.adapters import frameworks
from offdrift.adapters.base import Adapter
from offdrift.adapters.frameworks import FRAMEWORKS, require
from offdrift.errors import FrameworkError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import method, override
from offdrift.segments import Segments
from offdrift.setting import parse_settings
from offdrift.stats import summarize

LENGTHS = [4, 1, 7, 3, 5, 4]


def sequences(seed: int = 0, noise: float = 0.2):
    g = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    rollout = -2 * torch.rand(n, generator=g)
    old = (rollout + noise * torch.randn(n, generator=g)).clamp(max=0.0)
    current = (old + noise * torch.randn(n, generator=g)).clamp(max=0.0)
    return rollout, current, old, torch.randn(n, generator=g)


def packed(first: int, last: int, seed: int = 0, noise: float = 0.2):
    cut = torch.tensor([0, *LENGTHS]).cumsum(0)
    at = slice(int(cut[first]), int(cut[last]))
    rollout, current, old, advantages = (x[at] for x in sequences(seed, noise))
    lp = LogProbs.pack(rollout, current, old, segments=Segments.from_lengths(LENGTHS[first:last]))
    return lp, advantages


def stepped(cuts: list[int], name: str = "decoupled_geo_rs_token_tis") -> dict[str, float]:
    adapter = Adapter(name, framework="plain", on_idle="warn")
    for first, last in itertools.pairwise(cuts):
        lp, advantages = packed(first, last)
        adapter.loss(lp, advantages, normalizer=6.0)
    return adapter.end_step(1)


def test_micro_batches_give_the_metrics_of_the_whole_step() -> None:
    whole, cut = stepped([0, 6]), stepped([0, 1, 4, 6])
    assert whole.keys() == cut.keys()
    assert len(whole) > 60
    assert {"offdrift/mismatch/ratio_mean", "offdrift/full/slope", "offdrift/full/k3_top_share"} <= set(whole)
    for name, x in whole.items():
        assert cut[name] == pytest.approx(x, rel=1e-5, abs=1e-7, nan_ok=True), name


def test_metrics_and_decisions_are_those_of_the_library() -> None:
    lp, advantages = packed(0, 6)
    result, found = policy_loss(lp, method("decoupled_geo_rs_token_tis"), advantages), stepped([0, 6])
    for name, x in summarize(result.stats).items():
        assert found[f"offdrift/{name}"] == pytest.approx(x, nan_ok=True), name
    adapter = Adapter("decoupled_geo_rs_token_tis", framework="plain")
    decided = adapter.correct(lp, advantages)
    assert torch.equal(decided.keep, result.corrected.keep)
    assert torch.equal(decided.weight, result.corrected.weight)
    dropped = 1 - float(decided.keep.float().mean())
    assert adapter.end_step(3)["offdrift/gate/drop_frac_token"] == pytest.approx(dropped)


def test_a_step_has_the_metrics_of_its_own_batches() -> None:
    """A step without batches logs nothing, and is no error after one that had some."""
    adapter, fresh = (Adapter("decoupled_token_is", framework="plain") for _ in range(2))
    adapter.loss(*packed(0, 6, seed=1, noise=1.5))
    assert adapter.end_step(1)
    assert adapter.end_step(2) == {}
    for one in (adapter, fresh):
        one.loss(*packed(0, 6))
    third, first = adapter.end_step(3), fresh.end_step(1)
    names = [name for name in first if "findings" not in name]
    assert len(names) > 60
    assert [third[name] for name in names] == pytest.approx([first[name] for name in names], nan_ok=True)


def test_processes_together_give_the_metrics_of_one() -> None:
    """Two adapters, each with half of the step, as two processes would run them."""
    import threading

    meet, slots = threading.Barrier(2), {}

    def gather_of(rank: int):
        def gather(mine):
            slots[rank] = mine
            meet.wait(10)
            both = [slots[0], slots[1]]
            meet.wait(10)
            return both

        return gather

    found = {}

    def run(rank: int) -> None:
        adapter = Adapter("decoupled_geo_rs_token_tis", framework="plain", on_idle="warn", gather=gather_of(rank))
        lp, advantages = packed(3 * rank, 3 * rank + 3)
        adapter.loss(lp, advantages, normalizer=6.0)
        found[rank] = adapter.end_step(1)
        if rank == 0:  # the other has no batch in its second step
            adapter.loss(lp, advantages, normalizer=6.0)
        found[rank, 2] = adapter.end_step(2)

    threads = [threading.Thread(target=run, args=(r,)) for r in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    whole = stepped([0, 6])
    assert found[0] == pytest.approx(found[1], nan_ok=True)
    for name, x in whole.items():
        assert found[0][name] == pytest.approx(x, rel=1e-5, abs=1e-7, nan_ok=True), name
    assert found[0, 2] == pytest.approx(found[1, 2], nan_ok=True)
    assert found[1, 2]["offdrift/batch/tokens"] == sum(LENGTHS[:3])


def test_findings_come_once_with_the_fix_for_the_framework(caplog: pytest.LogCaptureFixture) -> None:
    adapter = Adapter("decoupled_token_is", framework="trl")
    with caplog.at_level(logging.INFO, logger="offdrift.trl"):
        for step in range(1, 7):
            lp, advantages = packed(0, 6, seed=step, noise=1.5)
            adapter.loss(lp, advantages)
            metrics = adapter.end_step(step)
    told = [r.message for r in caplog.records if ": " in r.message and r.message.split(":")[0] in ("stop", "act")]
    urgent = [f for f in adapter.findings if f.severity in ("stop", "act")]
    assert len(told) == len(set(told)) >= len(urgent) > 0
    assert metrics["offdrift/findings_stop"] + metrics["offdrift/findings_act"] == len(urgent)
    assert any(
        next(iter(f.snippets)) == "trl" and f.snippets["trl"] in "\n".join(told) for f in urgent if "trl" in f.snippets
    )


def test_settings_reach_the_method_and_unknown_ones_are_refused() -> None:
    adapter = Adapter("token_tis", framework="plain", settings={"weight.cap": 5.0})
    assert adapter.method == override(method("token_tis"), {"weight.cap": 5.0})
    with pytest.raises(MethodError, match="cap"):
        Adapter("token_tis", framework="plain", settings={"weight.capp": 5.0})
    with pytest.raises(MethodError, match="path=value"):
        parse_settings("weight.cap")


def test_versions_are_compared_as_numbers_and_what_is_absent_is_named(monkeypatch, caplog) -> None:
    for found in ("1.7.9", "1.07.0", "0.1", "1.8.0", "1.10.0", "1.16.0", "2.0.0"):
        require.cache_clear()
        monkeypatch.setattr(frameworks, "version", lambda name, found=found: found)
        if found in ("1.8.0", "1.10.0", "1.16.0", "2.0.0"):
            require("trl")
        else:
            with pytest.raises(FrameworkError, match=rf"trl {found}.*older.*1\.8\.0 to 1\.16\.0.*pip install"):
                require("trl")
        assert bool(caplog.records) == (found == "2.0.0")
    require.cache_clear()
    monkeypatch.undo()
    with pytest.raises(FrameworkError, match=r"slime is not installed.*tested"):
        require("slime")


def test_no_framework_is_imported_with_the_library() -> None:
    import subprocess

    names = [f.module for f in FRAMEWORKS.values()]
    code = f"import sys, offdrift, offdrift.adapters.base; print([m for m in {names!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
