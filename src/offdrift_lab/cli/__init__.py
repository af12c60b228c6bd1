"""Commands of the trainer, the planner and the exact experiments."""
