"""Configuration of MCP servers (Model Context Protocol)."""

from typing import Self

from pydantic import Field, model_validator

from .sections import Section, when


class McpServer(Section):
    """An MCP server: a command that speaks over its standard input and output, or a URL."""

    name: str = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]{0,31})?$")
    """Its name among the servers; default: `server1`, `server2` and so on."""
    command: str = Field(default="", max_length=4096)
    """Program of a server over stdio; `{python}` stands for the pool's interpreter."""
    args: list[str] = Field(
        default_factory=list[str], max_length=1024, json_schema_extra=when("command")
    )
    """Its arguments."""
    env: dict[str, str] = Field(default_factory=dict[str, str], json_schema_extra=when("command"))
    """Its environment variables."""
    url: str = Field(default="", max_length=4096, pattern=r"^(https?://[!-~]+)?$")
    """URL of a server over streamable HTTP."""
    headers: dict[str, str] = Field(default_factory=dict[str, str], json_schema_extra=when("url"))
    """Headers of each request to it."""

    @model_validator(mode="after")
    def _one_transport(self) -> Self:
        if bool(self.command) == bool(self.url):
            found = "both" if self.command else "neither"
            raise ValueError(f"give command or url; {found} is set")
        return self

    def named(self, number: int) -> Self:
        """Return it with a name: its own, or one by its number."""
        return self if self.name else self.model_copy(update={"name": f"server{number}"})
