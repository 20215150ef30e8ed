#!/bin/bash
# A job of SLURM that goes on from its last commit when it is preempted, loses a node or has no time left:
#
#   sbatch deploy/slurm-requeue.sh python train.py --epochs 10
#   sbatch --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 deploy/slurm-requeue.sh python train.py
#
# As deploy/slurm.sh; besides, the ranks commit when they receive SIGTERM, in COMMITS, which all nodes can write, and the
# job is queued again. Its output is in one file.

#SBATCH --job-name=choros
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120

chorosrun --min-np "${MIN_NP:-1}" --commit-dir "${COMMITS:-commits-$SLURM_JOB_ID}" --grace-period 100 "$@" &
job=$!
trap 'kill -s TERM "$job"' TERM
wait "$job"; code=$?
while kill -0 "$job" 2>/dev/null; do  # the trap has ended the wait
    wait "$job"; code=$?
done
if [ "$code" = 75 ]; then  # all have committed
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
