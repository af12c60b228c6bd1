"""What tests of hooks share: the fixture `process`, a process of its own."""

from tests.adapters.hooked import process

__all__ = ["process"]
