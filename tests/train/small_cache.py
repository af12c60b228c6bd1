"""`offdrift` with a small cache of keys and values: 2 GB hold the tests that draw with vLLM."""

import functools

from offdrift.cli import main
from offdrift.train import context
from tests.engines.models import CACHE_MIB

if __name__ == "__main__":
    context.make_engine = functools.partial(context.make_engine, kv_cache_mib=CACHE_MIB)
    main()
