"""The frameworks that are compared with, imported once per process."""

import pytest

from tests.parity.peers import load_verl
from tests.parity.trl_trainer import load_trl


@pytest.fixture(scope="session")
def verl():
    return load_verl()


@pytest.fixture(scope="session")
def trl():
    return load_trl()
