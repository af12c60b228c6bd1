"""offdrift: measure, correct and certify off-policy drift in RL of language models."""
