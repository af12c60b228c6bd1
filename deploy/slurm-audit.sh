#!/usr/bin/env bash
# An audit in slices, one for each task of a job array: no cluster is needed, only a folder that all tasks see.
#
#   sbatch --array=1-16 deploy/slurm-audit.sh LOGS OUT     # then, when all are done, on any machine:
#   offdrift audit LOGS --out OUT                          # merges them; what a lost task left out is read here
#
# A task that dies loses the piece that it was reading; submit the same array again, or only the tasks that failed.
#SBATCH --job-name=offdrift-audit
#SBATCH --cpus-per-task=8
#SBATCH --mem=12G
set -euo pipefail
export OMP_NUM_THREADS=1
offdrift audit "$1" --out "$2" --workers "${SLURM_CPUS_PER_TASK:-8}" \
  --slice "${SLURM_ARRAY_TASK_ID:-1}/${SLURM_ARRAY_TASK_COUNT:-1}" --quiet
