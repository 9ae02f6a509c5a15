#!/usr/bin/env bash
# Make an environment with Ray on top of that of vLLM: install_ray.sh FOLDER VLLM (its environment)
#
# It sees all of vLLM's packages, streamer too, and adds Ray and what the tests need: vLLM behaves in
# other ways where Ray can be imported, so Ray does not go into vLLM's own environment.
set -euo pipefail

venv=$1 vllm=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

"${PYTHON:-python3}" -m venv --clear --without-pip "$venv"
echo "import site; site.addsitedir('$(packages "$vllm/bin/python")')" \
    > "$(packages "$venv/bin/python")/vllm.pth"
PIP_CONSTRAINT="$here/ray-constraints.txt $here/../constraints.txt" \
    "$vllm/bin/python" -m pip --disable-pip-version-check --python "$venv/bin/python" \
    install -qq ray pytest pytest-timeout hypothesis
"$venv/bin/python" -c 'import importlib.metadata as m; print("Ray", m.version("ray"))'
