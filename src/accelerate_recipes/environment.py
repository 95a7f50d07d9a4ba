"""Strategy of this launch, as `accelerate launch` wrote it into the environment."""

import os
from collections.abc import Mapping

# Names of the sizes in a `parallelism_config`.
PARALLEL_SIZES = ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "TP_SIZE", "CP_SIZE", "SP_SIZE")


def is_on(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "false").lower() in ("true", "1")


def is_one_of(env: Mapping[str, str], name: str, *values: str) -> bool:
    return env.get(name, "").upper() in values


def is_compiled(env: Mapping[str, str] = os.environ) -> bool:
    return env.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO"


def computes_in_bf16(precision: str | None = None) -> bool:
    """Tell whether layers compute in bf16 while weights are in fp32.

    `precision` is `mixed_precision` of the accelerate YAML; default: that of this launch. With fp8, the linear layers
    get their inputs in bf16, and everything else computes in bf16.
    """
    return (precision or os.environ.get("ACCELERATE_MIXED_PRECISION")) in ("bf16", "fp8")
