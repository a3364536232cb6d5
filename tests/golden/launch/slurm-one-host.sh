#!/bin/bash
#SBATCH --job-name=it-s-mine
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# shapes/resnet8 on 1 host of 2 replicas: 625 steps of 128 images, 8 epochs
# Submit it with: sbatch FILE. Submitted again, it continues.
srun --cpu-bind=none --wait=120 paceline train shapes/resnet8 --device cpu --out '/runs/It'"'"'s mine'
status=$?
if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
