"""Adapters and readers against the frameworks' own modules, where these can be imported.

`make test-foreign` installs the pinned wheels of requirements-foreign.txt and fails if one of them was
skipped. verl and TRL are in the environment of every test: see tests/parity and tests/integrations.
"""
