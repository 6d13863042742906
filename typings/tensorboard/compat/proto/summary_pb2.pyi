class SummaryMetadata:
    class PluginData:
        def __init__(self, *, plugin_name: str) -> None: ...

    def __init__(self, *, plugin_data: PluginData) -> None: ...

class _Values:
    def add(self, **fields: object) -> object: ...

class Summary:
    value: _Values
