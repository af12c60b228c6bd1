"""Drawing tokens with the transformers engine, beside transformers' own `generate` on the same prompts.

    python benchmarks/generation.py [--model tiny-qwen3] [--prompts 32] [--samples 8] [--max-tokens 14] [--json PATH]

`generate` samples as the engine does (the same stop tokens, temperature and batch) and keeps the logits of every step,
from which its log-probs are taken; the engine also packs them and records evidence. "forward" reads the engine's
responses once, all tokens at a time. "products" repeats the matrix products of linear layers and attention in one of
the engine's calls, and nothing else: no engine with these forward passes is faster. Tiny models get the supervised
start of recipes/tiny.toml, so that responses end at their own lengths; the surer the model is of its tokens, the more
responses share what the engine reads.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from measure import interleaved_medians, machine
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import GenerationConfig, PreTrainedModel

from offdrift.engines import make_engine
from offdrift.engines.hf_decode import left_padded
from offdrift.engines.score import chunks, score
from offdrift.models import load_model
from offdrift.records.provenance import Sampling
from offdrift_lab.train.data.prompts import prompt_ids
from offdrift_lab.train.data.tasks import find_task
from offdrift_lab.train.data.warmstart import warm_start


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=14)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--evidence", default="full")
    parser.add_argument("--warm-start", type=int, default=900, help="supervised steps of a tiny model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)

    tiny = args.model.startswith("tiny")
    model, tokenizer = load_model(args.model, seed=0)
    task = find_task("arithmetic" if tiny else "chat-arithmetic")
    if tiny:
        warm_start(model, tokenizer, task, steps=args.warm_start, batch_size=128, lr=2e-3, seed=0)
    ids = [prompt_ids(p, tokenizer) for p in task.sample(args.prompts, seed=1)]
    prompts = [p for p in ids for _ in range(args.samples)]
    stops = (tokenizer.eos_token_id,)
    sampling = Sampling(max_tokens=args.max_tokens, stop_token_ids=stops)
    engine = make_engine("transformers", model, dtype=args.dtype, batch_size=len(prompts))
    own = engine.model
    evidence = int(args.evidence) if args.evidence.isdigit() else args.evidence
    plain = GenerationConfig(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        max_new_tokens=args.max_tokens,
        eos_token_id=list(stops),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    padded, mask = left_padded(prompts, own.device)

    @torch.no_grad()
    def generate() -> int:
        out = own.generate(input_ids=padded, attention_mask=mask, generation_config=plain)
        logp = torch.stack(out.logits, 1).float().log_softmax(-1)
        tokens = out.sequences[:, padded.shape[1] :]
        logp.gather(2, tokens[..., None])
        ended = (tokens == stops[0]).int().cumsum(1) - (tokens == stops[0]).int()
        return int((ended == 0).sum())

    rollouts = engine.generate(prompts, sampling, seed=0, evidence="sampled")
    pieces = list(chunks(rollouts, token_budget=2**20))
    products, read = products_of(own, lambda: engine.generate(prompts, sampling, seed=0, evidence="sampled"))

    @torch.no_grad()
    def forward() -> None:
        for piece in pieces:
            score(own, rollouts.select(piece), temperature=1.0)

    drawn = {"engine": [], "generate": []}
    seeds = iter(range(1, 10_000))
    arms = {
        "engine": lambda: drawn["engine"].append(
            len(engine.generate(prompts, sampling, seed=next(seeds), evidence=evidence).tokens)
        ),
        "generate": lambda: drawn["generate"].append(generate()),
        "forward": forward,
        "products": products,
    }
    seconds = interleaved_medians(arms, repeats=args.repeats)
    tokens = {name: sum(counts) / len(counts) for name, counts in drawn.items()}
    tokens |= dict.fromkeys(("forward", "products"), len(rollouts.tokens))
    rate = {name: tokens[name] / seconds[name] for name in arms}
    result: dict[str, object] = vars(args) | {"json": None, "machine": machine(), "threads": args.threads}
    result |= {"tokens_per_second": rate, "engine_over_generate": rate["engine"] / rate["generate"]}
    result["engine_over_forward"] = rate["engine"] / rate["forward"]
    result["engine_over_products"] = rate["engine"] / rate["products"]
    result["tokens_read_per_token_drawn"] = read / len(rollouts.tokens)
    print(f"{args.model}, {len(prompts)} responses of up to {args.max_tokens} tokens\n{result['machine']}")
    for name in arms:
        print(f"{name:10}{rate[name]:12,.0f} tokens/s")
    print(f"the engine draws {result['engine_over_generate']:.2f} times as fast as generate,")
    print(f"{result['engine_over_products']:.2f} times as fast as its matrix products alone would be,")
    print(f"and reads {result['tokens_read_per_token_drawn']:.2f} tokens, prompts among them, for each that it draws")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def products_of(model: PreTrainedModel, call: Callable[[], object]) -> tuple[Callable[[], None], int]:
    """A function that repeats the matrix products of this call, on numbers of its own, and how many tokens it reads."""
    numbers: dict[tuple[int, ...], torch.Tensor] = {}
    linears: list[tuple[torch.Tensor, torch.Tensor]] = []
    attentions: list[list[torch.Tensor]] = []
    read = 0

    def alike(x: torch.Tensor) -> torch.Tensor:
        return numbers.setdefault(tuple(x.shape), torch.rand_like(x))

    def count(_: object, arguments: tuple[torch.Tensor, ...]) -> None:
        nonlocal read
        read += arguments[0].numel()

    def attention(query: torch.Tensor, *others: torch.Tensor, **options: object) -> torch.Tensor:
        # Heads that share keys and values are rows of one product.
        states = (query.reshape(len(query), others[0].shape[1], -1, query.shape[-1]), *others)
        attentions.append([alike(x) for x in states])
        return scaled_dot_product_attention(query, *others, **options)

    hooks = [model.get_input_embeddings().register_forward_pre_hook(count)]
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_pre_hook(lambda m, x: linears.append((alike(x[0]), m.weight))))
    with mock.patch("torch.nn.functional.scaled_dot_product_attention", attention):
        call()
    for hook in hooks:
        hook.remove()

    @torch.no_grad()
    def products() -> None:
        for x, weight in linears:
            linear(x, weight)
        for query, keys, values in attentions:
            torch.matmul(torch.matmul(query, keys.transpose(-1, -2)), values)

    return products, read


if __name__ == "__main__":
    main()
