#!/bin/bash
# A job of SLURM that runs a command on every task of its allocation, under chorosrun:
#
#   sbatch deploy/slurm.sh python train.py --epochs 10
#   sbatch --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 deploy/slurm.sh python train.py
#
# Submit it from a shell in which the command works, as sbatch passes on that shell's variables and directory, or
# prepare the shell of the job here (module load ..., source .venv/bin/activate).
#
# Options of the command sbatch have precedence over these lines. A task is a rank: one for each GPU, or on CPUs a few
# for each node. Before the time is up, the ranks receive SIGTERM, and have a minute to save a checkpoint.

#SBATCH --job-name=choros
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@90

exec chorosrun --grace-period 60 "$@"
