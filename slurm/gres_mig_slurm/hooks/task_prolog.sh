#!/bin/sh
# Slurm's TaskProlog, as the job's user: tells a task its instance. What it prints, Slurm reads: `export KEY=VALUE`,
# and `print TEXT` for the job's output.

HANDOVER=/run/gres-mig/slurm SLURM_BIN='' TASK_PROLOG_CHAIN=''
# A link in a site's own task_prolog.d, say, has no settings beside it.
gm_self=$0
[ -L "$0" ] && gm_self=$(/usr/bin/readlink -f "$0")
[ -r "${gm_self%/*}/gres-mig.env" ] && . "${gm_self%/*}/gres-mig.env"

gm_path=${PATH-} gm_had_path=${PATH+yes}
PATH=${SLURM_BIN:+$SLURM_BIN:}/usr/sbin:/usr/bin:/sbin:/bin
unset IFS
gm_newline='
'

# The site's own task prolog, in the user's environment; Slurm reads what it prints.
go_on() {
    [ -n "$TASK_PROLOG_CHAIN" ] || exit 0
    if [ -n "$gm_had_path" ]; then PATH=$gm_path; else unset PATH; fi
    exec "$TASK_PROLOG_CHAIN"
}

# Once a node, not once a task.
say() {
    [ "${SLURM_LOCALID:-0}" = 0 ] && echo "print gres-mig: $1"
}

# Whether this task is where the job's user reads about the instance: the batch script on its node, and on a node
# without one the first step.
tells() {
    if [ "$gm_told_by" = batch ]; then
        [ -z "${SLURM_STEP_ID-}" ]
    else
        [ "${SLURM_STEP_ID:-0}" = 0 ]
    fi
}

give() {
    gm_told_by='' gm_text=''
    while IFS='=' read -r gm_key gm_value; do
        case $gm_key in
        STATE) ;;
        TOLD_BY) gm_told_by=$gm_value ;;
        TEXT) gm_text=$gm_value ;;
        # What the user preloads himself comes behind it; a step has from its script what that was told already.
        LD_PRELOAD)
            case ":${LD_PRELOAD-}:" in
            *":$gm_value:"*) ;;
            *) echo "export LD_PRELOAD=$gm_value${LD_PRELOAD:+:$LD_PRELOAD}" ;;
            esac
            ;;
        *) echo "export $gm_key=$gm_value" ;;
        esac
    done
    if tells; then say "$gm_text"; fi
}

refuse() {
    say "$1"
    exit 1
}

ask() {
    env -i PATH="$PATH" ${SLURM_CONF+"SLURM_CONF=$SLURM_CONF"} timeout -k 1 5 \
        squeue --noheader --all --states=all --jobs="$1" --Format='JobID:12|,tres-per-node:2000|,tres-per-task:2000|'
}

requeue() {
    gm_task=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    env -i PATH="$PATH" ${SLURM_CONF+"SLURM_CONF=$SLURM_CONF"} timeout -k 1 5 \
        scontrol requeue incomplete "${gm_task:-$SLURM_JOB_ID}" >/dev/null 2>&1
}

# The prolog did not learn what the job asked for, or did not run. Only a job that asked for migmem must not go on.
decide() {
    gm_rows=$(ask "$1")
    case $gm_rows in
    *migmem:0[,\ ]* | *migmem:0) ;;
    *migmem*)
        [ -n "$2" ] || refuse 'this node could not learn in time what the job asked for; submit it again'
        # A slurmd of 22.05 may take a requeued job for its last run, and leave the prolog out.
        [ -z "${SLURM_STEP_ID-}" ] && requeue
        refuse 'this node did not prepare the job; submit it again'
        ;;
    "$1 "* | *"$gm_newline$1 "*) ;;
    *)
        # Nobody knows: whatever else the job does, it uses no GPU that is somebody else's.
        [ -n "${SLURM_JOB_GPUS-}${SLURM_STEP_GPUS-}" ] || echo 'export CUDA_VISIBLE_DEVICES='
        ;;
    esac
}

# Whether its user may not look where the hand-overs are; then nothing says that there is none.
closed() {
    [ -e "${HANDOVER%/*}" ] && [ ! -x "${HANDOVER%/*}" ]
}

# A node that never had a hand-over manages no GPU.
[ -d "$HANDOVER" ] || closed || go_on
# A heterogeneous job's tasks all carry the leader's id; its components have hand-overs of their own.
gm_index=0 gm_ids=${SLURM_JOB_ID-}
while eval "gm_id=\${SLURM_JOB_ID_HET_GROUP_$gm_index-}" && [ -n "$gm_id" ]; do
    [ "$gm_id" = "${SLURM_JOB_ID-}" ] || gm_ids="$gm_ids $gm_id"
    gm_index=$((gm_index + 1))
done
gm_found=''
for gm_id in $gm_ids; do
    gm_file=$HANDOVER/$gm_id.${SLURMD_NODENAME-}
    [ -r "$gm_file" ] || continue
    gm_found=yes gm_state='' gm_text=''
    read -r gm_state <"$gm_file"
    case $gm_state in
    STATE=none) ;;
    STATE=given) give <"$gm_file" ;;
    STATE=failed)
        { read -r gm_state && IFS='=' read -r gm_key gm_text; } <"$gm_file"
        refuse "$gm_text"
        ;;
    *) decide "$gm_id" '' ;;
    esac
done
[ -n "$gm_found" ] || decide "${SLURM_JOB_ID-}" unprepared
go_on
