"""The Hugging Face Hub: its files on this machine, downloads, and pushes."""
