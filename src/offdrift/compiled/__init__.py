"""Compiled code for CPUs: passes over packed tokens where the user asked for them, and exact divergences from logits.

`OFFDRIFT_COMPILE=1` in the environment asks, or `with compiled_passes():` around the calls; exact divergences of large
inputs do not wait to be asked. `OFFDRIFT_COMPILE=0`, `compiled_passes(False)` and `TORCH_COMPILE_DISABLE=1` refuse
both. The first use compiles one C++ file (seconds, once per machine and version; `$CXX`, g++ or clang++). Where that
fails one line is logged and another way gives the numbers.
"""

from offdrift.numerics import compiled_passes as compiled_passes
