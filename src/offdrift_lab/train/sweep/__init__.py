"""Sweeps: many runs of one recipe, compared."""
