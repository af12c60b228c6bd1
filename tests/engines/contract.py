"""What every rollout engine must keep (`offdrift.engines`), as one suite run on each engine.

A module with a class that inherits from `EngineContract` provides a fixture `built`: the trainer's
float32 model, whose weights the engine holds when a test begins and ends, the engine, and whether it
computes in float32, so that it must agree with the oracle to rounding.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from offdrift.engines import Engine
from offdrift.engines.output_head import deviations
from offdrift.engines.score import score
from offdrift.engines.sync_units import GROUPS, Units, weight_groups
from offdrift.engines.verify_sync import FLOAT32_CAP, check_sync, examine_sync, verify_sync
from offdrift.errors import EngineError, SyncError
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import FullVocab, HiddenStates, TopK
from tests.engines.models import VOCAB
from tests.engines.oracles import logp_rows

# Ragged, and with id 0, which fills rectangles, as a first, a last and a lone token.
PROMPTS = [[(7 * i) % VOCAB, (5 * i + 3) % VOCAB, 0][: 1 + i % 3] for i in range(8)]
PLAIN = Sampling(max_tokens=12)
SAMPLINGS = {
    "plain": PLAIN,
    "cold": replace(PLAIN, temperature=0.7),
    "top_k": replace(PLAIN, top_k=5),
    "top_p": replace(PLAIN, top_p=0.9),
    "min_p": replace(PLAIN, min_p=0.2),
    "all": replace(PLAIN, temperature=0.7, min_p=0.01, top_k=9, top_p=0.8),
}
FILTERED = [name for name, sampling in SAMPLINGS.items() if sampling.filtered]
INEXACT_TV = 0.25
"""19 of 20 reduced-precision rows are at most this far from the oracle in total variation."""


class Forgetful:
    """An engine that keeps the first weights it ever got of one group, and says nothing."""

    def __init__(self, engine: Engine, model: torch.nn.Module, group: str) -> None:
        self._engine = engine
        kept = {id(w) for w in weight_groups(model)[group]}
        self._old = {n: w.detach().clone() for n, w in model.named_parameters() if id(w) in kept}
        assert self._old, f"the model has no {group}"

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def load_weights(self, weights, *, version):
        stale = ((name, self._old.get(name, weight)) for name, weight in weights)
        self._engine.load_weights(stale, version=version)


class EngineContract:
    DRAWS = 2000
    """Tokens whose frequencies are compared with the recorded distribution."""
    REPEATED = 2e-6
    """Nats within which an engine that follows its own tokens repeats their log-probs."""

    @pytest.fixture
    def model(self, built):
        return built[0]

    @pytest.fixture
    def engine(self, built):
        return built[1]

    @pytest.fixture
    def exact(self, built):
        return built[2]

    # -- what is recorded is what was sampled --------------------------------------------------

    @pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
    def test_evidence_is_the_distribution_of_the_weights_tempered_and_filtered(self, engine, model, exact, sampling):
        rollouts = engine.generate(PROMPTS, sampling, seed=3, evidence="full")
        truth = logp_rows(model, rollouts, sampling)
        rows = rollouts.evidence.logp
        assert rows.shape == truth.shape == (8 * 12, VOCAB)
        tv = 0.5 * (rows.double().exp() - truth.exp()).abs().sum(-1)
        if exact:
            assert torch.equal(rows.isinf(), truth.isinf())
            assert tv.max() < 1e-5
        elif sampling in (PLAIN, SAMPLINGS["cold"]):
            assert 0 < tv.mean() < tv.quantile(0.95) < INEXACT_TV  # a flipped expert moves single rows by more

    @pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
    def test_log_probs_are_the_evidence_at_the_sampled_token(self, engine, sampling):
        rollouts = engine.generate(PROMPTS, sampling, seed=4, evidence="full")
        rows = rollouts.evidence.logp
        assert isinstance(rollouts.evidence, FullVocab)
        assert len(rows) == len(rollouts.tokens) == len(rollouts.logp_rollout) == 8 * 12
        assert rollouts.provenance.logprobs == "processed"
        assert rollouts.provenance.sampling == sampling
        picked = rows.gather(1, rollouts.tokens[:, None]).squeeze(1)
        torch.testing.assert_close(rollouts.logp_rollout, picked, atol=1e-6, rtol=0)
        torch.testing.assert_close(rows.logsumexp(-1), torch.zeros(96), atol=1e-5, rtol=0)
        if sampling.top_k > 0 and sampling.top_p == 1:
            # Equal scores at the k-th place all stay, in every engine.
            kept = rows.isfinite().sum(-1)
            assert kept.min() == sampling.top_k
            assert kept.max() <= sampling.top_k + (0 if exact_rows(rows) else 3)

    @pytest.mark.parametrize("k", [1, 5, VOCAB])
    def test_top_k_evidence_is_the_head_of_the_full_rows(self, engine, k):
        sampling = SAMPLINGS["cold"]
        top = engine.generate(PROMPTS, sampling, seed=5, evidence=k)
        full = engine.generate(PROMPTS, sampling, seed=5, evidence="full")
        assert isinstance(top.evidence, TopK)
        assert torch.equal(top.tokens, full.tokens)
        assert top.evidence.ids.shape == top.evidence.logp.shape == (96, k)
        largest = full.evidence.logp.topk(k).values
        torch.testing.assert_close(top.evidence.logp, largest, atol=1e-6, rtol=0)
        at_ids = full.evidence.logp.gather(1, top.evidence.ids.long())
        torch.testing.assert_close(top.evidence.logp, at_ids, atol=1e-6, rtol=0)
        seen = top.evidence.ids == top.tokens[:, None]
        assert seen.any()
        at_token = top.logp_rollout[:, None].expand(-1, k)[seen]
        torch.testing.assert_close(top.evidence.logp[seen], at_token, atol=1e-6, rtol=0)

    @pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
    def test_hidden_states_and_their_head_are_the_full_rows(self, engine, sampling):
        hidden = engine.generate(PROMPTS, sampling, seed=5, evidence="hidden")
        full = engine.generate(PROMPTS, sampling, seed=5, evidence="full")
        assert isinstance(hidden.evidence, HiddenStates)
        assert torch.equal(hidden.tokens, full.tokens)
        states, head = hidden.evidence.states, hidden.evidence.head
        assert states.dtype == head.weight.dtype == getattr(torch, engine.dtype)
        assert states.shape == (96, 64)
        logits = head.scores(states, slice(0, VOCAB))
        tempered = logits / sampling.temperature
        if sampling.filtered:
            assert torch.equal(hidden.support.ids, full.support.ids)
            tempered = tempered.masked_fill(hidden.support.left_out(slice(None), VOCAB), -torch.inf)
        rows = tempered.log_softmax(-1)
        tolerance = rounding(engine, logits) / sampling.temperature
        torch.testing.assert_close(rows, full.evidence.logp, atol=tolerance, rtol=0)

    def test_hidden_states_of_ragged_responses_reproduce_their_log_probs(self, engine):
        sampling = replace(PLAIN, stop_token_ids=tuple(range(0, VOCAB, 8)))
        rollouts = engine.generate(PROMPTS * 4, sampling, seed=8, evidence="hidden")
        assert len(set(rollouts.lengths.tolist())) >= 3
        found = rollouts.evidence
        gaps = deviations(found, rollouts.tokens, rollouts.logp_rollout)
        assert len(gaps) == len(rollouts.tokens) == len(found.states) > 64
        assert gaps.max() <= rounding(engine, found.head.scores(found.states, slice(0, VOCAB)))
        # The test can tell: states one token off miss by nats.
        shifted = HiddenStates(found.states.roll(1, 0), found.head)
        assert deviations(shifted, rollouts.tokens, rollouts.logp_rollout).mean() > 0.5

    @pytest.mark.parametrize("name", FILTERED)
    def test_the_support_is_what_the_recorded_distribution_has_probability_on(self, engine, name):
        sampling = replace(SAMPLINGS[name], stop_token_ids=tuple(range(0, VOCAB, 8)))
        rollouts = engine.generate(PROMPTS * 4, sampling, seed=8, evidence="full")
        assert len(set(rollouts.lengths.tolist())) >= 3
        rows, support = rollouts.evidence.logp, rollouts.support
        assert torch.equal(support.left_out(slice(None), VOCAB), rows.isinf())
        assert support.ids.dtype == torch.int32
        assert 0 < support.cu_seqlens.diff().min() < support.cu_seqlens.diff().max() + (name == "top_k") <= VOCAB
        # Whatever else is recorded, and for tokens that are given.
        lone = engine.generate(PROMPTS * 4, sampling, seed=8)
        assert lone.evidence is None
        assert torch.equal(lone.support.ids, support.ids)
        again = engine.rescore(rollouts)
        assert torch.equal(again.support.left_out(slice(None), VOCAB), again.evidence.logp.isinf())
        assert engine.generate(PROMPTS, PLAIN, seed=8).support is None

    @pytest.mark.parametrize("name", FILTERED)
    def test_ratios_on_the_support_are_one_at_equal_weights_and_otherwise_the_mass_that_was_kept(
        self, engine, model, exact, name
    ):
        sampling = SAMPLINGS[name]
        rollouts = engine.generate(PROMPTS * 4, sampling, seed=9)
        with torch.no_grad():
            replayed = score(model, rollouts, temperature=sampling.temperature)
            whole = score(model, rollouts.with_(support=None), temperature=sampling.temperature)
        left_out = rollouts.support.left_out(slice(None), VOCAB)
        kept_mass = whole.logits.log_softmax(-1).exp().masked_fill(left_out, 0.0).sum(-1)
        ratios, unmasked = (x.logp - rollouts.logp_rollout for x in (replayed, whole))
        assert len(ratios) == 4 * 8 * 12
        if exact:
            assert ratios.abs().max() <= rounding(engine, whole.logits)
            torch.testing.assert_close(unmasked, kept_mass.log(), atol=1e-5, rtol=0)
        else:
            assert ratios.mean().abs() < 0.02
            torch.testing.assert_close(unmasked.mean(), kept_mass.log().mean(), atol=0.02, rtol=0)
        assert unmasked.mean() < -0.05

    def test_hidden_states_keep_the_head_that_sampled(self, engine, model):
        before = engine.generate(PROMPTS, PLAIN, seed=5, evidence="hidden")
        again = engine.generate(PROMPTS, PLAIN, seed=6, evidence="hidden")
        assert again.evidence.head is before.evidence.head
        first = before.evidence.head.weight.clone()
        moved = {n: w * 1.0 + 0.3 * w.roll(1, 0) for n, w in model.named_parameters()}
        engine.load_weights(moved.items(), version=1)
        try:
            after = engine.generate(PROMPTS, PLAIN, seed=5, evidence="hidden")
        finally:
            engine.load_weights(model.named_parameters(), version=0)
        assert torch.equal(before.evidence.head.weight, first)
        assert not torch.equal(after.evidence.head.weight, first)
        for rollouts in (before, after):
            found = rollouts.evidence
            gaps = deviations(found, rollouts.tokens, rollouts.logp_rollout)
            assert gaps.max() <= rounding(engine, found.head.scores(found.states, slice(0, VOCAB)))
        swapped = HiddenStates(before.evidence.states, after.evidence.head)
        assert deviations(swapped, before.tokens, before.logp_rollout).mean() > 0.05

    def test_frequencies_are_those_of_the_recorded_distribution(self, engine):
        # Chi-squared over cells that expect at least 5 draws: mean df, variance 2 df.
        # Raw log-probs would be off by the temperature and the filter: thousands.
        sampling = Sampling(max_tokens=1, temperature=0.7, top_p=0.9)
        rollouts = engine.generate([PROMPTS[2]] * self.DRAWS, sampling, seed=6)
        row = engine.generate([PROMPTS[2]], sampling, seed=6, evidence="full").evidence.logp[0]
        expected = self.DRAWS * row.double().exp()
        seen = torch.bincount(rollouts.tokens, minlength=VOCAB).double()
        cells = expected >= 5
        df = int(cells.sum()) - 1
        assert df >= 5
        assert seen[row.isinf()].sum() == 0
        chi2 = float(((seen - expected).square() / expected)[cells].sum())
        assert chi2 < df + 5 * (2 * df) ** 0.5

    # -- lengths ------------------------------------------------------------------------------

    def test_without_stop_tokens_every_response_has_the_maximal_length(self, engine):
        rollouts = engine.generate(PROMPTS, PLAIN, seed=7)
        assert rollouts.lengths.tolist() == [12] * 8
        assert rollouts.finish == ("length",) * 8

    def test_a_response_ends_with_the_first_stop_token_and_contains_it(self, engine, model, exact):
        stops = tuple(range(0, VOCAB, 8))
        sampling = replace(PLAIN, stop_token_ids=stops)
        rollouts = engine.generate(PROMPTS, sampling, seed=8, evidence="full")
        responses = rollouts.tokens.split(rollouts.lengths.tolist())
        for response, finish in zip(responses, rollouts.finish, strict=True):
            assert not set(response[:-1].tolist()) & set(stops)
            assert (int(response[-1]) in stops) == (finish == "stop")
            assert finish == "stop" or len(response) == 12
        assert rollouts.finish.count("stop") >= 3
        assert len(set(rollouts.lengths.tolist())) >= 3
        picked = rollouts.evidence.logp.gather(1, rollouts.tokens[:, None]).squeeze(1)
        torch.testing.assert_close(rollouts.logp_rollout, picked, atol=1e-6, rtol=0)
        truth = logp_rows(model, rollouts, sampling).gather(1, rollouts.tokens[:, None]).squeeze(1)
        worst = float((truth - rollouts.logp_rollout).abs().max())
        assert worst < (1e-4 if exact else 1.0)

    def test_a_stop_token_sampled_first_is_a_response_of_one_token(self, engine):
        sampling = replace(PLAIN, stop_token_ids=tuple(range(VOCAB)))
        rollouts = engine.generate(PROMPTS, sampling, seed=9, evidence=3)
        assert rollouts.lengths.tolist() == [1] * 8
        assert rollouts.finish == ("stop",) * 8
        assert rollouts.evidence.ids.shape == (8, 3)

    def test_a_stop_token_in_the_last_place_is_a_stop(self, engine):
        rollouts = engine.generate([PROMPTS[0]] * 64, replace(PLAIN, max_tokens=2), seed=10)
        last = rollouts.tokens[1::2]
        stop = int(last[(rollouts.tokens[::2] != last)][0])
        sampling = replace(PLAIN, max_tokens=2, stop_token_ids=(stop,))
        again = engine.generate([PROMPTS[0]] * 64, sampling, seed=10)
        full = again.lengths == 2
        ends = again.tokens[again.cu_seqlens[1:] - 1] == stop
        assert (full & ends).any()
        assert [f == "stop" for f in again.finish] == ends.tolist()

    def test_a_sampled_pad_id_is_a_token_like_any_other(self, engine, model, exact):
        # Id 0 fills rectangles in most backends. A head that likes it makes it frequent.
        keen = keen_on_zero(model)
        engine.load_weights(keen.items(), version=1)
        try:
            sampling = replace(PLAIN, stop_token_ids=(1, 2))
            rollouts = engine.generate(PROMPTS * 4, sampling, seed=11)
            zeros = rollouts.tokens == 0
            assert zeros.sum() >= 32
            lengths = rollouts.lengths
            assert (lengths < 12).any()
            ends = rollouts.tokens[rollouts.cu_seqlens[1:] - 1].tolist()
            assert [f == "stop" for f in rollouts.finish] == [e in (1, 2) for e in ends]
            assert all(n == 12 for n, e in zip(lengths.tolist(), ends, strict=True) if e > 2)
            if exact:
                truth = with_weights(model, keen, lambda m: logp_rows(m, rollouts, sampling))
                picked = truth.gather(1, rollouts.tokens[:, None]).squeeze(1).float()
                torch.testing.assert_close(rollouts.logp_rollout, picked, atol=1e-4, rtol=0)
        finally:
            engine.load_weights(model.named_parameters(), version=0)

    # -- seeds and state ----------------------------------------------------------------------

    def test_a_seed_decides_the_tokens_and_nothing_else_does(self, engine):
        first = engine.generate(PROMPTS, PLAIN, seed=12)
        torch.manual_seed(99)
        again = engine.generate(PROMPTS, PLAIN, seed=12)
        other = engine.generate(PROMPTS, PLAIN, seed=13)
        assert torch.equal(first.tokens, again.tokens)
        assert torch.equal(first.logp_rollout, again.logp_rollout)
        assert (first.tokens != other.tokens).float().mean() > 0.5

    def test_equal_prompts_draw_different_responses(self, engine):
        rollouts = engine.generate([PROMPTS[1]] * 8, PLAIN, seed=14)
        assert len({tuple(r.tolist()) for r in rollouts.tokens.split(12)}) == 8

    def test_the_random_state_of_the_host_stays_as_it_is(self, engine, model):
        # Not Python's own `random`: the checks of the test run draw from it.
        torch.manual_seed(1)
        np.random.seed(1)
        before = torch.get_rng_state(), str(np.random.get_state())
        threads = torch.get_num_threads()
        engine.generate(PROMPTS, PLAIN, seed=15, evidence="full")
        engine.load_weights(model.named_parameters(), version=0)
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == str(np.random.get_state())
        assert torch.get_num_threads() == threads
        assert torch.set_num_threads is torch._C.set_num_threads

    # -- bookkeeping --------------------------------------------------------------------------

    def test_prompts_groups_and_versions_are_recorded(self, engine, model):
        engine.load_weights(model.named_parameters(), version=41)
        try:
            rollouts = engine.generate([[1, 2], [3], [1, 2], [3, 4]], PLAIN, seed=16)
        finally:
            engine.load_weights(model.named_parameters(), version=0)
        assert rollouts.prompt_tokens.tolist() == [1, 2, 3, 1, 2, 3, 4]
        assert rollouts.prompt_cu_seqlens.tolist() == [0, 2, 3, 5, 7]
        assert rollouts.group_ids.tolist() == [0, 1, 0, 2]
        assert rollouts.rollout_version.tolist() == [41] * 48
        assert rollouts.provenance.engine == engine.name
        assert rollouts.provenance.dtype == engine.dtype
        assert isinstance(engine, Engine)

    @pytest.mark.parametrize("evidence", ["full", "hidden", 20])
    def test_evidence_above_the_memory_limit_is_refused_with_the_way_out(self, engine, evidence, monkeypatch):
        monkeypatch.setattr(engine, "evidence_limit_mib", 0)
        with pytest.raises(EngineError, match=r"limit 0 MiB.*evidence = 20.*evidence_limit_mib"):
            engine.generate(PROMPTS, PLAIN, seed=17, evidence=evidence)

    # -- weights ------------------------------------------------------------------------------

    def test_a_synchronisation_is_verified_and_leaves_no_trace(self, engine, model):
        weights = {name: w.detach().clone() for name, w in model.named_parameters()}
        model.train()
        before = engine.generate(PROMPTS, PLAIN, seed=18)
        report = verify_sync(engine, model, PROMPTS, PLAIN, seed=0)
        assert all(module.training for module in model.modules())
        model.eval()
        assert report.stale == ()
        assert report.unverified == ()
        assert report.tokens == 8 * 12 * 2
        assert 0 < report.noise <= report.cap
        assert report.gap <= report.limit
        assert report.proved > 0.6 * report.parts
        changed = [n for n, w in model.named_parameters() if not torch.equal(w, weights[n])]
        assert changed == []
        assert len(weights) > 20
        after = engine.generate(PROMPTS, PLAIN, seed=18)
        assert engine.version == 0
        assert torch.equal(before.logp_rollout, after.logp_rollout)

    @pytest.mark.parametrize("group", GROUPS)
    def test_a_group_that_stays_behind_is_caught_and_named(self, engine, model, group):
        weights = {name: w.detach().clone() for name, w in model.named_parameters()}
        report = examine_sync(Forgetful(engine, model, group), model, PROMPTS, PLAIN, seed=0)
        assert report.stale
        units = Units.of(model)
        named = {units.unions.index(unit.name) for unit in report.stale}
        parts = {units.parts[i].split("[")[0] for row in named for i in units.parts_of(row).tolist()}
        ids = {id(w) for w in weight_groups(model)[group]}
        assert parts <= {n for n, w in model.named_parameters() if id(w) in ids}
        changed = [n for n, w in model.named_parameters() if not torch.equal(w, weights[n])]
        assert changed == []

    def test_the_cheap_check_passes_after_a_load_and_fails_without_one(self, engine, model, exact):
        baseline = verify_sync(engine, model, PROMPTS, PLAIN, seed=0)
        gap = check_sync(engine, model, PROMPTS, PLAIN, seed=1, baseline=baseline)
        assert 0 < gap <= baseline.cap
        assert baseline.cap == FLOAT32_CAP or not exact
        # One update of 10 % of each weight moves log-probs far; the engine has not been told.
        ahead = {n: w * 1.0 + 0.3 * w.roll(1, 0) for n, w in model.named_parameters()}

        def stale(moved):
            return check_sync(engine, moved, PROMPTS, PLAIN, seed=1, baseline=baseline)

        with pytest.raises(SyncError, match="at version 0; the limit is"):
            with_weights(model, ahead, stale)

    # -- tokens that were drawn before ---------------------------------------------------------

    @pytest.mark.parametrize("evidence", ["full", "hidden", "sampled", 5])
    def test_its_own_draw_is_recorded_again_as_it_was(self, engine, evidence):
        sampling = replace(PLAIN, stop_token_ids=tuple(range(0, VOCAB, 8)))
        drawn = engine.generate(PROMPTS * 4, sampling, seed=8, evidence=evidence)
        assert len(set(drawn.lengths.tolist())) >= 3
        again = engine.rescore(drawn, evidence=evidence)
        assert again.finish == drawn.finish
        for name in ("tokens", "cu_seqlens", "group_ids", "rollout_version"):
            assert torch.equal(getattr(again, name), getattr(drawn, name)), name
        torch.testing.assert_close(again.logp_rollout, drawn.logp_rollout, atol=self.REPEATED, rtol=0)
        assert type(again.evidence) is type(drawn.evidence)
        assert again.provenance.engine == engine.name

    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_given_tokens_are_recorded_as_the_weights_say(self, engine, model, exact, temperature):
        # Tokens that nobody drew, some of them all but impossible; lengths 1 to 12.
        drawn = engine.generate(PROMPTS, PLAIN, seed=0)
        lengths = torch.tensor([1, 12, 5, 3, 7, 12, 2, 9])
        rows = torch.cat([torch.arange(n) + 12 * i for i, n in enumerate(lengths.tolist())])
        given = drawn.with_(
            tokens=(11 * torch.arange(len(rows)) + 5) % VOCAB,
            logp_rollout=drawn.logp_rollout[rows],
            rollout_version=drawn.rollout_version[rows],
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        )
        sampling = replace(PLAIN, temperature=temperature)
        found = engine.rescore(given, sampling=sampling)
        truth = logp_rows(model, given, sampling)
        assert torch.equal(found.tokens, given.tokens)
        assert found.evidence.logp.shape == truth.shape == (51, VOCAB)
        assert found.provenance.sampling.temperature == temperature
        picked = truth.gather(1, given.tokens[:, None]).squeeze(1).float()
        tolerance = 1e-4 if exact else 1.0
        torch.testing.assert_close(found.evidence.logp, truth.float(), atol=tolerance, rtol=0)
        torch.testing.assert_close(found.logp_rollout, picked, atol=tolerance, rtol=0)

    def test_a_given_token_that_a_filter_excludes_is_refused(self, engine):
        drawn = engine.generate(PROMPTS, PLAIN, seed=0)
        with pytest.raises(EngineError, match="log-prob -inf"):
            engine.rescore(drawn, sampling=replace(PLAIN, top_k=1))


def rounding(engine: Engine, logits: torch.Tensor) -> float:
    """What two products of the same numbers may differ by at the engine's precision, nats.

    Half precisions sum in float32 and round the logit once, so that a logit and the normalizer may
    each come out one neighbor apart; float32 sums of 64 terms in another order differ in the last
    few bits.
    """
    steps = 8 if engine.dtype == "float32" else 2
    return steps * torch.finfo(getattr(torch, engine.dtype)).eps * float(logits.abs().max())


def exact_rows(rows: torch.Tensor) -> bool:
    """Whether no two finite log-probs of a row are equal, so that no k-th place is shared."""
    return not any(len(set(f := r[r.isfinite()].tolist())) < len(f) for r in rows)


def keen_on_zero(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights whose head prefers token 0: its row points along the average final state."""
    weights = {name: w.detach().clone() for name, w in model.named_parameters()}
    with torch.no_grad():
        states = model.model(input_ids=torch.arange(VOCAB)[None]).last_hidden_state[0]
    head = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    weights[head][0] = 3 * states.mean(0) / states.mean(0).norm()
    return weights


def with_weights(model, weights, call):
    """`call(model)` while the model holds other weights; they are put back afterwards."""
    own = {name: w.detach().clone() for name, w in model.named_parameters()}

    @torch.no_grad()
    def put(values):
        for name, weight in model.named_parameters():
            weight.copy_(values[name])

    put(weights)
    try:
        return call(model)
    finally:
        put(own)
