#!/bin/sh
# Runs gres-mig on real GPUs and says PASS or FAIL, line by line, into a file to send back.
#
#   bench/real_gpu.sh                      only looks: changes nothing, needs no root
#   bench/real_gpu.sh --create-mig GPU-…   also makes and destroys instances on that GPU, which an admin chose:
#                                          MIG must be on, the GPU must be empty and nobody may use it
#   bench/real_gpu.sh --simulated DIR …    any of these on the simulated node in DIR, to rehearse it
#
# With GRES_MIG_HAMI_CORE=/path/libvgpu.so, as root, it also runs programs in slices of a GPU that nobody uses, the
# first without MIG mode or GRES_MIG_SLICE_GPU; bench/real_slices.py says how.
#
# It never changes MIG mode, clocks or power, and never resets a GPU. PYTHON names the interpreter (default python3),
# whose gres-mig is run, or else the one beside this script; OUT is the folder of the file (default this one).
set -u
bench=$(cd "$(dirname "$0")" && pwd) || exit 4

# absolute PATH: this runs in another folder.
absolute() { printf '%s/%s\n' "$(cd "$(dirname "$1")" && pwd)" "$(basename "$1")"; }

python=$(command -v "${PYTHON:-python3}") || {
    echo "there is no ${PYTHON:-python3}; PYTHON names the interpreter that has gres-mig" >&2
    exit 4
}
python=$(absolute "$python")
gpu= simulated= extra= hami_core=${GRES_MIG_HAMI_CORE:-}
case $hami_core in
    '' | stand-in) ;;
    *) hami_core=$(absolute "$hami_core") || exit 4 ;;
esac
while [ $# -gt 0 ]; do
    case $1 in
        --create-mig) gpu=${2:?"--create-mig needs the UUID of a GPU, as nvidia-smi -L shows it"} ;;
        --simulated) simulated=${2:?"--simulated needs the folder of a simulated node"} ;;
        *)
            sed -n '2,/^set/s/^#\( \|$\)//p' "$0"
            exit 2
            ;;
    esac
    shift 2
done
[ -z "$simulated" ] || {
    simulated=$(absolute "$simulated")
    extra="simulator = \"$simulated\""
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=$(cd "${OUT:-.}" && pwd)/real_gpu-$(date +%Y%m%d-%H%M%S).txt || exit 4
# From a folder without code, so that it is the installed gres-mig that is run where there is one.
cd "$work" || exit 4
source=${bench%/*}
"$python" -c 'import gres_mig' 2>/dev/null ||
    export PYTHONPATH="$source:$source/slurm:$source/jupyter_ext${PYTHONPATH:+:$PYTHONPATH}"
failed=0

say() { printf '%s\n' "$*" | tee -a "$out"; }
show() { sed 's/^/    /' "$1" | tee -a "$out"; }
mig() { "$python" -m gres_mig --config "$work/config.toml" "$@"; }

# check WHAT CODES COMMAND…: runs it, shows what it printed, passes when its exit code is one of CODES.
check() {
    what=$1 codes=$2
    shift 2
    "$@" >"$work/out" 2>"$work/err"
    code=$?
    case " $codes " in
        *" $code "*) say "PASS $what (exit $code)" ;;
        *)
            say "FAIL $what (exit $code, expected $codes)"
            failed=$((failed + 1))
            ;;
    esac
    show "$work/out"
    show "$work/err"
}

# field NAME: a field of the JSON object that the last check printed.
field() {
    "$python" -c 'import json, sys
value = json.load(open(sys.argv[1]))
for name in sys.argv[2].split("."):
    value = value[name]
print(value)' "$work/out" "$1"
}

expect() {
    if [ "$2" = "$3" ]; then
        say "PASS $1: $2"
    else
        say "FAIL $1: $2, expected $3"
        failed=$((failed + 1))
    fi
}

# config LINE: a configuration whose records are here.
config() { printf '%s\nstate_dir = "%s/state"\n%s\n' "$1" "$work" "$extra"; }

# settings: what an admin may have set on each GPU, as far as nvidia-smi shows it.
settings() {
    [ -z "$simulated" ] && command -v nvidia-smi >/dev/null || return 0
    nvidia-smi --format=csv --query-gpu=uuid,mig.mode.current,mig.mode.pending,persistence_mode,compute_mode,power.limit
}

# finish LINE: the end of the run.
finish() {
    [ -z "$before" ] || check 'no setting of a GPU has changed' 0 test "$(settings)" = "$before"
    say "$failed failed; $1"
    say "written to $out"
    [ "$failed" = 0 ]
    exit
}

umask 077
if [ -n "$gpu" ]; then
    config "gpus = [\"$gpu\"]" >"$work/config.toml"
else
    config '' >"$work/config.toml"
fi
before=$(settings)

say "gres-mig on $(uname -srm), $(date -u '+%Y-%m-%d %H:%M UTC'), uid $(id -u)"
check 'version, driver and NVML' 0 mig --version
check 'profiles' 0 mig profiles
check 'profiles as JSON' 0 mig profiles --json
check 'status' 0 mig status
check 'doctor answers' '0 4' mig doctor

nobody() { setpriv --reuid 65534 --regid 65534 --clear-groups "$python" "$@"; }
chmod 0711 "$work"
if [ "$(id -u)" != 0 ] || ! command -v setpriv >/dev/null; then
    say 'NOTE what other users see was not tried: that needs root and setpriv'
elif ! nobody -c 'import gres_mig' 2>/dev/null; then
    say "NOTE what other users see was not tried: uid 65534 cannot run gres-mig with $python"
else
    # What anybody may see, through the same library.
    config 'gpus = "*"' >"$work/nobody.toml"
    chmod 0644 "$work/config.toml" "$work/nobody.toml"
    check 'profiles as uid 65534' 0 nobody -m gres_mig --config "$work/config.toml" profiles
    check 'status as uid 65534' '0 4' nobody -m gres_mig --config "$work/config.toml" status
    check 'why 8000 as uid 65534' '0 3 4' nobody -m gres_mig --config "$work/nobody.toml" why 8000
    check 'allocate as uid 65534 is refused' 2 \
        nobody -m gres_mig --config "$work/config.toml" allocate --owner manual:x --memory 8000
fi

# Looking only, as on a node whose GPUs are all managed.
config 'gpus = "*"' >"$work/all.toml"
for size in 8000 40000 90000 999999; do
    check "why $size" '0 2 3 4' "$python" -m gres_mig --config "$work/all.toml" why "$size"
done
check 'doctor on managed GPUs answers' '0 4' "$python" -m gres_mig --config "$work/all.toml" doctor

if [ -n "$hami_core" ]; then
    {
        "$python" "$bench/real_slices.py" "$hami_core" --gpu "${GRES_MIG_SLICE_GPU:-}" --simulated "$simulated"
        echo $? >"$work/code"
    } 2>&1 | tee -a "$out"
    [ "$(cat "$work/code")" = 0 ] || failed=$((failed + 1))
else
    say 'NOTE slices were not tried: GRES_MIG_HAMI_CORE names no libvgpu.so'
fi

if [ -z "$gpu" ]; then
    check 'without managed GPUs a request is refused' 4 mig allocate --owner manual:x --memory 8000
    finish "no instance was made: see --create-mig in $0"
fi

check 'the GPU is empty and its records agree' 0 mig status --check
check 'why 8000 says that it fits' 0 mig why 8000
check 'allocate 8,000 MiB' 0 mig allocate --owner manual:real-1 --memory 8000 --json
first=$(field mig_uuid) profile=$(field profile.name)
if [ -z "$simulated" ] && command -v nvidia-smi >/dev/null; then
    check "nvidia-smi lists $first" 0 sh -c "nvidia-smi -L | grep $first"
fi
check 'asking again' 0 mig allocate --owner manual:real-1 --memory 8000 --json
expect 'asking again gives the same instance' "$(field mig_uuid)" "$first"

made=1
while mig allocate --owner "manual:real-$((made + 1))" --memory 8000 >"$work/out" 2>"$work/err"; do
    made=$((made + 1))
    [ "$made" -lt 64 ] || break
done
say "made $made instances of $profile"
check 'a full GPU refuses, with the reason' 3 mig allocate --owner manual:real-more --memory 8000
check 'status shows them' 0 mig status --check
check 'why says who is in the way' 3 mig why 8000
check 'reclaiming one' 0 mig reclaim manual:real-1
check 'its place can be had again' 0 mig allocate --owner manual:real-again --memory 8000

say 'killing 20 allocations at different moments'
n=0
while [ "$n" -lt 20 ]; do
    mig reclaim manual:real-again >/dev/null 2>&1
    mig allocate --owner manual:real-again --memory 8000 >/dev/null 2>&1 &
    pid=$!
    "$python" -c "import time; time.sleep($n * 0.1)"
    kill -9 "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
    n=$((n + 1))
done
mig reclaim manual:real-again >/dev/null 2>&1
n=0
until mig reconcile >/dev/null && mig status --check >"$work/out" 2>"$work/err" || [ "$n" -ge 12 ]; do
    n=$((n + 1))
    "$python" -c 'import time; time.sleep(5)'
done
check 'after the kills records and hardware agree' 0 mig status --check

while [ "$made" -gt 0 ]; do
    mig reclaim "manual:real-$made" >>"$work/reclaimed" 2>&1
    made=$((made - 1))
done
show "$work/reclaimed"
check 'everything is gone' 0 mig status --check
check 'no instance is left' 0 sh -c "! '$python' -m gres_mig --config '$work/config.toml' status --json | grep -q MIG-"
finish 'the instances that were made are gone'
