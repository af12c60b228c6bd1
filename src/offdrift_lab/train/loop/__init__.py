"""The training loop: arms, batches, steps, old policies, and what a run records."""
