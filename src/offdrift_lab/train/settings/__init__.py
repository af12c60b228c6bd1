"""Settings of a run: the recipe, its sections, and where recipes are looked for."""
