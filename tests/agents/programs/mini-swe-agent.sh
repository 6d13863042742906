#!/bin/sh
# mini-swe-agent. sh mini-swe-agent.sh FOLDER_OF_ITS_ENVIRONMENT PROMPT
set -e
export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors MSWEA_SILENT_STARTUP=1
export LITELLM_LOCAL_MODEL_COST_MAP=true
exec "$1/bin/python" -B "$1/bin/mini" -m openai/policy -t "$2" -y --exit-immediately \
  -o "$HOME/trajectory.json" < /dev/null
