#!/bin/sh
# Record `make quickstart` of a fresh clone of this checkout as docs/start/quickstart.svg.
#
# To be run in a terminal. Of 80 x 24; each two seconds are shown for 0.4.
# termtosvg comes into an environment of its own, which goes with the clone.
set -eu
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet termtosvg==1.1.0 'setuptools<80' # it imports pkg_resources
git clone --quiet . "$work/sqshforge"
(cd "$work/sqshforge" && "$work/venv/bin/termtosvg" "$work/quickstart.svg" \
    --command 'make quickstart' --screen-geometry 80x24 --min-frame-duration 2000 --max-frame-duration 400 --loop-delay 5000)
# Its styles say where their colours are from, in comments that a picture does not need.
"$work/venv/bin/python" -c '
import pathlib, re, sys
source, target = map(pathlib.Path, sys.argv[1:])
target.write_text(re.sub(r"/\*.*?\*/", "", source.read_text(), flags=re.DOTALL))
' "$work/quickstart.svg" docs/start/quickstart.svg
