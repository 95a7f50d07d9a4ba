# shellcheck shell=bash
# Settings of one cluster, here a plain one. Copy this file to slurm/site.sh, which git ignores, and change it there.
# slurm/submit.sh reads it on the login node and in the job.

# module load python/3.11 cuda

# Defaults for sbatch's flags (they work with slurm/submit.sh, not with sbatch slurm/submit.sh):
# export SBATCH_PARTITION=gpu SBATCH_ACCOUNT=my_project SBATCH_GPUS_PER_NODE=8 SBATCH_TIMELIMIT=24:00:00

# Where `python -m accelerate_recipes download` put models and data; on the shared filesystem.
# export HF_HOME=/shared/huggingface

# The environment that slurm/create_env.sh made.
. .venv/bin/activate

# export NCCL_SOCKET_IFNAME=ib0
