#!/bin/bash
#SBATCH --job-name=mine
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=255
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# nvidia/resnet50 on 2 hosts of 8 replicas: 31,250 steps of 2,048 images, 50 epochs
# Submit it with: sbatch FILE. Submitted again, it continues.
srun --cpu-bind=none --wait=120 paceline train nvidia/resnet50 epochs=50 'on.time_limit=4 hours' --device cuda --data /shared/imagenet --out /shared/runs/mine
status=$?
if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
