"""One of two processes that share each sequence: the adapter with slime's own modules, over gloo.

python context_parallel.py SOURCE MEETING FACTOR RANK
"""

import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.nn  # which slime finds imported

from offdrift.adapters import frameworks
from offdrift.adapters.contrib import slime
from tests.adapters import hooked, test_slime


def main() -> None:
    source, meeting, factor, rank = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    group = {"get_context_parallel_world_size": lambda: 2, "get_context_parallel_rank": lambda: rank}
    group["get_context_parallel_group"] = lambda: dist.group.WORLD
    for name in ("megatron", "megatron.core"):
        sys.modules[name] = ModuleType(name)
    sys.modules["megatron.core"].mpu = SimpleNamespace(**group)  # type: ignore[attr-defined]
    for name in ("slime", "slime.utils", "slime.backends", "slime.backends.megatron_utils"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(source.joinpath(*name.split(".")))]
    torch.compile = lambda function=None, **_: function or (lambda f: f)  # type: ignore[assignment]
    theirs = importlib.import_module(slime.LOSSES["slime"])
    own = theirs.vanilla_tis_function
    theirs.vanilla_tis_function = lambda *x, **y: (factor * (f := own(*x, **y))[0], *f[1:])
    frameworks.version = lambda _: "0.3.1"  # type: ignore[assignment]
    of, share = hooked.batch(spread=0.6), theirs.slice_log_prob_with_cp
    sizes = list(zip(test_slime.PROMPTS, test_slime.LENGTHS, strict=True))
    parts = {
        name: [share(row, p + n, n) for row, (p, n) in zip(test_slime.listed(x), sizes, strict=True)]
        for name, x in (("train_log_probs", of.old), ("rollout_log_probs", of.rollout))
    }
    slime.tis(
        test_slime.options(context_parallel_size=2),
        pg_loss=torch.ones(sum(map(len, parts["train_log_probs"]))),
        loss_masks=test_slime.masks_of(of),
        total_lengths=[p + n for p, n in sizes],
        response_lengths=test_slime.LENGTHS,
        **parts,
    )


if __name__ == "__main__":
    main()
