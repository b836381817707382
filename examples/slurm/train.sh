#!/usr/bin/env bash
# One task for each GPU; srun tells each its rank, and run.dir is a folder that all nodes share.
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --signal=TERM@300
# The signal comes five minutes before the time limit: the run saves, and this job, submitted again, resumes it.

srun --kill-on-bad-exit=1 trueshard train "${1:-examples/pretrain.toml}"
