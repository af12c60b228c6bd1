"""Audit of the logs of a run: numbers, findings, a suggestion and a certificate from stored rollouts."""
