#!/bin/sh
# Check DJL Serving's source: check.sh SOURCE SHA256, the sum of the sums of the files that build.sh reads.
set -eu
cd "$1"
sum=$(find wlm/src/main prometheus/src/main serving/src/main engines/python/src/main engines/python/setup LICENSE NOTICE \
    -type f | LC_ALL=C sort | xargs -d '\n' sha256sum | sha256sum | cut -d ' ' -f 1)
if [ "$sum" != "$2" ]; then
    echo "$1: expected the source of the Dockerfile's commit, whose files have the SHA-256 $2; these have $sum" >&2
    exit 1
fi
