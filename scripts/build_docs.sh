#!/usr/bin/env bash
# Build the site, and make sure that dead links would have failed the build.
#
#   build_docs.sh MKDOCS
#
# Prints nothing if all is well, and all that mkdocs says if not. Not with --quiet: that drops the
# warnings before --strict counts them.
set -euo pipefail

mkdocs=$(realpath --no-symlinks "$1")
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Material for MkDocs tells of a coming MkDocs at each build; no release of it is taken unseen.
build() { (cd "$1" && NO_MKDOCS_2_WARNING=1 "$mkdocs" build --strict) > "$work/log" 2>&1; }

build "$root" || {
    cat "$work/log"
    exit 1
}

# The same repository, with one dead link of each kind.
mkdir "$work/copy"
for entry in "$root"/*; do
    case ${entry##*/} in
        build | docs) ;;
        *) ln -s "$entry" "$work/copy" ;;
    esac
done
cp -R "$root/docs" "$work/copy"
cat >> "$work/copy/docs/start.md" << 'END'

[a page](no-page.md), [an anchor](gpus.md#no-anchor), [a file](../streamer/no_file.py)
END
! build "$work/copy" || {
    echo "a build with dead links has succeeded"
    exit 1
}
for link in no-page.md '#no-anchor' streamer/no_file.py; do
    grep -q "^WARNING .*$link" "$work/log" || {
        cat "$work/log"
        echo "the build does not tell of the dead link to $link"
        exit 1
    }
done
