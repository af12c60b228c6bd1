"""`offdrift lab`: what a person sees, and what a program reads."""

import json
from collections.abc import Callable
from functools import partial

import jaxtyping
import pytest
from tests.command import Done, command

from offdrift_lab.exact import pairs
from offdrift_lab.exact import search as adversary


@pytest.fixture
def offdrift(monkeypatch, capsys) -> Callable[..., Done]:
    """The command line in this process, in a terminal of 140 columns."""
    return partial(command, monkeypatch, capsys)


FEW = ("--testbeds", "chain", "--horizons", "4,200", "--methods", "token_is,full_is,minpro", "--tokens", "20000", "--batch", "16")  # fmt: skip


def test_frontier_shows_every_family_the_verdict_and_how_each_number_was_found(offdrift, tmp_path):
    stem = tmp_path / "deep" / "frontier"
    done = offdrift("lab", "frontier", *FEW, "--out", str(stem))
    assert done.code == 0, done.stderr
    for word in ("token", "prefix", "sequence", "T=4", "T=200", "conjecture", "E[g]"):
        assert word in done.stdout
    assert (tmp_path / "deep" / "frontier.png").stat().st_size > 10_000
    assert "plotly" in (tmp_path / "deep" / "frontier.html").read_text().lower()
    (found,) = json.loads((tmp_path / "deep" / "frontier.json").read_text())
    how = {(e["method"], e["horizon"]): e["how"] for e in found["estimates"]}
    assert how == {
        ("token_is", 4): "enumeration", ("full_is", 4): "enumeration", ("minpro", 4): "enumeration",
        ("token_is", 200): "recursion", ("full_is", 200): "recursion", ("minpro", 200): "sampled",
    }  # fmt: skip
    unbiased = [e for e in found["estimates"] if e["method"] == "full_is"]
    assert max(e["bias"] for e in unbiased) < 1e-9
    assert [w["horizon"] for w in found["winners"]] == [4, 200]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bounds", "--pairs", "0"), "'--pairs'"),
        (("bounds", "--plant", "nan"), "--plant: nan is no number"),
        (("bounds", "--adversarial-steps", "-1"), "'--adversarial-steps'"),
        (("bounds", "--restarts", "0"), "'--restarts'"),
        (("frontier", "--testbeds", "tree"), "tree"),
        (("frontier", "--horizons", "8,many"), "'many' is not a number"),
        (("frontier", "--methods", "token_iss"), "did you mean"),
        (("frontier", "--kl", "-1"), "kl_token = -1"),
        (("length-bias", "--violation", "2"), "violation = 2"),
        (("length-bias", "--same-at", "5000"), "--same-at 5000"),
        (("length-bias", "--recording", "nowhere.npz"), "nowhere.npz"),
        (("routing", "--top-k", "9"), "top_k = 9; there are 4 experts"),
        (("coverage", "--worlds", "benign,malign"), "'malign' is none of benign, shared-fate"),
        (("coverage", "--alpha", "0.2"), "--alpha 0.2"),
        (("masking", "--delta", "0"), "--delta 0"),
        (("masking", "--rejected", "rare"), "'rare' is no list"),
        (("masking", "--rejected", "0.9", "--pairs", "2"), "give a smaller share"),
        (("three-policies", "--gammas", "1"), "1 is no discount"),
        (("three-policies", "--plant", "0"), "--plant 0"),
        (("flips", "--tasks", "maze"), "'maze' is none of threshold, chain, walk"),
        (("flips", "--counts", "2"), "give 3 or more"),
    ],
)
def test_a_mistake_is_one_message(offdrift, words, said):
    done = offdrift("lab", *words)
    assert done.code in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_ctrl_c_shows_what_is_finished(offdrift, monkeypatch):
    from offdrift_lab.exact import frontier as testbeds

    make = testbeds.make_testbed

    def interrupted(name, **how):
        if how["horizon"] == 200:
            raise KeyboardInterrupt
        return make(name, **how)

    monkeypatch.setattr(testbeds, "make_testbed", interrupted)
    done = offdrift("lab", "frontier", *FEW)
    assert done.code == 130
    assert "T=4" in done.stdout
    assert "T=200" not in done.stdout
    assert "interrupted" in done.stderr


@pytest.mark.slow
def test_length_bias_tells_decay_from_constant(offdrift, tmp_path):
    done = offdrift("lab", "length-bias", "--sequences", "300", "--out", str(tmp_path / "bias"))
    assert done.code == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.strip().startswith("TRM-Max")]
    assert len(rows) == 6  # three streams, thresholds published and alike
    assert "falls exponentially" in rows[0]
    assert "SmolLM2-135M" in done.stdout
    assert (tmp_path / "bias.png").exists()
    assert (tmp_path / "bias.html").exists()
    found = json.loads((tmp_path / "bias.json").read_text())
    worst = next(r for r in found if r["gate"] == "trm_max")
    assert worst["exponent"] == pytest.approx(1.0, abs=0.1)
    assert len(worst["lengths"]) == len(worst["acceptance"]) == 9


def test_routing_shows_a_row_for_each_way_of_replay(offdrift):
    done = offdrift("lab", "routing", "--pairs", "20", "--steps", "2", "--mismatch", "0", "--update", "0")
    assert done.code == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.strip().endswith(tuple("0123456789"))]
    assert [row[0] for row in rows] == ["own", "R3,", "R2,", "reference"], done.stdout
    assert rows[0][1] == "-"  # no surrogate to be a share of
    assert "…" not in done.stdout
    done = offdrift("lab", "routing", "--pairs", "20", "--top-k", "1", "--json")
    result = {row["scheme"]: row for row in json.loads(done.stdout)["schemes"]}
    assert result["r3"]["alpha_1_seen"] < 1e-12 < result["own"]["alpha_1_seen"]


def test_masking_shows_that_the_pair_stays_and_what_a_vanishing_rejection_removes(offdrift):
    done = offdrift("lab", "masking", "--pairs", "20", "--horizons", "8,64", "--rejected", "1e-8")
    assert done.code == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    assert rows["none"][2] == rows["token"][2] == rows["sequence"][2], "D_max is the pair's"
    assert rows["none"][4] == rows["token"][4] == rows["sequence"][4], "and so is B*"
    assert rows["none"][6] == "0.0%"
    assert "T=64" in done.stdout
    assert "…" not in done.stdout
    done = offdrift("lab", "masking", "--pairs", "20", "--horizons", "64", "--rejected", "1e-8", "--json")
    kl, ratio = json.loads(done.stdout)["vanishing"]
    assert (kl["criterion"], ratio["criterion"]) == ("kl", "ratio")
    assert kl["rejected"] == pytest.approx(1e-8, rel=1e-6)
    assert kl["share"] == pytest.approx(kl["limit"], rel=0.05)


def test_three_policies_finds_no_violation_and_notices_a_planted_one(offdrift):
    done = offdrift("lab", "three-policies", "--triples", "900", "--gammas", "0.9")
    assert done.code == 0, done.stderr
    assert "No violation" in done.stdout
    assert "1.000" in done.stdout, "the sharp bound is attained"
    planted = offdrift("lab", "three-policies", "--triples", "900", "--gammas", "0.9", "--plant", "0.9", "--json")
    assert planted.code == 3
    result = json.loads(planted.stdout)
    assert result["bounds"]["sharp"]["violations"] > 0
    assert sum(row["triples"] for row in result["advice"]) >= 900


def test_flips_fits_the_powers_of_the_conjecture(offdrift):
    words = ("--tasks", "chain", "--horizons", "16,32", "--counts", "4,8", "--pairs", "3")
    done = offdrift("lab", "flips", *words)
    assert done.code == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith(" chain")][:2] == ["δ", "T"]
    assert "dense / flips" in done.stdout
    result = json.loads(offdrift("lab", "flips", *words, "--json").stdout)
    assert {e["swept"] for e in result["exponents"]} == {"delta", "T", "T_last", "K", "K_sparse"}
    assert result["complete"] is True


def test_coverage_shows_each_world_and_certificate(offdrift):
    done = offdrift("lab", "coverage", "--worlds", "benign,shared-fate", "--repetitions", "5")
    assert done.code == 0, done.stderr
    for word in ("benign: ", "shared-fate: ", "certificate", "by direct", "unseen", "95 % interval", "speaks"):
        assert word in done.stdout
    assert "interval of gain" not in done.stdout
    assert "No certificate is" in done.stdout
    more = offdrift("lab", "coverage", "--worlds", "benign", "--repetitions", "5", "--intervals")
    assert "interval of gain" in more.stdout


def test_coverage_ends_with_3_where_a_planted_mistake_is_noticed(offdrift):
    done = offdrift("lab", "coverage", "--worlds", "shared-fate", "--repetitions", "80", "--plant", "answers", "--json")
    assert done.code == 3
    said = json.loads(done.stdout)
    assert said["refuted"] == sum(row["refuted"] for row in said["rows"]) > 0
    assert said["worlds"]["shared-fate"]["prompts"] == 64
    row = next(r for r in said["rows"] if r["statement"] == "certificate")
    assert row["low"] > row["alpha"] == 0.05
    assert row["false"] == round(row["share"] * 80)


def test_coverage_counts_what_was_drawn_before_an_interrupt(offdrift, monkeypatch):
    from offdrift_lab.exact import coverage

    simulate = coverage.simulate

    def interrupted(world, repetitions, **options):
        yield from simulate(world, 3, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(coverage, "simulate", interrupted)
    done = offdrift("lab", "coverage", "--json")
    assert done.code == 130
    said = json.loads(done.stdout)
    assert not said["complete"]
    assert {row["repetitions"] for row in said["rows"]} == {3}
    assert set(said["worlds"]) == {"benign"}
    assert "interrupted" in done.stderr


# -- bounds ------------------------------------------------------------------------------------------


@pytest.fixture
def bounds(monkeypatch, capsys) -> Callable[..., Done]:
    """`offdrift lab bounds` in this process, in a wide terminal, on few kinds of pairs with horizons up to 16."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(pairs, "HORIZONS", (16,))
    monkeypatch.setattr(pairs, "TREES", [(2, 2), (2, 4), (3, 3)])
    monkeypatch.setattr(adversary, "arenas", lambda: [adversary.tree(2, t) for t in (2, 7)])
    return partial(command, monkeypatch, capsys, "lab", "bounds", width=170)


def test_no_violation_in_a_table_a_figure_and_a_file(bounds, tmp_path):
    stem = tmp_path / "deep" / "bounds"
    done = bounds("--pairs", "200", "--adversarial-steps", "2", "--restarts", "1", "--out", str(stem))
    assert done.code == 0, done.stderr
    for word in ("Coupling", "Masked, ratio region", "Variance (9)", "Hellinger (13)", "sharp", "paper", "T=16", "T=7"):
        assert word in done.stdout, word
    assert "No violation in 200 random pairs and 2 searches." in done.stdout
    assert stem.with_suffix(".png").stat().st_size > 10_000
    assert "plotly" in stem.with_suffix(".html").read_text().lower()
    stored = json.loads(stem.with_suffix(".json").read_text())
    assert stored["pairs"] == 200
    assert stored["violations"] == 0
    assert stored["complete"]
    assert len(stored["random"]) == len(stored["searched"]) == 41
    assert sum(rows[0]["checked"] for rows in stored["by_drift"].values()) == 200
    assert sum(rows[0]["checked"] for rows in stored["by_horizon"].values()) == 200


def test_a_planted_constant_is_found_and_fails(bounds):
    done = bounds("--pairs", "300", "--plant", "0.9", "--adversarial-steps", "0", "--json")
    assert done.code == 3
    found = json.loads(done.stdout)
    assert found["violations"] > 0
    assert found["factor"] == 0.9
    wrong = {r["bound"] for r in found["random"] if r["violations"]}
    assert {"coupling", "two-sided identity: worst case over R"} <= wrong
    assert found["searched"] == []


def test_an_interrupt_shows_what_was_checked(bounds, monkeypatch):
    whole = pairs.batches

    def cut(count: int, *, seed: int):
        for i, batch in enumerate(whole(count, seed=seed)):
            if i == 20:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(pairs, "batches", cut)
    done = bounds("--pairs", "1000")
    assert done.code == 130
    assert "interrupted" in done.stderr
    assert "No violation in" in done.stdout
    assert "1,000 random pairs" not in done.stdout


def test_an_interrupt_before_the_first_pair(bounds, monkeypatch, tmp_path):
    def cut(count: int, *, seed: int):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(pairs, "batches", cut)
    done = bounds("--out", str(tmp_path / "none"))
    assert done.code == 130
    assert list(tmp_path.iterdir()) == []


def test_lengths_shows_where_bounds_pass_one_and_takes_drift_of_ones_own(offdrift, tmp_path):
    check = tmp_path / "mine" / "check.json"
    check.parent.mkdir()
    baseline = {"kl_mean": 1e-3, "kl_max": 0.02, "tv_max": 0.1, "tv_mean": 0.01, "divergence/grade": "exact"}
    check.write_text(json.dumps({"kind": "check", "baseline": baseline, "sampling": {"max_tokens": 64}}))
    done = offdrift("lab", "lengths", "--from", str(check.parent), "--tokens", "16,1000", "--json")
    assert done.code == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["name"] == "mine"
    assert row["passes"]["sharp"] == 1000  # T times the mean KL is 1 there
    assert [entry["tokens"] for entry in row["lengths"]] == [16, 1000]
    assert row["lengths"][1]["sharp"] == {"bound": "sequence_kl", "value": pytest.approx(1.0)}

    both = offdrift("lab", "lengths", "--from", str(check.parent), "--beside", "--chart", str(tmp_path / "l.svg"))
    assert both.code == 0, both.stderr
    assert "mine" in both.stdout
    assert "bfloat16 MoE" in both.stdout
    assert "mine: 1,000 (" in (tmp_path / "l.svg").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tokens", "16,many"), "'many' is not a number of tokens"),
        (("--beside",), "name yours with --from"),
        (("--from", "nowhere"), "nowhere holds no measured drift"),
    ],
)
def test_lengths_says_what_is_wrong(offdrift, words, said):
    done = offdrift("lab", "lengths", *words)
    assert done.code in (1, 2)
    assert said in " ".join((done.stdout + done.stderr).split())


def test_lengths_needs_the_largest_kl(offdrift, tmp_path):
    audit = tmp_path / "audit.json"
    audit.write_text(json.dumps({"kind": "audit", "overall": {"full/k3": 1e-3}}))
    done = offdrift("lab", "lengths", "--from", str(audit))
    assert done.code == 2
    assert "recorded no exact divergences" in " ".join((done.stdout + done.stderr).split())


def test_lag_law_reads_sweeps_fits_each_and_writes_what_it_can_read_again(offdrift, tmp_path):
    from offdrift_lab.exact.lag_law import judge
    from tests_lab.exact.test_lag_law import sweep_folder, world

    files = []
    for name, seed in (("sums", 1), ("guess", 2)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(judge(world(name, c=30, alpha=1, n=120, seed=seed), draws=20)))
    stem, words = tmp_path / "law", ("--draws", "40")
    done = offdrift("lab", "lag-law", *map(str, files), *words, "--out", str(stem))
    assert done.code == 0, done.stderr
    assert "L_max = c ESS^α: holds here" in done.stdout
    assert (tmp_path / "law.png").stat().st_size > 10_000
    again = offdrift("lab", "lag-law", f"{stem}.json", *words, "--json")
    result = json.loads(again.stdout)
    assert result == json.loads((tmp_path / "law.json").read_text())
    assert [row["family"] for row in result["families"]] == ["sums", "guess"]

    pooled = offdrift("lab", "lag-law", *(f"both={file}" for file in files), *words, "--json")
    assert [(row["family"], row["runs"]) for row in json.loads(pooled.stdout)["families"]] == [("both", 240)]

    folder = sweep_folder(tmp_path / "s", lags=[0, 1], ess=[1, 0.5], rewards=[0.5, 0.5])
    alone = offdrift("lab", "lag-law", str(folder), *words)
    assert alone.code == 0, alone.stderr
    assert "undecided: no family with stable and unstable runs" in alone.stdout
    missing = offdrift("lab", "lag-law", str(folder), "--arms", "grpo")
    assert missing.code == 1
    assert "no finished run of grpo" in missing.stderr
    wrong = offdrift("lab", "lag-law", str(folder), "--keep", "1.5")
    assert wrong.code == 1
    assert "keep = 1.5" in wrong.stderr


def test_collapse_reads_runs_and_says_how_well_they_are_predicted(offdrift, tmp_path):
    for seed in range(10):
        arm = tmp_path / f"run-{seed}" / "arms" / "a"
        arm.mkdir(parents=True)
        (tmp_path / f"run-{seed}" / "run.json").write_text(json.dumps({"recipe": {"seed": seed}}))
        rows = [
            {
                "reward/mean": 0.1 if seed % 2 and i >= 20 else 0.8,
                "full/ess_seq_frac": 0.2 if seed % 2 and i >= 15 else 0.9,
                "optim/grad_norm": 1.0,
            }
            for i in range(40)
        ]
        (arm / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    scale = ["--horizon", "5", "--recovery", "5", "--window", "5"]
    done = offdrift("lab", "collapse", str(tmp_path), *scale, "--json")
    assert done.code == 0, done.stderr
    content = json.loads(done.stdout)
    assert (content["runs"], content["collapsed"], content["groups"]) == (10, 5, 10)
    assert content["predictors"]["four rolling features"]["auroc"][0] > 0.95
    assert "AUROC" in offdrift("lab", "collapse", str(tmp_path), *scale).stdout
    assert offdrift("lab", "collapse", str(tmp_path / "nothing")).code == 2
