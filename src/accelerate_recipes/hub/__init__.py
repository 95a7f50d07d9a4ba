"""The Hugging Face Hub: what this machine has of it, and downloads."""
