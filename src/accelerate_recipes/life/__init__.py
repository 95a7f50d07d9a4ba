"""What keeps a run alive, ends it in good order, and says so."""
