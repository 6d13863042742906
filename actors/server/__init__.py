"""The inference server: answers chats and completions, and plays whole episodes."""
