"""Benchmarks run: the method table knows every row and computes what verl does; the audit counts alike three ways."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests_lab.train.conftest import Digits

from offdrift.methods import METHODS, method
from offdrift.methods.table import FAMILIES
from offdrift_lab.train.data.tasks import TASKS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = ["--sequences", "64", "--longest", "48", "--quick", "--threads", "1"]


def imported(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module(name)


@pytest.fixture(scope="module")
def benchmark():
    yield from imported("methods")


@pytest.fixture(scope="module")
def audits():
    yield from imported("audit")


@pytest.fixture(scope="module")
def run(benchmark, tmp_path_factory):
    """One run over all rows; it sets torch's threads, which is given back."""
    threads, path = torch.get_num_threads(), tmp_path_factory.mktemp("benchmark") / "methods.json"
    found = benchmark.main([*TINY, "--json", str(path)])
    torch.set_num_threads(threads)
    assert json.loads(path.read_text()) == found
    return found


@pytest.mark.slow
def test_every_row_is_timed(run):
    assert list(run["rows"]) == list(METHODS)
    for name, row in run["rows"].items():
        for kind in ("loss", "whole"):
            assert row["ns_per_token"][kind] > 0, name
            assert row["times_base"][kind] > 0, name


def test_rows_of_another_machine_are_added_and_change_no_other(benchmark):
    row = {"times_base": {"loss": 1.0}}
    stored = {"machine": {"processor": "a"}, "tokens": 9, "rows": {"x": row, "y": row}, "failures": ["x: slow"]}
    found = {"machine": {"processor": "b"}, "tokens": 9, "rows": {"x": row, "z": row}, "failures": ["z: slow"]}
    both = benchmark.added({**stored, "reasons": {"y": "w"}}, {**found, "reasons": {"z": "v"}})
    assert both["rows"] == {
        "x": {**row, "machine": found["machine"]},
        "y": row,
        "z": {**row, "machine": found["machine"]},
    }
    assert both["failures"] == ["z: slow"]
    assert both["reasons"] == {"y": "w", "z": "v"}
    assert both["machine"] == stored["machine"]


def test_reasons_are_of_rows(benchmark):
    assert benchmark.REASONS.keys() <= METHODS.keys()
    assert len(benchmark.REASONS) > 5


def test_losses_and_gradients_are_verls(benchmark, run):
    if benchmark.load_verl() is None:
        pytest.skip("verl cannot be imported")
    verl = {name: row["verl"] for name, row in run["rows"].items() if "verl" in row}
    peers = importlib.import_module("methods_verl").PEERS
    assert verl.keys() == peers.keys() | FAMILIES["presets"].keys()
    for name, beside in verl.items():
        differs = beside["disagreement"]
        assert differs["loss"] < 1e-5, name
        assert differs["gradient"] < 1e-5, name
        assert differs["tokens_pushed"] > 50, name
        corrected = {"whole", "verl, with metrics"} if name in FAMILIES["presets"] else set()
        assert beside["seconds"].keys() == {"loss", "loss, padded", "verl"} | corrected
    assert not [words for words in run["failures"] if "differs from verl's" in words]


def test_leaving_out_the_statistics_changes_nothing_else(benchmark):
    batch = benchmark.make_batch(64, 48)
    for name, row in METHODS.items():
        for mine, all_of_it in zip(benchmark.loss(batch, row), benchmark.whole(batch, row)):
            assert torch.equal(mine, all_of_it), name
        assert benchmark.loss(batch, row)[1].any(), name


def test_statistics_are_back_afterwards(benchmark):
    batch = benchmark.make_batch(8, 16)
    of = benchmark.DriftStats.of
    with benchmark.without_statistics():
        assert benchmark.DriftStats.of(batch.fresh()) is benchmark.NO_STATISTICS
    assert benchmark.DriftStats.of is of


def test_gates_act_on_the_batch(benchmark):
    """No gate rejects everything, and few nothing (limits for tokens that are all but impossible)."""
    batch, kept = benchmark.make_batch(512, 512), {}
    for name, row in METHODS.items():
        if row.correction.gates:
            advantages = batch.packed["advantages"]
            out = benchmark.policy_loss(
                batch.fresh(), row, advantages, batch.batch_info_for(row), horizon=batch.horizon
            )
            kept[name] = int(out.corrected.keep.sum())
    assert min(kept.values()) > 0
    assert sum(k < batch.tokens for k in kept.values()) > 20


def row_of(times: float, **beside: float) -> dict:
    row = {"times_base": {"loss": times, "whole": 9.0}}
    return {**row, "verl": {"disagreement": {**beside, "tokens_pushed": 1}}} if beside else row


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("none", row_of(2.9), None),
        ("none", row_of(3.1), "none: 3.1 times the loss of ppo_clip, and no reason"),
        ("kl_cov", row_of(50.0), None),
        ("none", row_of(1.0, loss=1e-6, gradient=1e-6), None),
        ("none", row_of(1.0, loss=1e-3, gradient=1e-6), "none: loss differs from verl's by 1.0e-03"),
        ("none", row_of(1.0, loss=0.0, gradient=float("nan")), "none: gradient differs"),
    ],
)
def test_what_fails_a_run(benchmark, name, row, words):
    found = benchmark.failures({name: row})
    assert len(found) == (words is not None)
    assert all(f.startswith(words) for f in found)


def test_a_turn_times_the_row_and_the_base(benchmark, monkeypatch):
    timed = []
    for arm in ("loss", "whole"):
        monkeypatch.setattr(benchmark, arm, lambda _, row, arm=arm: timed.append((arm, row)))
    seconds = benchmark.turn(None, METHODS["espo"])
    base, row = METHODS["ppo_clip"], METHODS["espo"]
    once = [("loss", base), ("loss", row), ("whole", base), ("whole", row)]
    assert timed == [x for x in once for _ in range(2)]  # each after one call that is not counted
    assert seconds.keys() == {"ppo_clip, loss", "loss", "ppo_clip, whole", "whole"}


def test_each_row_has_its_own_turn_in_every_round(benchmark, monkeypatch):
    order = []
    seconds = {f"{base}{kind}": 1.0 for base in ("", "ppo_clip, ") for kind in ("loss", "whole")}
    monkeypatch.setattr(benchmark, "load_verl", lambda: None)
    monkeypatch.setattr(benchmark, "turn", lambda _, row: order.append(row) or seconds)
    methods = {name: METHODS[name] for name in ("none", "espo")}
    found = benchmark.measure(benchmark.make_batch(8, 16), methods, repeats=3)
    assert order == 3 * [METHODS["none"], METHODS["espo"]]
    assert found["espo"]["times_base"] == {"loss": 1.0, "whole": 1.0}


def test_figures_are_medians_over_rounds_of_ratios_within_a_round(benchmark):
    """The third round is disturbed: everything takes a hundred times as long, the base twenty."""
    turns = [{"loss": x, "whole": 2 * x} for x in (6.0, 8.0, 700.0)]
    base = [{"loss": x, "whole": x} for x in (2.0, 2.0, 40.0)]
    found = benchmark.figures(turns, base, tokens=10**9)
    assert found["ns_per_token"] == {"loss": 8.0, "whole": 16.0}
    assert found["times_base"] == {"loss": 4.0, "whole": 8.0}


def test_verl_is_divided_by_ours(benchmark):
    arms = {"loss": 1.0, "loss, padded": 2.0, "verl": 10.0}
    assert benchmark.figures_beside_verl([arms])["times_faster"] == {"loss": 10.0, "loss, padded": 5.0}
    arms |= {"whole": 3.0, "verl, with metrics": 60.0}
    assert benchmark.figures_beside_verl([arms])["times_faster"]["whole"] == 20.0


def test_chosen_rows_and_no_others(benchmark):
    threads = torch.get_num_threads()
    found = benchmark.main([*TINY, "--rows", "none,trm_max"])
    torch.set_num_threads(threads)
    assert list(found["rows"]) == ["none", "trm_max"]
    with pytest.raises(ValueError, match="did you mean"):
        benchmark.main([*TINY, "--rows", "trm_maks"])


def test_only_divergences_that_a_row_reads_are_summarized(benchmark):
    batch = benchmark.make_batch(8, 16)
    wanted = {n: {*batch.batch_info_for(method(n)).divergences} for n in ("none", "trm_max", "trm_max_tv")}
    assert wanted == {"none": set(), "trm_max": {"kl_rollout_current"}, "trm_max_tv": {"tv_rollout_current"}}


# -- the audit, and how peak memory is measured --------------------------------------------------


def test_a_tiny_audit(audits, tmp_path, monkeypatch):
    threads, path = torch.get_num_threads(), tmp_path / "audit.json"
    processes = []
    monkeypatch.setattr(audits, "peak_mib", lambda arm, file: processes.append(arm) or 1.0)
    found = audits.main(["--tokens", "20000", "--steps", "2", "--repeats", "1", "--json", str(path)])
    torch.set_num_threads(threads)
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))
    arms = audits.available()
    assert found["parquet"].keys() == arms.keys() == found["peak_mib"].keys()
    assert processes == [arm for arm in arms for _ in range(2)]
    assert found["decoded"].keys() >= {"everything", "core statistics", "facets"}
    assert all(x["tokens_per_second"] > 0 for part in ("decoded", "parquet") for x in found[part].values())
    assert all(x < 1e-3 for x in found["disagreement"].values())


def test_another_number_is_noticed(audits, tmp_path, monkeypatch):
    pytest.importorskip("polars")
    file = audits.write_log(audits.make_log(3000, steps=1), tmp_path / "log.parquet")
    right = audits.core
    monkeypatch.setattr(audits, "core", lambda path: {step: {**n, "k3": 1.01 * n["k3"] + 1e-4} for step, n in right(path).items()})  # fmt: skip
    with pytest.raises(AssertionError, match="finds other numbers"):
        audits.disagreement(file)


def test_peak_memory_is_of_a_process_of_its_own(audits, tmp_path):
    file = audits.write_log(audits.make_log(3000, steps=1), tmp_path / "log.parquet")
    assert audits.peak_mib("reading alone", file) > 0


SCRIPT = """
import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
import torch
from measure import peak_mib

MIB = 2**18  # float32 numbers
torch.ones(16 * MIB)  # freed at once: what it leaves behind must not be reused unseen

def in_turn():
    for _ in range(4):
        torch.ones(8 * MIB)
    return torch.ones(3 * MIB) + torch.ones(3 * MIB)

def work(size, together):
    block = torch.ones(size * MIB)
    together.wait(10)
    block.sum()

def side_by_side():
    together = Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, (4, 5, 6), [together] * 3))

print(json.dumps([peak_mib(run) for run in (in_turn, side_by_side) * 2]))
"""


def test_blocks_of_every_thread_count_once_while_they_live():
    # In a process of its own, as benchmarks are: threads of other tests have heaps of their own.
    run = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(run, cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == pytest.approx([9, 15, 9, 15], abs=0.6)


@pytest.mark.slow
def test_the_diagnosis_of_a_trained_run_is_measured(tmp_path, monkeypatch):
    """Of `confusion`, the part that trains: a folder of a run that is looked for elsewhere is no number of anything."""
    confusion = importlib.import_module("benchmarks.confusion")
    monkeypatch.setitem(TASKS, "digits", Digits())
    case = next(c for c in confusion.planted_real.CASES if c.name == "float32")
    case = replace(
        case, recipe={**case.recipe, **confusion.planted_real.SMALL}
    )  # without a warm start, of which nothing here speaks
    row = confusion._trained(case, 0, 4, tmp_path)
    assert (row["case"], row["planted"], row["seed"]) == ("float32", confusion.CLEAN, 0)
    assert row["reported"] == confusion.CLEAN
    assert confusion._trained(case, 0, 4, tmp_path)["rules"] == row["rules"], "judged again, not trained again"


@pytest.fixture(scope="module")
def faults():
    yield from imported("planted")


@pytest.mark.parametrize(
    ("name", "caught", "module"),
    [
        ("none (qwen3)", False, ""),
        ("values scaled by 1.05 (scale of the cache)", True, "model.layers.0.self_attn.v_proj"),
    ],
)
def test_planted_faults_are_caught_and_named_and_right_models_pass(faults, name, caught, module, tmp_path):
    threads, path = torch.get_num_threads(), tmp_path / "planted.json"
    faults.main(["--only", name, "--json", str(path)])
    torch.set_num_threads(threads)
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["fault"], row["caught"], row["module"]) == (name, caught, module)
    assert row["named"] is caught


@pytest.fixture(scope="module")
def outside(faults):
    yield from imported("planted_outside")


def test_a_fault_of_somebody_elses_is_planted_in_a_folder_and_named(outside, tmp_path):
    threads, path = torch.get_num_threads(), tmp_path / "outside.json"
    outside.main(["--only", "none (moe)", "experts_rotated", "--json", str(path)])
    torch.set_num_threads(threads)
    right, fault = json.loads(path.read_text())["rows"]
    assert (right["fault"], right["caught"]) == ("none (moe)", False)
    assert (fault["caught"], fault["module"]) == (True, "model.layers.1.mlp.experts")
    assert fault["story"] == outside.FAULTS["experts_rotated"].story


def test_faults_have_names_of_their_own(faults):
    names = [fault.name for fault in (*faults.HONEST, *faults.FAULTS)]
    assert len(set(names)) == len(names) >= 60
    assert set(faults.REAL) <= set(names)


STORED = ("planted", "planted_vllm", "planted_outside", "planted_outside_vllm", "planted_outside_smollm2")


@pytest.mark.parametrize("name", STORED)
def test_totals_of_planted_faults_are_those_of_their_rows_and_of_the_page(name):
    """Counted anew, and the page says them with the commit that they were measured at."""
    results = Path(__file__).parent.parent / "benchmarks" / "results"
    stored = json.loads((results / f"{name}.json").read_text())
    rows = [row for row in stored["rows"] if not row["fault"].startswith("none")]
    right = [row for row in stored["rows"] if row["fault"].startswith("none")]
    caught, named = sum(row["caught"] for row in rows), sum(row["caught"] and row["named"] for row in rows)
    assert len({row["fault"] for row in stored["rows"]}) == len(stored["rows"])
    passed = sum(not row["caught"] for row in right)
    totals = {"faults": len(rows), "caught": caught, "named": named, "honest": len(right), "honest_passed": passed}
    assert stored["totals"] == totals
    assert passed == len(right)
    page = (results.parent.parent / "docs" / "check.md").read_text()
    commits = [row.get("commit", stored["machine"]["commit"]) for row in stored["rows"]]
    at = ", ".join(f"{c} ({commits.count(c)} rows)" if len(set(commits)) > 1 else c for c in dict.fromkeys(commits))
    cells = f"| {at} | {len(rows)} | {caught} | {named} ({named / len(rows):.0%})"
    assert cells in page


def test_rows_keep_the_commit_they_were_measured_at_and_are_not_run_again(faults, tmp_path, monkeypatch):
    path, row = tmp_path / "planted.json", {"fault": "a", "caught": True, "named": True}
    facts = {"commit": "first"}
    monkeypatch.setattr(faults, "machine", lambda *packages: dict(facts))
    faults.stored([row], "vllm", ["a", "b"], path, command="x")
    assert faults.measured_now(path) == {"a"}
    facts["commit"] = "second"
    assert faults.measured_now(path) == set(), "another commit runs it again"
    faults.stored([row | {"fault": "b"}], "vllm", ["a", "b"], path, command="x")
    kept = json.loads(path.read_text())["rows"]
    assert [(r["fault"], r["commit"]) for r in kept] == [("a", "first"), ("b", "second")]
    assert faults.measured_now(path) == {"b"}
    monkeypatch.setattr(faults, "caught", lambda fault, *rest: row | {"fault": fault.name, "says": ""})
    facts["commit"] = "third"
    names = [fault.name for fault in faults.HONEST]
    threads = torch.get_num_threads()
    first = faults.main(["--only", names[0], "--json", str(path)])
    again = faults.main(["--only", "none (", "--json", str(path)])
    torch.set_num_threads(threads)
    assert [r["fault"] for r in first["rows"]] == names[:1]
    assert [r["fault"] for r in again["rows"]] == names


def test_an_interrupted_list_goes_on_where_it_ended(faults, outside, tmp_path, monkeypatch):
    path, run = tmp_path / "outside.json", []
    row = {"caught": True, "named": True, "says": ""}
    monkeypatch.setattr(outside, "measured_row", lambda name, *rest: run.append(name) or row | {"fault": name})
    threads = torch.get_num_threads()
    outside.main(["--engine", "vllm", "--only", "rope", "--json", str(path)])
    outside.main(["--engine", "vllm", "--json", str(path)])
    torch.set_num_threads(threads)
    assert sorted(run) == sorted(outside.planned("vllm", False)), "each once"
    assert not set(outside.SLOW) & set(run)


@pytest.fixture(scope="module")
def staleness():
    yield from imported("staleness")


def test_parts_of_a_sweep_that_ran_elsewhere_are_joined(staleness, tmp_path):
    def ran(arm, seed, end):
        return {"arm": arm, "seed": seed, "values": {}, "status": "finished", "folder": f"{arm}-{seed}"} | {"end": end}

    def swept(folder, runs):
        for run in runs:
            files = folder / run["folder"] / "arms" / run["arm"]
            files.mkdir(parents=True)
            rows = [{"update": at, "reward": x, "prompts": 64, "samples": 1} for at, x in ((0, 0.25), (16, run["end"]))]
            (files / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (files / "metrics.jsonl").write_text('{"update": 1, "version_lag/max": 1}\n')
        settings = [{"name": arm, "arm": arm, "values": {}, "baseline": "b"} for arm in ("a", "b")]
        content = {"name": "s", "changes": [], "versions": [], "runs": runs, "settings": settings}
        (folder / "sweep.json").write_text(json.dumps(content))
        return folder

    ends = {"a": [0.5, 0.625, 0.5], "b": [0.25, 0.375, 0.375]}
    of = {arm: [ran(arm, seed, end) for seed, end in enumerate(x)] for arm, x in ends.items()}
    whole = staleness.of_sweep(swept(tmp_path / "whole", of["a"] + of["b"]))
    part = json.loads(json.dumps(staleness.of_sweep(swept(tmp_path / "a", of["a"]))))
    stored = {"machine": {"processor": "a"}, "sweeps": [part, {**part, "name": "another"}]}
    joined = staleness.of_sweep(swept(tmp_path / "b", of["b"]), stored)
    assert joined["earlier"] == {"machine": {"processor": "a"}, "runs": 3}
    assert joined["settings"] == whole["settings"]
    assert [r for r in joined["runs"] if r["arm"] == "a"] == [r for r in whole["runs"] if r["arm"] == "a"]
    again = staleness.of_sweep(tmp_path / "whole", stored)  # what is here counts
    assert "earlier" not in again
    assert again["runs"] == whole["runs"]
