#!/bin/bash
# Trains on a Slurm cluster. At the time limit or a preemption the job saves, requeues itself, and continues; in the
# morning the model is there.
#
#   slurm/submit.sh [SBATCH FLAGS] -- [CONFIG [LAUNCH FLAGS] RECIPE [ARGS]]     checks the run, then queues it
#   sbatch [SBATCH FLAGS] slurm/submit.sh [CONFIG [LAUNCH FLAGS] RECIPE [ARGS]] the job checks it first
#
# CONFIG and RECIPE default to accelerate_configs/fsdp_full.yaml and recipes/chess.py. Nodes, GPUs, time, partition and
# account are sbatch's flags; put other settings of your cluster into slurm/site.sh. slurm/README.md has more.
#SBATCH --job-name=accelerate-recipes
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@300
set -uo pipefail

say() { echo "submit.sh $(date +%T): $*"; }
die() { say "error: $*" >&2; exit 1; }
usage() { sed -n '2,/^#SBATCH/{/^#SBATCH/d;s/^# \{0,1\}//;p}' "$0"; } # the comment above

NO_ARRAY="all tasks would share one output directory, and signals and requeues would reach all of them; submit a job for each run"

# The login node checks the same as the job: offline, like the compute nodes.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

main() {
    case ${1-} in -h | --help) usage; exit ;; esac
    [[ -f slurm/submit.sh ]] || die "this is $PWD; run it from the folder that holds slurm/ and recipes/, without --chdir to another"
    SRUN_FLAGS=()
    if [[ -f slurm/site.sh ]]; then site=slurm/site.sh; else site=slurm/site.plain.sh; fi
    # shellcheck source=slurm/site.plain.sh
    . "$site" || die "$site ended with $?; is there .venv? slurm/create_env.sh makes it"
    MAX_RESTARTS=${MAX_RESTARTS:-100}
    if [[ $0 == */slurm_script ]]; then run "$@"; else submit "$@"; fi # Slurm's copy of this file
}

# Sets OUTPUT_DIR, SIGNAL_SECONDS, LAUNCH_FLAGS and COMMAND, from: NODES GPUS CPUS GPU [CONFIG ...]
plan() {
    local flags=(--nodes "$1" --gpus-per-node "$2" --cpus-per-node "$3") assignments
    [[ -z $4 ]] || flags+=(--gpu "$4")
    # In the job, its processes verify the checksums, and find out whether they fit.
    [[ $0 != */slurm_script ]] || flags+=(--no-checksums --no_plan)
    shift 4
    (($#)) || set -- accelerate_configs/fsdp_full.yaml recipes/chess.py
    assignments=$(python -m accelerate_recipes preflight --shell "$1" "${flags[@]}" "${@:2}") || return
    eval "$assignments"
}

### On the login node

# Flags of sbatch without a value, or with one only after `=`. Every other flag takes the next word.
SWITCHES=" -h -H -k -O -Q -s -v -V -W --consolidate-segments --contiguous --exclusive --get-user-env --help --hold
    --ignore-pbs --nice --no-kill --no-requeue --oom-kill-step --overcommit --oversubscribe --parsable --propagate --quiet
    --reboot --requeue --resv-ports --spread-job --stepmgr --test-only --usage --use-min-nodes --verbose --version --wait "
# Flags that are read here, or refused.
READ=(--array --chdir --cpus-per-task --gpus --gpus-per-node --gpus-per-socket --gpus-per-task --gres --nodes --signal --tres-per-task)
declare -A LONG=([-a]=--array [-D]=--chdir [-c]=--cpus-per-task [-G]=--gpus [-N]=--nodes)

# Puts the values of sbatch's flags into `asked`, under their long names: --nodes=4, --nodes 4, -N4, -N 4, -N=4.
read_flags() { # FLAGS OF SBATCH
    local word name long
    while (($#)); do
        word=$1
        shift
        case $word in
        --*) name=${word%%=*} ;;
        -?*) name=${word:0:2} ;;
        *) die "put -- before $word: what stands before it is for sbatch" ;;
        esac
        for long in "${READ[@]}"; do
            [[ " ${READ[*]} " == *" $name "* || $long != "$name"* ]] || die "$name: write it out, $long"
        done
        name=${LONG[$name]:-$name}
        if [[ $word == --*=* ]]; then
            asked[$name]=${word#*=}
        elif [[ $SWITCHES =~ [[:space:]]"$name"[[:space:]] ]]; then
            [[ $word == --* || ${#word} == 2 ]] || set -- "-${word:2}" "$@" # several in one word: -Qv
        elif [[ $word != --* && ${#word} -gt 2 ]]; then
            word=${word:2}
            asked[$name]=${word#=}
        else
            (($#)) || die "$word needs a value"
            asked[$name]=$1
            shift
        fi
    done
}

# Prints the number of GPUs of a node, from --gpus-per-node (8, h100:8), else from --gres (gpu, gpu:8, gpu:h100:8, among
# other resources). What is no number is printed as it is.
num_gpus() { # GPUS_PER_NODE GRES
    local part sum=0 wanted=${1:-$2}
    for part in ${wanted//,/ }; do
        if [[ -z $1 ]]; then
            [[ $part =~ ^(gres[:/])?gpu(:.*)?$ ]] || continue
            part=${BASH_REMATCH[2]#:}
            [[ $part =~ ^([^:]*[^:0-9][^:]*)?$ ]] && part=1 # no number: gpu, gpu:h100
        fi
        [[ $part =~ ^([^:]+:)?([0-9]+)$ ]] || { echo "$wanted"; return; }
        sum=$((sum + 10#${BASH_REMATCH[2]}))
    done
    echo "$sum"
}

# Prints the name of a node's GPUs as preflight knows them: of the first, from --gpus-per-node (h100:8) or --gres (gpu:h100:8).
gpu_name() { # GPUS_PER_NODE GRES
    local name=${1%%:*}
    if [[ -z $1 ]]; then
        [[ ,$2 =~ [,:/]gpu:([^:,]+)(:|,|$) ]] || return
        name=${BASH_REMATCH[1]}
    fi
    [[ $name =~ ^[0-9]*$ ]] || python -m accelerate_recipes.arguments.gpus "$name"
}

# Prints a request for GPUs as one of --gres: without the cores behind each name that sinfo shows, gpu:h100:8(S:0-1), and
# with `:` where Slurm also takes `=`, gres/gpu=8.
plain() { # REQUEST
    local words=$1
    while [[ $words =~ ^(.*)\([^\)]*\)(.*)$ ]]; do words=${BASH_REMATCH[1]}${BASH_REMATCH[2]}; done
    echo "${words//=/:}"
}

submit() {
    local flags=() nodes gpus gres gpu cpus signal name defaults problems=0
    local -A asked=(
        [--array]=${SBATCH_ARRAY_INX:-} [--cpus-per-task]=1 [--gpus]=${SBATCH_GPUS:-} [--gpus-per-node]=${SBATCH_GPUS_PER_NODE:-}
        [--gpus-per-task]=${SBATCH_GPUS_PER_TASK:-} [--gres]=${SBATCH_GRES:-} [--nodes]=1 [--signal]=${SBATCH_SIGNAL:-}
    )
    while (($#)); do
        if [[ $1 == -- ]]; then shift; break; fi
        flags+=("$1")
        shift
    done
    read_flags "${flags[@]}"
    [[ -z ${asked[--array]} ]] || die "--array ${asked[--array]}: $NO_ARRAY"
    [[ ${asked[--chdir]:-.} -ef . ]] || die "--chdir ${asked[--chdir]}: the job would not begin in $PWD, whose recipe and paths are checked; leave it out"
    [[ ${asked[--tres-per-task]:-} == *gpu* ]] || unset "asked[--tres-per-task]"
    for name in --gpus --gpus-per-socket --gpus-per-task --tres-per-task; do
        [[ -z ${asked[$name]:-} ]] || die "$name ${asked[$name]} leaves open how many each node has; give --gpus-per-node"
    done
    nodes=${asked[--nodes]}
    [[ ${nodes%-*} != "${nodes#*-}" ]] || nodes=${nodes#*-} # at least and at most: 2-2
    cpus=${asked[--cpus-per-task]}
    gpus=$(plain "${asked[--gpus-per-node]}")
    gres=$(plain "${asked[--gres]}")
    gpu=$(gpu_name "$gpus" "$gres")
    gpus=$(num_gpus "$gpus" "$gres")
    [[ "$nodes $gpus $cpus" =~ ^[0-9]+\ [0-9]+\ [0-9]+$ ]] ||
        die "--nodes $nodes, --gpus-per-node $gpus and --cpus-per-task $cpus must be numbers"
    # Report everything that is wrong with the run and with the request at once.
    plan "$nodes" "$gpus" "$cpus" "$gpu" "$@" || problems=1
    signal=B:USR1@${SIGNAL_SECONDS:-300}
    if [[ ! ${asked[--signal]:=$signal} =~ ^B:(SIG)?USR1(@[0-9]+)?$ ]]; then
        say "error: --signal ${asked[--signal]} takes the place of --signal=$signal, at which the job saves and requeues itself;" \
            "leave it out, or give B:USR1 with other seconds" >&2
        problems=1
    fi
    defaults=(--job-name="$(basename "${COMMAND[0]:-chess}" .py)" --signal="${asked[--signal]}")
    sbatch --test-only "${defaults[@]}" "${flags[@]}" slurm/submit.sh || problems=1
    ((problems == 0)) || die "nothing was queued"
    exec sbatch "${defaults[@]}" "${flags[@]}" slurm/submit.sh "$@"
}

### In the job

stopping=0 # how often Slurm signalled that it wants the nodes back

on_signal() { # NAME
    say "$1: the processes are told to save and stop"
    stopping=$((stopping + 1))
    # The file is for processes that are still importing, and ignore signals.
    [[ -z ${OUTPUT_DIR:-} ]] || { mkdir -p "$OUTPUT_DIR" && echo "$1 $ATTEMPT" >"$OUTPUT_DIR/stop"; }
    scancel --quiet --signal=USR1 "$SLURM_JOB_ID" # to the steps
}

run() {
    export ATTEMPT=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
    local restart=${SLURM_RESTART_COUNT:-0} node addr port end per_node pid seen rc state count next signalled=()
    ((restart <= MAX_RESTARTS)) || die "restarted $restart times, MAX_RESTARTS is $MAX_RESTARTS"
    [[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || die "--array: $NO_ARRAY"
    trap 'on_signal USR1' USR1
    trap 'on_signal TERM' TERM # Slurm kills what is left after KillWait
    plan "$SLURM_NNODES" "${SLURM_GPUS_ON_NODE:-0}" "${SLURM_CPUS_ON_NODE:-1}" "" "$@" || exit 1
    if ((SLURM_CPUS_ON_NODE < ${SLURM_GPUS_ON_NODE:-0})); then
        say "warning: $SLURM_CPUS_ON_NODE CPUs for $SLURM_GPUS_ON_NODE GPUs on a node; give --cpus-per-task or --exclusive"
    fi

    # The head node may change at each restart, and its name need not resolve.
    node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    addr=$(scontrol show node "$node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    port=$((20000 + SLURM_JOB_ID % 10000))
    while (: <"/dev/tcp/$addr/$port") 2>/dev/null; do port=$((port + 1)); done
    # With this the processes save in time, even if no signal reaches them.
    end=$(date -d "$(squeue --noheader --job "$SLURM_JOB_ID" --format %e)" +%s 2>/dev/null) && export JOB_END_TIME=$end
    # The launcher would die of USR1, and would pass on a TERM that the processes have already got, so it ignores both. The
    # processes inherit this until they install handlers of their own. An earlier attempt may have left its file `stop`, on
    # any node if each has a disk of its own; a person's file is empty.
    # shellcheck disable=SC2016 # expanded on each node, which has its own SLURM_NODEID
    per_node='trap "" USR1 TERM
        [[ ! -s $0/stop || $(<"$0/stop") == *" $ATTEMPT" ]] || rm -f "$0/stop"
        export PET_SIGNALS_TO_HANDLE=SIGINT PET_RDZV_ID=$ATTEMPT
        export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[\${rank}] "
        exec accelerate launch --machine_rank "$SLURM_NODEID" --log_dir "$0/logs/node-$SLURM_NODEID" --tee 3 "$@"'
    set -- "${LAUNCH_FLAGS[@]}" --main_process_ip "$addr" --main_process_port "$port" "${COMMAND[@]}"
    [[ -d /opt/sagemaker_cluster ]] && SRUN_FLAGS+=(--auto-resume=1) # HyperPod replaces a node that fails
    say "job $SLURM_JOB_ID, restart $restart, on $SLURM_JOB_NODELIST${end:+ until $(date -d "@$end")}"
    say "on each node: accelerate launch $*"
    if ((stopping == 0)); then
        # Without --export, srun takes over that of sbatch, and the processes would lack what the site file has set.
        srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none --export=ALL \
            "${SRUN_FLAGS[@]}" bash -c "$per_node" "$OUTPUT_DIR" "$@" &
        pid=$!
        # A trap ends `wait` early, with another exit code: wait again until no trap ran meanwhile.
        while seen=$stopping; wait "$pid"; rc=$?; ((seen != stopping)); do :; done
        say "srun ended with $rc"
    fi
    rm -f "$OUTPUT_DIR/stop"

    # If the job was cancelled, or somebody else requeued it (it may already run again, if Slurm took this attempt for
    # lost), leave it alone.
    read -r state count <<<"$(squeue --noheader --job "$SLURM_JOB_ID" --Format State,RestartCnt)"
    [[ $state == RUNNING && $count == "$restart" ]] || { say "the job is $state, restart $count: nothing is left to do"; exit 1; }
    ((stopping == 0)) || signalled=(--signalled)
    next=$(python -m accelerate_recipes requeue "$OUTPUT_DIR" --max_restarts "$MAX_RESTARTS" "${signalled[@]}")
    case $? in
    0) say "$next" ;;
    75)
        say "$next; it is requeued"
        trap '' USR1
        trap - TERM
        scontrol requeue "$SLURM_JOB_ID" || die "it could not be requeued; submit it again"
        sleep 600 # Slurm ends this script
        ;;
    *) die "$next" ;;
    esac
}

main "$@"
