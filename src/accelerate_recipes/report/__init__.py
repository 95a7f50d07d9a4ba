"""Pages about runs: what a run writes of itself, for its reader."""
