#!/usr/bin/env bash
# Train on two nodes of a SLURM cluster. From a folder that all nodes see, with the environment of Python active:
#
#     sbatch slurm.sh --steps 1000 --blocks 14 --chunks 16
#
# Two minutes before the time is over, and when the job is preempted, the ranks save a checkpoint and leave, and the job
# goes back to the queue. Started again, it goes on from there; after a node was lost, from the checkpoint before. If a
# rank crashes, torchrun starts all of them again on the spot, from the last checkpoint, three times at most.
#
#SBATCH --job-name=pipesight
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out

set -euo pipefail

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=${RENDEZVOUS_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
attempt=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}

# Seconds that torchrun leaves its ranks between SIGTERM and SIGKILL. Saving must be done by then.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100

# One task a node. If a node ends and others do not follow within a minute, they are ended.
srun --wait=60 torchrun \
    --nnodes="$SLURM_NNODES" \
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" \
    --max-restarts=3 \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$host:$port" \
    --rdzv-id="$attempt" \
    "${PROGRAM:-train.py}" --checkpoints "checkpoints-$SLURM_JOB_ID" --out "runs/$attempt" "$@" &
step=$!

# SLURM tells this shell alone that the end is near; srun passes it on to all tasks, and torchrun to the ranks.
asked_to_leave=
trap 'asked_to_leave=1; kill -TERM "$step" || true' TERM

status=0
wait "$step" || status=$?
if [[ -n $asked_to_leave ]]; then
    status=0
    wait "$step" || status=$?  # the signal ended the wait above, but not the step
    [[ $status -eq 0 ]] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
