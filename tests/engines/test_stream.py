"""Responses in progress: whatever the order of calls, each token is one that the weights of its version drew."""

import inspect
import itertools
import random
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM

from offdrift.engines.hf import TransformersEngine
from offdrift.engines.hf_decode import inverted
from offdrift.engines.hf_stream import response_numbers
from offdrift.engines.stream import Delta, DrawJob, open_stream, rollouts_of
from offdrift.engines.verify_sync import check_sync, verify_sync
from offdrift.errors import EngineError, ShapeError
from offdrift.records.provenance import Provenance, Sampling
from offdrift.records.rollouts import FullVocab, HiddenStates, Support, TopK
from tests.engines.models import SMALLER, VOCAB, tiny
from tests.engines.oracles import processed

PLAIN = Sampling(max_tokens=12)
STOPS = Sampling(max_tokens=10, temperature=0.8, top_k=40, stop_token_ids=(7, 9))
PROMPTS = [(5,), (1, 2, 3), (0, 8), (4, 4, 4, 4, 4, 4, 6)]
VERSIONS = 6
EXACT = 1e-4  # of the engines' contract, nats


def sliding() -> Gemma2ForCausalLM:
    """A model of which one layer looks back eight tokens only."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = SMALLER | {"initializer_range": 0.5, "sliding_window": 8, "tie_word_embeddings": False}
        return Gemma2ForCausalLM(Gemma2Config(**sizes, attn_implementation="eager")).eval()


def versions_of(kind: str) -> list:
    """A model, and what it became after one update, two updates and so on."""
    models = [sliding() if kind == "sliding" else tiny(kind) for _ in range(VERSIONS)]
    for version, model in enumerate(models):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.15 * version * weight.roll(1, 0))
    return models


VLLM = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(
    scope="module",
    params=[
        ("transformers", "dense"),
        ("transformers", "moe"),
        ("transformers", "sliding"),
        pytest.param(("vllm", "dense"), marks=VLLM),
        pytest.param(("vllm", "moe"), marks=VLLM),
    ],
    ids=lambda p: "-".join(p),
)
def built(request):
    """An engine at version 0, and the models whose weights it may be given."""
    backend, kind = request.param
    models = versions_of(kind)
    if backend == "transformers":
        return TransformersEngine(models[0], batch_size=5), models
    return request.getfixturevalue("vllm_engine")(kind, dtype="float32"), models


@pytest.fixture
def models(built):
    return built[1]


@pytest.fixture
def engine(built):
    engine, models = built
    yield engine
    if engine.stream is not None:
        engine.stream.close()
    engine.load_weights(models[0].named_parameters(), version=0)


@pytest.fixture(
    params=[pytest.param("transformers", id="transformers"), pytest.param("vllm", id="vllm", marks=VLLM)],
    scope="module",
)
def simple(request):
    """One engine per backend, for what does not depend on the model; and its models."""
    models = versions_of("dense")
    if request.param == "transformers":
        return TransformersEngine(models[0]), models
    return request.getfixturevalue("vllm_engine")("dense", dtype="float32"), models


@pytest.fixture
def dense(simple):
    engine, models = simple
    yield engine
    if engine.stream is not None:
        engine.stream.close()
    engine.load_weights(models[0].named_parameters(), version=0)


class Book:
    """Deltas by key, and what a reader of them can tell."""

    def __init__(self):
        self.jobs: dict[str, DrawJob] = {}
        self.deltas: dict[str, list[Delta]] = defaultdict(list)

    def submit(self, stream, *jobs):
        stream.submit(jobs)
        self.jobs |= {job.key: job for job in jobs}

    def step(self, stream, steps=1):
        deltas = stream.step(steps)
        assert len({d.key for d in deltas}) == len(deltas)
        for delta in deltas:
            assert 1 <= len(delta.tokens) == len(delta.logp) <= steps
            assert delta.version == stream.version
            assert not any(d.finish for d in self.deltas[delta.key])
            self.deltas[delta.key].append(delta)
        return deltas

    def drain(self, stream):
        for _ in range(100):
            if not stream.active:
                return self
            self.step(stream)
        raise AssertionError(f"{stream.active} responses never end")

    def tokens(self, key):
        return [t for d in self.deltas[key] for t in d.tokens.tolist()]

    def versions(self, key):
        return [d.version for d in self.deltas[key] for _ in d.tokens]

    def logp(self, key):
        return torch.cat([d.logp for d in self.deltas[key]])

    def rows(self, key):
        return torch.cat([d.evidence.logp for d in self.deltas[key]])


@torch.no_grad()
def drawn_by(models, job, tokens, versions, sampling):
    """log mu(a) for all a at every token, each by the weights of its version alone: no cache, no padding."""
    text = torch.tensor([[*job.prompt, *job.before, *tokens]])
    start = text.shape[1] - len(tokens) - 1
    logits = {v: models[v](input_ids=text).logits[0] for v in set(versions)}
    return torch.stack([processed(logits[v][start + i], sampling) for i, v in enumerate(versions)]).float()


@torch.no_grad()
def drawn_with_kept_cache(models, job, tokens, versions, sampling):
    """The same where each token reads the keys and values that earlier versions computed."""
    cache, rows, piece = DynamicCache(config=models[0].config), [], [*job.prompt, *job.before]
    for token, version in zip(tokens, versions, strict=True):
        output = models[version](input_ids=torch.tensor([piece]), past_key_values=cache, use_cache=True)
        rows.append(processed(output.logits[0, -1], sampling))
        piece = [token]
    return torch.stack(rows).float()


def check_responses(book, keys, models, sampling, reference=drawn_by, tolerance=EXACT):
    """Every recorded row and log-prob is the reference's at the version recorded beside it."""
    assert keys
    for key in keys:
        tokens, versions = book.tokens(key), book.versions(key)
        assert versions == sorted(versions)
        truth = reference(models, book.jobs[key], tokens, versions, sampling)
        rows = book.rows(key)
        assert torch.equal(rows.isinf(), truth.isinf())
        support = Support.joined([d.support for d in book.deltas[key]])
        assert (support is not None) == sampling.filtered
        if support is not None:
            assert torch.equal(support.left_out(slice(None), VOCAB), rows.isinf())
        finite = truth.isfinite()
        torch.testing.assert_close(rows[finite], truth[finite], atol=tolerance, rtol=0)
        picked = rows.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        torch.testing.assert_close(book.logp(key), picked, atol=1e-6, rtol=0)


# -- any order of calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", range(3))
def test_no_token_is_lost_or_doubled_in_any_order_of_calls(engine, models, order):
    rng, book, cancelled = random.Random(order), Book(), {}
    stream = open_stream(engine, STOPS, evidence="full")
    names = itertools.count()
    for i in range(60):
        call = rng.choice(["submit", "step", "step", "load", "cancel"])
        ended = [k for k, d in book.deltas.items() if d and d[-1].finish]
        going = [k for k in book.jobs if k not in ended and k not in cancelled]
        if call == "submit":
            lengths = [rng.choice([0, 0, 3, 9]) for _ in range(rng.choice([1, 2, 4]))]
            prompt = rng.choice(PROMPTS)
            jobs = [
                DrawJob(str(next(names)), prompt, rng.randrange(100), tuple(rng.choices(range(10, VOCAB), k=n)))
                for n in lengths
            ]
            book.submit(stream, *jobs)
        elif call == "step":
            book.step(stream, rng.choice([1, 1, 1, 2, 4]))
        elif call == "load" and i > 12 * stream.version and stream.version + 1 < VERSIONS:
            stream.load_weights(models[stream.version + 1].named_parameters(), version=stream.version + 1)
        elif call == "cancel" and len(going) > 2:
            key = rng.choice(going)
            stream.cancel([key, "nobody"])
            cancelled[key] = len(book.tokens(key))
        ended = [k for k, d in book.deltas.items() if d and d[-1].finish]
        assert stream.active == len(book.jobs) - len(ended) - len(cancelled)
    book.drain(stream)
    assert {k: len(book.tokens(k)) for k in cancelled} == cancelled
    whole = [k for k in book.jobs if k not in cancelled]
    for key in whole:
        response = [*book.jobs[key].before, *book.tokens(key)]
        ends = response[-1] in STOPS.stop_token_ids
        assert not set(response[:-1]) & set(STOPS.stop_token_ids)
        assert book.deltas[key][-1].finish == ("stop" if ends else "length")
        assert len(response) == 10 or (ends and len(response) < 10)
    check_responses(book, [k for k in book.jobs if book.tokens(k)], models, STOPS)
    spans = Counter(len(set(book.versions(k))) for k in whole)
    assert cancelled
    assert spans[1] >= 2
    assert sum(spans.values()) >= spans[1] + 4
    assert stream.provenance.cache == "recompute"


def test_old_keys_and_values_are_kept_if_asked(engine, models):
    stream, book = open_stream(engine, PLAIN, evidence="full"), Book()
    book.submit(stream, *(DrawJob(f"a{i}", p, i) for i, p in enumerate(PROMPTS)))
    book.step(stream, 3)
    book.submit(stream, DrawJob("b", PROMPTS[1], 8), DrawJob("c", PROMPTS[1], 9, before=(20, 21)))
    for version in (1, 2):
        stream.load_weights(models[version].named_parameters(), version=version, cache="keep")
        book.step(stream, 3)
    book.drain(stream)
    assert book.versions("a0") == [0] * 3 + [1] * 3 + [2] * 6
    assert book.versions("c") == [1] * 3 + [2] * 7
    check_responses(book, book.jobs, models, PLAIN, drawn_with_kept_cache)
    assert stream.provenance.cache == "keep"
    # The test can tell: no version alone drew the tokens behind an update.
    alone = drawn_by(models, book.jobs["a1"], book.tokens("a1"), book.versions("a1"), PLAIN)
    gaps = (book.rows("a1") - alone).abs().amax(1)
    assert gaps[:3].max() < EXACT
    assert gaps[3:].min() > 100 * EXACT


def test_a_response_that_was_not_read_yet_starts_with_the_new_weights_and_nothing_else(engine, models):
    stream, book = open_stream(engine, PLAIN, evidence="full"), Book()
    long = tuple(i % VOCAB for i in range(3, 153))  # vLLM keeps keys and values of whole blocks of 128
    book.submit(stream, DrawJob("before", long, 0))
    book.step(stream)
    book.submit(stream, DrawJob("waiting", long, 1))
    stream.load_weights(models[2].named_parameters(), version=2, cache="keep")
    book.submit(stream, DrawJob("after", long, 2))
    book.step(stream, 2)
    stream.load_weights(models[3].named_parameters(), version=3, cache="recompute")
    stream.load_weights(models[4].named_parameters(), version=4, cache="keep")
    book.drain(stream)
    assert book.versions("waiting") == book.versions("after") == [2] * 2 + [4] * 10
    assert book.versions("before") == [0] + [2] * 2 + [4] * 9
    check_responses(book, ["waiting", "after"], models, PLAIN)
    # Beside others in progress, and once they are gone:
    after = engine.generate([long], Sampling(max_tokens=1), seed=0, evidence="full").evidence.logp
    truth = drawn_by(models, DrawJob("", long, 0), [0], [4], PLAIN)
    torch.testing.assert_close(after, truth, atol=EXACT, rtol=0)
    old = drawn_by(models, DrawJob("", long, 0), [0], [0], PLAIN)
    assert (old - truth).abs().max() > 0.1


# -- what is drawn -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "top_p"),
    [("sampled", 1.0), (5, 1.0), ("full", 1.0), ("hidden", 1.0), ("sampled", 0.8), ("hidden", 0.8)],
)
def test_a_stream_records_what_generate_would(engine, evidence, top_p):
    sampling = replace(PLAIN, top_p=top_p, stop_token_ids=tuple(range(0, VOCAB, 8)))
    stream, book = open_stream(engine, sampling, evidence=evidence), Book()
    jobs = [DrawJob(f"{i}", PROMPTS[i % 4], i) for i in range(16)]
    book.submit(stream, *jobs[:6])
    book.step(stream, 2)
    book.submit(stream, *jobs[6:])
    book.drain(stream)
    rollouts = rollouts_of(jobs, book.deltas, stream.provenance)
    assert len(set(rollouts.lengths.tolist())) >= 3
    assert rollouts.rollout_version.tolist() == [0] * len(rollouts.tokens)
    assert rollouts.group_ids.tolist() == [0, 1, 2, 3] * 4
    assert rollouts.finish == tuple(book.deltas[j.key][-1].finish for j in jobs)
    assert rollouts.provenance == engine.generate([[1]], sampling, seed=0).provenance
    again = engine.rescore(rollouts, evidence=evidence)
    torch.testing.assert_close(again.logp_rollout, rollouts.logp_rollout, atol=1e-5, rtol=0)
    assert (rollouts.support is None) == (top_p == 1)
    if top_p < 1:
        assert torch.equal(again.support.ids, rollouts.support.ids)
        assert torch.equal(again.support.cu_seqlens, rollouts.support.cu_seqlens)
    kinds = {"full": FullVocab, "hidden": HiddenStates, 5: TopK}
    assert type(rollouts.evidence) is type(again.evidence) is kinds.get(evidence, type(None))
    if evidence != "sampled":
        name = "states" if evidence == "hidden" else "logp"
        torch.testing.assert_close(getattr(rollouts.evidence, name), getattr(again.evidence, name), atol=1e-4, rtol=0)


def test_frequencies_are_those_of_the_recorded_distribution(dense):
    # Chi-squared over cells that expect at least 5 draws, as in the contract; the second token of each response.
    stream, book = open_stream(dense, Sampling(max_tokens=2, temperature=0.7, top_p=0.9), evidence="full"), Book()
    book.submit(stream, *(DrawJob(str(i), (0, 8), seed=i, before=(20,)) for i in range(2000)))
    book.drain(stream)
    row = book.rows("0")[0]
    expected = 2000 * row.double().exp()
    counts = torch.bincount(torch.tensor([book.tokens(k)[0] for k in book.jobs]), minlength=VOCAB).double()
    cells = expected >= 5
    df = int(cells.sum()) - 1
    assert df >= 5
    assert counts[row.isinf()].sum() == 0
    assert float(((counts - expected).square() / expected)[cells].sum()) < df + 5 * (2 * df) ** 0.5


def test_a_seed_decides_a_response_whatever_is_beside_it(dense):
    def drawn(*company):
        stream, book = open_stream(dense, PLAIN), Book()
        book.submit(stream, *company, DrawJob("a", (1, 2, 3), seed=5), DrawJob("b", (1, 2, 3), seed=6))
        book.drain(stream)
        stream.close()
        return book.tokens("a"), book.tokens("b")

    torch.manual_seed(3)
    alone = drawn()
    torch.manual_seed(4)
    assert alone == drawn(*(DrawJob(str(i), PROMPTS[i % 4], i) for i in range(9)))
    assert alone[0] != alone[1]


@pytest.mark.parametrize("kind", ["dense", "moe", "sliding"])
def test_a_response_continued_elsewhere_gets_the_tokens_that_it_would_have_got(kind):
    model = versions_of(kind)[0]
    here, there = (TransformersEngine(model) for _ in range(2))
    jobs = [DrawJob(str(i), PROMPTS[i % 4], 2**40 + i) for i in range(16)]
    sampling = replace(STOPS, stop_token_ids=tuple(range(0, VOCAB, 8)))
    whole, parts = Book(), Book()
    stream = open_stream(here, sampling)
    whole.submit(stream, *jobs)
    whole.drain(stream)
    stream.close()
    stream = open_stream(here, sampling)
    parts.submit(stream, *jobs)
    parts.step(stream, 4)
    going = [j for j in jobs if not parts.deltas[j.key][-1].finish]
    stream.close()
    assert 0 < len(going) < 16
    stream = open_stream(there, sampling)
    stream.submit([replace(j, before=tuple(parts.tokens(j.key))) for j in going])
    parts.drain(stream)
    assert {j.key: parts.tokens(j.key) for j in jobs} == {j.key: whole.tokens(j.key) for j in jobs}
    rollouts = rollouts_of(
        [replace(j, before=tuple(parts.tokens(j.key)[:2])) for j in jobs[:1]], parts.deltas, stream.provenance
    )
    assert rollouts.tokens.tolist() == whole.tokens("0")


def test_token_t_is_drawn_from_the_number_of_seed_and_t():
    models = versions_of("dense")
    stream, book = open_stream(TransformersEngine(models[0]), PLAIN, evidence="full"), Book()
    book.submit(stream, DrawJob("a", (1, 2), seed=-3, before=(4, 5, 6)))
    book.step(stream, 4)
    stream.load_weights(models[1].named_parameters(), version=1)
    book.drain(stream)
    uniforms = response_numbers(-3, 12)
    assert torch.equal(response_numbers(-3, 5), uniforms[:5])
    assert book.tokens("a") == inverted(book.rows("a"), uniforms[3:]).tolist()
    assert len({float(response_numbers(seed, 1)) for seed in (0, 1, -1, 2**32, 2**32 + 1, 2**63)}) == 6


def test_cohorts_become_one_and_equal_texts_are_read_once():
    engine = TransformersEngine(tiny("dense"), batch_size=64)
    shapes = []
    engine.model.register_forward_pre_hook(
        lambda _, a, kw: shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True
    )
    stream, book = open_stream(engine, PLAIN), Book()
    book.submit(stream, *(DrawJob(f"a{i}", (1, 2, 3), i) for i in range(8)))
    book.step(stream)
    book.submit(stream, *(DrawJob(f"b{i}", (4,) * 30, i) for i in range(4)))
    book.step(stream)
    book.step(stream, 2)
    assert shapes == [(1, 3), (8, 1), (1, 30), (12, 1), (12, 1)]
    stream.cancel([f"b{i}" for i in range(4)])
    book.submit(stream, DrawJob("c", (5,), 0))
    book.step(stream)
    book.step(stream)
    (cohort,) = stream._cohorts
    assert cohort.mask.shape == (9, 3 + 6)  # not the 30 columns that nobody reads any more
    assert cohort.mask.sum(1).tolist() == [9] * 8 + [3]


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_draws_a_continued_response_from_another_seed_and_keeps_no_rows(vllm_engine, monkeypatch):
    engine, models = vllm_engine("dense", dtype="float32"), versions_of("dense")
    core, seeds = engine.llm.llm_engine, []
    add = core.add_request
    monkeypatch.setattr(
        core, "add_request", lambda name, prompt, params: (seeds.append(params.seed), add(name, prompt, params))
    )
    stream, book = open_stream(engine, PLAIN, evidence="full"), Book()
    book.submit(stream, DrawJob("a", (1, 2), 0), DrawJob("b", (1, 2), 0, before=(4,)), DrawJob("c", (1, 2), 1))
    book.step(stream, 2)
    stream.load_weights(models[1].named_parameters(), version=1)
    book.step(stream)
    states = core.output_processor.request_states.values()
    assert [len(s.logprobs_processor.logprobs) for s in states] == [0] * 3
    assert len(set(seeds)) == len(seeds) == 6
    stream.close()
    assert not core.has_unfinished_requests()
    engine.load_weights(models[0].named_parameters(), version=0)


# -- the engine beside its stream ----------------------------------------------------------------------


def test_weights_go_through_the_stream_while_responses_are_in_progress(dense, simple):
    models = simple[1]
    stream, book = open_stream(dense, PLAIN), Book()
    book.submit(stream, DrawJob("a", (1,), 0))
    with pytest.raises(EngineError, match=r"load_weights is refused.*1 responses in progress.*the stream's own"):
        dense.load_weights(models[1].named_parameters(), version=1)
    stream.load_weights(models[2].named_parameters(), version=2)
    with pytest.raises(EngineError, match="version = 1 is lower than 2"):
        stream.load_weights(models[1].named_parameters(), version=1)
    with pytest.raises(EngineError, match="cache = 'drop'"):
        inspect.unwrap(type(stream).load_weights)(stream, models[3].named_parameters(), version=3, cache="drop")
    assert dense.version == stream.version == 2
    book.drain(stream)
    assert stream.provenance.cache is None  # nothing had been read when the weights came
    dense.load_weights(models[0].named_parameters(), version=1)
    assert stream.version == 1


def test_a_load_that_fails_loses_no_response(dense, simple):
    models = simple[1]
    stream, book = open_stream(dense, PLAIN, evidence="full"), Book()
    book.submit(stream, DrawJob("a", (1,), 0))
    book.step(stream, 2)
    with pytest.raises(EngineError, match=r"not given|no weights"):
        stream.load_weights(iter(()), version=1)
    book.drain(stream)
    assert book.versions("a") == [0] * 12
    check_responses(book, "a", models, PLAIN)


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_does_not_drain_a_stream_for_another_call(vllm_engine):
    engine, model = vllm_engine("dense", dtype="float32"), tiny("dense")
    baseline = verify_sync(engine, model, PROMPTS, PLAIN, seed=0)
    rollouts = engine.generate(PROMPTS, PLAIN, seed=0)
    stream, book = open_stream(engine, PLAIN), Book()
    book.submit(stream, DrawJob("a", (1,), 0))
    book.step(stream)
    calls = {
        "generate": lambda: engine.generate(PROMPTS, PLAIN, seed=0),
        "rescore": lambda: engine.rescore(rollouts),
        "routes": lambda: engine.routes(rollouts),
        "drop_prefixes": engine.drop_prefixes,
    }
    for name, call in calls.items():
        with pytest.raises(EngineError, match=rf"{name} is refused: engine 'vllm' has 1 responses in progress.*cancel"):
            call()
    with pytest.raises(EngineError, match="generate is refused"):
        check_sync(engine, model, PROMPTS, PLAIN, seed=0, baseline=baseline)
    book.drain(stream)
    assert len(book.tokens("a")) == 12
    check_sync(engine, model, PROMPTS, PLAIN, seed=0, baseline=baseline)
    stream.close()


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_streams_neither_prompts_in_chunks_nor_steps_ahead(vllm_engine, monkeypatch):
    engine = vllm_engine("dense", dtype="float32")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "chunk", 32)
        with pytest.raises(EngineError, match="max_num_batched_tokens = 32"):
            open_stream(engine, PLAIN)
    scheduler = engine.llm.llm_engine.vllm_config.scheduler_config
    assert not scheduler.async_scheduling
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "async_scheduling", True)
        with pytest.raises(EngineError, match="async_scheduling=False"):
            open_stream(engine, PLAIN)
    assert engine.stream is None


def test_generate_beside_a_stream_changes_nothing_on_transformers():
    engine = TransformersEngine(tiny("dense"))
    stream, book = open_stream(engine, PLAIN, evidence="hidden"), Book()
    book.submit(stream, DrawJob("a", (1,), 0))
    plain, alone = Book(), open_stream(TransformersEngine(tiny("dense")), PLAIN)
    plain.submit(alone, DrawJob("a", (1,), 0))
    plain.drain(alone)
    while stream.active:
        engine.generate([[1, 2]], PLAIN, seed=0, evidence="hidden")
        book.step(stream)
    assert book.tokens("a") == plain.tokens("a")


def test_an_engine_has_one_stream_and_a_closed_one_says_so(dense):
    stream = open_stream(dense, PLAIN)
    with pytest.raises(EngineError, match="has an open stream already"):
        open_stream(dense, PLAIN)
    stream.submit([DrawJob("a", (1,), 0)])
    stream.step()
    stream.close()
    stream.close()
    assert stream.active == 0
    for call in (stream.step, lambda: stream.submit([]), lambda: stream.version):
        with pytest.raises(EngineError, match="the stream is closed"):
            call()
    other = open_stream(dense, PLAIN)
    assert other.step() == []


def test_a_closed_engine_closes_its_stream():
    engine = TransformersEngine(tiny("dense"))
    stream = open_stream(engine, PLAIN)
    stream.submit([DrawJob("a", (1,), 0)])
    engine.close()
    with pytest.raises(EngineError, match="the stream is closed"):
        stream.step()


def test_an_engine_that_keeps_nothing_in_progress_is_refused():
    class Elsewhere:
        name, vocab_size, version = "elsewhere", 8, 0

        def generate(self, prompts, sampling, *, seed, evidence): ...
        def load_weights(self, weights, *, version): ...
        def close(self): ...

    with pytest.raises(EngineError, match="'elsewhere' keeps no responses in progress"):
        open_stream(Elsewhere(), PLAIN)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([DrawJob("a", (1,), 0), DrawJob("a", (2,), 1)], "key 'a' is in progress already"),
        ([DrawJob("there", (1,), 0)], "key 'there' is in progress already"),
        ([DrawJob("b", (), 0)], r"prompts\[0\] has no tokens"),
        ([DrawJob("b", (1,), 0), DrawJob("c", (VOCAB,), 0)], r"prompts\[1\] has token id 64"),
        ([DrawJob("b", (1,), 0, before=(1, VOCAB))], "`before` of 'b' has token id 64"),
        ([DrawJob("b", (1,), 0, before=(20,) * 10)], "`before` of 'b' has 10 tokens, and sampling.max_tokens = 10"),
        ([DrawJob("b", (1,), 0, before=(20, 9))], "`before` of 'b' ends with stop token 9 at place 1"),
    ],
)
def test_a_senseless_job_is_refused_by_name_and_none_of_the_others_begins(dense, jobs, message):
    stream = open_stream(dense, STOPS)
    stream.submit([DrawJob("there", (1,), 0)])
    with pytest.raises(EngineError, match=message):
        stream.submit(jobs)
    assert stream.active == 1
    assert [d.key for d in stream.step()] == ["there"]
    with pytest.raises(EngineError, match="steps = 0"):
        stream.step(0)


def test_senseless_sampling_is_refused_before_a_stream_is_open(dense):
    with pytest.raises(EngineError, match=r"temperature = 0.0"):
        open_stream(dense, Sampling(4, temperature=0.0))
    with pytest.raises(EngineError, match=r"min_p = 1.0"):
        open_stream(dense, Sampling(4, min_p=1.0))
    assert dense.stream is None


def test_the_last_token_of_a_full_response_may_stop_it(dense):
    stream, book = open_stream(dense, Sampling(4, stop_token_ids=tuple(range(VOCAB)))), Book()
    book.submit(stream, DrawJob("a", (1,), 0))
    assert [d.finish for d in book.step(stream, 3)] == ["stop"]
    stream.close()
    stream = open_stream(dense, Sampling(4))
    book.submit(stream, DrawJob("b", (1,), 0, before=(1, 2, 3)))
    assert [(d.finish, len(d.tokens)) for d in book.step(stream, 3)] == [("length", 1)]


# -- as rollouts ---------------------------------------------------------------------------------------

WHERE = Provenance("t", "1", "m", "float32", None, Sampling(4), cache="recompute")


def delta(tokens, version=0, finish=None, evidence=None, key="a"):
    tokens = torch.tensor(tokens)
    return Delta(key, version, tokens, -tokens.float(), evidence, finish)


def test_deltas_of_several_versions_become_rollouts():
    jobs = [DrawJob("b", (3,), 0), DrawJob("a", (1, 2), 0), DrawJob("c", (3,), 0)]
    full = {n: FullVocab(torch.rand(n, 5)) for n in (1, 2)}
    deltas = {
        "a": [delta([1, 2], 4, None, full[2]), delta([3], 6, "length", full[1])],
        "b": [delta([5], 5, "length", full[1])],
        "c": [delta([6], 4, None, full[1]), delta([7], 4, "length", full[1])],
    }
    rollouts = rollouts_of(jobs, deltas, WHERE)
    assert rollouts.tokens.tolist() == [5, 1, 2, 3, 6, 7]
    assert rollouts.logp_rollout.tolist() == [-5, -1, -2, -3, -6, -7]
    assert rollouts.rollout_version.tolist() == [5, 4, 4, 6, 4, 4]
    assert rollouts.cu_seqlens.tolist() == [0, 1, 4, 6]
    assert rollouts.prompt_tokens.tolist() == [3, 1, 2, 3]
    assert rollouts.group_ids.tolist() == [0, 1, 0]
    assert rollouts.provenance.cache == "recompute"
    assert torch.equal(rollouts.evidence.logp, torch.cat([full[n].logp for n in (1, 2, 1, 1, 1)]))


@pytest.mark.parametrize(
    ("job", "deltas", "message"),
    [
        (DrawJob("a", (1,), 0), [], "'a' has not finished"),
        (DrawJob("a", (1,), 0), [delta([1])], "'a' has not finished"),
        (DrawJob("a", (1,), 0), [delta([1], 0, "stop"), delta([2], 0, "stop")], "'a' goes on behind its end"),
        (DrawJob("a", (1,), 0), [delta([1], 3), delta([2], 2, "stop")], "version of response 'a' falls from 3 to 2"),
        (DrawJob("a", (1,), 0, before=(9,)), [delta([1], 3, "stop")], "do not begin with its `before`"),
    ],
)
def test_deltas_that_are_no_whole_response_are_refused_by_name(job, deltas, message):
    with pytest.raises(EngineError, match=message):
        rollouts_of([job], {"a": deltas}, WHERE)


def test_several_versions_need_a_word_on_the_cache_and_one_output_head():
    deltas = {"a": [delta([1], 3), delta([2], 4, "stop")]}
    with pytest.raises(EngineError, match=r"'a' spans versions 3 to 4, but provenance.cache is None"):
        rollouts_of([DrawJob("a", (1,), 0)], deltas, replace(WHERE, cache=None))
    models = versions_of("dense")
    stream, book = open_stream(TransformersEngine(models[0]), PLAIN, evidence="hidden"), Book()
    job = DrawJob("a", (1,), 0)
    book.submit(stream, job)
    book.step(stream, 2)
    stream.load_weights(models[1].named_parameters(), version=1)
    book.drain(stream)
    with pytest.raises(ShapeError, match="hidden states of different output heads"):
        rollouts_of([job], book.deltas, stream.provenance)
    kinds = [delta([1], 3, None, FullVocab(torch.rand(1, 5))), delta([2], 4, "stop", FullVocab(torch.rand(1, 4)))]
    with pytest.raises(ShapeError, match="evidence of different kinds"):
        rollouts_of([job], {"a": kinds}, WHERE)
    with pytest.raises(EngineError, match="jobs is empty"):
        rollouts_of([], {}, WHERE)


def test_streams_import_no_backend():
    code = "import sys, offdrift.engines.stream; assert not {'transformers', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
