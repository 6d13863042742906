#!/bin/sh
# pi. sh pi.sh PATH_OF_NODE PATH_OF_CLI PROMPT
set -e
mkdir -p "$HOME/.pi/agent"
cat > "$HOME/.pi/agent/models.json" <<END
{
  "providers": {
    "policy": {
      "baseUrl": "$OPENAI_BASE_URL",
      "api": "openai-completions",
      "apiKey": "OPENAI_API_KEY",
      "models": [{"id": "policy"}]
    }
  }
}
END
export PI_OFFLINE=1
exec "$1" "$2" --provider policy --model policy --no-session -p "$3" < /dev/null
