"""Planning of asynchronous runs: a simulation on a virtual clock, decided by the scheduler that real runs use."""
