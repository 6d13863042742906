#!/bin/sh
# Codex CLI. sh codex.sh PATH_OF_CODEX PROMPT
set -e
export CODEX_HOME="$HOME/codex"
mkdir -p "$CODEX_HOME"
cat > "$CODEX_HOME/config.toml" <<END
model = "policy"
model_provider = "policy"
approval_policy = "never"
sandbox_mode = "danger-full-access"
model_context_window = 200000
model_auto_compact_token_limit = ${COMPACT_AT:-180000}
[model_providers.policy]
name = "policy"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
supports_websockets = false
END
exec "$1" exec --skip-git-repo-check "$2" < /dev/null
