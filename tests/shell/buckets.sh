#!/bin/bash
# A batched model with buckets, from export to the counts of a run, as a release script would have it.
#
# usage: buckets.sh MODEL.py   (its dynamic dimension is `batch`, from 1 to 32)
set -euo pipefail
model=$1

devplan export "$model" -o batched.pte -q --check --buckets batch=1,8,32
devplan inspect batched.pte --json >batched.json
jq -e 'all(.methods[]; . as $m | all(.buckets[].arenas[]; . as $a
    | $a.planned_bytes <= 1.01 * $a.lower_bound_bytes
    and $a.planned_bytes <= ($m.arenas[] | select(.memory_id == $a.memory_id) | .planned_bytes)))' batched.json >/dev/null
jq -r '.methods[].buckets[] | "batch \(.sizes.batch): \([.arenas[].planned_bytes] | add) bytes"' batched.json >plans.txt
[ "$(wc -l <plans.txt)" = 3 ]

# A size that is declared counts as a hit, and gives what the same input gives in a larger batch.
devplan run batched.pte -q --shape input=8x16 --outputs eight.npz --repeat 2 --json >eight.json
jq -r '.buckets[] | "\(.sizes.batch) \(.calls)"' eight.json >hits.txt
printf '1 0\n8 2\n32 0\n' | diff - hits.txt
[ "$(jq .other_calls eight.json)" = 0 ]

# Any other size up to the bound runs too, and tells why no graph is used.
devplan run batched.pte -q --shape input=9x16 --json >nine.json
[ "$(jq .other_calls nine.json)" = 1 ]
jq -e '.cuda_graph == true or (.cuda_graph.reason | length > 0)' nine.json >/dev/null

refuse() { # refuse CODE WORDS...: the exit code, and a last line that names what is valid
    local wanted=$1 code=0
    shift
    devplan "$@" >out.txt 2>err.txt || code=$?
    [ "$code" = "$wanted" ] || { echo "devplan $*: exit $code instead of $wanted"; exit 1; }
    tail -n 1 err.txt
}
refuse 2 export "$model" -o none.pte -q --buckets bacth=1
refuse 2 export "$model" -o none.pte -q --buckets batch=1,64
refuse 2 export "$model" -o none.pte -q --buckets batch
refuse 2 run batched.pte -q --shape input=33x16
refuse 1 run batched.pte -q --device emulator --shape input=8x16 --require-cuda-graph
[ ! -e none.pte ] || { echo "a refused export has left a file"; exit 1; }
