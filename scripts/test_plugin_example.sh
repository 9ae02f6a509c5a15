#!/usr/bin/env bash
# Build the example plugin's wheel, install it as a user would, and run its own tests.
#
#   test_plugin_example.sh PYTHON [PYTEST ARGUMENT ...]    PYTHON is that of the development environment
#
# It is installed into an environment of its own, which sees all of the development environment,
# streamer too: nothing is downloaded, and what is there is not touched.
set -euo pipefail

python=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# Of a copy, because tests must not find the sources beside them.
cp -r "$root/examples/streamer-plugin-example" "$work/source"
"$python" -m build --no-isolation --outdir "$work/dist" "$work/source" > "$work/build.log" 2>&1 || {
    cat "$work/build.log"
    exit 1
}
rm -r "$work/source/src"

"$python" -m venv --without-pip "$work/venv"
plugin_python=$work/venv/bin/python
echo "import site; site.addsitedir('$(packages "$python")')" \
    > "$(packages "$plugin_python")/development.pth"
"$python" -m pip --python "$plugin_python" install -qq --no-deps "$work"/dist/*.whl
"$python" -m pip --python "$plugin_python" check

cd "$work/source"
"$plugin_python" -m streamer sources | grep $'^acme\t.*\tstreamer-plugin-example$'
"$plugin_python" -m pytest "$@"
