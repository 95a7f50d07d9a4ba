# shellcheck shell=bash
# What is particular to a cluster: one on AWS with EFA, whose jobs run in a container by Pyxis and Enroot. Not run yet.
# Copy it to slurm/site.sh, which git ignores, and change it there. slurm/submit.sh reads it on the login node and in the
# job.

export HF_HOME=/fsx/huggingface
export SBATCH_EXCLUSIVE=1

# Of the login node and the job script: checks, and what is done after the run. Made by slurm/create_env.sh.
. .venv/bin/activate

# The processes run in the image of docs/image.md, on a base with EFA; the repository, and with it its library, is mounted
# where it is.
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
