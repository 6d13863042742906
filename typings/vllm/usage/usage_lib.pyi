from enum import Enum

class UsageContext(str, Enum):
    LLM_CLASS = "LLM_CLASS"
