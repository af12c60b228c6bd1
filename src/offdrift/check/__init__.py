"""Two engines at the same weights, or a server and a checkpoint: how far apart they are, and why."""
