"""Other frameworks: reading what they log, and plugging into them."""
