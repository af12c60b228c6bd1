"""Everything that only a GPU can tell, in one command of at most nine minutes on a bare machine.

    python benchmarks/gpu.py [--only exact,step] [--minutes 9] [--json PATH] [--wheels FOLDER]

Needs torch and Triton; `transformers` for `step`, pytest for `tests`, verl for its column of `correction`, what
`pip install offdrift[train]` installs for `train`. On a machine without a network what is missing can be carried as
wheels, which --wheels unpacks for this run alone. A part that lacks something says so and is left out. Parts, in this
order, each stored as soon as it is done:

    ceilings    device copy and bfloat16 products: what everything is compared with
    tests       tests that need a CUDA device, and the kernels' numbers against float64
    methods     loss and gradient of every method on the device against those of the CPU
    transfers   how often a step waits for the device: pack, loss and backward, metrics
    exact       divergences from logits, vocabularies of 32k to 262k, forward and backward, against a copy, log_softmax
                twice, and torch.compile (bar: 80 % of the copy's bandwidth, forward)
    hidden      the same from hidden states, against the products with the output head
    topk        intervals from the rollout policy's top k, against log-sum-exp and exact divergences
    correction  packed correction and metrics against verl's helper, on the ragged batch of correction.py
    step        a training step of a Qwen3 of 0.6 billion parameters with random weights, with and without offdrift
                (bar: 2 %)
    train       offdrift train recipes/tiny.toml, and offdrift check, on the device

Without a GPU nothing is timed: TRITON_INTERPRET=1 with --tiny runs methods, exact, hidden, topk, correction and step on
the CPU, for errors.
"""

import argparse
import atexit
import contextlib
import importlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measure import machine
from torch import Tensor
from torch.nn.functional import linear

ROOT = Path(__file__).parents[1]
VOCABULARIES = (32_000, 128_256, 151_936, 262_144)
WIDEST = 2**31
"""Bytes of logits of one policy in `exact`, far beyond any cache."""

GPU_TESTS = ["tests/test_gpu.py", "tests/records/test_recorder.py"]
"""Files with tests that are marked `gpu`."""

Arms = dict[str, Callable[[], object]]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"parts to run, of {','.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no part after this")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--vocab", type=int, nargs="*", default=VOCABULARIES, help="of `exact`")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU in Triton's interpreter, for errors")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to import from, where nothing can be installed")
    parser.add_argument("--json", type=Path, help="write the numbers here too; parts that are not run again stay")
    args = parser.parse_args(argv)
    chosen = args.only.split(",") if args.only else list(PARTS)
    if unknown := sorted(set(chosen) - set(PARTS)):
        parser.error(f"--only names {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    if not torch.cuda.is_available() and not (args.tiny and os.environ.get("TRITON_INTERPRET") == "1"):
        sys.exit("no GPU here: nothing to time. TRITON_INTERPRET=1 with --tiny runs some parts for errors")
    if args.wheels is not None:
        import_from(args.wheels)
    import_verl_without_ray()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: Triton's interpreter"
    results = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    results |= {"device": name, "machine": machine("triton", "transformers", "verl")}
    print(f"{name}\n{results['machine']}", flush=True)
    start = time.perf_counter()
    for part in (p for p in PARTS if p in chosen):
        passed = time.perf_counter() - start
        if passed > 60 * args.minutes:
            results[part] = {"left out": f"{passed:.0f} s had passed"}
            print(f"\n== {part}: left out, {passed:.0f} s have passed", flush=True)
            continue
        print(f"\n== {part}, after {passed:.0f} s", flush=True)
        try:
            results[part] = PARTS[part](args, device)
        except Exception as error:  # one part's failure must not cost the others their device time
            results[part] = {"failed": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nall of it took {time.perf_counter() - start:.0f} s")
    return results


# -- how time is taken ------------------------------------------------------------------------------


def medians(arms: Arms, device: torch.device, *, repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds of each arm by the device's own events, arms in turn, and peak MiB beyond what was held.

    `times_first` is the median over rounds of an arm's time by that of the first arm in the same round.
    """
    table: dict[str, dict[str, float]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for name, run in arms.items():
        run()  # compiles, allocates
        table[name] = {}
        if device.type == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            table[name]["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    for _ in range(repeats):
        for name, run in arms.items():
            run()
            seconds[name].append(once(run, device))
    first = next(iter(seconds.values()))
    for name, row in table.items():
        low, high = min(seconds[name]), max(seconds[name])
        # Round by round, so that a machine that slows down for all arms changes no ratio.
        ratios = [x / y for x, y in zip(seconds[name], first, strict=True)]
        row |= {"seconds": statistics.median(seconds[name]), "fastest": low, "slowest": high}
        row |= {"times_first": statistics.median(ratios), "times_first_by_round": [round(x, 4) for x in ratios]}
    return table


def once(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def launches(run: Callable[[], object], device: torch.device) -> int:
    """Kernels and copies that a call starts on the device."""
    if device.type != "cuda":
        return 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.device_type.name == "CUDA")


def show(title: str, table: dict[str, dict[str, float]], columns: tuple[str, ...]) -> None:
    print(f"{title:32}" + "".join(f"{column:>16}" for column in columns))
    for name, row in table.items():
        print(f"  {name:30}" + "".join(f"{row[c]:16.4g}" if c in row else " " * 16 for c in columns), flush=True)


def on(device: torch.device, x: Any) -> Any:
    """Tensors of a dictionary, a dataclass or alone, on the device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {name: on(device, value) for name, value in x.items()}
    if is_dataclass(x) and not isinstance(x, type):
        moved = {f.name: on(device, getattr(x, f.name)) for f in fields(x) if f.init}
        return replace(x, **moved)
    return x


# -- ceilings, tests --------------------------------------------------------------------------------


def ceilings(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """GB/s of a device copy (bytes read and written) and TFLOP/s of bfloat16 products on random numbers."""
    size = 2**12 if args.tiny else 2**31
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    n = 64 if args.tiny else 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    arms: Arms = {"copy": lambda: target.copy_(source), "product": lambda: a @ b}
    table = medians(arms, device, repeats=args.repeats)
    table["copy"]["gb_per_s"] = 2 * size / table["copy"]["seconds"] / 1e9
    table["product"]["tflop_per_s"] = 2 * n**3 / table["product"]["seconds"] / 1e12
    show("ceilings", table, ("seconds", "gb_per_s", "tflop_per_s"))
    return table


def tests(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Kernels against float64, and every test that is marked `gpu`."""
    results: dict[str, Any] = {}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])}
    options = ["-q", "-p", "no:cacheprovider", "-x", "-o", "addopts=--strict-markers", "--maxfail=20", "--tb=short"]
    for name, what in {
        "kernels": ["tests/divergence/kernel_numbers.py", "-n", "8", "-p", "no:benchmark"],
        "gpu": ["-m", "gpu", *GPU_TESTS, "-p", "no:benchmark"],
    }.items():
        command = [sys.executable, "-m", "pytest", *what, *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
        lines = done.stdout.strip().splitlines()
        counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", lines[-1])}
        results[name] = {"status": done.returncode, **counts}
        print(name, results[name], flush=True)
        if done.returncode:
            print("\n".join(lines[-60:]), done.stderr[-2000:], flush=True)
    return results


# -- methods, transfers -----------------------------------------------------------------------------


def methods(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every row on the device: its distance from the CPU's loss and gradient, and its time in units of PPO's clip."""
    from methods_batch import make_batch

    from methods import _distance, loss, whole
    from offdrift.methods import METHODS

    host = make_batch(*((8, 64) if args.tiny else (256, 4096)))
    batch = on(device, host)
    rows: dict[str, dict[str, float]] = {}
    failures = []
    for name, row in METHODS.items():
        try:
            expected, computed = loss(host, row), loss(batch, row)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}"[:300])
            continue
        rows[name] = {
            "loss": _distance(computed[0].cpu(), expected[0]),
            "gradient": _distance(computed[1].cpu(), expected[1]),
        }
        far = max(rows[name].values())
        if not far <= 1e-4:
            failures.append(
                f"{name}: loss {rows[name]['loss']:.1e}, gradient {rows[name]['gradient']:.1e} from the CPU's"
            )
    arms: Arms = {name: (lambda row=METHODS[name]: whole(batch, row)) for name in rows}
    times = medians(arms, device, repeats=1 if args.tiny else 3)
    for name, row in rows.items():
        row["times_ppo_clip"] = times[name]["seconds"] / times["ppo_clip"]["seconds"]
    worst = {what: max(row[what] for row in rows.values()) for what in ("loss", "gradient", "times_ppo_clip")}
    base = times["ppo_clip"]["seconds"]
    print(f"{len(rows)} methods, {batch.tokens:,} tokens; ppo_clip with metrics {base * 1e3:.3g} ms")
    print("largest relative distances from the CPU and largest time:", worst)
    slow = sorted(rows, key=lambda name: -rows[name]["times_ppo_clip"])[:8]
    print("slowest:", {name: round(rows[name]["times_ppo_clip"], 2) for name in slow})
    print("\n".join(failures) or "every row agrees within 1e-4")
    return {"tokens": batch.tokens, "ppo_clip_seconds": base, "failures": failures, "rows": rows}


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Where the host waits for the device: a line of source for each time."""
    places: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
            places += [
                f"{Path(w.filename).name}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)
            ]


def transfers(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Waits of packing, of the loss with its backward pass, and of the metrics, for every method."""
    from methods_batch import make_batch

    from offdrift.logprobs import LogProbs
    from offdrift.loss import policy_loss
    from offdrift.methods import METHODS
    from offdrift.stats.metrics import summarize

    batch = on(device, make_batch(64, 512))
    log = batch.packed
    with waits() as packing:
        LogProbs.pack(log["rollout"], log["logp"], log["old"], segments=batch.fresh().segments)
    rows: dict[str, dict[str, list[str]]] = {}
    for name, row in METHODS.items():
        lp = batch.fresh()
        info = batch.batch_info_for(row, lp)
        lp.segments.check()
        int(lp.segments.num_tokens)
        with waits() as pushing:
            out = policy_loss(lp, row, log["advantages"], info, horizon=batch.horizon)
            torch.autograd.grad(out.loss, lp.current)
        with waits() as summary:
            summarize(out.stats)
        recorded = LogProbs.pack(lp.logp_rollout, None, lp.logp_old, logp_ref=lp.logp_ref, segments=lp.segments)
        leaf = lp.current.detach().requires_grad_()
        with waits() as unread:
            later = policy_loss(recorded.with_current(leaf), row, log["advantages"], info, horizon=batch.horizon)
            torch.autograd.grad(later.loss, leaf)
        if not torch.equal(later.loss, out.loss):
            raise AssertionError(f"{name}: with_current gives another loss")
        rows[name] = {"loss": pushing, "with_current": unread, "metrics": summary}
    counts = {name: len(r["loss"]) + len(r["metrics"]) for name, r in rows.items()}
    places: dict[str, int] = {}
    for row_places in rows.values():
        for place in row_places["loss"]:
            places[place] = places.get(place, 0) + 1
    once_only = sum(count == 1 for count in counts.values())
    print(f"packing waits {len(packing)} times: {packing}")
    print(f"{once_only} of {len(counts)} methods wait once, for their metrics; most waits: {max(counts.values())}")
    never = sum(not r["with_current"] for r in rows.values())
    print(f"with_current: {never} of {len(rows)} methods do not wait before their metrics")
    print("lines that wait inside the loss, with how many methods:", dict(sorted(places.items(), key=lambda x: -x[1])))
    return {"packing": packing, "rows": rows, "places": places}


# -- divergences ------------------------------------------------------------------------------------


def exact(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Forward and backward from logits, by vocabulary and dtype."""
    results: dict[str, Any] = {}
    for vocab in (300,) if args.tiny else args.vocab:
        for dtype in (torch.bfloat16, torch.float32):
            rows = 2 if args.tiny else WIDEST // (vocab * dtype.itemsize)
            title = f"{rows} x {vocab:,}, {str(dtype).removeprefix('torch.')}"
            results[title] = exact_case(title, rows, vocab, dtype, device, repeats=args.repeats)
    return results


def exact_case(
    title: str, rows: int, vocab: int, dtype: torch.dtype, device: torch.device, *, repeats: int
) -> dict[str, Any]:
    import gpu_kl

    from offdrift.divergence import kernels

    mu, pi, tokens = gpu_kl.policies(rows, vocab, dtype, device)
    target = torch.empty_like(mu)
    forward: Arms = {"copy": lambda: target.copy_(mu), "naive": lambda: gpu_kl.naive(mu, pi)}
    backward: Arms = {"naive": lambda: gpu_kl.naive_step(mu, pi)}
    widest = vocab == 151_936
    if device.type == "cuda" and widest:
        torch.compiler.reset()
        compiled, compiled_step = torch.compile(gpu_kl.naive), torch.compile(gpu_kl.naive_step)
        forward["torch.compile"] = lambda: compiled(mu, pi)
        backward["torch.compile"] = lambda: compiled_step(mu, pi)
    warps = [4, 8, 16] if widest else []
    forward |= gpu_kl.our_arms(lambda: kernels.with_normalizers(mu, pi, tokens)[0], warps)
    backward |= gpu_kl.our_arms(lambda: gpu_kl.our_step(mu, pi), warps)
    table = medians(forward, device, repeats=repeats)
    steps = medians(backward, device, repeats=repeats)
    for row in table.values():
        row["gb_per_s"] = 2 * mu.nbytes / row["seconds"] / 1e9
        row["share_of_copy"] = table["copy"]["seconds"] / row["seconds"]
        row["naive_over_it"] = table["naive"]["seconds"] / row["seconds"]
    for row in steps.values():
        # Both policies read twice, the gradient written once.
        row["share_of_copy"] = 2.5 * table["copy"]["seconds"] / row["seconds"]
        row["naive_over_it"] = steps["naive"]["seconds"] / row["seconds"]
    worst = gpu_kl.errors(device, vocab, dtype)
    show(f"{title}, forward", table, ("seconds", "gb_per_s", "share_of_copy", "naive_over_it", "peak_mib"))
    show("  and backward of the KL", steps, ("seconds", "share_of_copy", "naive_over_it", "peak_mib"))
    print(f"  largest relative error {max(worst.values()):.1e}", flush=True)
    return {"forward": table, "backward": steps, "relative_errors": worst}


def hidden(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """From hidden states of width 1,024 and 4,096, against two products with the output head."""
    results: dict[str, Any] = {}
    tokens, vocab = (8, 300) if args.tiny else (8192, 151_936)
    for width in (16,) if args.tiny else (1024, 4096):
        for round_to in (torch.bfloat16, None):
            title = f"{tokens} x {width} -> {vocab:,}, logits {'bfloat16' if round_to else 'float32'}"
            table = hidden_case(tokens, width, vocab, round_to, device, repeats=max(1, args.repeats // 2))
            show(title, table, ("seconds", "times_the_products", "peak_mib"))
            results[title] = table
    return results


def hidden_case(
    tokens: int, width: int, vocab: int, round_to: torch.dtype | None, device: torch.device, *, repeats: int
) -> dict[str, dict[str, float]]:
    from gpu_kl import naive

    from offdrift.divergence.hidden import Head, hidden_divergences

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    states = draw(tokens, width).to(torch.bfloat16)
    moved = (states + 0.02 * draw(tokens, width)).to(torch.bfloat16)
    weight = (3 * draw(vocab, width) / width**0.5).to(torch.bfloat16)
    head = Head(weight, round_to=round_to)
    few = tokens // 4

    def products() -> None:
        for part in weight.split(8192):
            linear(states, part)
            linear(moved, part)

    arms: Arms = {
        "two products": products,
        "ours": lambda: hidden_divergences(states, head, moved, head),
        "ours, nothing kept": lambda: hidden_divergences(states, head, moved, head, keep_mib=0),
        "naive, a quarter": lambda: naive(states[:few] @ weight.T, moved[:few] @ weight.T),
    }
    table = medians(arms, device, repeats=repeats)
    for row in table.values():
        row["times_the_products"] = row["seconds"] / table["two products"]["seconds"]
    return table


def topk(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Certified intervals from a record of the top 20."""
    from offdrift.divergence.fused import exact_divergences
    from offdrift.divergence.interval import topk_divergences

    rows, vocab = (4, 300) if args.tiny else (1024, 151_936)
    before = 3 * torch.randn(rows, vocab, device=device)
    logits = before + 0.05 * torch.randn(rows, vocab, device=device)
    log_mu = before.log_softmax(-1)
    tokens = torch.multinomial(log_mu.exp(), 1).squeeze(1)
    top = log_mu.topk(20)
    record = (top.indices, top.values, tokens, log_mu.gather(1, tokens[:, None]).squeeze(1))
    arms: Arms = {
        "log-sum-exp": lambda: logits.logsumexp(-1),
        "sort": lambda: logits.sort(-1),
        "exact": lambda: exact_divergences(before, logits),
        "interval": lambda: topk_divergences(*record, logits),
        "capped interval": lambda: topk_divergences(*record, logits, tail_log_ratio_cap=0.5),
    }
    table = medians(arms, device, repeats=max(1, args.repeats // 2))
    for row in table.values():
        row["us_per_row"] = 1e6 * row["seconds"] / rows
    show(f"{rows} x {vocab:,}, k = 20", table, ("seconds", "us_per_row", "peak_mib"))
    return table


# -- correction, step, train ------------------------------------------------------------------------


def correction(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The batch and modes of correction.py, on the device; verl's helper where it can be imported."""
    import correction as peer

    host = peer.ragged(*((8, 64) if args.tiny else (512, 8192)))
    moved = {f.name: getattr(host, f.name) for f in fields(host)}
    batch = peer.Batch(**{name: x.to(device) for name, x in moved.items()})
    verl = peer.verl_function()
    results: dict[str, Any] = {"verl": verl is not None, "ray is a stand-in for import": STAND_IN in sys.modules}
    for mode, (ours, options) in peer.MODES.items():
        arms: Arms = {
            "read": lambda: peer.read(batch),
            "ours, packed": lambda ours=ours: peer.ours_packed(batch, ours),
            "ours, padded": lambda ours=ours: peer.ours_padded(batch, ours),
        }
        if verl is not None:
            arms["verl"] = lambda options=options: peer.run_verl(verl, batch, options)
        table = medians(arms, device, repeats=args.repeats)
        for name, run in arms.items():
            table[name]["launches"] = launches(run, device)
        if verl is not None:
            for row in table.values():
                row["verl_over_it"] = table["verl"]["seconds"] / row["seconds"]
            results[f"{mode}: agreement"] = peer.disagreements(verl, batch, mode)
        show(mode, table, ("seconds", "verl_over_it", "launches", "peak_mib"))
        results[mode] = table
    return results


def step(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Forward, loss, backward and AdamW of a Qwen3-0.6B with random weights, bfloat16, packed responses."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import offdrift as od
    from offdrift.divergence.hidden import Head, hidden_divergences

    size = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    size |= {"num_attention_heads": 16, "head_dim": 128}
    size |= {"num_key_value_heads": 8, "vocab_size": 151_936, "tie_word_embeddings": True}
    sequences, prompt, length, micro = 32, 256, 1024, 8
    if args.tiny:
        size |= {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 16,
        }
        size |= {"num_key_value_heads": 1, "vocab_size": 300}
        sequences, prompt, length, micro = 4, 8, 24, 2
    config = Qwen3Config(**size, attn_implementation="sdpa")  # type: ignore[arg-type]
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    ids = torch.randint(0, config.vocab_size, (sequences, length), device=device)
    responses = length - prompt
    n = micro * responses
    segments = od.Segments.from_lengths([responses] * micro)  # on the host, where lengths are known
    advantages = torch.randn(micro, device=device).repeat_interleave(responses)

    def states_of(rows: Tensor) -> Tensor:
        return model.model(rows).last_hidden_state[:, prompt - 1 : -1].reshape(n, -1)

    def logp_of(states: Tensor, rows: Tensor) -> Tensor:
        logits = linear(states, model.lm_head.weight).float()
        return -torch.nn.functional.cross_entropy(logits, rows[:, prompt:].reshape(-1), reduction="none")

    with torch.no_grad():  # what an engine would have recorded: the same model, log-probs a little off
        recorded = [states_of(rows) for rows in ids.split(micro)]
        rollout = [logp_of(s, rows) for s, rows in zip(recorded, ids.split(micro), strict=True)]
        old = rollout
        rollout = [(x + 0.02 * torch.randn_like(x)).clamp(max=0) for x in rollout]
        recorded = [(s + 0.01 * torch.randn_like(s)) for s in recorded]
    method_name = "decoupled_k3_rs_token_tis"  # PPO's clip, truncated token weights, sequences rejected by mean k3
    method = od.method(method_name)
    frozen = Head(model.lm_head.weight.detach().clone(), round_to=torch.bfloat16)

    def plain() -> None:
        losses = []
        for i, rows in enumerate(ids.split(micro)):
            logp = logp_of(states_of(rows), rows)
            ratio = (logp - old[i]).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * advantages, clipped * advantages).mean() / len(rollout)
            loss.backward()
            losses.append(loss.detach())
        finish(torch.stack(losses).sum())

    def ours(*, divergences: bool) -> None:
        losses, stats = [], []
        # What is on record is looked at before anything else is asked of the device; nothing waits after that.
        packed = [od.LogProbs.pack(r, None, o, segments=segments) for r, o in zip(rollout, old, strict=True)]
        for i, rows in enumerate(ids.split(micro)):
            states = states_of(rows)
            logp = logp_of(states, rows)
            lp = packed[i].with_current(logp)
            info = od.BatchInfo()
            if divergences:
                head = Head(model.lm_head.weight.detach(), round_to=torch.bfloat16)
                d = hidden_divergences(recorded[i], frozen, states.detach(), head)
                info = od.BatchInfo(
                    divergences={"kl_rollout_current": exact_of("kl_rollout_current", d.kl_rollout_current)}
                )
            out = od.policy_loss(lp, method, advantages, info)
            (out.loss / len(rollout)).backward()
            losses.append(out.loss.detach())
            stats.append(out.stats)  # after the backward pass was started: see `PolicyLoss.stats`
        od.summarize(merged(stats))  # the one wait: raises before the step if a log-prob was none
        finish(torch.stack(losses).sum())

    def finish(loss: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss)

    def drift_alone() -> None:
        stats = []
        for i in range(len(rollout)):
            leaf = old[i].clone().requires_grad_()
            lp = od.LogProbs.pack(rollout[i], None, old[i], segments=segments).with_current(leaf)
            out = od.policy_loss(lp, method, advantages)
            out.loss.backward()
            stats.append(out.stats)
        od.summarize(merged(stats))

    arms: Arms = {
        "plain PPO": plain,
        "offdrift": lambda: ours(divergences=False),
        "offdrift, exact divergences": lambda: ours(divergences=True),
        "offdrift's own part, alone": drift_alone,
    }
    table = medians(arms, device, repeats=args.repeats)
    for row in table.values():
        row["times_plain"] = row["times_first"]
        row["fastest_times_plain"] = row["fastest"] / table["plain PPO"]["fastest"]
    title = f"{parameters / 1e6:.0f}M parameters, {sequences} x {length} tokens, {method_name}"
    show(title, table, ("seconds", "fastest", "times_plain", "fastest_times_plain", "peak_mib"))
    return {"parameters": parameters, "sequences": sequences, "length": length, "method": method_name, **table}


def exact_of(name: str, values: Tensor) -> Any:
    from offdrift.divergence.evidence import Divergence

    return Divergence.exact(name, values)


def merged(stats: list[Any]) -> Any:
    from offdrift.stats.drift import DriftStats

    return DriftStats.merge_all(stats)


def train(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The product on the device: sixteen updates of tiny.toml with int8 and bfloat16 rollouts, and a check."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])}
    few = ["warm_start.steps=0", "batches=16", "log.eval_every=16", "log.eval_prompts=64", "log.trackers=[]"]
    runs = {
        "int8 rollouts": [],
        "bfloat16 rollouts": ["rollout.dtype=bfloat16", "rollout.quantization=none"],
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        problems = Path(folder) / "sums.jsonl"  # what `arithmetic` asks, without the package that makes it
        pairs = [(i % 40, 7 * i % 41) for i in range(1000)]
        lines = [json.dumps({"prompt": f"{a} + {b} =", "answer": f"{a + b}"}) for a, b in pairs]
        problems.write_text("\n".join(lines) + "\n")
        few += [f"task={problems}", "reward=recipes/digits.py:digits", "optim.lr=1e-3"]
        for name, changes in runs.items():
            sets = [word for change in few + changes for word in ("--set", change)]
            where = str(Path(folder) / name.replace(" ", "-"))
            command = ["train", "recipes/tiny.toml", "--arms", "none,trm_tis", "--out", where, *sets]
            results[name] = run_offdrift(command, environment)
        words = [
            "check",
            "--model",
            "tiny-qwen3",
            "--rollout",
            "transformers:bfloat16",
            "--quick",
            "--out",
            f"{folder}/check",
        ]
        results["check"] = run_offdrift(words, environment)
    return results


def run_offdrift(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    start = time.perf_counter()
    words = [sys.executable, "-m", "offdrift", *command]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    seconds = time.perf_counter() - start
    print(f"offdrift {' '.join(command[:2])}: status {done.returncode}, {seconds:.0f} s", flush=True)
    print((done.stdout[-1500:] if done.returncode == 0 else done.stdout[-1500:] + done.stderr[-2500:]), flush=True)
    return {"status": done.returncode, "seconds": seconds}


STAND_IN = "_stand_in_for_ray"


def import_from(wheels: Path) -> None:
    """Unpack wheels where this process and its children look for modules, until it ends."""
    files = sorted(wheels.glob("*.whl"))
    if not files:
        sys.exit(f"--wheels {wheels}: no .whl file there; `pip download --no-deps -d {wheels} NAME` gets them")
    folder = tempfile.mkdtemp(prefix="wheels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for file in files:
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(folder)
    sys.path.append(folder)  # behind what is installed
    importlib.invalidate_caches()


def import_verl_without_ray() -> None:
    """verl imports Ray wherever one starts; its correction helper does not use it."""
    if importlib.util.find_spec("ray") is None and importlib.util.find_spec("verl") is not None:
        import types

        class Anything(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return Anything(name)

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return args[0] if args else self

        sys.modules["ray"] = sys.modules[STAND_IN] = Anything("ray")
        os.environ.setdefault("VERL_USE_EXTERNAL_PLUGINS", "none")


PARTS: dict[str, Callable[[argparse.Namespace, torch.device], dict[str, Any]]] = {
    "ceilings": ceilings,
    "tests": tests,
    "methods": methods,
    "transfers": transfers,
    "exact": exact,
    "hidden": hidden,
    "topk": topk,
    "correction": correction,
    "step": step,
    "train": train,
}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    main()
