"""The grid on a pretrained model: its task, engine, evidence, rate rule, statistics, and that it resumes."""

import contextlib
import importlib
import itertools
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def grid():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("pretrained")


@pytest.fixture(scope="module")
def tasks(grid):
    return grid.tasks


@pytest.fixture(scope="module")
def models(grid):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("pretrained_model")


# -- the model and its weights ----------------------------------------------------------------------


def test_the_model_is_llama(models):
    from transformers import LlamaConfig, LlamaForCausalLM

    weights, shape = models.drawn(vocab=50)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    names |= {n: f"self_attn.{n}_proj" for n in "qkvo"} | {n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    state = {f"model.layers.{i}.{names[n]}.weight": weights[n][i] for n in names for i in range(2)}
    state |= {"model.embed_tokens.weight": weights["embed"], "model.norm.weight": weights["norm"]}
    theirs.load_state_dict(state | {"lm_head.weight": weights["embed"]})
    tokens = torch.randint(0, 50, (3, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = models.answer(weights, shape, tokens, 4)
        torch.testing.assert_close(ours, theirs(tokens).logits[:, 3:-1], atol=1e-5, rtol=1e-5)


def a_gguf(path: Path, models) -> dict[str, torch.Tensor]:
    """A tiny file of the three kinds of tensors that the package's has, and what `gguf` itself makes of it."""
    gguf = pytest.importorskip("gguf")
    draw = np.random.default_rng(0).normal
    writer = gguf.GGUFWriter(path, "llama")
    expected = {}
    for name, kind in (
        ("token_embd", "Q8_0"),
        ("blk.0.attn_q", "Q4_1"),
        ("blk.0.ffn_up", "Q4_1"),
        ("output_norm", "F32"),
    ):
        values = draw(size=(32, 64) if kind != "F32" else (32,)).astype(np.float32)
        raw = values
        if kind != "F32":
            type_ = gguf.GGMLQuantizationType[kind]
            raw = gguf.quants.quantize(values, type_)
            values = gguf.quants.dequantize(raw, type_)
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=type_)
        else:
            writer.add_tensor(f"{name}.weight", raw)
        expected[name] = torch.from_numpy(values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_weights_come_back_bit_by_bit(models, tmp_path):
    expected = a_gguf(tmp_path / "tiny.gguf", models)
    blob = models.packed(tmp_path / "tiny.gguf", models.Shape(heads=4, kv_heads=2))
    (tmp_path / "weights.0").write_bytes(blob[:1000])
    (tmp_path / "weights.1").write_bytes(blob[1000:])
    found = models.load(tmp_path)
    assert torch.equal(found["embed"], expected["token_embd"])
    assert torch.equal(found["norm"], expected["output_norm"])
    assert torch.equal(found["up"][0], expected["blk.0.ffn_up"])
    halves = (
        expected["blk.0.attn_q"].view(4, 4, 2, 64).transpose(1, 2).reshape(32, 64)
    )  # row 2 i + h is row i of half h
    assert torch.equal(found["q"][0], halves)


def engine_of(grid, models, dtype=torch.float32, **words):
    weights, shape = models.drawn()
    scaled = {k: x * 1.1 for k, x in weights.items()}
    size = grid.size_of("count", tiny=True, smoke=False)
    texts = grid.prompts_of(size.task, grid.problems(size.task, 6, torch.Generator().manual_seed(0), held_out=False))
    engine = models.Engine(weights, shape, 2, 6, prompt=texts.shape[1], length=size.length, dtype=dtype, **words)
    engine.sync(0, weights)
    engine.sync(1, scaled)
    return engine, (weights, scaled), shape, texts


def test_the_engine_draws_from_the_trainers_policy(grid, models):
    engine, both, shape, texts = engine_of(grid, models, evidence=7)
    out = engine.draw(texts.expand(2, -1, -1), grid.noise_of([torch.Generator().manual_seed(3)], 2))
    for i, weights in enumerate(both):
        with torch.no_grad():
            logits = models.answer(weights, shape, torch.cat([texts, out.tokens[i]], 1), texts.shape[1])
        logp = logits.log_softmax(-1)
        torch.testing.assert_close(out.logp[i], logp.gather(-1, out.tokens[i][..., None])[..., 0], atol=1e-4, rtol=0)
        torch.testing.assert_close(out.top_logp[i], logp.topk(7, -1).values, atol=1e-4, rtol=0)
    assert not torch.equal(out.tokens[0], out.tokens[1])


def test_draws_have_the_frequencies_of_the_policy(grid, models):
    """A fixed policy of four tokens, 40,000 draws: every share within four standard errors."""
    engine, _, _, _ = engine_of(grid, models)
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    engine.noise = torch.empty(2, 20_000, 4)
    engine.token = torch.zeros(2, 20_000, dtype=torch.int64)
    engine.out, engine.logp = torch.zeros(2, 20_000, 1, dtype=torch.int64), torch.zeros(2, 20_000, 1)
    fill = grid.noise_of([torch.Generator().manual_seed(s) for s in (0, 1)], 2)
    engine._pick(p.log().expand(2, 20_000, 4), fill, at=0)
    shares = torch.bincount(engine.token.flatten(), minlength=4) / 40_000
    assert (shares - p).abs().le(4 * (p * (1 - p) / 40_000).sqrt()).all()


def test_a_recorded_step_draws_the_same(grid, models, monkeypatch):
    """The way through a graph, with a stand-in that runs what it recorded: warm-up and recording leave no trace."""

    class Stream:
        def wait_stream(self, other) -> None: ...

    class Graph:
        def replay(self) -> None:
            recorded._body()

    class Recorded(models.Engine):
        def _step(self) -> None:
            if self.graph is None:
                self._capture()
            self.graph.replay()

    for name, thing in {"Stream": Stream, "current_stream": Stream, "CUDAGraph": Graph}.items():
        monkeypatch.setattr(torch.cuda, name, thing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    outs = []
    for kind in (models.Engine, Recorded):
        monkeypatch.setattr(models, "Engine", kind)
        recorded, _, _, texts = engine_of(grid, models, evidence=3)
        outs.append(recorded.draw(texts.expand(2, -1, -1), grid.noise_of([torch.Generator().manual_seed(3)], 2)))
    assert recorded.how == "CUDA graph"
    assert torch.equal(outs[0].tokens, outs[1].tokens)
    assert torch.equal(outs[0].logp, outs[1].logp)
    assert torch.equal(outs[0].top_ids, outs[1].top_ids)


@pytest.mark.parametrize("fp8", [False, True])
def test_lower_precision_is_another_policy(grid, models, fp8):
    engine, both, shape, texts = engine_of(grid, models, torch.bfloat16, fp8=fp8)
    out = engine.draw(texts.expand(2, -1, -1), grid.noise_of([torch.Generator().manual_seed(3)], 2))
    with torch.no_grad():
        logits = models.answer(both[0], shape, torch.cat([texts, out.tokens[0]], 1), texts.shape[1])
    gap = (logits.log_softmax(-1).gather(-1, out.tokens[0][..., None])[..., 0] - out.logp[0]).abs().max()
    assert (0.1 if fp8 else 0.002) < gap < (1.0 if fp8 else 0.1)


def test_e4m3_has_three_bits_of_mantissa(models):
    x = torch.tensor([[1.0, 1.06, 1.07, 448.0, 0.3]])
    assert models.e4m3(x).tolist() == [[1.0, 1.0, 1.125, 448.0, 0.3125]]
    assert models.e4m3(torch.tensor([1000.0])).item() == 448.0
    assert models.e4m3_rows(x / 448)[0, 3].item() == pytest.approx(1.0)


def test_runs_of_one_seed_get_the_same_noise(grid):
    x = torch.zeros(4, 3, 5)
    grid.noise_of([torch.Generator().manual_seed(s) for s in (0, 1)], 4)(x)
    assert torch.equal(x[0], x[1])
    assert torch.equal(x[2], x[3])
    assert not torch.equal(x[0], x[2])


# -- the task ---------------------------------------------------------------------------------------


def test_prompts_are_the_tokenizers_tokens(grid, tasks):
    """Of the words in a prompt; the numbers of a piece of text are its digits."""
    count, totals = tasks.Count(40, 12), tasks.Totals(40)
    assert {len(count.prompt(one)) for one in ((10, 10, 87), (59, 55, 30))} == {110}
    assert count.prompt((12, 34, 56))[-10:] == [9825, 429, 216, 33, 34, 288, 216, 37, 34, 42]
    assert totals.prompt((3, 5)) == [33343, 37651, 282, 216, 32, 32, 35, 28, 32, 32, 37, 42]
    assert tasks.right_answer(totals, (3, 9)) == [216, 32, 32, 35, 28, 32, 33, 34, 198]
    lengths = {len(tasks.right_answer(totals, (n,) * 40)) for n in (1, 9)}
    assert lengths == {grid.SIZES["totals"].length} == {161}  # every total equally far behind what it adds


@pytest.mark.parametrize("name", ["count", "totals"])
def test_held_out_problems_are_never_trained_on(grid, name):
    task = grid.SIZES[name].task
    held_out, trained = (grid.problems(task, 300, torch.Generator().manual_seed(4), held_out=x) for x in (True, False))
    assert not {*held_out} & {*trained}
    assert max(len(grid.tasks.right_answer(task, one)) for one in held_out) <= grid.SIZES[name].length
    assert {len(task.prompt(one)) for one in held_out + trained} == {len(task.prompt(task.longest))}


def test_counts_have_two_digits(grid):
    found = grid.problems(grid.Size().task, 300, torch.Generator().manual_seed(4), held_out=False)
    assert all(a >= 10 and a + 40 <= 99 and max(s, t) + 12 <= 99 for a, s, t in found)
    assert grid.Size().length == 124


def test_rewards(grid, tasks):
    task = tasks.Count(4, 2)  # five numbers
    right = tasks.right_answer(task, (20, 0, 0))
    wrong_third = [*right[:8], tasks.DIGIT, *right[9:]]
    no_end = [*right[:-1], tasks.COMMA]
    stopped = [*right[:6], tasks.NEWLINE, *right[7:]]
    ended = [tasks.END, *right[1:]]
    answers = torch.tensor([right, wrong_third, no_end, stopped, ended])
    prefix, exact, length = grid.scored(answers, tasks.answers_of(task, [(20, 0, 0)] * 5, len(right)))
    assert prefix.tolist() == pytest.approx([1, 0.4, 1, 0.4, 0])
    assert exact.tolist() == [1, 0, 0, 0, 0]
    assert length.tolist() == [16, 16, 16, 7, 1]


def test_rewards_of_answers_that_differ_in_length(grid, tasks):
    short, long = [tasks.SPACE, *tasks.digits(5)], [tasks.SPACE, *tasks.digits(7), tasks.COMMA, *tasks.digits(12)]
    right = torch.tensor([[*short, tasks.NEWLINE, *[tasks.NO_TOKEN] * 3], [*long, tasks.NEWLINE]])
    rows = [[*short, tasks.NEWLINE, *[tasks.COMMA] * 3], [*long[:-1], tasks.DIGIT, tasks.NEWLINE]]
    prefix, exact, length = grid.scored(torch.tensor(rows), right)
    assert (prefix.tolist(), exact.tolist(), length.tolist()) == ([1.0, 0.5], [1.0, 0.0], [3, 6])


# -- supervised steps -------------------------------------------------------------------------------


def totals_lab(grid, models, path, **words):
    size = grid.replace(grid.size_of("totals", tiny=True, smoke=False), **words)
    weights, shape = models.drawn(vocab=40_000)
    return grid.Lab(weights, shape, size, torch.device("cpu"), time.monotonic() + 1e6, grid.empty_store(), path)


def test_supervised_steps_make_right_answers_likelier(grid, models, tmp_path, monkeypatch):
    """Held-out ones, of which no step has seen any."""
    monkeypatch.setattr(grid, "SUPERVISED_RATE", 3e-3)
    lab = totals_lab(grid, models, tmp_path / "a.json", supervised=24)
    task = lab.size.task
    found = grid.problems(task, 50, torch.Generator().manual_seed(1), held_out=True)
    texts, right = grid.prompts_of(task, found), grid.answers_of(task, found, lab.size.length)

    def loss():
        with torch.no_grad():
            tokens = torch.cat([texts, right.clamp_min(0)], 1)
            logits = grid.answer(lab.start, lab.shape, tokens, texts.shape[1])
            return float(grid.cross_entropy(logits.flatten(0, 1), right.flatten(), ignore_index=grid.tasks.NO_TOKEN))

    before = loss()
    evals = grid.teach(lab)
    assert [step for step, *_ in evals] == [*range(3, 25, 3)]
    assert loss() < before - 1


@pytest.mark.parametrize(("rewards", "steps"), [([0.9] * 8, 4), ([0.1] * 5 + [0.3] * 3, 6), ([0.2] * 8, 8)])
def test_supervised_steps_end_by_the_rule(grid, models, tmp_path, monkeypatch, rewards, steps):
    """Not before half of them, then at the first evaluation with enough of the reward."""
    found = iter(rewards)
    monkeypatch.setattr(grid, "held_out_reward", lambda *_: [[next(found), 0.0]])
    lab = totals_lab(grid, models, tmp_path / "a.json", supervised=8)
    assert grid.teach(lab)[-1][0] == steps


def test_a_store_goes_on_only_from_the_weights_that_it_began_with(grid, models, tmp_path):
    lab = totals_lab(grid, models, tmp_path / "a.json", supervised=1)
    untaught = {k: x.clone() for k, x in lab.start.items()}
    grid.begin(lab, tmp_path)
    again = grid.replace(lab, start=untaught)
    grid.begin(again, tmp_path)
    assert torch.equal(again.start["q"], lab.start["q"])
    assert not torch.equal(again.start["q"], untaught["q"])
    kept = torch.load(tmp_path / "taught-1.pt", weights_only=True)
    kept["weights"]["q"][0, 0, 0] += 1
    torch.save(kept, tmp_path / "taught-1.pt")
    with pytest.raises(ValueError, match="other weights"):
        grid.begin(again, tmp_path)


# -- evidence and updates ---------------------------------------------------------------------------


def test_the_lumped_kl_is_a_lower_end(grid):
    g = torch.Generator().manual_seed(0)
    mu, pi = (3 * torch.randn(200, 60, generator=g, dtype=torch.float64) for _ in range(2))
    log_mu, log_pi = mu.log_softmax(-1), pi.log_softmax(-1)
    exact = (log_mu.exp() * (log_mu - log_pi)).sum(-1)
    ends = []
    for k in (5, 20, 59):
        top = log_mu.topk(k, -1)
        ends.append(grid.lumped_kl(top.values, log_pi.gather(-1, top.indices)).double())
        assert (ends[-1] <= exact + 1e-6).all()
    assert (ends[0] <= ends[1] + 1e-6).all()
    torch.testing.assert_close(ends[-1], exact, atol=1e-5, rtol=1e-5)


def lab_of(grid, models, tmp_path, **store):
    weights, shape = models.drawn()
    return grid.Lab(
        weights,
        shape,
        grid.size_of("count", tiny=True, smoke=False),
        torch.device("cpu"),
        time.monotonic() + 1e6,
        grid.empty_store() | store,
        tmp_path / "a.json",
    )


def a_batch(grid, lab, run, rewards):
    engine = lab.engine(grid.CELLS["fp8"], 1, lab.size.batch, lab.size.evidence)
    streams = grid.streams_of([0], lab.device)
    (batch,) = grid.draw_batches(lab, engine, [run], [0], streams, 0)
    batch.reward = torch.tensor(rewards).repeat(lab.size.batch // len(rewards))
    return batch


@pytest.mark.parametrize(("arm", "moves"), [("trm_95", True), ("trm_95_skip", False)])
def test_an_empty_batch_moves_the_weights_unless_it_is_skipped(grid, models, tmp_path, arm, moves):
    """After a step with everything accepted, one with everything rejected."""
    lab = lab_of(grid, models, tmp_path, thresholds={"fp8": {"delta95": 1e-9}})
    run = lab.new_run("fp8", arm, 0, 1e-3)
    batch = a_batch(grid, lab, run, [0.0, 1.0])
    strict, run.method = run.method, grid.method_of(grid.ARMS[arm], 1e9)
    grid.train(run, lab.shape, batch, lab.size, update=0)
    before = {k: x.detach().clone() for k, x in run.weights.items()}
    assert not torch.equal(before["q"], lab.start["q"])
    run.method = strict
    grid.train(run, lab.shape, batch, lab.size, update=1)
    assert run.record["metrics"]["accepted"] == [1.0, 0.0]
    assert run.record["metrics"]["norm"][1] == 0
    assert run.record["metrics"]["stepped"] == [1.0, float(moves)]
    assert any(not torch.equal(before[k], run.weights[k]) for k in before) is moves


@pytest.mark.parametrize("arm", ["token_tis", "ppo", "trm_05"])
def test_pieces_of_a_batch_add_up(grid, models, tmp_path, arm):
    lab = lab_of(grid, models, tmp_path)
    gradients = []
    for micro in (4, 8):
        run = lab.new_run("fp8", arm, 0, 1e-3)
        batch = a_batch(grid, lab, run, [0.0, 1.0, 0.5, 0.25])
        row = grid.backward(run, lab.shape, batch, lab.size, micro)
        gradients.append(run.weights["up"].grad)
        assert row["reward"] == pytest.approx(0.4375)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


def test_a_step_raises_what_was_rewarded(grid, models, tmp_path):
    lab = lab_of(grid, models, tmp_path)
    run = lab.new_run("fp8", "token_tis", 0, 1e-3)
    batch = a_batch(grid, lab, run, [0.0, 1.0])
    mask = grid.trainable(batch)

    def likelihood():
        with torch.no_grad():
            logp, _ = grid.score(run.weights, lab.shape, batch, slice(None))
        return (logp * mask).sum(1).view(-1, 2).mean(0)

    before = likelihood()
    grid.train(run, lab.shape, batch, lab.size, update=0)
    assert (likelihood() - before)[1] > (likelihood() - before)[0]


# -- the rule, the plan, results --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({1e-6: (0.2, 0.40), 1e-5: (0.2, 0.36), 1e-4: (0.2, 0.1)}, 1e-5),
        ({1e-6: (0.2, 0.25), 1e-5: (0.2, 0.29), 1e-4: (0.2, 0.1)}, 1e-5),
        ({1e-6: (0.2, 0.20), 1e-5: (0.2, 0.20), 1e-4: (0.2, 0.20)}, 1e-6),
        ({1e-6: (0.2, 0.9), 1e-5: (0.2, 0.9), 1e-4: (0.2, 0.36)}, 1e-4),
    ],
)
def test_the_rate_is_chosen_by_the_rule(grid, ends, expected):
    assert grid.chosen_rate(ends) == expected


def a_run(grid, cell, arm, seed, end, complete=True):
    metrics = {"accepted": [1.0], "stepped": [1.0], "kl": [0.01]}
    evals = [[0, 0.2, 0.0], [40, end, 0.1]][: 2 if complete else 1]
    return grid.key(cell, arm, seed), {
        "cell": cell, "arm": arm, "seed": seed, "complete": complete, "evals": evals, "metrics": metrics,
    }  # fmt: skip


def test_any_prefix_of_the_plan_is_balanced(grid):
    """A stage at a time, seeds outermost, and what is done is left out."""
    store = grid.empty_store()
    plan = [*grid.blocks(store, 8, 8)]
    assert plan[0] == ("lag8", ("token_tis", "trm_05", "trm_05_skip", "ppo"), [0, 1])
    assert all(len(arms) * len(seeds) <= 8 for _, arms, seeds in plan)
    assert {(c, a, s) for c, arms, seeds in plan for a in arms for s in seeds} >= {
        (cell, arm, seed) for cell, arm, base in grid.CONTRASTS for seed in range(8) for arm in (arm, base)
    }
    for arm in plan[0][1]:
        store["runs"] |= dict(
            [a_run(grid, "lag8", arm, 0, 0.5), a_run(grid, "lag8", arm, 1, 0.5, complete=arm != "ppo")]
        )
    assert next(grid.blocks(store, 8, 8))[2] == [1, 2]


def test_stores_of_several_machines_become_one(grid):
    one, two = grid.empty_store() | {"lr": 1e-5}, grid.empty_store() | {"lr": 1e-5}
    one["runs"] = dict([a_run(grid, "lag8", "ppo", 0, 0.5), a_run(grid, "lag8", "ppo", 1, 0.5, complete=False)])
    two["runs"] = dict([a_run(grid, "lag8", "ppo", 1, 0.7), a_run(grid, "lag8", "ppo", 2, 0.6)])
    for stores in ([one, two], [two, one]):
        assert grid.outcomes(grid.merged(stores), "lag8", "ppo") == {0: 0.5, 1: 0.7, 2: 0.6}
    with pytest.raises(ValueError, match="lr"):
        grid.merged([one, two | {"lr": 2e-5}])


def test_sign_flips_are_counted_exactly(grid):
    d = [0.3, -0.1, 0.25, 0.4, 0.05]
    all_signs = itertools.product((1, -1), repeat=5)
    at_least = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) >= sum(d) - 1e-9 for signs in all_signs]
    assert grid.flip_p(d) == pytest.approx(sum(at_least) / 32)
    assert grid.flip_p([1.0] * 8) == 2 / 256
    assert grid.flip_p([]) == 1
    assert grid.holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])


def test_power_is_what_it_says(grid):
    """Pairs whose difference is the smallest seen: a t-test finds it in about 80 of 100 samples."""
    draw = np.random.default_rng(0)
    base = draw.normal(size=8)
    scatter = (base / base.std(ddof=1)).tolist()
    seen = grid.smallest_difference(scatter)
    found = [grid.over_seeds((seen + draw.normal(size=8)).tolist()).p <= 0.05 for _ in range(2000)]
    assert 0.75 < np.mean(found) < 0.86
    assert grid.smallest_difference([0.1]) == math.inf


def test_the_tables_say_what_was_not_run(grid):
    store = grid.empty_store()
    for seed in range(8):
        store["runs"] |= dict(
            [a_run(grid, "lag8", "token_tis", seed, 0.1), a_run(grid, "lag8", "trm_05_skip", seed, 0.5 + seed / 100)]
        )
    text = grid.table(store)
    ends = ", ".join(["0.100"] * 8)
    assert f"| lag8 | token_tis | 8 | 0.200 | 0.100 (0.100 to 0.100) | {ends} | 8 of 8 |" in text
    assert "| lag8: trm_05_skip less token_tis | 8 | +.435" in text
    assert "| 0.0078, 0.0312 |" in text
    assert text.count("not run") == 18 + 3


def test_the_page_has_the_tables_of_the_stored_runs(grid):
    store = json.loads((BENCHMARKS / "results" / "pretrained.json").read_text())
    page = (BENCHMARKS.parent / "docs" / "pretrained.md").read_text()
    assert grid.with_table(page, grid.table(store)) == page
    assert grid.with_table(page, "another") != page
    ends = {run["lr"]: (run["evals"][0][1], run["evals"][-1][1]) for run in store["pilot"]["runs"]}
    assert grid.chosen_rate(ends) == store["lr"] == 4.5e-5


def test_the_stored_grid_can_go_on(grid):
    store = json.loads((BENCHMARKS / "results" / "pretrained.json").read_text())
    assert grid.of_one_grid(store, grid.SIZES["count"])
    assert not grid.of_one_grid(store, grid.SIZES["totals"])
    assert not grid.of_one_grid(store | {"lr": None}, grid.SIZES["count"])  # its pilot had fewer updates
    assert {grid.CELLS[cell].engine for cell, _ in grid.PLAN} == store["thresholds"].keys()


def test_it_runs_stops_at_its_limit_and_goes_on(grid, tmp_path, monkeypatch):
    """Two arms of one seed on random weights: first no time for the block, then the rest, the pilot not again."""
    monkeypatch.setattr(grid, "PLAN", (("lag8", ("token_tis", "trm_05_skip")),))
    path, words = tmp_path / "store.json", ["--tiny", "--seeds", "1", "--device", "cpu"]
    real = grid.run_arms
    monkeypatch.setattr(grid, "run_arms", lambda lab, *a: real(grid.replace(lab, deadline=0.0), *a))
    grid.main([*words, "--to", str(path)])
    first = json.loads(path.read_text())
    assert [r["complete"] for r in first["runs"].values()] == [False, False]
    assert first["lr"] in grid.RATES
    monkeypatch.setattr(grid, "run_arms", real)
    monkeypatch.setattr(grid, "pilot", lambda lab: pytest.fail("the pilot ran twice"))
    grid.main([*words, "--to", str(path)])
    second = json.loads(path.read_text())
    assert second["lr"] == first["lr"]
    for run in second["runs"].values():
        assert run["complete"]
        assert [e[0] for e in run["evals"]] == [0, 2, 4]
        assert run["metrics"]["lag"] == [0, 1, 2, 3]  # at a lag of 8 the first eight batches are of version 0
