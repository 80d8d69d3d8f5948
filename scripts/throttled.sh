#!/bin/sh
# Run a command with the disk's reads throttled, or in less memory, and undo it, however the command ends.
#
#   scripts/throttled.sh read_bps=100e6 [read_iops=500] [memory=3GiB] [path=DIR] -- COMMAND ...
#
# path= lies on the disk that is throttled (default: here). Ends with the command's own status; 77, after one line that
# says why, where this machine or this user cannot have it (nothing was run then); 2 for wrong use. Needs Linux with
# control groups, and a user who may write to them. PYTHON= names a Python that has moebench.
here=$(dirname "$0")
python=${PYTHON:-python3}
case " $* " in
*" -- "*) ;;
*)
    sed -n '2,8p' "$0" >&2
    exit 2
    ;;
esac
limits=""
for word in "$@"; do
    [ "$word" = "--" ] && break
    limits="$limits $word"
done
# shellcheck disable=SC2086 - limits are words
if ! why=$("$python" "$here/../benchmarks/cgroups.py" $limits -- true 2>&1); then
    echo "throttled.sh: not here: $(echo "$why" | tail -n 1)" >&2
    exit 77
fi
exec "$python" "$here/../benchmarks/cgroups.py" "$@"
