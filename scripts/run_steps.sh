#!/usr/bin/env bash
# Run targets of the Makefile, and end with a table of how each went: run_steps.sh GROUP ...
#
# A group is one target, or lanes of targets that run side by side: 'unit | vllm trl'. What a lane
# prints is kept until each of its steps ends, so that no two mix.
#
# A failed step does not keep the next from running, except that nothing can be done without `setup`,
# nor `interop`, `grpo` and `ray` without `vllm`, nor `grpo` without `trl`. A step that takes half an hour
# hangs, and is ended.
set -u

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

needs() {
    case $1 in
        setup) ;;
        interop | ray) echo setup vllm ;;
        grpo) echo setup vllm trl ;;
        *) echo setup ;;
    esac
}

# `timeout` leads a process group of its own: Ctrl-C has to be passed on.
run() {
    timeout --kill-after=10 1800 "${MAKE:-make}" --no-print-directory "$1" &
    trap 'kill $!; wait $!; exit 130' INT TERM
    wait $!
}

step() {
    local outcome=ok started=$SECONDS need
    for need in $(needs "$1"); do
        [ "$(cut -d' ' -f1 "$results/$need" 2> /dev/null || echo ok)" = ok ] || outcome="not-run"
    done
    printf '\n===== %s\n' "$1"
    if [ $outcome = ok ]; then
        run "$1" || outcome=FAILED
    fi
    [ $outcome = ok ] || echo "$outcome: $1"
    echo "$outcome $((SECONDS - started))" > "$results/$1"
}

lane() {
    local name
    for name in $1; do
        step "$name" > "$results/$name.log" 2>&1
        cat "$results/$name.log"
    done
}

for group in "$@"; do
    IFS='|' read -ra lanes <<< "$group"
    if [ ${#lanes[@]} = 1 ]; then
        for name in $group; do step "$name"; done
    else
        trap 'kill $(jobs -p) 2> /dev/null; wait; exit 130' INT TERM
        for each in "${lanes[@]}"; do lane "$each" & done
        wait
    fi
done

failed=0
printf '\n%-14s %-8s %7s\n' step result time
for name in ${*//|/ }; do
    read -r outcome seconds < "$results/$name" || outcome=not-run seconds=0
    [ "$outcome" = ok ] || failed=1
    printf '%-14s %-8s %5d s\n' "$name" "$outcome" "$seconds"
done
printf '%-23s %5d s\n' total "$SECONDS"
exit $failed
