"""Compiled passes over packed tokens on a CPU, where the user asked for them.

`OFFDRIFT_COMPILE=1` in the environment asks, or `with compiled_passes():` around the calls; `TORCH_COMPILE_DISABLE=1`
refuses, as it does for exact divergences. The first use compiles one C++ file (seconds, once per machine and version;
`$CXX`, g++ or clang++). Where that fails one line is logged and the plain way gives the numbers.
"""

from offdrift.numerics import compiled_passes as compiled_passes
