"""Divergences of two policies at each token, and the grade of evidence of each."""
