#!/usr/bin/env bash
# Runs a command and leaves what an issue says of it, with the command's status:
#
#     bash packaging/report.sh REPORT COMMAND...
#
# REPORT has the table that the command wrote into table.md, if it did, and the last lines that it printed.
set -uo pipefail
report=$1
shift
rm -f table.md
# A file, not a pipe: processes that the command left behind would keep that open.
"$@" > output.txt 2>&1
status=$?
cat output.txt
{
  if [ -s table.md ]; then cat table.md; fi
  printf '\n`%s` ended with %s. Its last lines:\n\n```text\n' "$*" "$status"
  # An issue takes 65,536 characters.
  tail -n 150 output.txt | tail -c 40000
  printf '```\n'
} > "$report"
[ -z "${GITHUB_STEP_SUMMARY:-}" ] || cat "$report" >> "$GITHUB_STEP_SUMMARY"
exit "$status"
