"""The host process is after a backend what it was before."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch

from offdrift.engines.isolation import host_kept


def test_what_a_backend_does_to_its_host_is_undone():
    random.seed(2)
    before = random.getstate(), torch.get_rng_state(), str(np.random.get_state())
    threads = torch.get_num_threads()
    with host_kept():
        _ = random.random(), torch.rand(1), np.random.rand()
        torch.set_num_threads(threads + 1)
        torch.set_num_threads = lambda n: None
    after = random.getstate(), torch.get_rng_state(), str(np.random.get_state())
    assert torch.set_num_threads is torch._C.set_num_threads
    assert torch.get_num_threads() == threads
    assert (before[0], before[2]) == (after[0], after[2])
    assert torch.equal(before[1], after[1])


def test_deprecations_inside_a_backend_are_not_the_hosts(recwarn):
    with host_kept():
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        warnings.warn("soon", FutureWarning, stacklevel=1)
    assert len(recwarn) == 0
    with pytest.warns(FutureWarning, match="soon"):
        warnings.warn("soon", FutureWarning, stacklevel=1)
