#!/usr/bin/env bash
# Build the wheel and run the tests against it, where the sources cannot be reached.
#
#   test_wheel.sh PYTHON [PYTEST ARGUMENT ...]        PYTHON is that of the development environment
#
# The wheel is built from the sdist, and installed into an environment of its own. What it depends on
# is linked from the development environment: its pins hold here too, and torch is not copied.
set -euo pipefail

python=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

cd "$root"
rm -rf dist
"$python" -m build --no-isolation --outdir dist . > "$work/build.log" 2>&1 || {
    cat "$work/build.log"
    exit 1
}
ls dist

"$python" -m venv --without-pip "$work/venv"
wheel_python=$work/venv/bin/python
find "$(packages "$python")" -mindepth 1 -maxdepth 1 ! -name '*streamer*' ! -name '*.pth' \
    -exec ln -s -t "$(packages "$wheel_python")" {} +
"$python" -m pip --python "$wheel_python" install -qq --no-deps dist/*.whl
"$python" -m pip --python "$wheel_python" check

# Everything that tests read but the code itself.
mkdir "$work/tree"
cp -r pyproject.toml README.md tests "$work/tree"
for folder in docs examples; do
    [ -d "$folder" ] && cp -r "$folder" "$work/tree"
done
cd "$work/tree"
"$wheel_python" - "$work/venv" <<'PYTHON'
import importlib.metadata
import sys

import streamer

venv = sys.argv[1]
distribution = importlib.metadata.distribution("streamer")
modules = [streamer]
modules += [point.load() for point in distribution.entry_points.select(group="streamer")]
for module in modules:
    assert module.__file__.startswith(venv), f"{module.__file__} is not the wheel's"
license_file = distribution.locate_file(
    f"streamer-{distribution.version}.dist-info/licenses/LICENSE"
)
assert "Apache License" in license_file.read_text()
assert distribution.locate_file("streamer/py.typed").exists()
print("the wheel's:", *(module.__name__ for module in modules))
PYTHON
"$work/venv/bin/streamer" sources
"$wheel_python" -m pytest "$@"
