#!/bin/bash
# The CI recipe of devplan_cli/ci.md, on a machine without a GPU: export under budgets, look inside with jq,
# verify against eager PyTorch, and compare with the artifact of the last release.
#
# usage: ci_recipe.sh MODEL.py [LAST.pte]
set -euo pipefail
model=$1
last=${2:-}
name=$(basename "$model" .py)

devplan export "$model" --no-progress --json \
    --memory-budget 64MiB --max-artifact-size 10MiB --max-copies 2 >"$name.export.json"

devplan inspect "$name.pte" --json >"$name.json"
jq -e '[.methods[].copies[].bytes] | add <= 4096' "$name.json" >/dev/null
jq -e 'all(.methods[].arenas[]; .planned_bytes <= 1.01 * .lower_bound_bytes)' "$name.json" >/dev/null
jq -r '.methods[] | "\(.name): \(.copies | length) copies, \(.kernels.generated) generated kernels"' "$name.json"

devplan verify "$name.pte" "$model" --json >"$name.verify.json"
jq -e '.equal' "$name.verify.json" >/dev/null

if [ -n "$last" ]; then
    devplan diff "$last" "$name.pte" --markdown >"$name.diff.md"
fi
