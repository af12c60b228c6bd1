"""Stored rollouts judged by a policy: the evidence is what exact logits say, however it is cut."""

import copy
import importlib
import math
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from offdrift.certificate import Looks, TrustRegion
from offdrift.certificate.batch import COLUMNS, BatchEvidence
from offdrift.certificate.certify import certify
from offdrift.certificate.control import RATIO_CAP
from offdrift.divergence.evidence import Divergence
from offdrift.engines.hf import TransformersEngine
from offdrift.engines.score import chunks
from offdrift.errors import RecordError, ShapeError
from offdrift.logprobs import LogProbs
from offdrift.prove.certify import (
    JudgedBatches,
    check_clusters,
    check_design,
    judge,
    longest_response,
    newest_policy,
    rollout_files,
)
from offdrift.records import Provenance, Rollouts, Sampling
from offdrift.records.store import read, write
from tests.engines.models import tiny

module = importlib.import_module("offdrift.prove.certify")
LONGEST, PROMPTS, ANSWERS = 7, 4, 3
REGION = TrustRegion(horizon=LONGEST, delta=0.05, eps=0.15, tau=0.5)
OF_RATIOS = ("length", "reward", "kept", "excess", "log_product", "worst")
EVIDENCE = ("full", "hidden", 8, "sampled")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def policies() -> tuple[nn.Module, nn.Module]:
    """The one that drew the rollouts, and another that is to be judged by them."""
    mu = tiny("dense")
    pi, g = copy.deepcopy(mu), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in pi.parameters():
            p += 0.04 * p.std() * torch.randn(p.shape, generator=g)
    return mu, pi


@pytest.fixture(scope="module")
def drawn(policies) -> dict[str | int, Rollouts]:
    """The same ragged batch with every kind of evidence, and one that was tempered."""
    engine = TransformersEngine(policies[0], dtype="float32")
    prompts = [[5, 6, 7, 8][: 1 + i // ANSWERS] for i in range(PROMPTS * ANSWERS)]

    def draw(evidence: str | int, temperature: float = 1.0) -> Rollouts:
        sampling = Sampling(max_tokens=LONGEST, temperature=temperature, stop_token_ids=tuple(range(8)))  # fmt: skip
        g = torch.Generator().manual_seed(0)
        return engine.generate(prompts, sampling, seed=2, evidence=evidence).with_(
            rewards=torch.rand(len(prompts), generator=g), group_ids=torch.arange(len(prompts)) // ANSWERS
        )

    found = {kind: draw(kind) for kind in EVIDENCE}
    assert len(set(found["full"].lengths.tolist())) > 2
    assert all(torch.equal(r.tokens, found["full"].tokens) for r in found.values())
    return {**found, "cool": draw("full", temperature=0.7)}


@pytest.fixture(scope="module")
def stored(drawn, tmp_path_factory: pytest.TempPathFactory) -> dict[str | int, Path]:
    folder = tmp_path_factory.mktemp("rollouts")
    return {kind: write(r, folder / f"{kind}.parquet") for kind, r in drawn.items()}


def rows(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """log pi of the whole vocabulary at every response token: one sequence at a time, unpadded."""
    found = []
    cuts, prompt_cuts = rollouts.cu_seqlens.tolist(), rollouts.prompt_cu_seqlens.tolist()
    for i in range(rollouts.num_sequences):
        prompt = rollouts.prompt_tokens[prompt_cuts[i] : prompt_cuts[i + 1]]
        response = rollouts.tokens[cuts[i] : cuts[i + 1]]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, response])[None].long()).logits[0]
        found.append(logits[len(prompt) - 1 : -1].double().log_softmax(-1))
    return torch.cat(found)


@pytest.fixture(scope="module")
def truth(policies, drawn) -> BatchEvidence:
    """The evidence by the definitions of ratio, KL and TV, in the order of the file."""
    rollouts = drawn["full"]
    mu, pi = (rows(model, rollouts) for model in policies)
    drawn_token = rollouts.tokens.long()[:, None]
    logp_mu, logp_pi = (x.gather(1, drawn_token).squeeze(1) for x in (mu, pi))
    exact = {
        "kl_rollout_current": (mu.exp() * (mu - pi)).sum(-1),
        "tv_rollout_current": (mu.exp() - pi.exp()).abs().sum(-1) / 2,
    }
    assert exact["kl_rollout_current"].max() > REGION.delta, "some tokens must leave the region"
    assert exact["kl_rollout_current"].median() < REGION.delta
    assert rollouts.rewards is not None
    by_prompt = rollouts.with_(group_ids=rollouts.prompt_keys())  # intervals take them in this order
    return BatchEvidence.of(
        LogProbs.pack(logp_mu, logp_pi, segments=by_prompt.segments),
        rollouts.rewards.double(),
        region=REGION,
        divergences={k: Divergence.exact(k, x) for k, x in exact.items()},
        ratio_means=torch.minimum(pi.double().exp(), RATIO_CAP * mu.double().exp()).sum(-1),
    )


def judged(files: list[Path], model: nn.Module, budget: int = 40, **options) -> JudgedBatches:
    return judge(files, model, region=REGION, token_budget=budget, **options)


def columns(table: Tensor, names: tuple[str, ...]) -> Tensor:
    return table[:, [COLUMNS.index(n) for n in names]]


@pytest.mark.parametrize("kind", ["full", "hidden"])
def test_whole_distributions_give_the_evidence_of_exact_logits(policies, drawn, stored, truth, kind):
    found = judged([stored[kind]], policies[1])
    table = found.evidence.columns
    assert table.shape == (PROMPTS * ANSWERS, len(COLUMNS))
    torch.testing.assert_close(table, truth.columns, rtol=2e-4, atol=2e-6)
    torch.testing.assert_close(found.evidence.tv_by_position, truth.tv_by_position, rtol=2e-4, atol=2e-6)  # fmt: skip
    assert found.evidence.grades == truth.grades
    assert (found.files, found.tokens) == (1, len(drawn[kind].tokens))
    ours, theirs = (certify(e) for e in (found.evidence, truth))
    assert ours.premises == theirs.premises
    assert ours.gain_low == pytest.approx(theirs.gain_low, rel=1e-4)


def test_top_k_surrounds_the_truth_and_says_what_a_cap_assumes(policies, drawn, stored, truth):
    found = judged([stored[8]], policies[1]).evidence
    table = found.columns
    torch.testing.assert_close(columns(table, OF_RATIOS), columns(truth.columns, OF_RATIOS), rtol=2e-4, atol=2e-6)  # fmt: skip
    room = 1e-6
    for name in ("kl", "tv"):
        low, high = (columns(table, (f"{name}_{end}",)) for end in ("low", "high"))
        exact = columns(truth.columns, (f"{name}_high",))
        assert (low <= exact + room).all()
        assert (high >= exact - room).all()
        assert (low < high).all()
    assert set(found.grades.values()) == {"interval"}
    assert not found.assumes
    capped = judged([stored[8]], policies[1], tail_log_ratio_cap=0.5).evidence
    assert set(capped.grades.values()) == {"capped interval"}
    assert capped.assumes
    assert (capped.column("kl_high") <= found.column("kl_high")).all()
    assert (capped.column("kl_high") < found.column("kl_high")).any()


def test_the_sampled_token_alone_says_nothing_of_divergences(policies, drawn, stored, truth):
    found = judged([stored["sampled"]], policies[1]).evidence
    table = found.columns
    torch.testing.assert_close(columns(table, OF_RATIOS), columns(truth.columns, OF_RATIOS), rtol=2e-4, atol=2e-6)  # fmt: skip
    for name, end in (("kl_low", 0.0), ("kl_high", math.inf), ("tv_low", 0.0), ("tv_high", 1.0)):
        assert found.column(name).tolist() == [end] * len(found), name
    proof = certify(found)
    assert set(proof.premises.values()) == {"unknown"}
    assert proof.bound is None
    assert proof.unseen is None


@pytest.mark.parametrize("kind", ["full", "sampled"])
def test_a_policy_equal_to_the_engines_has_not_moved(policies, drawn, stored, kind):
    found = judged([stored[kind]], policies[0])
    table = found.evidence.columns
    assert columns(table, ("excess", "log_product", "worst")).abs().max() < 1e-5
    proof = certify(found.evidence)
    assert proof.estimates["surrogate"].mean == pytest.approx(0.0, abs=1e-5)
    assert proof.gain_low <= 0
    assert not proof.certified
    if kind == "full":
        assert proof.delta_seen[1] == pytest.approx(0.0, abs=1e-6)
        assert proof.precondition == "not falsified"
        assert proof.bound is not None


def test_both_policies_are_tempered_as_the_rollouts_were(policies, stored):
    same = judged([stored["cool"]], policies[0]).evidence
    assert same.column("worst").max() < 1e-5
    assert same.column("kl_high").max() < 1e-6


@pytest.mark.parametrize("kind", EVIDENCE)
def test_evidence_does_not_depend_on_how_a_file_is_cut(policies, drawn, stored, kind):
    whole = judged([stored[kind]], policies[1], 10_000).evidence
    expected = whole.columns
    for budget in (1, 30):
        assert len(list(chunks(drawn[kind], token_budget=budget))) > 2
        found = judged([stored[kind]], policies[1], budget).evidence
        table = found.columns
        torch.testing.assert_close(table, expected, rtol=2e-4, atol=2e-6, equal_nan=True)
        assert found.group_ids is not None
        assert torch.equal(found.group_ids, drawn[kind].prompt_keys()), "in the order of the file"
        assert certify(found).gain_low == pytest.approx(certify(whole).gain_low, rel=1e-5)


@pytest.mark.parametrize("stretch", [1, 2**32, -(2**62) // PROMPTS])
def test_a_prompt_is_known_by_its_tokens_in_every_file(policies, drawn, stored, tmp_path, stretch):
    """Whatever the ids are: small and the same in every file, or as large as ids of others go."""
    wide = drawn["full"].with_(group_ids=drawn["full"].group_ids * stretch)
    longer = torch.tensor([0, *wide.prompt_cu_seqlens.diff().add(1).cumsum(0).tolist()])
    others = torch.full((int(longer[-1]),), 9)
    other = drawn["full"].with_(prompt_tokens=others, prompt_cu_seqlens=longer)
    files = [write(wide, tmp_path / "a.parquet"), stored["full"], stored["hidden"]]
    found = judged([*files, write(other, tmp_path / "b.parquet")], policies[1], 10_000).evidence
    ids = found.group_ids
    assert ids is not None
    assert sorted(ids.unique(return_counts=True)[1].tolist()) == [ANSWERS] * PROMPTS + [3 * ANSWERS] * PROMPTS  # fmt: skip
    same_prompt = wide.group_ids[:, None] == wide.group_ids
    for mine in ids[: 3 * PROMPTS * ANSWERS].split(PROMPTS * ANSWERS):
        assert torch.equal(mine, ids[: PROMPTS * ANSWERS])
        assert torch.equal(mine[:, None] == mine, same_prompt)
    assert certify(found).prompts == 2 * PROMPTS


def test_a_group_of_a_file_is_one_draw_even_if_its_prompts_differ(policies, drawn, tmp_path):
    """Two questions about one text, say: the file knows that they belong together."""
    joined = drawn["full"].with_(group_ids=drawn["full"].group_ids // 2)
    found = judged([write(joined, tmp_path / "joined.parquet")], policies[1]).evidence
    assert certify(found).prompts == PROMPTS / 2


class Constant(nn.Module):
    """A policy over two tokens that says the same everywhere: log(3/4), log(1/4)."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.75, 0.25]).log())

    def forward(self, input_ids: Tensor, logits_to_keep: int, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits.expand(len(input_ids), logits_to_keep, 2))


def test_prompts_that_recur_over_files_are_no_fresh_draws(tmp_path):
    """8 prompts in 12 files, a gain of +-1/4 on each and of 0 in expectation over prompts.

    The rollout policy tosses a fair coin; a prompt, drawn at random, rewards one of its sides.
    """
    runs, prompts, files, g = 24, 8, 12, torch.Generator().manual_seed(0)
    b, model = 16 * prompts, Constant()
    provenance = Provenance("coin", "0", "none", "float32", None, Sampling(max_tokens=1))
    region = TrustRegion(horizon=1, delta=1.0)
    certified, split = 0, 0
    for run in range(runs):
        ids = torch.randint(2**31, (prompts,), generator=g).repeat_interleave(16)
        wanted = torch.randint(2, (prompts,), generator=g).repeat_interleave(16)
        paths = []
        for i in range(files):
            tokens = torch.randint(2, (b,), generator=g)
            paths.append(write(Rollouts(
                tokens=tokens, logp_rollout=torch.full((b,), math.log(0.5)), cu_seqlens=torch.arange(b + 1),
                rollout_version=torch.zeros(b, dtype=torch.int64), prompt_tokens=ids,
                prompt_cu_seqlens=torch.arange(b + 1), group_ids=torch.arange(b) // 16, finish=("length",) * b,
                provenance=provenance, rewards=(tokens == wanted).float(),
            ), tmp_path / f"{run}-{i}.parquet"))  # fmt: skip
        found = judge(paths, model, region=region).evidence
        assert certify(found).prompts == prompts
        certified += certify(found).certified
        ours = torch.arange(len(found)) // b * 2**20 + found.group_ids % 2**20
        apart = replace(found, group_ids=ours)  # as if prompts of different files were different
        split += certify(apart).certified
    assert certified <= 0.05 * runs
    assert split > 0.1 * runs  # what goes wrong where they count as fresh


def _drawn_answers(folder: Path, run: int, g: torch.Generator, *, draws: int) -> list[Path]:
    """Files of draws of 200 prompts, one with 55 % of them: it loses by the policy of `Constant`, the others gain.

    The rollout policy tosses a fair coin, the current one says the first side in 3 of 4 cases. The heavy prompt rewards
    the second side (gain -1/4), each other the first (+1/4): J over draws changes by .45/4 - .55/4 = -.025, J over
    distinct prompts by 198/200/4 = +.2475.
    """
    provenance = Provenance("coin", "0", "none", "float32", None, Sampling(max_tokens=1))
    heavy = torch.rand(draws, generator=g) < 0.55
    prompt = torch.where(heavy, 0, torch.randint(1, 200, (draws,), generator=g))
    ids, group = prompt.repeat_interleave(2), torch.arange(draws).repeat_interleave(2)
    tokens = torch.randint(2, (2 * draws,), generator=g)
    rewards = torch.where(ids == 0, tokens == 1, tokens == 0).float()
    paths = []
    for i, rows in enumerate(torch.arange(2 * draws).chunk(4)):
        b = len(rows)
        paths.append(write(Rollouts(
            tokens=tokens[rows], logp_rollout=torch.full((b,), math.log(0.5)), cu_seqlens=torch.arange(b + 1),
            rollout_version=torch.zeros(b, dtype=torch.int64), prompt_tokens=ids[rows],
            prompt_cu_seqlens=torch.arange(b + 1), group_ids=group[rows] - group[rows[0]], finish=("length",) * b,
            provenance=provenance, rewards=rewards[rows],
        ), folder / f"drawn-{run}-{i}.parquet"))  # fmt: skip
    return paths


@pytest.mark.parametrize("arriving", [False, True])
def test_draws_of_a_prompt_that_comes_more_often_than_others_are_counted_as_drawn(tmp_path, arriving):
    """By draws J falls and at most alpha of the certificates may say that it rises; merged by prompts nearly all do."""
    runs, g, model = 20, torch.Generator().manual_seed(1), Constant()
    region, looks = TrustRegion(horizon=1, delta=1.0), Looks(anytime=arriving)
    false, merged, lowest = 0, 0, []
    for run in range(runs):
        files = _drawn_answers(tmp_path, run, g, draws=1200)
        by_draw = judge(files, model, region=region, prompts="drawn", arriving=arriving)
        assert by_draw.repeated == 0
        drawn = certify(by_draw.evidence, looks=looks, prompts="drawn")
        assert drawn.prompts == 1200
        assert "a prompt counts as often as it is drawn" in drawn.verdict
        false += drawn.gain_low > -0.025
        lowest.append(drawn.gain_low)
        listed = certify(judge(files, model, region=region, prompts="listed").evidence, prompts="listed")
        assert 150 < listed.prompts <= 200
        merged += listed.certified
        with pytest.raises(RecordError, match=rf"1,200 groups .* {listed.prompts} distinct prompts.*listed.*drawn"):
            check_design(files)
    assert false == int(arriving)  # as docs/certificates.md says; at alpha = .05, 4 or more of 20 have probability .016
    assert max(lowest) > -0.2, "it says something"
    assert merged == runs, "what goes wrong where draws are merged"


def _with_column(path: Path, column: str, values: list) -> Path:
    table = pq.read_table(path)
    pq.write_table(table.append_column(column, pa.array(values)), path)
    return path


@pytest.mark.parametrize("arriving", [False, True])
def test_prompts_that_share_a_document_are_one_draw(tmp_path, arriving):
    """40 documents of 8 prompts each, which all reward one side of a coin: a gain of +-1/4 each, and of 0 on average."""
    runs, documents, g, model = 30, 40, torch.Generator().manual_seed(3), Constant()
    region, looks = TrustRegion(horizon=1, delta=1.0), Looks(anytime=arriving)
    provenance = Provenance("coin", "0", "none", "float32", None, Sampling(max_tokens=1))
    b, apart, shared = 16 * documents, 0, 0
    for run in range(runs):
        document = torch.arange(documents).repeat_interleave(16)
        wanted = torch.randint(2, (documents,), generator=g)[document]
        tokens = torch.randint(2, (b,), generator=g)
        path = write(Rollouts(
            tokens=tokens, logp_rollout=torch.full((b,), math.log(0.5)), cu_seqlens=torch.arange(b + 1),
            rollout_version=torch.zeros(b, dtype=torch.int64), prompt_tokens=torch.arange(b) // 2,
            prompt_cu_seqlens=torch.arange(b + 1), group_ids=torch.arange(b) // 2, finish=("length",) * b,
            provenance=provenance, rewards=(tokens == wanted).float(),
        ), tmp_path / f"{run}.parquet")  # fmt: skip
        _with_column(path, "document", [f"document {i}" for i in document.tolist()])
        check_clusters([path], "document")
        kept = judge([path], model, region=region, prompts="clustered", cluster="document", arriving=arriving)
        proof = certify(kept.evidence, looks=looks, prompts="clustered")
        assert proof.prompts == documents
        assert "clusters of prompts" in proof.verdict
        shared += proof.certified
        apart += certify(judge([path], model, region=region, arriving=arriving).evidence, looks=looks).certified
    assert shared <= 0.1 * runs, "3 of 30 or fewer have probability .94 where each is false with .05"
    assert apart > 0.15 * runs, "what goes wrong where prompts of one document pass for independent"


def test_a_document_that_arrives_again_was_judged_already(policies, drawn, stored, tmp_path):
    files = [write(drawn["full"], tmp_path / f"{i}.parquet") for i in range(2)]
    for i, path in enumerate(files):
        documents = (torch.arange(PROMPTS * ANSWERS) // ANSWERS).clamp(max=1) + i
        _with_column(path, "document", documents.tolist())
    with pytest.raises(RecordError, match=r"answers to one prompt are of several clusters \(document\)"):
        check_clusters(files, "document")
    region = TrustRegion(horizon=LONGEST, delta=0.05)
    how = {"region": region, "prompts": "clustered", "cluster": "document"}
    found = judge(files, policies[0], **how)
    assert certify(found.evidence, prompts="clustered").prompts == 3
    later = judge(files, policies[0], **how, arriving=True)
    assert later.repeated == ANSWERS, "those of document 1 in the second file"
    assert len(later.evidence) == (2 * PROMPTS - 1) * ANSWERS


@pytest.mark.parametrize(
    ("values", "words"),
    [(None, "has no column 'document'; it has tokens"), ([0.5], "holds double"), (["a", None], "sequences have no")],
)
def test_a_column_that_names_no_clusters_is_refused(drawn, tmp_path, values, words):
    path, b = write(drawn["full"], tmp_path / "a.parquet"), PROMPTS * ANSWERS
    if values is not None:
        _with_column(path, "document", [values[min(i, len(values) - 1)] for i in range(b)])
    with pytest.raises(RecordError, match=words):
        check_clusters([path], "document")


def test_a_group_is_of_one_document(drawn, tmp_path):
    split = _with_column(write(drawn["full"], tmp_path / "a.parquet"), "document", list(range(PROMPTS * ANSWERS)))
    with pytest.raises(RecordError, match="several clusters"):
        check_clusters([split], "document")
    other = drawn["full"].with_(prompt_tokens=torch.arange(PROMPTS * ANSWERS),
                                prompt_cu_seqlens=torch.arange(PROMPTS * ANSWERS + 1))  # fmt: skip
    split = _with_column(write(other, tmp_path / "b.parquet"), "document", list(range(PROMPTS * ANSWERS)))
    with pytest.raises(RecordError, match="a group of answers is of several clusters"):
        check_clusters([split], "document")


def test_no_design_is_asked_for_where_no_prompt_comes_twice(policies, drawn, stored, tmp_path):
    check_design([stored["full"]])
    for again in (drawn["full"], drawn["full"].with_(group_ids=drawn["full"].group_ids + 7)):
        with pytest.raises(RecordError, match=f"{2 * PROMPTS} groups of answers are to {PROMPTS} distinct prompts"):
            check_design([stored["full"], write(again, tmp_path / "again.parquet")])
    apart = drawn["full"].with_(group_ids=torch.arange(PROMPTS * ANSWERS))
    with pytest.raises(RecordError, match="--prompts listed"):
        check_design([write(apart, tmp_path / "apart.parquet")])


def test_one_file_at_a_time_is_in_memory(policies, stored, monkeypatch):
    opened: list[weakref.ref] = []

    def reading(path: Path) -> Rollouts:
        alive = [r for r in opened if r() is not None]
        assert not alive, f"{len(alive)} earlier files are still in memory"
        rollouts = read(path)
        opened.extend(map(weakref.ref, (rollouts, rollouts.evidence)))
        return rollouts

    monkeypatch.setattr(module, "read", reading)
    files = [stored["full"], stored["hidden"], stored[8]]
    assert judged(files, policies[1]).files == 3
    assert len(opened) == 6
    assert longest_response(files) == LONGEST
    assert len(opened) == 6  # it reads headers


def test_whoever_watches_sees_what_was_read_so_far(policies, drawn, stored):
    seen: list[tuple[Path, JudgedBatches]] = []
    files = [stored["full"], stored["sampled"]]
    last = judged(files, policies[1], watch=lambda file, so_far: seen.append((file, so_far)))
    n, b = len(drawn["full"].tokens), PROMPTS * ANSWERS
    assert [file for file, _ in seen] == files
    assert [(s.files, s.tokens, len(s.evidence)) for _, s in seen] == [(1, n, b), (2, 2 * n, 2 * b)]
    assert {str(g) for g in seen[0][1].evidence.grades.values()} == {"exact"}
    assert {str(g) for g in last.evidence.grades.values()} == {"sampled"}, "the weakest"
    assert torch.equal(last.evidence.columns.nan_to_num(-1), seen[1][1].evidence.columns.nan_to_num(-1))


def test_dropout_does_not_judge(policies, drawn, stored):
    model = copy.deepcopy(policies[0]).train()
    changed = 0
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout, changed = 0.5, changed + 1
    assert changed > 0
    assert judged([stored["full"]], model).evidence.column("worst").max() < 1e-5


def test_files_that_do_not_add_up_or_hold_nothing_are_refused(policies, drawn, stored, tmp_path):
    silent = write(drawn["full"].with_(rewards=None), tmp_path / "silent.parquet")
    empty = write(drawn["full"].select(torch.zeros(0).long()), tmp_path / "empty.parquet")
    with pytest.raises(ShapeError, match="rewards"):
        judged([stored["full"], silent], policies[1])
    for files in ([], [empty]):
        with pytest.raises(RecordError, match="nothing to certify"):
            judged(files, policies[1])
    assert certify(judged([silent], policies[1]).evidence).verdict.endswith("has no rewards")
    both = judged([empty, stored["full"], empty], policies[1])
    assert (both.files, len(both.evidence)) == (3, PROMPTS * ANSWERS)


def test_files_are_found_in_files_folders_and_arms(drawn, tmp_path):
    arm, folder = tmp_path / "arms" / "none", tmp_path / "fresh"
    for name in ("b", "a"):
        write(drawn["sampled"], folder / f"{name}.parquet")
        write(drawn["sampled"], arm / "rollouts" / f"{name}.parquet")
    (folder / "notes.txt").write_text("")
    ours = [arm / "rollouts" / "a.parquet", arm / "rollouts" / "b.parquet"]
    fresh = [folder / "a.parquet", folder / "b.parquet"]
    assert rollout_files([arm]) == rollout_files([arm / "rollouts"]) == ours
    assert rollout_files([folder, arm]) == fresh + ours
    assert rollout_files([folder / "b.parquet"]) == [folder / "b.parquet"]
    again = [folder / "b.parquet", folder, folder / ".." / "fresh" / "a.parquet"]
    assert rollout_files(again) == [folder / "b.parquet", folder / "a.parquet"], "each once"
    (tmp_path / "bare").mkdir()
    for nothing in (tmp_path / "bare", tmp_path / "absent", tmp_path / "absent.parquet"):
        with pytest.raises(RecordError, match="holds no rollouts; give") as refused:
            rollout_files([folder, nothing])
        assert str(nothing) in str(refused.value)


def test_the_longest_response_is_what_sampling_allowed(drawn, stored, tmp_path):
    provenance = replace(drawn["full"].provenance, sampling=Sampling(max_tokens=50))
    longer = write(drawn["sampled"].with_(provenance=provenance), tmp_path / "longer.parquet")
    assert longest_response([stored["full"]]) == LONGEST
    assert longest_response([stored["full"], longer, stored[8]]) == 50


def test_a_certificate_is_about_one_rollout_policy(policies, stored, tmp_path):
    """Rollouts of several versions or samplings are several samples: pooled, nothing covers."""
    one = read(stored["full"])
    later = tmp_path / "later.parquet"
    write(one.with_(rollout_version=one.rollout_version + 3), later)
    hotter = tmp_path / "hotter.parquet"
    sampling = replace(one.provenance.sampling, temperature=1.5)
    write(one.with_(provenance=replace(one.provenance, sampling=sampling)), hotter)
    mixed = tmp_path / "mixed.parquet"
    versions = one.rollout_version.clone()
    versions[-1] += 1
    write(one.with_(rollout_version=versions), mixed)
    raw = tmp_path / "raw.parquet"
    write(one.with_(provenance=replace(one.provenance, logprobs="raw")), raw)
    assert newest_policy([stored["full"], later]) == (3, [later])
    assert newest_policy([stored["full"], mixed]) == (0, [stored["full"]])
    with pytest.raises(RecordError, match="several weight versions"):
        newest_policy([mixed])
    for other, words in ((later, "later.parquet"), (hotter, "temperature=1.5"), (mixed, "mixed"), (raw, "raw log-probs")):  # fmt: skip
        with pytest.raises(RecordError, match=words):
            judged([stored["full"], other], policies[1])
