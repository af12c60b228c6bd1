"""Features of a training run: what it may have beside model, optimizer and method, each an object with hooks."""
