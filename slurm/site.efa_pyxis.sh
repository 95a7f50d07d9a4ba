# shellcheck shell=bash
# Settings of one cluster, here on AWS with EFA, whose jobs run in a container by Pyxis and Enroot. Not tried yet.
# Copy this file to slurm/site.sh, which git ignores, and change it there. slurm/submit.sh reads it on the login node and
# in the job.

export HF_HOME=/fsx/huggingface
export SBATCH_EXCLUSIVE=1

# slurm/create_env.sh makes this environment. The login node and the job script use it, for checks and after the run.
. .venv/bin/activate

# The processes run in the image of docs/image.md, on a base with EFA. The repository, with its library, is mounted at its
# own path.
export PYTHONPATH=$PWD/src
# shellcheck disable=SC2034 # slurm/submit.sh reads it
SRUN_FLAGS=(
    --container-image=/fsx/images/accelerate-recipes.sqsh
    --container-mounts="/fsx:/fsx,$PWD:$PWD"
    --container-workdir="$PWD"
)

export FI_PROVIDER=efa
# Huge pages make the fork of data workers fail: "Cannot allocate memory".
export FI_EFA_USE_HUGE_PAGE=0
export NCCL_SOCKET_IFNAME=^docker,lo,veth
