#!/bin/bash
# Usage: loop.sh MODEL PROMPTS FOLDER ROUNDS [flags of run_finetuning.py]
set -e
model=$1 prompts=$2 folder=$3 rounds=$4 adapter=
flags=(--adapter.rank 16 --adapter.targets all-linear)
mkdir -p "$folder"
for round in $(seq 1 "$rounds"); do
    python3 docs/rollouts/sample.py "$model" "$prompts" "$folder/$round.jsonl" \
        --seed "$round" ${adapter:+--adapter "$adapter"}
    python3 run_finetuning.py --load "$model" --training.objective grpo --epochs 1 "${flags[@]}" \
        --data.train "$folder/$round.jsonl" --save "$folder/run-$round" "${@:5}"
    python3 run_export.py --load "$folder/run-$round" --save-hf "$folder/adapter-$round"
    adapter=$folder/adapter-$round flags=(--adapter.load "$folder/adapter-$round")
done
