"""The Hugging Face Hub: what of it is on this machine, and fetching more."""
