# shellcheck shell=bash
# What is particular to a cluster: a plain one. Copy it to slurm/site.sh, which git ignores, and change it there.
# slurm/submit.sh reads it on the login node and in the job.

# module load python/3.11 cuda

# What sbatch takes unless it is given as a flag (read by slurm/submit.sh, not by sbatch slurm/submit.sh):
# export SBATCH_PARTITION=gpu SBATCH_ACCOUNT=my_project SBATCH_GPUS_PER_NODE=8 SBATCH_TIMELIMIT=24:00:00

# Where `python -m accelerate_recipes download` put models and data; on the shared filesystem.
# export HF_HOME=/shared/huggingface

# The environment that slurm/create_env.sh made.
. .venv/bin/activate

# export NCCL_SOCKET_IFNAME=ib0
