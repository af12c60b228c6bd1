"""`offdrift` with a small cache of keys and values: 2 GB hold the tests that draw with vLLM."""

import functools

from tests.engines.models import CACHE_MIB

from offdrift.cli import main
from offdrift_lab.train.loop import context

if __name__ == "__main__":
    context.make_engine = functools.partial(context.make_engine, kv_cache_mib=CACHE_MIB)
    main()
