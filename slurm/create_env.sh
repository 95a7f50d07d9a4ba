#!/bin/bash
# Makes or updates .venv, for the login node and all compute nodes: the repository lies on a filesystem that they share.
# Run this file, or source it to activate .venv too. Load the cluster's Python (3.11 or newer) first.
#
#   slurm/create_env.sh                where there is internet
#   slurm/create_env.sh WHEELHOUSE     where there is none. Fill this folder elsewhere, with the same Python, by
#                                      pip download --dest WHEELHOUSE --requirement requirements.txt setuptools

# Runs in a subshell: no error and no option may reach the shell that sources this file.
create_env() (
    cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
    if (($#)); then
        [[ -d $1 ]] || { echo "create_env.sh: $1 is no folder; give the one that holds the wheels" >&2; exit 1; }
        PIP_FIND_LINKS=$(realpath "$1")
        export PIP_FIND_LINKS PIP_NO_INDEX=1
    fi
    make --silent .venv/recipes || exit
    echo "$PWD/.venv is ready"
)

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    create_env "$@"
else
    create_env "$@" && . "$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/activate"
fi
