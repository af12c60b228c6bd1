"""Asynchronous training on Ray: rollout workers, the driver that carries out a schedule, and the source of batches."""
