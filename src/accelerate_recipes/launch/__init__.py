"""Before and between the attempts of a job: checks, manifests, and whether it is queued again."""
