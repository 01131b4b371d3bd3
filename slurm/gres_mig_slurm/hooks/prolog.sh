#!/bin/sh
# Slurm's Prolog on every node, as root, in whatever environment slurmd gives: it has no PATH.
# A node with no managed GPU leaves at once. Otherwise the controller is asked once, and Python is started only for
# a job that asked for migmem.

CONFIG=/etc/gres-mig/config.toml HANDOVER=/run/gres-mig/slurm PYTHON='' SLURM_BIN='' PROLOG_CHAIN=''
# A link in a site's own prolog.d, say, has no settings beside it.
gm_self=$0
[ -L "$0" ] && gm_self=$(/usr/bin/readlink -f "$0")
[ -r "${gm_self%/*}/gres-mig.env" ] && . "${gm_self%/*}/gres-mig.env"

gm_path=${PATH-} gm_had_path=${PATH+yes}
PATH=${SLURM_BIN:+$SLURM_BIN:}/usr/sbin:/usr/bin:/sbin:/bin
unset IFS
gm_newline='
'
gm_file=$HANDOVER/${SLURM_JOB_ID-}.${SLURMD_NODENAME-}

# What lets somebody else than root change a program that root is to run, all links on the way followed; a sticky folder
# keeps what is root's in it.
flaw() {
    case $1 in /*) ;; *) echo 'its path does not begin with /' && return ;; esac
    gm_way=$(LC_ALL=C namei -mo "$1" 2>/dev/null) || { echo "namei does not find $1" && return; }
    printf '%s\n' "$gm_way" | while read -r gm_mode gm_owner _ gm_name; do
        case $gm_mode:$gm_owner in
        f::* | l*:root | [!l]????[!w]??[!w]?:root | [dD]????????[tT]:root) ;;
        *)
            echo "others than root can change $gm_name on the way to $1 (owner $gm_owner, mode $gm_mode)"
            break
            ;;
        esac
    done
}

# The site's own prolog, in the environment that slurmd gave, with its own exit code.
go_on() {
    [ -n "$PROLOG_CHAIN" ] || exit 0
    gm_flaw=$(flaw "$PROLOG_CHAIN")
    [ -z "$gm_flaw" ] || drain "PROLOG_CHAIN is not run as root: $gm_flaw; run: gres-mig slurm check"
    umask "$gm_umask"
    if [ -n "$gm_had_path" ]; then PATH=$gm_path; else unset PATH; fi
    exec "$PROLOG_CHAIN"
}

managed() {
    [ -r "$CONFIG" ] || return 1
    while read -r gm_line || [ -n "$gm_line" ]; do
        case $gm_line in
        '#'* | 'gpus = []' | 'gpus=[]' | 'slices = []' | 'slices=[]') ;;
        *gpus*=* | *slices*=*) return 0 ;;
        esac
    done <"$CONFIG"
    return 1
}

# Fields that no user writes freely, for a job's name may hold anything: a line that looks like another job, say.
ask() {
    env -i PATH="$PATH" ${SLURM_CONF+"SLURM_CONF=$SLURM_CONF"} SLURM_TIME_FORMAT=%s timeout -k 1 3 \
        squeue --noheader --all --states=all --jobs="$SLURM_JOB_ID" --Format='JobID:12|,ArrayJobID:12|,ArrayTaskID:12|,HetJobID:12|,UserID:12|,SubmitTime:12|,RestartCnt:9|,BatchFlag:2|,Requeue:2|,StateCompact:4|,BatchHost:255|,tres-per-node:2000|,tres-per-task:2000|,admin_comment:1000|'
}

drain() {
    printf 'gres-mig: %s\n' "$1" >&2
    env -i PATH="$PATH" ${SLURM_CONF+"SLURM_CONF=$SLURM_CONF"} timeout -k 1 3 \
        scontrol update NodeName="$SLURMD_NODENAME" State=DRAIN Reason="gres-mig: $1" >&2
    exit 1
}

# A descriptor that is closed would be given to the next file that is opened.
exec </dev/null
[ -e /proc/self/fd/1 ] || exec >/dev/null
[ -e /proc/self/fd/2 ] || exec 2>/dev/null
[ -n "$PROLOG_CHAIN" ] && gm_umask=$(umask)
umask 022

managed || go_on

case ${SLURM_JOB_ID-} in
'' | 0* | *[!0-9]* | ???????????*)
    echo "gres-mig: SLURM_JOB_ID is no job's id" >&2
    exit 64
    ;;
esac
case ${SLURMD_NODENAME-} in
'' | [.-]* | *[!A-Za-z0-9_.-]*)
    echo "gres-mig: SLURMD_NODENAME is no node's name" >&2
    exit 64
    ;;
esac

# Where a user could put links, root writes nothing.
[ ! -e "${HANDOVER%/*}" ] || [ -O "${HANDOVER%/*}" ] ||
    drain "${HANDOVER%/*} is not root's, and Slurm is here: run: gres-mig setup --delegate root --write"
[ -d "$HANDOVER" ] || mkdir -p "$HANDOVER"
# Before anything is begun: an epilog that comes while this is under way leaves a tombstone because of it.
echo STATE=asking 2>/dev/null >"$gm_file"

gm_rows=$(ask)
case $gm_rows in
*migmem*)
    [ -n "$PYTHON" ] || drain "no PYTHON in ${gm_self%/*}/gres-mig.env: run: gres-mig slurm setup --write"
    printf '%s\n' "$gm_rows" | env -i PATH="$PATH" ${SLURM_CONF+"SLURM_CONF=$SLURM_CONF"} "$PYTHON" -I \
        -m gres_mig_slurm.prolog "$SLURM_JOB_ID" "$SLURMD_NODENAME" "${SLURM_CLUSTER_NAME-}" \
        "$CONFIG" "$HANDOVER" $$
    gm_code=$?
    case $gm_code in
    0) ;;
    # A node fault: the node has its reason.
    4) exit 1 ;;
    70) drain 'the prolog failed: see: journalctl -t gres-mig' ;;
    *) drain "the prolog ended with $gm_code: run: $PYTHON -I -c 'import gres_mig_slurm.prolog'" ;;
    esac
    ;;
# Of an array's id, which is its last task's, there are the rows of other tasks first.
"$SLURM_JOB_ID "* | *"$gm_newline$SLURM_JOB_ID "*) echo STATE=none 2>/dev/null >"$gm_file" ;;
*) echo STATE=unknown 2>/dev/null >"$gm_file" ;;
esac
go_on
