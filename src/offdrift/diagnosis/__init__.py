"""Diagnosis: metrics in, findings out. What is wrong, how it is known, why, and what to do."""
