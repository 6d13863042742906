"""Families in vLLM's CPU build: log-probs of the learner, new weights, adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.schemas.config.sections import LoraConfig

from tests.support.families import FAMILIES
from tests.support.models import adapted
from tests.support.vllm_families import (
    check_served,
    make,
    moved,
    published,
    served,
)

pytestmark = pytest.mark.vllm
KINDS = (
    "deepseek_v3",
    "gemma3_text",
    "gpt_oss",
    "granitemoehybrid",
    "lfm2_moe",
    "mistral",
    "qwen3_5_text",
)
