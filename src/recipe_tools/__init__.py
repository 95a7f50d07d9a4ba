"""Programs before, between and after runs: plan, doctor, preflight, launch, Kubernetes, requeue, check-export.

They use the library; the library uses none of them, but for `python -m accelerate_recipes`.
"""
