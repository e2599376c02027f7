#!/usr/bin/env bash
# Writes the Python code of the contract to OUT/storesvc_proto/v1/.
#
#   proto/generate.sh OUT [PYTHON]
#
# The contract lies at storesvc/v1, as buf wants a package to lie; its code is
# the package storesvc_proto, because `storesvc` is the service. protoc names
# modules after the files that it reads, so it reads copies whose imports say so.
set -euo pipefail
out=$(realpath "$1") python=$(command -v "${2:-python3}")
cd "$(dirname "$0")"
PATH=$(dirname "$python"):$PATH # protoc looks its plugins up there

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir -p "$copy/storesvc_proto/v1"
for file in storesvc/v1/*.proto; do
  sed 's#^import "storesvc/#import "storesvc_proto/#' "$file" >"$copy/storesvc_proto/v1/${file##*/}"
done
cd "$copy"
"$python" -m grpc_tools.protoc -I. --python_out="$out" --grpc_python_out="$out" \
  --mypy_out="$out" --mypy_grpc_out="$out" storesvc_proto/v1/*.proto
