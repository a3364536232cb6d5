#!/bin/bash
# shapes/resnet8 on 1 host of 2 replicas: 625 steps of 128 images, 8 epochs
# Start it with: bash FILE. Started again, it continues.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100
rows=$(cat '/runs/It'"'"'s mine/record.jsonl' 2> /dev/null | wc -l)
torchrun --nnodes=1 --nproc-per-node=2 --standalone --max-restarts=0 \
  -m paceline train shapes/resnet8 'on.time_limit=20 seconds' --device cpu --out '/runs/It'"'"'s mine' &
launcher=$!
trap 'kill -TERM "$launcher"' TERM INT
wait "$launcher"; status=$?
while kill -0 "$launcher" 2> /dev/null; do wait "$launcher"; status=$?; done
if [ "$status" -ne 0 ] && tail -n "+$((rows + 1))" '/runs/It'"'"'s mine/record.jsonl' | grep -q '"kind": "interrupted"'; then
  status=75
fi
exit "$status"
