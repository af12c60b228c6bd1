"""What Triton's compiler makes of the GPU kernels, without a GPU: registers, spills, instructions."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offdrift.divergence import kernels, kernels_triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {"tokens": "*i64", "total": "*fp64", "total_rollout": "*fp64", "new_total": "*fp64", "again": "*i32"}
ALIGNED = ("stride", "stride_rollout", "width")
"""What a vocabulary that is a multiple of 16 lets the compiler know: vectors of 16 bytes."""

LINEAR = {"CAPPED": False, "ROUND": triton.language.float32}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one_sweep_rows": (kernels_triton.one_sweep_rows, {"HAS_TOKENS": True, "TV": False}),
    "one_sweep_rows:tv": (kernels_triton.one_sweep_rows, {"HAS_TOKENS": True, "TV": True}),
    "finish_rows": (kernels_triton.finish_rows, {"HAS_TOKENS": True, "TV": True}),
    "exact_rows": (kernels_triton.exact_rows, {"HAS_TOKENS": True}),
    "update_rows": (kernels_triton.update_rows, LINEAR),
    "accumulate_rows": (
        kernels_triton.accumulate_rows,
        {f"{k}{of}": x for k, x in LINEAR.items() for of in ("", "_ROLLOUT")},
    ),
    **{
        f"gradient_rows:{of}": (kernels_triton.gradient_rows, {"OF": of})
        for of in ("kl_rollout_current", "kl_current_rollout", "entropy")
    },
}


def compiled(arch: int, dtypes: list[str]) -> dict[str, dict[str, Any]]:
    """Every kernel for rows of every dtype, "bf16", "fp16" or "fp32"."""
    return {
        f"{name} {dtype}": _facts(kernel, constants, dtype, arch)
        for name, (kernel, constants) in CASES.items()
        for dtype in dtypes
    }


def _facts(kernel: Any, constants: dict[str, Any], dtype: str, arch: int) -> dict[str, Any]:
    size = 4 if dtype == "fp32" else 2
    shape = kernels.SWEEP
    most = shape.registers if kernel is kernels_triton.one_sweep_rows else None
    r, warps, scores_of_a_load = kernels.VECTOR // size, kernels.WARPS[size], 1
    if kernel is kernels_triton.one_sweep_rows:
        packed = dtype == "bf16"
        constants = {**constants, "PACKED": packed, "UNROLL": shape.unroll, "WIDE": shape.wide}
        r, warps, scores_of_a_load = shape.words, shape.warps, 2 if packed else 1
    elif kernel is kernels_triton.exact_rows:
        r, warps = kernels.AGAIN
    if kernel is kernels_triton.finish_rows:
        warps = kernels.FINISHING_WARPS
        constants = {**constants, "BLOCK": kernels.FINISHED_TOGETHER}
    else:
        constants = {**constants, "LANES": 32 * warps, "R": r}
    signature = {name: _type_of(name, constants, dtype) for name in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ALIGNED
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "maxnreg": most, **kernels.OPTIONS}
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        listing = _tool("nvdisasm", "-c", file.name)
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "warps": warps,
        "registers": used["REG"],
        "spilled_bytes": used["STACK"] + used["LOCAL"],
        "cubin_bytes": len(binary),
        "sweeps": [_per_entry(loop, r * scores_of_a_load) for loop in _loops(listing)],
    }


def _type_of(name: str, constants: dict[str, Any], dtype: str) -> str:
    if name in constants:
        return "constexpr"
    if name in ("n", "each", *ALIGNED):
        return "i32"
    if name.startswith(("bits", "scale", "soft_cap", "over_t", "minus_over_t")):
        return "fp32"
    if name in ("scores", "scores_rollout"):
        return f"*{dtype}"
    return POINTERS.get(name, "*fp32")


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _loops(listing: str) -> list[Counter[str]]:
    """Instructions, by name, of every loop that loads something; in program order."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(re.sub(r"^@!?U?P\w+\s+", "", instruction[1]))
    bodies = []
    for i, text in enumerate(instructions):
        target = re.search(r"^BRA.*`\((\.L_x_\d+)\)", text)
        if target and labels.get(target[1], i + 1) <= i:
            names = (x.split()[0].split(".")[0] for x in instructions[labels[target[1]] : i + 1])
            bodies.append(Counter(names))
    return [body for body in bodies if body["LDG"]]


def _per_entry(body: Counter[str], r: int) -> dict[str, float]:
    """Per entry of a row pair: two vectors of r scores are loaded for r entries."""
    entries = body["LDG"] * r / 2
    return {
        "instructions": body.total(),
        "per_entry": body.total() / entries,
        "exponentials_per_entry": body["MUFU"] / entries,
    }
