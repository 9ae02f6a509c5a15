#!/usr/bin/env bash
# Run targets of the Makefile in turn, and end with a table of how each went: run_steps.sh TARGET ...
#
# A failed step does not keep the next from running, except that nothing can be done without `setup`,
# nor `interop`, `grpo` and `ray` without `vllm`, nor `grpo` without `trl`. A step that takes half an hour
# hangs, and is ended.
set -u

needs() {
    case $1 in
        setup) ;;
        interop | ray) echo setup vllm ;;
        grpo) echo setup vllm trl ;;
        *) echo setup ;;
    esac
}

# `timeout` leads a process group of its own: Ctrl-C has to be passed on.
step_pid=
trap 'kill "$step_pid"; wait "$step_pid"; exit 130' INT TERM
run() {
    timeout --kill-after=10 1800 "${MAKE:-make}" --no-print-directory "$1" &
    step_pid=$!
    wait "$step_pid"
}

declare -A outcome
rows=()
failed=0
for step in "$@"; do
    started=$SECONDS
    outcome[$step]=ok
    for need in $(needs "$step"); do
        [ "${outcome[$need]:-ok}" = ok ] || outcome[$step]="NOT RUN"
    done
    if [ "${outcome[$step]}" = ok ]; then
        printf '\n===== %s\n' "$step"
        run "$step" || outcome[$step]=FAILED
    fi
    if [ "${outcome[$step]}" != ok ]; then
        failed=1
        echo "${outcome[$step]}: $step"
    fi
    rows+=("$(printf '%-14s %-8s %5d s' "$step" "${outcome[$step]}" $((SECONDS - started)))")
done
printf '\n%-14s %-8s %7s\n' step result time
printf '%s\n' "${rows[@]}"
printf '%-23s %5d s\n' total "$SECONDS"
exit $failed
