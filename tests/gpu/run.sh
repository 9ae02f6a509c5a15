#!/usr/bin/env bash
# Everything that needs GPUs:  run.sh CARRY OUT [part ...]
#
# CARRY holds a packed vLLM (vllm_site.tar.xz), make_checkpoint.py, serve_vllm.sh, the reference
# script (rlhf_http_nccl_no_vllm.py) and wheels: streamer, and for faults pytest's. Logs and results go to OUT.
# Parts: start (the 8b server of the other parts, in the background: after limits, which it disturbs),
# 8b-streamer (8b with one backend, 200 s),
# small (0.6b, fp8 and moe: 200 s), 8b (250 s), limits (60 s), push (130 s), module (90 s),
# verify (60 s). The last three start an 8b server first (70 s).
# settings: readers in turns (330 s). small-tensors (30 s). cold: where a cold start spends its time
# (40 s). refusal: a push to the GPU that sends (20 s). faults: the table of tests/faults over NCCL, into
# a server of one worker (300 s). alone: what the sending side takes by itself (120 s). calls: a few
# small tensors into the 8b server, by vLLM's engine and by ours (40 s). memory: 20 syncs, after small (40 s).
# growth: what NCCL alone keeps of communicators that are gone (100 s).
#
# With one GPU trainer and servers share it, and NCCL is told that they are different hosts: it goes over
# the loopback network then. What is right can be seen so; of speed only alone and small-tensors.
set -u
carry=$(realpath "$1") out=$(realpath "$2")
repo=$(realpath "$(dirname "$0")/../..")
shift 2
work=/tmp/streamer-gpu
mkdir -p "$work/site"
cd "$work" || exit 1
sender=1
if [ "$(nvidia-smi -L | wc -l)" = 1 ]; then
    sender=0
    export NCCL_HOSTID=trainer NCCL_SOCKET_IFNAME=lo
fi
export CUDA_VISIBLE_DEVICES=$sender
started=$(date +%s)
at() { echo "== $(($(date +%s) - started)) s: $*"; }

if [ ! -e site/vllm ]; then
    python3 -c "import tarfile; tarfile.open('$carry/vllm_site.tar.xz').extractall('site', filter='fully_trusted')"
    python3 -m pip install -q --no-index --no-deps --target site "$carry"/*.whl
    cp "$carry"/*.py "$carry"/*.sh .
fi
export PYTHONPATH=$work/site PYTHONUNBUFFERED=1
check=(python3 "$repo/tests/gpu/check_vllm.py" --site "$work/site" --serve serve_vllm.sh --make make_checkpoint.py)
at unpacked

make_8b() {
    [ -e /tmp/check/8b-7 ] || python3 make_checkpoint.py /tmp/check/8b-7 8b 7 > "$out/make.log" 2>&1
}

start_8b() { # port backend
    [ -e "started-$1" ] && return
    touch "started-$1"
    make_8b
    env SITE="$work/site" ${NCCL_HOSTID:+NCCL_HOSTID=receiver-$1} setsid bash serve_vllm.sh /tmp/check/8b-7 0 "$1" --gpu-memory-utilization 0.05 \
        --kv-cache-memory-bytes 1073741824 --weight-transfer-config "{\"backend\":\"$2\"}" > /dev/null 2>&1 &
}

serve_8b() { # port backend
    curl -sf "http://127.0.0.1:$1/get_world_size" > /dev/null && return
    start_8b "$@"
    for _ in $(seq 120); do
        curl -sf "http://127.0.0.1:$1/get_world_size" > /dev/null && break
        sleep 1
    done
    at "$2 server up"
}

benchmark() { # seconds log script arguments ...
    local seconds=$1 log=$2
    shift 2
    timeout "$seconds" python3 -W ignore "$@" > "$out/$log.log" 2>&1
    echo "rc $?"
    grep -v "UserWarning\|chunk = " "$out/$log.log" | tail -20
    at "$log"
}

for part in "${@:-small}"; do
    case $part in
        small) timeout 330 "${check[@]}" --models 0.6b,fp8,moe > "$out/small.log" 2>&1 ;;
        start) start_8b 8150 nccl ;;
        8b-streamer) timeout 230 "${check[@]}" --models 8b --backends streamer > "$out/8b-streamer.log" 2>&1 ;;
        8b) timeout 420 "${check[@]}" --models 8b > "$out/8b.log" 2>&1 ;;
        limits) make_8b && benchmark 100 limits "$repo/benchmarks/gpu_limits.py" --checkpoint /tmp/check/8b-7 \
            --small "${SMALL:-50000}" --json "$out/limits.json" --trace "$out/limits-trace" ;;
        push) serve_8b 8150 nccl && benchmark 250 push "$repo/benchmarks/push_vs_reference.py" --url http://127.0.0.1:8150 \
            --checkpoint /tmp/check/8b-7 --script rlhf_http_nccl_no_vllm.py --modes packed --json "$out/push.json" --trace "$out/push-trace" ;;
        module) serve_8b 8150 nccl && benchmark 120 module "$repo/benchmarks/module_vs_vllm.py" --url http://127.0.0.1:8150 \
            --checkpoint /tmp/check/8b-7 --sizes "${SIZES:-64,256,1024,0}" --num-buffers "${BUFFERS:-2,3}" --json "$out/module.json" --trace "$out/module-trace" ;;
        verify) serve_8b 8151 streamer && benchmark 100 verify "$repo/benchmarks/verify_cost.py" --device cuda ;;
        settings) serve_8b 8150 nccl && nvidia-smi topo -m | head -12 && benchmark 330 settings "$repo/benchmarks/reader_settings.py" \
            --url http://127.0.0.1:8150 --checkpoint /tmp/check/8b-7 --settings "${SETTINGS:-16:8:256,12:8:128,20:8:320,16:8:128,12:8:256}" \
            --json "$out/settings.json" ;;
        alone) make_8b && benchmark 60 alone "$repo/benchmarks/sender_alone.py" --checkpoint /tmp/check/8b-7
            benchmark 200 settings-alone "$repo/benchmarks/reader_settings.py" --checkpoint /tmp/check/8b-7 \
                --settings "${SETTINGS:-16:8:256,12:8:128,12:8:256,16:16:512,8:8:256,24:8:384}" --json "$out/settings-alone.json" ;;
        calls) serve_8b 8150 nccl && benchmark 60 calls "$repo/benchmarks/module_vs_vllm.py" --url http://127.0.0.1:8150 \
            --checkpoint /tmp/check/8b-7 --names norm --sizes 256,0 --json "$out/calls.json" --trace "$out/calls-trace" ;;
        memory) PYTHONPATH=$PYTHONPATH:$repo/benchmarks benchmark 100 memory "$repo/tests/gpu/memory.py" /tmp/check/0.6b-7 ;;
        growth) benchmark 150 growth "$repo/tests/gpu/growth.py" ;;
        small-tensors) benchmark 60 small-tensors "$repo/benchmarks/planning.py" --device cuda:0 --json "$out/small-tensors.json" ;;
        cold) serve_8b 8150 nccl && for _ in 1 2 3; do T0=$(date +%s.%N) timeout 60 \
            python3 -W ignore "$repo/tests/gpu/cold.py" http://127.0.0.1:8150 /tmp/check/8b-7 "$out/cold-trace.json"; date +%s.%N; done; at cold ;;
        refusal) serve_8b 8150 nccl; for command in push doctor; do
            timeout 60 python3 -W ignore -m streamer "$command" /tmp/check/8b-7 --to http://127.0.0.1:8150 --device cuda:0 2>&1 | tail -25
            echo "rc ${PIPESTATUS[0]}"; done; at refusal ;;
        faults) # NCCL's own monitor (RAS) keeps a connection for each server that was there: it would be counted.
            # So would the heaps of glibc that NCCL's memory is left in, thread by thread: see growth.
            (cd "$repo" && STREAMER_TEST_GPU=0 NCCL_RAS_ENABLE=0 MALLOC_MMAP_THRESHOLD_=131072 timeout 300 python3 -W ignore -m pytest -q \
            -n 12 --session-timeout=240 --tb=short -p no:cacheprovider -W default -o addopts=--import-mode=importlib \
            -o junit_family=xunit1 --junitxml="$out/faults.xml" ${FAULTS:-tests/faults/test_soak.py tests/gpu tests/faults/test_faults.py} > "$out/faults.log" 2>&1)
            echo "rc $?"; grep -E '^(E  |FAILED|[0-9]+ )' "$out/faults.log" | tail -60; at faults ;;
    esac
    case $part in small | 8b | 8b-streamer) echo "rc $?"; grep -v '^{' "$out/$part.log"; at "$part" ;; esac
done
tar cf "$out/vllm-logs.tar" vllm_8*.log 2> /dev/null
