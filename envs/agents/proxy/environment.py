"""The environment variables by which a program finds its model."""

from collections.abc import Mapping

from ..episode import ProgramEpisode

MODEL = "policy"
_MODEL_NAMES = (
    "OPENAI_MODEL",
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
)
_QUIET: Mapping[str, str] = {
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


def model_environment(episode: ProgramEpisode, base_url: str) -> dict[str, str]:
    """Return what points a program at the proxy under `base_url`, which ends without a slash."""
    key = episode.key
    return {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_BASE": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "TINKERMQ_EPISODE_URL": f"{base_url}/v1/episode",
        "TINKERMQ_EPISODE_KEY": key,
        **dict.fromkeys(_MODEL_NAMES, MODEL),
        **_QUIET,
    }
