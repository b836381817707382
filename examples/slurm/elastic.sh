#!/usr/bin/env bash
# One torchrun for each node, which starts the ranks again by itself when one is lost; run.dir is a folder that all nodes
# share. TORCH_ELASTIC_SHUTDOWN_TIMEOUT is how long the ranks may take to save when the job is asked to end.
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@300

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=8 --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$first:29400" --rdzv-id="$SLURM_JOB_ID" \
    -m trueshard train "${1:-examples/pretrain.toml}"
