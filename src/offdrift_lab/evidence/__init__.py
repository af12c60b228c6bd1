"""Conclusions from many stored runs: predictors of collapse, and how far a mismatch may go."""
