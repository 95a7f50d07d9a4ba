"""Modules for use before and between the attempts of a job: checks, manifests, and whether to queue it again."""
