"""Show stored runs: page, terminal view and overlap charts."""
