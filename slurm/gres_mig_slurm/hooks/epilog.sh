#!/bin/sh
# Slurm's Epilog on every node, as root, in whatever environment slurmd gives: it has no PATH.
# It never asks the controller. Python is started only where the prolog left something, or the records name the job.

CONFIG=/etc/gres-mig/config.toml HANDOVER=/run/gres-mig/slurm STATE=/var/lib/gres-mig/state.json
PYTHON='' SLURM_BIN='' EPILOG_CHAIN=''
# A link in a site's own epilog.d, say, has no settings beside it.
gm_self=$0
[ -L "$0" ] && gm_self=$(/usr/bin/readlink -f "$0")
[ -r "${gm_self%/*}/gres-mig.env" ] && . "${gm_self%/*}/gres-mig.env"

gm_path=${PATH-} gm_had_path=${PATH+yes}
PATH=${SLURM_BIN:+$SLURM_BIN:}/usr/sbin:/usr/bin:/sbin:/bin
unset IFS
gm_file=$HANDOVER/${SLURM_JOB_ID-}.${SLURMD_NODENAME-}
gm_code=0

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

# The site's own epilog, whatever became of ours, in the environment that slurmd gave.
go_on() {
    if [ -n "$EPILOG_CHAIN" ]; then
        gm_flaw=$(flaw "$EPILOG_CHAIN")
        [ -z "$gm_flaw" ] || refuse "EPILOG_CHAIN is not run as root: $gm_flaw; run: gres-mig slurm check"
        umask "$gm_umask"
        if [ -n "$gm_had_path" ]; then PATH=$gm_path; else unset PATH; fi
        "$EPILOG_CHAIN" || exit
    fi
    exit "$gm_code"
}

refuse() {
    EPILOG_CHAIN=''
    drain "$1"
}

drain() {
    printf 'gres-mig: %s\n' "$1" >&2
    env -i PATH="$PATH" ${SLURM_CONF+"SLURM_CONF=$SLURM_CONF"} timeout -k 1 3 \
        scontrol update NodeName="$SLURMD_NODENAME" State=DRAIN Reason="gres-mig: $1" >&2
    gm_code=1
    go_on
}

# A descriptor that is closed would be given to the next file that is opened.
exec </dev/null
[ -e /proc/self/fd/1 ] || exec >/dev/null
[ -e /proc/self/fd/2 ] || exec 2>/dev/null
[ -n "$EPILOG_CHAIN" ] && gm_umask=$(umask)
umask 022

case ${SLURM_JOB_ID-}:${SLURMD_NODENAME-} in
:* | 0* | *[!0-9]*:* | ???????????*:* | *: | *:[.-]* | *:*[!A-Za-z0-9_.-]*)
    echo 'gres-mig: SLURM_JOB_ID or SLURMD_NODENAME is missing or damaged' >&2
    exit 64
    ;;
esac

if [ -e "$gm_file" ]; then
    read -r gm_state <"$gm_file"
    [ "$gm_state" = STATE=none ] && rm -f "$gm_file" && go_on
elif ! grep -qsF "\"name\": \"slurm:${SLURM_CLUSTER_NAME-}:$SLURM_JOB_ID\"" "$STATE"; then
    go_on
fi

# A job that was put back has nothing to give back, and its next run is put off from the end of this: the site's first.
if [ "${gm_state-}" = STATE=failed ] && [ -n "$EPILOG_CHAIN" ]; then
    (go_on)
    gm_chained=$? EPILOG_CHAIN=''
fi

[ -n "$PYTHON" ] || drain "no PYTHON in ${gm_self%/*}/gres-mig.env: run: gres-mig slurm setup --write"
env -i PATH="$PATH" ${SLURM_CONF+"SLURM_CONF=$SLURM_CONF"} "$PYTHON" -I -m gres_mig_slurm.epilog \
    "$SLURM_JOB_ID" "$SLURMD_NODENAME" "${SLURM_CLUSTER_NAME-}" "$CONFIG" "$HANDOVER" $$
gm_code=$?
case $gm_code in
0) gm_code=${gm_chained:-0} ;;
# A node fault: the node has its reason.
4) gm_code=1 ;;
70) drain 'the epilog failed: see: journalctl -t gres-mig' ;;
*) drain "the epilog ended with $gm_code: run: $PYTHON -I -c 'import gres_mig_slurm.epilog'" ;;
esac
go_on
