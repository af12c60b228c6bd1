"""Judges what others have recorded: stored rollouts against a policy."""
