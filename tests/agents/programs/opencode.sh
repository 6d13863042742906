#!/bin/sh
# opencode. sh opencode.sh PATH_OF_OPENCODE PROMPT
set -e
cat > opencode.json <<END
{
  "provider": {
    "policy": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "{env:OPENAI_API_KEY}"},
      "models": {"policy": {"tool_call": true}}
    }
  },
  "model": "policy/policy",
  "small_model": "policy/policy",
  "share": "disabled",
  "autoupdate": false
}
END
export OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1
exec "$1" run --auto "$2" < /dev/null
