"""The packages of OpenAI and Anthropic, pointed at the model of one episode."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI


class SdkClients:
    """What makes clients of the packages for one episode; they are imported when asked for.

    What is not given is as the package has it: how long a call may take (`timeout`, in seconds),
    how often one that failed is sent again (`max_retries`), headers and query parameters of every
    call, and the client that sends them: of `httpx`, or of what else the package's version takes.
    """

    api_key: str
    """Worth nothing outside of this episode."""
    openai_base_url: str
    """For programs that speak Chat Completions or Responses."""
    anthropic_base_url: str
    """For programs that speak Messages."""

    def openai(
        self,
        *,
        timeout: float | None = None,
        max_retries: int | None = None,
        default_headers: Mapping[str, str] | None = None,
        default_query: Mapping[str, object] | None = None,
        http_client: Any = None,
    ) -> "OpenAI":
        """Return a client of the `openai` package for this episode."""
        from openai import DefaultHttpxClient, OpenAI

        return OpenAI(
            base_url=self.openai_base_url,
            api_key=self.api_key,
            http_client=http_client or DefaultHttpxClient(verify=self._is_remote),
            **_given(timeout, max_retries, default_headers, default_query),
        )

    def async_openai(
        self,
        *,
        timeout: float | None = None,
        max_retries: int | None = None,
        default_headers: Mapping[str, str] | None = None,
        default_query: Mapping[str, object] | None = None,
        http_client: Any = None,
    ) -> "AsyncOpenAI":
        """Return an async client of the `openai` package for this episode."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        return AsyncOpenAI(
            base_url=self.openai_base_url,
            api_key=self.api_key,
            http_client=http_client or DefaultAsyncHttpxClient(verify=self._is_remote),
            **_given(timeout, max_retries, default_headers, default_query),
        )

    def anthropic(
        self,
        *,
        timeout: float | None = None,
        max_retries: int | None = None,
        default_headers: Mapping[str, str] | None = None,
        default_query: Mapping[str, object] | None = None,
        http_client: Any = None,
    ) -> "Anthropic":
        """Return a client of the `anthropic` package for this episode."""
        from anthropic import Anthropic, DefaultHttpxClient

        return Anthropic(
            base_url=self.anthropic_base_url,
            api_key=self.api_key,
            http_client=http_client or DefaultHttpxClient(verify=self._is_remote),
            **_given(timeout, max_retries, default_headers, default_query),
        )

    def async_anthropic(
        self,
        *,
        timeout: float | None = None,
        max_retries: int | None = None,
        default_headers: Mapping[str, str] | None = None,
        default_query: Mapping[str, object] | None = None,
        http_client: Any = None,
    ) -> "AsyncAnthropic":
        """Return an async client of the `anthropic` package for this episode."""
        from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

        return AsyncAnthropic(
            base_url=self.anthropic_base_url,
            api_key=self.api_key,
            http_client=http_client or DefaultAsyncHttpxClient(verify=self._is_remote),
            **_given(timeout, max_retries, default_headers, default_query),
        )

    @property
    def _is_remote(self) -> bool:
        """Whether TLS is spoken: to read the certificates takes a tenth of a second per client."""
        return self.openai_base_url.startswith("https:")


def _given(
    timeout: float | None,
    max_retries: int | None,
    default_headers: Mapping[str, str] | None,
    default_query: Mapping[str, object] | None,
) -> dict[str, Any]:
    """Return the options that were given: to the packages None is a value of its own."""
    options = {
        "timeout": timeout,
        "max_retries": max_retries,
        "default_headers": default_headers,
        "default_query": default_query,
    }
    return {name: value for name, value in options.items() if value is not None}
