#!/bin/bash
# nvidia/resnet50 on 2 hosts of 8 replicas: 56,250 steps of 2,048 images, 90 epochs
# Start it on every host with: bash FILE FIRST_HOST. Started again, it continues.
first_host=${1:?write the name of the first host}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100
rows=$(cat /shared/runs/mine/record.jsonl 2> /dev/null | wc -l)
torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-id=mine --rdzv-endpoint="$first_host:29500" --max-restarts=3 \
  -m paceline train nvidia/resnet50 --device cuda --data /shared/imagenet --out /shared/runs/mine &
launcher=$!
trap 'kill -TERM "$launcher"' TERM INT
wait "$launcher"; status=$?
while kill -0 "$launcher" 2> /dev/null; do wait "$launcher"; status=$?; done
if [ "$status" -ne 0 ] && tail -n "+$((rows + 1))" /shared/runs/mine/record.jsonl | grep -q '"kind": "interrupted"'; then
  status=75
fi
exit "$status"
